// SPDX-License-Identifier: Apache-2.0
// A GPU as a Device (src/device.h): weights, gradients and selected columns in its memory.
//
// Work is queued on the caller's stream; gradients leave on a stream of their own, finished weights come back on
// another, and events order the three. Needs no CUDA header.
#pragma once

#include <cstdint>
#include <memory>

#include "src/device.h"  // "device.h" here is this file

namespace zenflow {

// GPU memory from the caller's framework, so that it counts it.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  // The caller's stream from now on.
  virtual void use_stream(uintptr_t) {}
  // Memory that work queued on the caller's stream may use. Throws what the framework throws.
  virtual void* allocate(int64_t bytes) = 0;
  virtual void* try_allocate(int64_t bytes) = 0;  // nullptr: there is not as much
  // What is queued so far on `stream` may still use it.
  virtual void release(void* memory, uintptr_t stream) noexcept = 0;
};

// Device memory for what is on its way: gradients to the host in `chunks` chunks, weights to the device in one.
struct TransferSizes {
  int64_t chunk_bytes = int64_t{16} << 20;  // large enough to hide a copy's start, small beside any model
  int64_t chunks = 4;
};

// The context outlives the device. Throws without the CUDA half, or if CUDA refuses.
std::unique_ptr<Device> make_cuda_device(int ordinal, std::unique_ptr<DeviceMemory> memory, const Context& context,
                                         const TransferSizes& sizes);

}  // namespace zenflow
