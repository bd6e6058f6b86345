// SPDX-License-Identifier: Apache-2.0
// Runs a launch: block after block, each block's threads as fibers, both in seeded random order. A thread runs until it
// meets a barrier or a warp operation; there its block, or its lanes alone, wait for each other. Divergence ends the
// launch with a text that names kernel, block and thread.
#pragma once

#include <cstdint>
#include <string>

#include "random.h"
#include "site.h"
#include "vector_types.h"

namespace emulation {

// What the built-in variables of the running thread hold.
struct Here {
  uint3 thread, block, block_size, grid_size;
};
extern __thread Here here;
extern __thread int running_on;  // the device whose code this thread runs now; -1: it is host code, or the emulator's

enum class Barrier : uint8_t { kPlain, kCount, kAnd, kOr };
enum class Warp : uint8_t { kSync, kBallot, kShuffle, kAdd, kMin, kMax, kAnd, kOr, kXor, kMatch };

// Called by device code, on a fiber.
int block_barrier(Barrier barrier, int predicate, Site site);
uint64_t warp_operation(Warp operation, unsigned mask, uint64_t value, int source, Site site);

// Called for the running thread of device code, which touched what it may not: it does not go on.
[[noreturn]] void fail_access(uintptr_t address, size_t bytes);

// A kernel with its arguments, ready to be called by each thread.
struct Launch {
  void (*call)(const void* function, void* const* arguments);
  const void* function;
  void* const* arguments;
  dim3 grid, block;
  int device;
};

constexpr int kMaxThreads = 1024;
constexpr int kWarpSize = 32;

// Runs the whole launch on the calling thread. Returns an empty string, or what went wrong.
std::string run_launch(const Launch& launch, Random& random);

}  // namespace emulation
