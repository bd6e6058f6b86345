// SPDX-License-Identifier: Apache-2.0
// One parameter with the memory, the threads and the jobs that the engine would give it, for benchmarks: each piece of
// host work can be run again and again, and so can the ceiling of the bytes that it moves.
//
// Nothing here is part of training. Calls come from one thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu_device.h"
#include "parameter.h"
#include "stream_ceiling.h"

namespace zenflow {

struct BenchmarkSettings {
  std::vector<int64_t> sizes;      // [rows, columns]
  std::vector<int32_t> selection;  // ascending; all other columns are deferred
  DType dtype, gradient, moments;
  int64_t interval;  // gradients of one window
  bool mean;
  int threads;  // of the host update, and of the calling thread's work
};

class HostBenchmark {
 public:
  HostBenchmark(const BenchmarkSettings& settings, void* weight);

  // One window's update: of all gradients in one pass, or each folded in by a pass of its own as it lands. Step counts
  // stay as they are, so that every call does the same work.
  void update(bool stream, const std::string& isa);
  void update_ceiling(bool stream, const Pattern& pattern);
  int64_t update_bytes(bool stream) const;
  const HostJob& window() const { return window_; }

  // The calling thread's share of a step. Gradients are of the given dtype, contiguous.
  void norms(void* gradient);
  void pack(void* gradient);                          // both sides' columns, into the places that staging has for them
  void apply(void* weight, void* gradient);           // packing, and AdamW on the selected columns
  void publish(void* weight);                         // compares, then writes the deferred columns
  void find_edits(void* weight);                      // compares alone
  void copy(void* gradient, const Pattern& pattern);  // all its bytes, into memory of its own

 private:
  std::vector<HostJob> jobs(bool stream) const;
  TensorView view(void* data, DType dtype) const { return TensorView(data, dtype, settings_.sizes, {}); }

  BenchmarkSettings settings_;
  ThreadPool caller_, host_;
  Context context_;
  CpuDevice device_;
  HostArray block_, sum_, copy_;
  Parameter parameter_;
  GradientStep step_;  // the window's last gradient
  HostJob window_;
};

}  // namespace zenflow
