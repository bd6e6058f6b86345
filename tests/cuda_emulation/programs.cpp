// SPDX-License-Identifier: Apache-2.0
// Programs with a mistake, each run as a process of its own by test_emulated_mistakes.cpp, because a sanitizer that
// finds the mistake ends the process.
//   programs NAME [ARGUMENT...]
// Exit status 0: nothing was noticed; 1: a wrong result; 2: an error of the device.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/event.h"
#include "cuda/launch.h"
#include "cuda/stream.h"
#include "emulation.h"

using zenflow::Event;
using zenflow::Grid;
using zenflow::launch;
using zenflow::Stream;

namespace {

constexpr int kCount = 4096, kThreads = 64;

__global__ void fill(int* data, int value) {
  data[blockIdx.x * kThreads + threadIdx.x] = value;
}

__global__ void pack(const int* gradient, int* staging, int* norm) {
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;
  staging[i] = gradient[i] + 1;
  if (i == 0) *norm = gradient[0];
}

Stream make_stream() {
  cudaStream_t stream = nullptr;
  ZENFLOW_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return Stream(stream);
}

int* device_memory(int count) {
  int* data = nullptr;
  ZENFLOW_CUDA_CHECK(cudaMalloc(&data, count * sizeof(int)));
  return data;
}

int* mapped_memory(int count) {
  int* data = nullptr;
  ZENFLOW_CUDA_CHECK(cudaHostAlloc(&data, count * sizeof(int), cudaHostAllocMapped));
  std::memset(data, 0, count * sizeof(int));
  return data;
}

bool all_are(const int* data, int value) {
  for (int i = 0; i < kCount; ++i) {
    if (data[i] != value) return false;
  }
  return true;
}

// Steps as zenflow makes them: a gradient is packed into a staging buffer on one stream and copied to one of two host
// lanes on another; the host reads a lane one step late. Without arguments it prints its waits, each with its
// producers; arguments name the one to delete and its producers.
int pipeline(const std::vector<std::string>& arguments) {
  if (!arguments.empty()) emulation::delete_wait(arguments[0], {arguments.begin() + 1, arguments.end()});
  const Stream compute = make_stream(), down = make_stream();
  int *gradient = device_memory(kCount), *staging = device_memory(kCount);
  int* lanes[] = {mapped_memory(kCount), mapped_memory(kCount)};
  int* norm = mapped_memory(1);
  int* norm_on_device = nullptr;
  ZENFLOW_CUDA_CHECK(cudaHostGetDevicePointer(&norm_on_device, norm, 0));
  const Event packed, copied[2];
  bool good = true;
  constexpr int kSteps = 6;
  for (int step = 0; step < kSteps; ++step) {
    launch(fill, Grid(kCount / kThreads, kThreads), compute, gradient, step);
    if (step > 0) ZENFLOW_CUDA_CHECK(cudaStreamWaitEvent(compute.handle(), copied[1 - step % 2].handle()));  // staging
    launch(pack, Grid(kCount / kThreads, kThreads), compute, gradient, staging, norm_on_device);
    ZENFLOW_CUDA_CHECK(cudaEventRecord(packed.handle(), compute.handle()));
    ZENFLOW_CUDA_CHECK(cudaStreamWaitEvent(down.handle(), packed.handle()));  // staging
    ZENFLOW_CUDA_CHECK(
        cudaMemcpyAsync(lanes[step % 2], staging, kCount * sizeof(int), cudaMemcpyDeviceToHost, down.handle()));
    ZENFLOW_CUDA_CHECK(cudaEventRecord(copied[step % 2].handle(), down.handle()));
    if (step == 0) continue;
    ZENFLOW_CUDA_CHECK(cudaEventSynchronize(copied[1 - step % 2].handle()));  // the lane
    good = good && all_are(lanes[1 - step % 2], step);
  }
  launch(fill, Grid(1, 1), compute, norm_on_device, -1);
  ZENFLOW_CUDA_CHECK(cudaStreamSynchronize(compute.handle()));  // the norm
  good = good && *norm == -1;
  for (const auto& site : arguments.empty() ? emulation::wait_sites() : std::vector<emulation::WaitSite>()) {
    std::printf("%s", site.place.c_str());
    for (const auto& producer : site.producers) std::printf("\t%s", producer.c_str());
    std::printf("\n");
  }
  return good ? 0 : 1;
}

// The sum of a block's thread numbers; `kSynchronized` is how it should be.
template <bool kSynchronized>
__global__ void sum_block(int* sum) {
  __shared__ int parts[kThreads];
  parts[threadIdx.x] = static_cast<int>(threadIdx.x);
  if constexpr (kSynchronized) __syncthreads();
  if (threadIdx.x == 0) {
    *sum = 0;
    for (const int part : parts) *sum += part;
  }
}

// A warp's lanes hand a value on through shared memory.
template <bool kSynchronized>
__global__ void rotate_warp(int* out) {
  __shared__ int values[32];
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  if constexpr (kSynchronized) __syncwarp();
  const int next = values[(threadIdx.x + 1) % 32];
  if constexpr (!kSynchronized) __ballot_sync(0xffffffffu, 1);  // brings the lanes together, but orders no memory
  out[threadIdx.x] = next;
}

int barrier(bool synchronized) {
  const Stream stream = make_stream();
  int* sum = mapped_memory(1);
  launch(synchronized ? sum_block<true> : sum_block<false>, Grid(1, kThreads), stream, sum);
  stream.synchronize();
  return *sum == kThreads * (kThreads - 1) / 2 ? 0 : 1;
}

int warp_barrier(bool synchronized) {
  const Stream stream = make_stream();
  int* out = mapped_memory(32);
  launch(synchronized ? rotate_warp<true> : rotate_warp<false>, Grid(1, 32), stream, out);
  stream.synchronize();
  for (int i = 0; i < 32; ++i) {
    if (out[i] != (i + 1) % 32) return 1;
  }
  return 0;
}

struct Hidden {
  int* data;
};

__global__ void write_hidden(Hidden hidden) {
  hidden.data[threadIdx.x] = 1;
}

// The freed address is inside a struct, where the launch does not look.
int write_after_free() {
  const Stream stream = make_stream();
  int* data = device_memory(kThreads);
  ZENFLOW_CUDA_CHECK(cudaFree(data));
  launch(write_hidden, Grid(1, kThreads), stream, Hidden{data});
  ZENFLOW_CUDA_CHECK(cudaDeviceSynchronize());
  return 0;
}

// The host changes a buffer that a copy is still reading.
int host_write_during_copy() {
  const Stream stream = make_stream();
  int *data = device_memory(kCount), *lane = mapped_memory(kCount);
  emulation::hold({"stream 1"});
  ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(data, lane, kCount * sizeof(int), cudaMemcpyHostToDevice, stream.handle()));
  lane[5] = 1;
  std::vector<int> result(kCount);
  ZENFLOW_CUDA_CHECK(
      cudaMemcpyAsync(result.data(), data, kCount * sizeof(int), cudaMemcpyDeviceToHost, stream.handle()));
  return all_are(result.data(), 0) ? 0 : 1;
}

int run(const std::string& name, const std::vector<std::string>& arguments) {
  if (name == "pipeline") return pipeline(arguments);
  if (name == "barrier") return barrier(true);
  if (name == "missing_barrier") return barrier(false);
  if (name == "warp_barrier") return warp_barrier(true);
  if (name == "missing_warp_barrier") return warp_barrier(false);
  if (name == "write_after_free") return write_after_free();
  if (name == "host_write_during_copy") return host_write_during_copy();
  std::fprintf(stderr, "no program %s\n", name.c_str());
  return 3;
}

}  // namespace

// By default TSan waits a second at exit.
extern "C" const char* __tsan_default_options() {
  return "atexit_sleep_ms=0";
}

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "", {argv + std::min(argc, 2), argv + argc});
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 2;
  }
}
