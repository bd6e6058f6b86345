// SPDX-License-Identifier: Apache-2.0
#include "cuda/column_norms.h"

#include <algorithm>

#include "adam.h"
#include "cuda/batch.h"
#include "cuda/elements.h"

namespace zenflow {
namespace {

constexpr int64_t kBlockRows = 128;  // part of the result's definition, like the order of all sums here
constexpr int kPartials = 256;       // the same
constexpr int kThreads = 64;         // small, so that blocks spread evenly over the device
constexpr int kRowsInFlight = 16;
constexpr int kSumsInFlight = 64;

struct Part {
  const void* gradient;
  float* sums;  // [row blocks, columns]
  float* norms;
  int64_t rows, columns;
  unsigned first_block, blocks;
};

int64_t row_blocks(int64_t rows) {
  return (rows + kBlockRows - 1) / kBlockRows;
}

// sums[b, j] = fma chain over the rows of block b, in row order. Bound by reading the gradient: a thread takes 16 bytes
// of a row and has 16 rows under way; threads count through column groups, then blocks, so that narrow matrices fill
// warps.
template <DType D, int kVector>
__global__ void __launch_bounds__(kThreads) sum_blocks(const Batch<Part> batch) {
  const Part& part = batch.mine();
  const int64_t thread = static_cast<int64_t>(blockIdx.x - part.first_block) * kThreads + threadIdx.x;
  const int64_t groups = part.columns / kVector, block = thread / groups, column = thread % groups * kVector;
  const int64_t first = block * kBlockRows;
  if (first >= part.rows) return;

  const Bits<D>* gradient = static_cast<const Bits<D>*>(part.gradient) + first * part.columns + column;
  const int rows = static_cast<int>(part.rows - first < kBlockRows ? part.rows - first : kBlockRows);
  float sum[kVector] = {};
  for (int i = 0; i < rows; i += kRowsInFlight) {
    Pack<Bits<D>, kVector> row[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      if (i + u < rows) row[u] = load<kVector>(gradient + (i + u) * part.columns);
    }
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      if (i + u >= rows) break;
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        const float g = to_float<D>(row[u].item[v]);
        sum[v] = fma(g, g, sum[v]);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVector; ++v) part.sums[block * part.columns + column + v] = sum[v];
}

// norms[j] = ((0 + sums[0, j]) + sums[1, j]) + ... Bound by latency: a thread has 64 loads under way. Adding 0 beyond
// the last block changes nothing, since no sum is -0.
__global__ void __launch_bounds__(kThreads) add_blocks(const Batch<Part> batch) {
  const Part& part = batch.mine();
  const int64_t j = static_cast<int64_t>(blockIdx.x - part.first_block) * kThreads + threadIdx.x;
  if (j >= part.columns) return;
  const int64_t blocks = (part.rows + kBlockRows - 1) / kBlockRows;
  float norm = 0.0f;
  for (int64_t b = 0; b < blocks; b += kSumsInFlight) {
    float sum[kSumsInFlight];
#pragma unroll
    for (int u = 0; u < kSumsInFlight; ++u) sum[u] = b + u < blocks ? part.sums[(b + u) * part.columns + j] : 0.0f;
#pragma unroll
    for (int u = 0; u < kSumsInFlight; ++u) norm = norm + sum[u];
  }
  part.norms[j] = norm;
}

struct SquareTask {
  const float* norms;
  const int32_t* place;  // where there are two sums
  double* squared;       // [sums]: of all columns, or of selected and of deferred ones
  unsigned sums;
  int64_t columns;
  unsigned first_block, blocks;
};

// One block a task, one thread a partial sum. Bound by latency, and little to read.
__global__ void __launch_bounds__(kPartials) add_columns(const Batch<SquareTask> batch) {
  __shared__ double partials[2][kPartials];
  const SquareTask& task = batch.mine();
  double selected = 0.0, deferred = 0.0;
#pragma unroll 8
  for (int64_t j = threadIdx.x; j < task.columns; j += kPartials) {
    const auto norm = static_cast<double>(task.norms[j]);
    if (task.sums == 1 || task.place[j] < 0) {
      selected += norm;
    } else {
      deferred += norm;
    }
  }
  partials[0][threadIdx.x] = selected;
  partials[1][threadIdx.x] = deferred;
  __syncthreads();
  if (threadIdx.x >= task.sums) return;
  double total = 0.0;
#pragma unroll 16
  for (int i = 0; i < kPartials; ++i) total += partials[threadIdx.x][i];
  task.squared[threadIdx.x] = total;
}

// One warp, so that 32 terms are loaded at once; every lane adds them in order. Bound by latency.
__global__ void __launch_bounds__(32)
    add_tasks(const double* squared, int64_t count, double max_norm, double* norm, float* coefficient) {
  double total = 0.0;
  for (int64_t first = 0; first < count; first += 32) {
    const double mine = first + threadIdx.x < count ? squared[first + threadIdx.x] : 0.0;
#pragma unroll
    for (int lane = 0; lane < 32; ++lane) total += __shfl_sync(0xffffffffu, mine, lane);
  }
  if (threadIdx.x != 0) return;
  const double root = ::sqrt(total);
  const double ratio = max_norm / (root + 1e-6);
  *norm = root;
  *coefficient = root < HUGE_VAL && ratio < 1.0 ? static_cast<float>(ratio) : 1.0f;
}

// Launches sum_blocks for the tasks of one dtype that are aligned for packs of 16 bytes, or that are not.
template <DType D, int kVector>
void sum_blocks_of(const std::vector<NormTask>& tasks, const std::vector<Part>& parts, Stream stream) {
  std::vector<Part> mine;
  for (size_t i = 0; i < tasks.size(); ++i) {
    Part part = parts[i];
    const bool wide = is_aligned(part.gradient, 16) && part.columns * item_size(D) % 16 == 0;
    if (tasks[i].dtype != D || wide != (kVector > 1) || part.rows == 0 || part.columns == 0) continue;
    part.blocks = static_cast<unsigned>((row_blocks(part.rows) * (part.columns / kVector) + kThreads - 1) / kThreads);
    mine.push_back(part);
  }
  launch_batches(sum_blocks<D, kVector>, mine, kThreads, stream);
}

}  // namespace

int64_t column_norms_scratch(const std::vector<NormTask>& tasks) {
  int64_t floats = 0;
  for (const NormTask& task : tasks) floats += task.rows > kBlockRows ? row_blocks(task.rows) * task.columns : 0;
  return floats;
}

void column_norms(const std::vector<NormTask>& tasks, float* scratch, Stream stream) {
  std::vector<Part> parts, rest;
  for (const NormTask& task : tasks) {
    const bool one_block = task.rows > 0 && task.rows <= kBlockRows;  // its sums are the norms
    const auto blocks = static_cast<unsigned>((task.columns + kThreads - 1) / kThreads);
    parts.push_back({task.gradient, one_block ? task.norms : scratch, task.norms, task.rows, task.columns, 0, blocks});
    if (one_block || task.columns == 0) continue;
    rest.push_back(parts.back());
    scratch += row_blocks(task.rows) * task.columns;
  }
  sum_blocks_of<DType::kFloat32, 4>(tasks, parts, stream);
  sum_blocks_of<DType::kFloat32, 1>(tasks, parts, stream);
  sum_blocks_of<DType::kBFloat16, 8>(tasks, parts, stream);
  sum_blocks_of<DType::kBFloat16, 1>(tasks, parts, stream);
  sum_blocks_of<DType::kFloat16, 8>(tasks, parts, stream);
  sum_blocks_of<DType::kFloat16, 1>(tasks, parts, stream);
  launch_batches(add_blocks, rest, kThreads, stream);
}

void squared_norms(const std::vector<NormTask>& tasks, double* squared, Stream stream) {
  std::vector<SquareTask> each;
  for (const NormTask& task : tasks) each.push_back({task.norms, nullptr, squared++, 1, task.columns, 0, 1});
  launch_batches(add_columns, each, kPartials, stream);
}

void side_norms(const std::vector<SideTask>& tasks, Stream stream) {
  std::vector<SquareTask> each;
  for (const SideTask& task : tasks) each.push_back({task.norms, task.place, task.sides, 2, task.columns, 0, 1});
  launch_batches(add_columns, each, kPartials, stream);
}

void clip_coefficient(const double* squared, int64_t count, double max_norm, double* norm, float* coefficient,
                      Stream stream) {
  launch(add_tasks, Grid(1, 32), stream, squared, count, max_norm, norm, coefficient);
}

}  // namespace zenflow
