// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <sstream>

#include "errors.h"
#include "sanitizers.h"

namespace emulation {

std::atomic<uint64_t> region_changes = 1;

namespace {

// NaNs in fp32, bf16 and fp16; large negative numbers as integers.
constexpr uint16_t kFresh = 0xffc1, kFreed = 0xffd2;
constexpr size_t kHeldBack = size_t{4} << 20;
constexpr size_t kAlignment = 256;  // cudaMalloc's

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, Region> regions;
  std::deque<Region> freed;
  size_t freed_bytes = 0;
};

Memory& memory() {
  static auto* all = new Memory;
  return *all;
}

uintptr_t number(const void* address) {
  return reinterpret_cast<uintptr_t>(address);
}

std::map<uintptr_t, Region>::iterator find(uintptr_t address) {
  auto& regions = memory().regions;
  auto after = regions.upper_bound(address);
  if (after == regions.begin()) return regions.end();
  --after;
  return address < after->second.end() ? after : regions.end();
}

size_t padded(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

void fill(const Region& region, uint16_t pattern) {
  auto* words = reinterpret_cast<uint16_t*>(region.begin);
  for (size_t i = 0; i < padded(region.bytes) / 2; ++i) words[i] = pattern;
}

void check(const Region& region) {
  permit(reinterpret_cast<void*>(region.begin), padded(region.bytes));
  const auto* words = reinterpret_cast<const uint16_t*>(region.begin);
  for (size_t i = 0; i < padded(region.bytes) / 2; ++i) {
    if (words[i] == kFreed) continue;
    std::ostringstream text;
    text << "device memory was written after it had been freed: byte " << 2 * i << " of " << region.bytes << " at "
         << words + i;
    keep({cudaErrorIllegalAddress, text.str()});
    break;
  }
  forbid(reinterpret_cast<void*>(region.begin), padded(region.bytes));
}

bool is_freed(const void* address) {
  const Invisible invisible;
  const std::lock_guard lock(memory().mutex);
  for (const Region& region : memory().freed) {
    if (number(address) >= region.begin && number(address) < region.end()) return true;
  }
  return false;
}

}  // namespace

std::optional<Region> region_of(const void* address) {
  const Invisible invisible;
  const std::lock_guard lock(memory().mutex);
  const auto found = find(number(address));
  if (found == memory().regions.end()) return std::nullopt;
  return found->second;
}

bool meets_region(const void* begin, size_t bytes) {
  const Invisible invisible;
  const std::lock_guard lock(memory().mutex);
  if (bytes == 0) return false;
  if (find(number(begin)) != memory().regions.end()) return true;
  const auto after = memory().regions.lower_bound(number(begin));
  return after != memory().regions.end() && after->first < number(begin) + bytes;
}

std::pair<uintptr_t, uintptr_t> between_device_regions(uintptr_t address) {
  const Invisible invisible;
  const std::lock_guard lock(memory().mutex);
  std::pair<uintptr_t, uintptr_t> range{0, UINTPTR_MAX};
  const auto after = memory().regions.upper_bound(address);
  for (auto next = after; next != memory().regions.end() && range.second == UINTPTR_MAX; ++next) {
    if (next->second.space == Space::kDevice) range.second = next->first;
  }
  for (auto before = after; before != memory().regions.begin() && range.first == 0;) {
    --before;
    if (before->second.space == Space::kDevice) range.first = before->second.end();
  }
  return range;
}

void add_region(const Region& region) {
  const Invisible invisible;
  const std::lock_guard lock(memory().mutex);
  memory().regions[region.begin] = region;
  ++region_changes;
}

bool remove_region(const void* begin, Space space) {
  const Invisible invisible;
  const std::lock_guard lock(memory().mutex);
  const auto found = memory().regions.find(number(begin));
  if (found == memory().regions.end() || found->second.space != space) return false;
  memory().regions.erase(found);
  ++region_changes;
  return true;
}

void drop_adopted(const void* begin, size_t bytes) {
  const Invisible invisible;
  const std::lock_guard lock(memory().mutex);
  auto& regions = memory().regions;
  ++region_changes;
  auto next = find(number(begin));
  if (next == regions.end()) next = regions.lower_bound(number(begin));
  while (next != regions.end() && next->first < number(begin) + bytes) {
    const bool adopted = next->second.space == Space::kDevice && !next->second.ours;
    next = adopted ? regions.erase(next) : std::next(next);
  }
}

void* allocate_device(size_t bytes, int device) {
  const Invisible invisible;
  void* address = std::aligned_alloc(kAlignment, padded(bytes));
  if (address == nullptr) return nullptr;
  const Region region{number(address), bytes, Space::kDevice, device, false, true};
  fill(region, kFresh);
  forbid(static_cast<char*>(address) + bytes, padded(bytes) - bytes);
  const std::lock_guard lock(memory().mutex);
  memory().regions[region.begin] = region;
  ++region_changes;
  return address;
}

void free_device(const Region& region) {
  const Invisible invisible;
  permit(reinterpret_cast<void*>(region.begin), padded(region.bytes));
  fill(region, kFreed);
  forbid(reinterpret_cast<void*>(region.begin), padded(region.bytes));
  const std::lock_guard lock(memory().mutex);
  memory().regions.erase(region.begin);
  ++region_changes;
  memory().freed.push_back(region);
  memory().freed_bytes += padded(region.bytes);
  while (memory().freed_bytes > kHeldBack) {
    const Region oldest = memory().freed.front();
    memory().freed.pop_front();
    memory().freed_bytes -= padded(oldest.bytes);
    check(oldest);
    permit(reinterpret_cast<void*>(oldest.begin), padded(oldest.bytes));
    std::free(reinterpret_cast<void*>(oldest.begin));
  }
}

void check_freed() {
  const Invisible invisible;
  const std::lock_guard lock(memory().mutex);
  for (const Region& region : memory().freed) check(region);
}

std::string describe(const void* address) {
  std::ostringstream text;
  text << address;
  const auto region = region_of(address);
  if (!region) {
    text << (is_freed(address) ? " (device memory that was freed)" : " (pageable host memory)");
  } else if (region->space == Space::kDevice) {
    text << " (byte " << number(address) - region->begin << " of " << region->bytes << " of memory of device "
         << region->device << ")";
  } else {
    text << " (byte " << number(address) - region->begin << " of " << region->bytes << " of "
         << (region->mapped ? "mapped" : "unmapped") << " page-locked host memory)";
  }
  return text.str();
}

}  // namespace emulation
