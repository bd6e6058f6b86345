// SPDX-License-Identifier: Apache-2.0
// Streams, events, devices and errors of the emulated runtime. Mistakes in their use: test_emulated_mistakes.cpp.
#include <sys/wait.h>
#include <unistd.h>

#include <cfenv>
#include <set>
#include <string>
#include <vector>

#include "cuda/event.h"
#include "cuda/launch.h"
#include "device_arrays.h"
#include "emulation.h"

using zenflow::DeviceScope;
using zenflow::Event;
using zenflow::Grid;
using zenflow::launch;
using zenflow::Stream;
using zenflow_test::DeviceArray;
using zenflow_test::test_stream;

namespace {

__global__ void add(int* value, int addend) {
  *value += addend;
}
__global__ void multiply(int* value, int factor) {
  *value *= factor;
}
__global__ void third(float* value) {
  *value = __fdiv_rn(1.0f, 3.0f);
}
__global__ void append(int* list, int* length, int value) {
  list[atomicAdd(length, 1)] = value;
}

class OwnStream {
 public:
  OwnStream() { ZENFLOW_CUDA_CHECK(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
  ~OwnStream() { (void)cudaStreamDestroy(handle_); }
  Stream get() const { return Stream(handle_); }
  cudaStream_t handle() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

std::string take_error() {
  const std::string text = emulation::kept_text();
  emulation::clear_error();
  return text;
}

}  // namespace

TEST(a_stream_keeps_its_order) {
  const DeviceArray<int> value({1});
  for (int i = 0; i < 20; ++i) {
    launch(add, Grid(1, 1), test_stream(), value.data(), 1);
    launch(multiply, Grid(1, 1), test_stream(), value.data(), i % 2 == 0 ? 2 : 1);
  }
  int expected = 1;
  for (int i = 0; i < 20; ++i) expected = (expected + 1) * (i % 2 == 0 ? 2 : 1);
  CHECK_EQ(value.read()[0], expected);
}

TEST(streams_overtake_each_other) {
  emulation::set_delay(200);
  std::set<std::vector<int>> orders;
  const OwnStream a, b;
  for (int round = 0; round < 50 && orders.size() < 3; ++round) {
    const DeviceArray<int> list(std::vector<int>(6)), length({0});
    for (int i = 0; i < 3; ++i) {
      launch(append, Grid(1, 1), a.get(), list.data(), length.data(), i);
      launch(append, Grid(1, 1), b.get(), list.data(), length.data(), 3 + i);
    }
    a.get().synchronize();
    b.get().synchronize();
    orders.insert(list.read());
  }
  emulation::set_delay(50);
  CHECK(orders.size() >= 3);
}

TEST(a_wait_is_for_the_record_that_was_last_when_it_was_queued) {
  const DeviceArray<int> value({0});
  const OwnStream producer, consumer;
  const Event event;
  launch(add, Grid(1, 1), producer.get(), value.data(), 5);
  ZENFLOW_CUDA_CHECK(cudaEventRecord(event.handle(), producer.handle()));
  ZENFLOW_CUDA_CHECK(cudaStreamWaitEvent(consumer.handle(), event.handle()));
  launch(multiply, Grid(1, 1), consumer.get(), value.data(), 3);
  ZENFLOW_CUDA_CHECK(cudaEventRecord(event.handle(), consumer.handle()));
  ZENFLOW_CUDA_CHECK(cudaEventSynchronize(event.handle()));
  CHECK_EQ(value.read()[0], 15);
}

TEST(an_event_without_a_record_is_done) {
  const Event event;
  CHECK_EQ(cudaEventQuery(event.handle()), cudaSuccess);
  ZENFLOW_CUDA_CHECK(cudaEventSynchronize(event.handle()));
  ZENFLOW_CUDA_CHECK(cudaStreamWaitEvent(test_stream().handle(), event.handle()));
}

TEST(a_query_says_when_a_held_stream_is_done) {
  emulation::restart_numbering();
  emulation::hold({"stream 1"});
  const DeviceArray<int> value({1});
  {
    const OwnStream held;
    launch(add, Grid(1, 1), held.get(), value.data(), 1);
    while (cudaStreamQuery(held.handle()) == cudaErrorNotReady) usleep(100);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);  // not ready is no error
  }
  emulation::hold({});
  CHECK_EQ(value.read()[0], 2);
}

TEST(a_held_stream_comes_after_all_others) {
  for (int round = 0; round < 10; ++round) {
    emulation::restart_numbering();
    emulation::hold({"stream 1"});
    const DeviceArray<int> list(std::vector<int>(6)), length({0});
    {
      const OwnStream held, other;
      for (int i = 0; i < 3; ++i) {
        launch(append, Grid(1, 1), held.get(), list.data(), length.data(), 3 + i);
        launch(append, Grid(1, 1), other.get(), list.data(), length.data(), i);
      }
      held.get().synchronize();
      other.get().synchronize();
    }
    emulation::hold({});
    CHECK(list.read() == std::vector<int>({0, 1, 2, 3, 4, 5}));
  }
}

TEST(elapsed_time_needs_events_with_timing) {
  const Event untimed;
  cudaEvent_t start, end;
  ZENFLOW_CUDA_CHECK(cudaEventCreate(&start));
  ZENFLOW_CUDA_CHECK(cudaEventCreate(&end));
  ZENFLOW_CUDA_CHECK(cudaEventRecord(start, test_stream().handle()));
  ZENFLOW_CUDA_CHECK(cudaEventRecord(end, test_stream().handle()));
  ZENFLOW_CUDA_CHECK(cudaEventSynchronize(end));
  float milliseconds = -1;
  ZENFLOW_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, end));
  CHECK(milliseconds >= 0);
  CHECK(cudaEventElapsedTime(&milliseconds, start, untimed.handle()) != cudaSuccess);
  CHECK(take_error().find("cudaEventDisableTiming") != std::string::npos);
  ZENFLOW_CUDA_CHECK(cudaEventDestroy(start));
  ZENFLOW_CUDA_CHECK(cudaEventDestroy(end));
}

