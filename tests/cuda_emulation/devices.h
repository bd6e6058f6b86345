// SPDX-License-Identifier: Apache-2.0
// The emulated devices and their streams by handle.
#pragma once

#include <memory>

#include "cuda_runtime.h"
#include "stream.h"

namespace emulation {

int device_count();
void set_device_count(int count);
int current_device();

// The stream behind a handle; null means the current device's default stream. Throws Misuse if there is none.
std::shared_ptr<Stream> stream_of(cudaStream_t handle);
std::shared_ptr<Stream> default_stream(int device);
// Created streams are numbered from 1 on, which labels them.
cudaStream_t add_stream(int device);
void remove_stream(cudaStream_t handle);
void restart_numbering();

// Waits for all that was queued on a device, or on all of them (-1), without ordering anything.
void drain(int device);

}  // namespace emulation
