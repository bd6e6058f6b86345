// SPDX-License-Identifier: Apache-2.0
#include "access.h"

#include <link.h>

#include <atomic>
#include <string>

#include "block.h"
#include "errors.h"
#include "fiber.h"
#include "memory.h"
#include "symbol.h"

namespace emulation {
namespace {

struct Range {
  uintptr_t begin = 0, end = 0;
  bool holds(uintptr_t address, size_t bytes) const { return address >= begin && address + bytes <= end; }
};

// Ranges that were found good for this thread, as long as no region comes or goes.
struct Known {
  static constexpr int kRanges = 8;
  uint64_t version = 0;
  int device = -1;
  Range ranges[kRanges];
  int next = 0;

  bool holds(uintptr_t address, size_t bytes) const {
    for (const Range& range : ranges) {
      if (range.holds(address, bytes)) return true;
    }
    return false;
  }
  void add(Range range) {
    ranges[next] = range;
    next = (next + 1) % kRanges;
  }
  void follow(uint64_t now, int on_device) {
    if (version == now && device == on_device) return;
    *this = Known();
    version = now;
    device = on_device;
  }
};
thread_local Known known_to_device, known_to_host;

// The module segment, or this thread's part of a module's thread-local data, that holds an address.
Range static_data_around(uintptr_t address) {
  struct Search {
    uintptr_t address;
    Range found;
  } search{address, {}};
  const auto visit = [](dl_phdr_info* info, size_t, void* data) {
    auto* s = static_cast<Search*>(data);
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& segment = info->dlpi_phdr[i];
      uintptr_t begin = 0;
      if (segment.p_type == PT_LOAD) begin = info->dlpi_addr + segment.p_vaddr;
      if (segment.p_type == PT_TLS) begin = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
      if (begin != 0 && s->address >= begin && s->address < begin + segment.p_memsz) {
        s->found = {begin, begin + segment.p_memsz};
        return 1;
      }
    }
    return 0;
  };
  dl_iterate_phdr(visit, &search);
  return search.found;
}

// The range around an address that the running kernel may touch; an empty one if it may not.
Range device_range_around(uintptr_t address, int device) {
  const auto region = region_of(reinterpret_cast<const void*>(address));
  if (!region) return static_data_around(address);
  const bool good = region->space == Space::kDevice ? region->device == device : region->mapped;
  return good ? Range{region->begin, region->end()} : Range();
}

void check_device_access(uintptr_t address, size_t bytes) {
  const auto frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  if (address >= frame && address < frame + Fiber::kStackBytes) return;
  known_to_device.follow(region_changes.load(std::memory_order_acquire), running_on);
  if (known_to_device.holds(address, bytes)) return;
  const int device = running_on;
  running_on = -1;  // what follows is the emulator's own
  const Range range = device_range_around(address, device);
  if (!range.holds(address, bytes)) fail_access(address, bytes);
  known_to_device.add(range);
  running_on = device;
}

void check_host_access(uintptr_t address, size_t bytes, const void* code) {
  known_to_host.follow(region_changes.load(std::memory_order_acquire), -1);
  if (known_to_host.holds(address, bytes)) return;
  const auto* pointer = reinterpret_cast<const void*>(address);
  const auto region = region_of(pointer);
  if (region && region->space == Space::kDevice) {
    keep({cudaErrorIllegalAddress, "host code touches " + std::to_string(bytes) + " bytes at " + describe(pointer) +
                                       " in " + symbol_name(code)});
    return;
  }
  const auto [begin, end] = between_device_regions(address);
  known_to_host.add({begin, end});
}

}  // namespace

void check_access(uintptr_t address, size_t bytes, const void* code) {
  if (hidden) return;
  if (running_on >= 0) {
    check_device_access(address, bytes);
  } else {
    check_host_access(address, bytes, code);
  }
}

}  // namespace emulation

#define EMULATION_ACCESS(name, bytes)                                     \
  extern "C" void __asan_##name##_noabort(uintptr_t address) {            \
    emulation::check_access(address, bytes, __builtin_return_address(0)); \
  }
EMULATION_ACCESS(load1, 1)
EMULATION_ACCESS(load2, 2)
EMULATION_ACCESS(load4, 4)
EMULATION_ACCESS(load8, 8)
EMULATION_ACCESS(load16, 16)
EMULATION_ACCESS(store1, 1)
EMULATION_ACCESS(store2, 2)
EMULATION_ACCESS(store4, 4)
EMULATION_ACCESS(store8, 8)
EMULATION_ACCESS(store16, 16)
#undef EMULATION_ACCESS

extern "C" void __asan_loadN_noabort(uintptr_t address, size_t bytes) {
  emulation::check_access(address, bytes, __builtin_return_address(0));
}
extern "C" void __asan_storeN_noabort(uintptr_t address, size_t bytes) {
  emulation::check_access(address, bytes, __builtin_return_address(0));
}
// The rest of what the instrumentation calls; nothing to do.
extern "C" void __asan_handle_no_return() {}
extern "C" void __asan_before_dynamic_init(const char*) {}
extern "C" void __asan_after_dynamic_init() {}
