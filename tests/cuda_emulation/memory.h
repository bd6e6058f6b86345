// SPDX-License-Identifier: Apache-2.0
// Who owns which addresses: device memory, page-locked host memory; all else is pageable host memory. Any thread may
// call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "cuda_runtime.h"

namespace emulation {

enum class Space : uint8_t { kDevice, kPinned, kPageable };

struct Region {
  uintptr_t begin;
  size_t bytes;
  Space space;
  int device = -1;      // device memory
  bool mapped = false;  // pinned memory that kernels may touch
  bool ours = false;    // allocated here, not declared by adopt() or cudaHostRegister

  uintptr_t end() const { return begin + bytes; }
};

// The region that holds `address`, if any.
std::optional<Region> region_of(const void* address);
// Whether any byte of these lies in a region.
bool meets_region(const void* begin, size_t bytes);
// Grows whenever a region comes or goes.
extern std::atomic<uint64_t> region_changes;
// The widest range around `address`, which is in none, that no device memory is in.
std::pair<uintptr_t, uintptr_t> between_device_regions(uintptr_t address);
void add_region(const Region& region);
// Takes away the region that begins there. False if there is none of this space.
bool remove_region(const void* begin, Space space);
// Takes away all adopted device memory that these bytes meet.
void drop_adopted(const void* begin, size_t bytes);

// Poisoned device memory. Freed memory is poisoned again and held back for a while; a write to it is a misuse, found
// when it is let go or by check_freed().
void* allocate_device(size_t bytes, int device);
void free_device(const Region& region);
void check_freed();

// What is at `address`, in words.
std::string describe(const void* address);

}  // namespace emulation
