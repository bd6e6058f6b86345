// SPDX-License-Identifier: Apache-2.0
// RAII for CUDA's events and for the calling thread's choice of a GPU.
#pragma once

#include <cuda_runtime.h>

#include "cuda/check.h"

namespace zenflow {

class Event {
 public:
  // A host thread that waits for it sleeps.
  Event() { ZENFLOW_CUDA_CHECK(cudaEventCreateWithFlags(&handle_, cudaEventDisableTiming | cudaEventBlockingSync)); }
  ~Event() { (void)cudaEventDestroy(handle_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  cudaEvent_t handle() const { return handle_; }

 private:
  cudaEvent_t handle_ = nullptr;
};

// Calls in its scope do not disturb a CUDA graph that another thread is recording.
class RelaxedCapture {
 public:
  RelaxedCapture() { ZENFLOW_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Calls in its scope are for one GPU; afterwards the thread's own choice holds again.
class DeviceScope {
 public:
  explicit DeviceScope(int ordinal) {
    ZENFLOW_CUDA_CHECK(cudaGetDevice(&before_));
    if (ordinal != before_) ZENFLOW_CUDA_CHECK(cudaSetDevice(ordinal));
  }
  ~DeviceScope() { (void)cudaSetDevice(before_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
};

}  // namespace zenflow
