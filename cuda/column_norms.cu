// SPDX-License-Identifier: Apache-2.0
#include "cuda/column_norms.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/launch.h"

namespace zenflow {
namespace {

constexpr int64_t kBlockRows =
    128;  // part of the result's definition, like the order of the two sums: not a tuning knob
constexpr int kThreads = 256;
constexpr int64_t kMaxGridY = 65535;

// Widening is exact, denormals and all; the intrinsics are one instruction each.
template <DType D>
__device__ float load(const void* data, int64_t i) {
  if constexpr (D == DType::kBFloat16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
  } else if constexpr (D == DType::kFloat16) {
    return __half2float(static_cast<const __half*>(data)[i]);
  } else {
    return static_cast<const float*>(data)[i];
  }
}

int64_t block_count(int64_t rows) {
  return rows / kBlockRows + (rows % kBlockRows != 0);
}

// sums[b, j] = fma chain over the rows of block b, in row order. One thread a column, so a warp reads
// consecutive elements of a row.
template <DType D>
__global__ void sum_blocks(const void* data, int64_t rows, int64_t columns, int64_t row_stride, float* sums) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= columns) return;
  for (int64_t first = blockIdx.y * kBlockRows; first < rows; first += gridDim.y * kBlockRows) {
    const int64_t end = first + kBlockRows < rows ? first + kBlockRows : rows;
    float sum = 0.0f;
    for (int64_t i = first; i < end; ++i) {
      const float g = load<D>(data, i * row_stride + j);
      sum = __fmaf_rn(g, g, sum);
    }
    sums[first / kBlockRows * columns + j] = sum;
  }
}

// norms[j] = ((0 + sums[0, j]) + sums[1, j]) + ...
__global__ void add_blocks(const float* sums, int64_t blocks, int64_t columns, float* norms) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= columns) return;
  float norm = 0.0f;
  for (int64_t b = 0; b < blocks; ++b) norm = __fadd_rn(norm, sums[b * columns + j]);
  norms[j] = norm;
}

auto sum_blocks_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return sum_blocks<DType::kBFloat16>;
    case DType::kFloat16:
      return sum_blocks<DType::kFloat16>;
    default:
      return sum_blocks<DType::kFloat32>;
  }
}

}  // namespace

int64_t column_norms_scratch(int64_t rows, int64_t columns) {
  return block_count(rows) * columns;
}

void column_norms(const DeviceMatrix& gradient, float* scratch, float* norms, Stream stream) {
  if (gradient.columns == 0) return;

  const int64_t blocks = block_count(gradient.rows);
  const auto across = static_cast<unsigned>((gradient.columns + kThreads - 1) / kThreads);
  const auto down = static_cast<unsigned>(std::min(blocks, kMaxGridY));
  if (blocks > 0) {
    launch(sum_blocks_of(gradient.dtype), Grid(dim3(across, down), kThreads), stream, gradient.data, gradient.rows,
           gradient.columns, gradient.row_stride, scratch);
  }
  launch(add_blocks, Grid(across, kThreads), stream, scratch, blocks, gradient.columns, norms);
}

}  // namespace zenflow
