// SPDX-License-Identifier: Apache-2.0
#include "cuda/top_k.h"

#include "cuda/batch.h"
#include "dtype.h"

namespace zenflow {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kKeyBits = 31;
constexpr unsigned kAll = 0xffffffffu;

struct Task {
  const float* norms;
  int64_t columns, k;
  int32_t* selected;
  unsigned first_block, blocks;
};

// Orders as the selection does: 0 for a non-finite norm, else larger for a larger norm.
__device__ __forceinline__ uint32_t order_key(float norm) {
  const uint32_t magnitude = bits_from_float(norm) & 0x7fffffffu;
  return magnitude < 0x7f800000u ? magnitude + 1 : 0;
}

// One block a task. First the k-th largest key, bit by bit from the top: the largest `least` that k keys reach. Then,
// in one ordered sweep, all keys above it and the first ones equal to it. A warp owns adjacent columns, so one barrier
// orders the sweep. Bound by the latency of 31 counting rounds, so a thread holds its keys in registers (kHeld of them;
// 0: too many, they are read again) and counts alternate between two places, so that a round needs one barrier.
template <int kHeld>
__global__ void __launch_bounds__(kThreads) select_largest(const Batch<Task> batch) {
  __shared__ unsigned reached_in[2][kWarps], above_in[kWarps], equal_in[kWarps];
  const Task& task = batch.mine();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int count = kHeld > 0 ? kHeld : static_cast<int>((task.columns + kThreads - 1) / kThreads);
  const int64_t begin = static_cast<int64_t>(warp) * count * 32 + lane;
  const auto read_key = [&](int i) {
    return begin + i * 32 < task.columns ? order_key(task.norms[begin + i * 32]) : 0;
  };
  uint32_t held[kHeld > 0 ? kHeld : 1];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) held[i] = read_key(i);
  const auto key = [&](int i) { return kHeld > 0 ? held[kHeld > 0 ? i : 0] : read_key(i); };

  uint32_t least = 0;
  for (int bit = kKeyBits - 1; bit >= 0; --bit) {
    const uint32_t candidate = least | 1u << bit;
    unsigned mine = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) mine += key(i) >= candidate;
    mine = __reduce_add_sync(kAll, mine);
    if (lane == 0) reached_in[bit % 2][warp] = mine;
    __syncthreads();
    if (__reduce_add_sync(kAll, reached_in[bit % 2][lane]) >= task.k) least = candidate;
  }

  // Keys of 0 beyond the last column come after all columns, so they never win.
  unsigned above = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    above += __popc(__ballot_sync(kAll, key(i) > least));
    equal += __popc(__ballot_sync(kAll, key(i) == least));
  }
  if (lane == 0) above_in[warp] = above, equal_in[warp] = equal;
  __syncthreads();
  const unsigned wanted = static_cast<unsigned>(task.k) - __reduce_add_sync(kAll, above_in[lane]);  // equal ones
  above = __reduce_add_sync(kAll, lane < warp ? above_in[lane] : 0u);
  equal = __reduce_add_sync(kAll, lane < warp ? equal_in[lane] : 0u);
  const unsigned lower = (1u << lane) - 1;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const unsigned are_above = __ballot_sync(kAll, key(i) > least);
    const unsigned are_equal = __ballot_sync(kAll, key(i) == least);
    const unsigned equal_before = equal + __popc(are_equal & lower);
    const bool wins = are_above >> lane & 1 || (are_equal >> lane & 1 && equal_before < wanted);
    const unsigned at = above + __popc(are_above & lower) + (equal_before < wanted ? equal_before : wanted);
    if (wins) task.selected[at] = static_cast<int32_t>(begin + i * 32);
    above += __popc(are_above);
    equal += __popc(are_equal);
  }
}

}  // namespace

void top_k(const std::vector<TopKTask>& tasks, Stream stream) {
  std::vector<Task> few, many, most;
  for (const TopKTask& task : tasks) {
    if (task.k == 0) continue;
    auto& size = task.columns <= 4 * kThreads ? few : task.columns <= 32 * kThreads ? many : most;
    size.push_back({task.norms, task.columns, task.k, task.selected, 0, 1});
  }
  launch_batches(select_largest<4>, few, kThreads, stream);
  launch_batches(select_largest<32>, many, kThreads, stream);
  launch_batches(select_largest<0>, most, kThreads, stream);
}

}  // namespace zenflow
