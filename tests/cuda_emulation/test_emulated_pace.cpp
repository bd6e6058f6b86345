// SPDX-License-Identifier: Apache-2.0
// The paced device (pace.h): its times are reckoned, so they are compared exactly.
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "cuda/event.h"
#include "cuda/launch.h"
#include "device_arrays.h"
#include "emulation.h"

using emulation::Activity;
using emulation::Occupied;
using zenflow::Event;
using zenflow::Grid;
using zenflow::launch;
using zenflow::Stream;
using zenflow_test::DeviceArray;
using zenflow_test::test_stream;

namespace {

constexpr int64_t kBytes = 4000;
constexpr double kLink = 1e6;  // bytes a second
constexpr auto kCopyTime = std::chrono::milliseconds(4);

__global__ void named_one(int* value) {
  *value = 1;
}
__global__ void other(int* value) {
  *value = 2;
}

class Paced {
 public:
  explicit Paced(const emulation::Pace& pace) {
    ZENFLOW_CUDA_CHECK(cudaDeviceSynchronize());
    (void)emulation::take_occupied();
    emulation::set_pace(pace);
  }
  ~Paced() {
    (void)cudaDeviceSynchronize();
    emulation::clear_pace();
  }
};

class OwnStream {
 public:
  OwnStream() { ZENFLOW_CUDA_CHECK(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
  ~OwnStream() { (void)cudaStreamDestroy(handle_); }
  cudaStream_t handle() const { return handle_; }
  void wait_for(const Event& event) const { ZENFLOW_CUDA_CHECK(cudaStreamWaitEvent(handle_, event.handle())); }

 private:
  cudaStream_t handle_ = nullptr;
};

class Pinned {
 public:
  explicit Pinned(int64_t bytes) { ZENFLOW_CUDA_CHECK(cudaHostAlloc(&data_, bytes, cudaHostAllocDefault)); }
  ~Pinned() { (void)cudaFreeHost(data_); }
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
};

std::vector<Occupied> of(const std::vector<Occupied>& all, Activity activity) {
  std::vector<Occupied> some;
  std::copy_if(all.begin(), all.end(), std::back_inserter(some), [&](const auto& o) { return o.activity == activity; });
  std::sort(some.begin(), some.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  return some;
}

}  // namespace

TEST(paced_copies_of_one_direction_take_turns_and_the_other_direction_does_not_mind) {
  const DeviceArray<char> device(std::vector<char>(kBytes, 1)), target(std::vector<char>(kBytes, 1));
  const Pinned host(3 * kBytes);
  const OwnStream busy, first, second, third;
  const Event event;
  const Paced paced({kLink, 0, true, {}});
  emulation::queue_work(busy.handle(), 0.05);  // nothing begins before all is queued
  ZENFLOW_CUDA_CHECK(cudaEventRecord(event.handle(), busy.handle()));
  for (const OwnStream* stream : {&first, &second, &third}) stream->wait_for(event);
  ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(host.data(), device.data(), kBytes, cudaMemcpyDeviceToHost, first.handle()));
  ZENFLOW_CUDA_CHECK(
      cudaMemcpyAsync(host.data() + kBytes, device.data(), kBytes, cudaMemcpyDeviceToHost, second.handle()));
  ZENFLOW_CUDA_CHECK(
      cudaMemcpyAsync(target.data(), host.data() + 2 * kBytes, kBytes, cudaMemcpyHostToDevice, third.handle()));
  ZENFLOW_CUDA_CHECK(cudaDeviceSynchronize());

  const auto all = emulation::take_occupied();
  const auto work = of(all, Activity::kWork), down = of(all, Activity::kDown), up = of(all, Activity::kUp);
  CHECK_EQ(work.size(), 1u);
  CHECK_EQ(down.size(), 2u);
  CHECK_EQ(up.size(), 1u);
  CHECK(down[0].begin == work[0].end);
  CHECK(down[1].begin == down[0].end);
  CHECK(up[0].begin == work[0].end);
  for (const Occupied& copy : {down[0], down[1], up[0]}) {
    CHECK(copy.end - copy.begin == kCopyTime);
    CHECK_EQ(copy.bytes, kBytes);
  }
}

TEST(what_waits_for_paced_work_begins_when_that_ends) {
  const OwnStream producer, consumer;
  const Event event;
  const Paced paced({kLink, 0, true, {}});
  emulation::queue_work(producer.handle(), 0.03);
  emulation::queue_work(producer.handle(), 0.01);
  ZENFLOW_CUDA_CHECK(cudaEventRecord(event.handle(), producer.handle()));
  consumer.wait_for(event);
  emulation::queue_work(consumer.handle(), 0.01);
  ZENFLOW_CUDA_CHECK(cudaDeviceSynchronize());

  const auto work = of(emulation::take_occupied(), Activity::kWork);
  CHECK_EQ(work.size(), 3u);
  CHECK(work[1].begin == work[0].end);
  CHECK(work[2].begin == work[1].end);
  CHECK(work[2].stream != work[1].stream);
}

TEST(the_host_waits_until_paced_work_has_ended) {
  const OwnStream stream;
  const Paced paced({kLink, 0, true, {}});
  emulation::queue_work(stream.handle(), 0.02);
  ZENFLOW_CUDA_CHECK(cudaStreamSynchronize(stream.handle()));
  const auto now = std::chrono::steady_clock::now();
  CHECK(emulation::take_occupied()[0].end <= now);
}

TEST(a_paced_device_runs_the_kernels_that_are_named_and_no_others) {
  const DeviceArray<int> value({0}), untouched({0});
  {
    const Paced paced({kLink, 0.001, true, {"named_one"}});
    launch(named_one, Grid(1, 1), test_stream(), value.data());
    launch(other, Grid(1, 1), test_stream(), untouched.data());
    ZENFLOW_CUDA_CHECK(cudaStreamSynchronize(test_stream().handle()));
    const auto kernels = of(emulation::take_occupied(), Activity::kKernel);
    CHECK_EQ(kernels.size(), 2u);
    for (const auto& kernel : kernels) CHECK(kernel.end - kernel.begin == std::chrono::milliseconds(1));
  }
  CHECK_EQ(value.read()[0], 1);
  CHECK_EQ(untouched.read()[0], 0);
  launch(other, Grid(1, 1), test_stream(), untouched.data());
  CHECK_EQ(untouched.read()[0], 2);
}

TEST(paced_copies_move_bytes_only_where_asked_but_for_pageable_memory) {
  const DeviceArray<char> device(std::vector<char>(kBytes, 7));
  const Pinned host(kBytes);
  std::fill(host.data(), host.data() + kBytes, 0);
  const auto copy = [&] {
    ZENFLOW_CUDA_CHECK(
        cudaMemcpyAsync(host.data(), device.data(), kBytes, cudaMemcpyDeviceToHost, test_stream().handle()));
    ZENFLOW_CUDA_CHECK(cudaStreamSynchronize(test_stream().handle()));
  };
  std::vector<char> pageable(kBytes, 0);
  {
    const Paced paced({kLink, 0, false, {}});
    copy();
    CHECK_EQ(static_cast<int>(host.data()[kBytes - 1]), 0);
    ZENFLOW_CUDA_CHECK(
        cudaMemcpyAsync(pageable.data(), device.data(), kBytes, cudaMemcpyDeviceToHost, test_stream().handle()));
    CHECK_EQ(static_cast<int>(pageable[kBytes - 1]), 7);
  }
  const Paced paced({kLink, 0, true, {}});
  copy();
  CHECK_EQ(static_cast<int>(host.data()[kBytes - 1]), 7);
}
