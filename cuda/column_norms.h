// SPDX-License-Identifier: Apache-2.0
// Squared norms of gradients' columns on the device, with the bits that docs/arithmetic.md prescribes and the host path
// computes, and what follows from them: the global norm and the clipping coefficient. Everything is in device memory
// and queued on `stream` without waiting; nothing overlaps. Throws if a launch fails.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/stream.h"
#include "dtype.h"

namespace zenflow {

struct NormTask {
  const void* gradient;  // [rows, columns], contiguous
  DType dtype;
  int64_t rows, columns;
  float* norms;  // [columns]
};

// Floats that column_norms needs as scratch: one per column and block of 128 rows, for tasks of more than one block.
int64_t column_norms_scratch(const std::vector<NormTask>& tasks);

// norms[j] = sum over i of gradient[i, j]^2. No columns: nothing is done; no rows: zeros.
void column_norms(const std::vector<NormTask>& tasks, float* scratch, Stream stream);

// squared[t] = the norms of task t, added in double: column j into partial sum j mod 256, columns ascending, each from
// 0; then the 256 partial sums in order, from 0. `squared` is [tasks].
void squared_norms(const std::vector<NormTask>& tasks, double* squared, Stream stream);

// The same sums of one task's selected columns, and of its deferred ones.
struct SideTask {
  const float* norms;    // [columns]
  const int32_t* place;  // [columns]; negative: selected
  int64_t columns;
  double* sides;  // [2]
};
void side_norms(const std::vector<SideTask>& tasks, Stream stream);

// norm = sqrt(squared[0] + squared[1] + ...), added in order from 0; coefficient = min(1, max_norm / (norm + 1e-6)) in
// double, rounded to fp32; 1 if norm is not finite. One element each.
void clip_coefficient(const double* squared, int64_t count, double max_norm, double* norm, float* coefficient,
                      Stream stream);

}  // namespace zenflow
