// SPDX-License-Identifier: Apache-2.0
// Pacing, for benchmarks of what surrounds a GPU: operations take the time that they would take there, and no core.
//
// While a pace is set, kernels are not run, and copies between the host's page-locked memory and the device may move
// nothing; both occupy their stream. Copies of one direction share the link, one at a time; the directions do not
// disturb each other. Streams, events and what waits for them mean what they always do.
//
// A stream's time is reckoned: an operation begins when it was queued, when the one before ends or when what it waits
// for ends, whichever comes last, and a thread that wakes up late does not move what follows. Only the host's calls
// bring the clock's time in.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace emulation {

using Instant = std::chrono::steady_clock::time_point;

struct Pace {
  double link_bytes_per_second = 0;  // each way
  double kernel_seconds = 0;         // what each kernel takes
  bool moves_bytes = true;           // copies also copy
  std::vector<std::string> runs;     // kernels with one of these in their name are run all the same
};

enum class Activity : uint8_t { kNone, kWork, kKernel, kDown, kUp };

// What an operation does where the device is paced.
struct Cost {
  Activity activity = Activity::kNone;
  int64_t bytes = 0;   // of a copy
  double seconds = 0;  // of anything else
};

// What an operation did, and when.
struct Occupied {
  std::string stream;
  Activity activity;
  int64_t bytes;
  Instant begin, end;
};

void set_pace(const Pace& pace);
void clear_pace();
bool is_paced();
Pace pace();
// Whether a paced device runs this kernel.
bool runs_in_pace(const void* function);

// Remembers what takes its time on `stream` from `ready` on, or once the link is free; returns its end.
Instant occupy(const Cost& cost, Instant ready, const std::string& stream);
// What was remembered since the last call, in no order.
std::vector<Occupied> take_occupied();

}  // namespace emulation
