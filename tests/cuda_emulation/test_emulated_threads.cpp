// SPDX-License-Identifier: Apache-2.0
// Blocks, warps and barriers of the emulated device: what correct kernels get, and that wrong ones are named.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "device_arrays.h"
#include "emulation.h"

using zenflow::Grid;
using zenflow::launch;
using zenflow_test::DeviceArray;
using zenflow_test::test_stream;

namespace {

constexpr unsigned kAll = 0xffffffffu;

struct Scaled {
  int64_t* sums;
  int factor;
};

__global__ void sum_block(Scaled scaled) {
  __shared__ int parts[256];
  parts[threadIdx.x] = static_cast<int>(threadIdx.x) * scaled.factor;
  __syncthreads();
  for (unsigned width = 128; width > 0; width /= 2) {
    if (threadIdx.x < width) parts[threadIdx.x] += parts[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x == 0) scaled.sums[blockIdx.x] = parts[0];
}

__global__ void use_warp(int* out) {
  const int lane = static_cast<int>(threadIdx.x % 32), value = lane * lane;
  int at = static_cast<int>(threadIdx.x);
  const auto put = [&](int result) {
    out[at] = result;
    at += 64;
  };
  put(__shfl_sync(kAll, value, 5));
  put(__shfl_sync(kAll, value, 9, 8));
  put(__shfl_up_sync(kAll, value, 3));
  put(__shfl_down_sync(kAll, value, 3, 16));
  put(__shfl_xor_sync(kAll, value, 4));
  put(static_cast<int>(__ballot_sync(kAll, lane % 3 == 0)));
  put(__any_sync(kAll, lane == 7) + 2 * __all_sync(kAll, lane >= 0) + 4 * __all_sync(kAll, lane > 0));
  put(static_cast<int>(__match_any_sync(kAll, lane / 8)));
  put(__reduce_add_sync(kAll, lane));
  put(__reduce_min_sync(kAll, lane - 5));
  put(static_cast<int>(__reduce_max_sync(kAll, static_cast<unsigned>(lane - 5))));
}

int expected_of_warp(int operation, int lane) {
  switch (operation) {
    case 0:
      return 25;
    case 1:
      return (lane / 8 * 8 + 1) * (lane / 8 * 8 + 1);
    case 2:
      return lane < 3 ? lane * lane : (lane - 3) * (lane - 3);
    case 3:
      return lane % 16 > 12 ? lane * lane : (lane + 3) * (lane + 3);
    case 4:
      return (lane ^ 4) * (lane ^ 4);
    case 5:
      return static_cast<int>(0x49249249u);
    case 6:
      return 1 + 2;
    case 7:
      return static_cast<int>(0xffu << lane / 8 * 8);
    case 8:
      return 31 * 16;
    case 9:
      return -5;
    default:
      return -1;  // the largest unsigned
  }
}

// The upper half of the block never comes to the warp operation; the lower half of each warp meets alone.
__global__ void meet_in_parts(int* out) {
  if (threadIdx.x < 32) out[threadIdx.x] = static_cast<int>(__ballot_sync(threadIdx.x < 16 ? 0xffffu : 0xffff0000u, 1));
  out[64 + threadIdx.x] = __syncthreads_count(threadIdx.x % 4 == 0);
  out[128 + threadIdx.x] = __syncthreads_or(threadIdx.x == 63) + 2 * __syncthreads_and(threadIdx.x < 63);
}

__global__ void take_turns(int* next, int* order) {
  order[atomicAdd(next, 1)] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

std::vector<int> order_with(uint64_t seed) {
  emulation::set_seed(seed);
  cudaStream_t stream = nullptr;
  emulation::restart_numbering();
  ZENFLOW_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const DeviceArray<int> next({0}), order(std::vector<int>(64));
  launch(take_turns, Grid(4, 16), zenflow::Stream(stream), next.data(), order.data());
  zenflow::Stream(stream).synchronize();
  ZENFLOW_CUDA_CHECK(cudaStreamDestroy(stream));
  return order.read();
}

// Wrong kernels, each for one block of 64 threads.
__global__ void exit_before_barrier(int*) {
  if (threadIdx.x == 3) return;
  __syncthreads();
}
__global__ void two_barriers(int*) {
  if (threadIdx.x == 3) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void barrier_against_shuffle(int*) {
  if (threadIdx.x == 3) {
    __syncthreads();
  } else {
    __shfl_sync(kAll, 1, 0);
  }
}
__global__ void different_masks(int*) {
  __ballot_sync(threadIdx.x == 3 ? 0xffu : kAll, 1);
}
__global__ void mask_without_own_lane(int*) {
  __ballot_sync(0xfffffff7u, 1);
}
__global__ void read_outside_mask(int*) {
  if (threadIdx.x % 32 < 8) __shfl_sync(0xffu, 1, 8);
}
__global__ void exit_before_shuffle(int*) {
  if (threadIdx.x == 3) return;
  __shfl_sync(kAll, 1, 0);
}

void check_failure(void (*kernel)(int*), unsigned threads, std::initializer_list<std::string> parts) {
  const DeviceArray<int> out(std::vector<int>(64));
  launch(kernel, Grid(1, threads), test_stream(), out.data());
  CHECK_EQ(cudaStreamSynchronize(test_stream().handle()), cudaErrorLaunchFailure);
  const std::string text = emulation::kept_text();
  emulation::clear_error();
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) throw zenflow_test::Failure("no '" + part + "' in: " + text);
  }
}

}  // namespace

TEST(barriers_and_shared_memory) {
  const DeviceArray<int64_t> sums(std::vector<int64_t>(7));
  launch(sum_block, Grid(7, 256), test_stream(), Scaled{sums.data(), 2});
  for (const int64_t sum : sums.read()) CHECK_EQ(sum, 255 * 256);
}

TEST(warp_operations) {
  const DeviceArray<int> out(std::vector<int>(11 * 64));
  launch(use_warp, Grid(1, 64), test_stream(), out.data());
  const std::vector<int> found = out.read();
  for (int i = 0; i < 11 * 64; ++i) CHECK_EQ(found[i], expected_of_warp(i / 64, i % 32));
}

TEST(a_warp_operation_holds_up_its_own_lanes_alone) {
  const DeviceArray<int> out(std::vector<int>(192));
  launch(meet_in_parts, Grid(1, 64), test_stream(), out.data());
  const std::vector<int> found = out.read();
  for (int i = 0; i < 32; ++i) CHECK_EQ(static_cast<unsigned>(found[i]), i < 16 ? 0xffffu : 0xffff0000u);
  for (int i = 64; i < 128; ++i) CHECK_EQ(found[i], 16);
  for (int i = 128; i < 192; ++i) CHECK_EQ(found[i], 1);
}

TEST(blocks_and_threads_run_in_seeded_random_order) {
  std::vector<int> sorted(64);
  for (int i = 0; i < 64; ++i) sorted[i] = i;
  const std::vector<int> first = order_with(1), second = order_with(2);
  CHECK(first != sorted);
  CHECK(first != second);
  CHECK(order_with(1) == first);
  CHECK(std::is_permutation(first.begin(), first.end(), sorted.begin()));
}

TEST(divergence_is_named) {
  const std::string thread_3 = "thread (3, 0, 0) of block (0, 0, 0) of (anonymous namespace)::";
  const std::string at = "waits at the barrier tests/cuda_emulation/test_emulated_threads.cpp:";
  check_failure(exit_before_barrier, 64, {at, thread_3 + "exit_before_barrier(int*) has exited"});
  check_failure(two_barriers, 64, {at, "two_barriers(int*)"});
  check_failure(barrier_against_shuffle, 64, {"waits in the shuffle", thread_3, at});
  check_failure(different_masks, 64, {"waits in the vote", "with mask 0x000000ff", "with mask 0xffffffff"});
  check_failure(mask_without_own_lane, 32, {thread_3, "does not have its own lane"});
  check_failure(read_outside_mask, 64, {"reads lane 8, which is not in the mask"});
  check_failure(exit_before_shuffle, 64, {"waits in the shuffle", thread_3 + "exit_before_shuffle(int*) has exited"});
  check_failure(read_outside_mask, 6, {"its warp has no lane 6"});
}

TEST(a_failed_launch_leaves_the_device_usable_once_its_error_is_cleared) {
  for (int round = 0; round < 3; ++round) check_failure(two_barriers, 64, {"two_barriers"});
  const DeviceArray<int64_t> sums(std::vector<int64_t>(1));
  launch(sum_block, Grid(1, 256), test_stream(), Scaled{sums.data(), 1});
  CHECK_EQ(sums.read()[0], 255 * 128);
}

TEST(launches_that_no_device_takes_are_refused) {
  const DeviceArray<int> out(std::vector<int>(1));
  for (const auto& [grid, block] : std::vector<std::pair<dim3, dim3>>{
           {1, 1025}, {0, 1}, {1, 0}, {dim3(1, 65536), 1}, {dim3(1, 1, 65536), 1}, {1, dim3(1, 1, 65)}}) {
    CHECK_THROWS(std::runtime_error, launch(exit_before_barrier, Grid(grid, block), test_stream(), out.data()));
    emulation::clear_error();
  }
}
