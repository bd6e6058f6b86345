// SPDX-License-Identifier: Apache-2.0
// What tests say to the emulated device besides CUDA's own calls.
//
// The environment sets the beginning: ZENFLOW_EMULATION_SEED, ZENFLOW_EMULATION_DELAY_US (the longest random delay
// before an operation), ZENFLOW_EMULATION_FAIL_HOST_REGISTER (if set, page-locking is refused).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_runtime.h"
#include "errors.h"      // kept_text, clear_error, fail_next
#include "pace.h"        // set_pace, clear_pace, take_occupied
#include "stream.h"      // set_seed, set_delay, hold
#include "wait_sites.h"  // wait_sites, delete_wait, restore_waits

namespace emulation {

// Ordinary memory becomes device memory, or stops to be. What was adopted there before is forgotten. Throws Misuse if
// the bytes belong to somebody else.
void adopt(void* pointer, size_t bytes, int device);
void disown(void* pointer);

// Page-locking is refused from now on, as where the limit of locked memory is too small.
void fail_host_register(bool fails);

// cudaStreamIsCapturing will say so.
void set_capturing(cudaStream_t stream, bool capturing);

// Something that takes this long on a paced stream, as a forward pass does.
void queue_work(cudaStream_t stream, double seconds);

void set_device_count(int count);
// The next created stream is "stream 1" again, so that a second run in a process gets the labels of the first.
void restart_numbering();

// A write to freed device memory becomes the kept error.
void check_freed();

}  // namespace emulation
