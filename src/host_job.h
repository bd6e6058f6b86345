// SPDX-License-Identifier: Apache-2.0
// One parameter's share of a host update: everything the background thread needs, by value, apart from the arrays
// themselves.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace zenflow {

// Elements that a thread's share of a host array is rounded to: whole cache lines, and small parameters stay on one
// thread.
constexpr int64_t kHostGrain = 16384;

// What is not read again soon goes past the caches, in arrays of so many elements and more.
constexpr int64_t kStreamFrom = 65536;

// AdamStep's corrections for columns that had different numbers of updates ("mean").
struct ColumnCorrections {
  std::vector<float> step, root, ahead;

  bool empty() const { return step.empty(); }
  ColumnSteps view() const { return {step.data(), root.data(), ahead.data()}; }
};

// A lane whose gradients are scaled by `late` too (nullptr: not), which is known when the job runs.
struct LateLane {
  Lane lane;
  const float* late;
};

std::vector<Lane> known_lanes(const std::vector<LateLane>& lanes);

struct HostJob {
  float* master;
  void* exp_avg;
  void* exp_avg_sq;
  DType moments;
  uint32_t noise;
  float* sum;  // "mean" while streaming or resumed within a window, else null
  void* written;
  std::vector<LateLane> lanes;
  DType lane_dtype, written_dtype;
  int64_t rows, slots;
  bool mean;

  bool closes_window;
  AdamStep move;
  Fold mean_fold;
  int64_t gradient_count;
  ColumnCorrections corrections;  // empty: `move` holds for every column

  void run(const Kernels& kernels, ThreadPool& pool) const;
};

}  // namespace zenflow
