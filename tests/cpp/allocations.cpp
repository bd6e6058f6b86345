// SPDX-License-Identifier: Apache-2.0
#include "allocations.h"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<bool> counting{false};
std::atomic<int64_t> count{0}, bytes{0}, kept{0};

void* allocate(std::size_t size, std::size_t alignment) {
  void* const memory = alignment == 0 ? std::malloc(size)
                                      : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  if (counting) {
    ++count;
    bytes += static_cast<int64_t>(size);
    kept += static_cast<int64_t>(malloc_usable_size(memory));
  }
  return memory;
}

void release(void* memory) {
  if (counting && memory != nullptr) kept -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

// All other forms of new and delete call these, or are a pair of their own.
void* operator new(std::size_t size) {
  return allocate(size, 0);
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return allocate(size, 0);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept {
  release(memory);
}
void operator delete(void* memory, const std::nothrow_t&) noexcept {
  release(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  release(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  release(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  release(memory);
}

namespace zenflow_test {

AllocationCount::AllocationCount() {
  count = bytes = kept = 0;
  counting = true;
}

AllocationCount::~AllocationCount() {
  counting = false;
}

Allocations AllocationCount::so_far() const {
  return {count, bytes, kept};
}

}  // namespace zenflow_test