TEST(a_destroyed_stream_finishes_its_work) {
  const DeviceArray<int> value({1});
  const Event event;
  {
    const OwnStream stream;
    launch(add, Grid(1, 1), stream.get(), value.data(), 1);
    ZENFLOW_CUDA_CHECK(cudaEventRecord(event.handle(), stream.handle()));
  }
  ZENFLOW_CUDA_CHECK(cudaEventSynchronize(event.handle()));
  CHECK_EQ(value.read()[0], 2);
}

TEST(handles_are_checked) {
  cudaStream_t gone;
  {
    const OwnStream stream;
    gone = stream.handle();
  }
  CHECK_EQ(cudaStreamQuery(gone), cudaErrorInvalidResourceHandle);
  CHECK(take_error().find("no such stream") != std::string::npos);
  CHECK(cudaStreamCreateWithFlags(&gone, cudaStreamDefault) != cudaSuccess);
  CHECK(take_error().find("only streams with cudaStreamNonBlocking") != std::string::npos);
}

TEST(devices_are_kept_apart) {
  int count = 0;
  ZENFLOW_CUDA_CHECK(cudaGetDeviceCount(&count));
  CHECK_EQ(count, 2);
  const DeviceScope scope(1);
  const Event event;
  CHECK(cudaEventRecord(event.handle(), test_stream().handle()) != cudaSuccess);
  CHECK(take_error().find("the event belongs to device 1, the stream to device 0") != std::string::npos);
  const DeviceArray<int> value({1});
  CHECK_THROWS(std::runtime_error, launch(add, Grid(1, 1), test_stream(), value.data(), 1));
  CHECK(take_error().find("the stream belongs to device 0, current is 1") != std::string::npos);
  CHECK_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  take_error();
}

TEST(a_device_ignores_the_hosts_rounding) {
  std::fesetround(FE_UPWARD);
  {
    const OwnStream stream;
    const DeviceArray<float> value({0.0f});
    launch(third, Grid(1, 1), stream.get(), value.data());
    stream.get().synchronize();
    std::fesetround(FE_TONEAREST);
    CHECK_EQ(value.read()[0], 0x1.555556p-2f);
  }
}

TEST(an_error_stays_until_it_is_cleared) {
  CHECK(cudaStreamDestroy(nullptr) != cudaSuccess);
  int device;
  CHECK_EQ(cudaGetDevice(&device), cudaErrorInvalidResourceHandle);
  CHECK_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  CHECK_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  CHECK_EQ(std::string(cudaGetErrorString(cudaErrorInvalidResourceHandle)),
           "cudaStreamDestroy: the default stream cannot be destroyed");
  emulation::clear_error();
  ZENFLOW_CUDA_CHECK(cudaGetDevice(&device));
}

TEST(a_call_can_be_made_to_fail) {
  emulation::fail_next("cudaMalloc", cudaErrorMemoryAllocation);
  void* memory = nullptr;
  CHECK_EQ(cudaMalloc(&memory, 4), cudaErrorMemoryAllocation);
  ZENFLOW_CUDA_CHECK(cudaMalloc(&memory, 4));
  ZENFLOW_CUDA_CHECK(cudaFree(memory));
  CHECK_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
}

TEST(capture_is_what_a_test_says) {
  cudaStreamCaptureStatus status;
  emulation::set_capturing(test_stream().handle(), true);
  ZENFLOW_CUDA_CHECK(cudaStreamIsCapturing(test_stream().handle(), &status));
  CHECK_EQ(status, cudaStreamCaptureStatusActive);
  emulation::set_capturing(test_stream().handle(), false);
  ZENFLOW_CUDA_CHECK(cudaStreamIsCapturing(test_stream().handle(), &status));
  CHECK_EQ(status, cudaStreamCaptureStatusNone);
}

TEST(a_forked_child_has_no_device) {
  const pid_t child = fork();
  if (child == 0) _exit(cudaStreamSynchronize(test_stream().handle()) == cudaErrorInitializationError ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
}
