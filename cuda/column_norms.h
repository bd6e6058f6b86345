// SPDX-License-Identifier: Apache-2.0
// Squared norms of a gradient's columns on the device, with the bits that docs/arithmetic.md prescribes and
// the host path computes.
#pragma once

#include <cstdint>

#include "cuda/stream.h"
#include "dtype.h"

namespace zenflow {

// A matrix in device memory. Element (i, j) is at data + i * row_stride + j, in elements of its dtype.
struct DeviceMatrix {
  const void* data;
  DType dtype;
  int64_t rows, columns, row_stride;
};

// Floats that column_norms needs as scratch: one per column and block of 128 rows.
int64_t column_norms_scratch(int64_t rows, int64_t columns);

// norms[j] = sum over i of gradient[i, j]^2; norms is [columns], scratch as above, both in device memory, no
// two buffers overlapping. Queued on `stream`, without waiting for it. No columns: nothing is done; no rows:
// zeros. Throws if a launch fails.
void column_norms(const DeviceMatrix& gradient, float* scratch, float* norms, Stream stream);

}  // namespace zenflow
