// SPDX-License-Identifier: Apache-2.0
// The emulated device's blocks, warps and barriers: what correct kernels get, and that wrong ones are named.
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/launch.h"
#include "emulation.h"

using zenflow::Grid;
using zenflow::launch;
using zenflow::Stream;

namespace {

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : count_(values.size()) {
    ZENFLOW_CUDA_CHECK(cudaMalloc(&data_, count_ * sizeof(T)));
    ZENFLOW_CUDA_CHECK(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { cudaFree(data_); }
  T* data() const { return data_; }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    ZENFLOW_CUDA_CHECK(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

struct Pair {
  int64_t* sums;
  int factor;
};

__global__ void sum_block(Pair pair) {
  __shared__ int parts[256];
  parts[threadIdx.x] = static_cast<int>(threadIdx.x) * pair.factor;
  __syncthreads();
  for (int width = 128; width > 0; width /= 2) {
    if (threadIdx.x < static_cast<unsigned>(width)) parts[threadIdx.x] += parts[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x == 0) pair.sums[blockIdx.x] = parts[0];
}

__global__ void sum_warp(int* sums) {
  int value = static_cast<int>(threadIdx.x);
  for (int width = 16; width > 0; width /= 2) value += __shfl_down_sync(0xffffffffu, value, width);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
}

__global__ void diverge(int* out) {
  if (threadIdx.x == 3) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

std::string failure_of(void (*kernel)(int*), unsigned threads) {
  DeviceArray<int> out(std::vector<int>(1024));
  launch(kernel, Grid(1, threads), Stream::from_handle(0), out.data());
  cudaDeviceSynchronize();
  const std::string text = emulation::kept_text();
  emulation::clear_error();
  return text;
}

}  // namespace

TEST(barriers_and_shared_memory) {
  DeviceArray<int64_t> sums(std::vector<int64_t>(7));
  launch(sum_block, Grid(7, 256), Stream::from_handle(0), Pair{sums.data(), 2});
  for (const int64_t sum : sums.read()) CHECK_EQ(sum, 255 * 256);
}

TEST(shuffles) {
  DeviceArray<int> sums(std::vector<int>(4));
  launch(sum_warp, Grid(1, 128), Stream::from_handle(0), sums.data());
  CHECK(sums.read() == std::vector<int>({496, 1520, 2544, 3568}));
}

TEST(divergence_is_named) {
  const std::string text = failure_of(diverge, 64);
  CHECK(text.find("diverge(int*) waits at the barrier tests/cuda_emulation/test_emulated_threads.cpp:") !=
        std::string::npos);
  CHECK(text.find("thread (3, 0, 0) of block (0, 0, 0)") != std::string::npos);
}
