// SPDX-License-Identifier: Apache-2.0
// Memory of the emulated runtime: allocation, page-locking, and who owns an address.
#include <atomic>
#include <cstdlib>
#include <string>

#include "devices.h"
#include "emulation.h"
#include "errors.h"
#include "memory.h"

namespace emulation {
namespace {

std::atomic<bool>& host_register_fails() {
  static std::atomic<bool> fails = std::getenv("ZENFLOW_EMULATION_FAIL_HOST_REGISTER") != nullptr;
  return fails;
}

Span span(const Region& region) {
  return {region.begin, region.bytes};
}

void refuse_while_in_use(const Region& region) {
  if (queued_work_touches(span(region))) {
    throw Misuse(cudaErrorIllegalAddress, "queued work still uses " + describe(reinterpret_cast<void*>(region.begin)));
  }
}

Region begin_of(const void* pointer, Space space) {
  const auto region = region_of(pointer);
  if (!region || region->begin != reinterpret_cast<uintptr_t>(pointer) || region->space != space) {
    throw Misuse(cudaErrorInvalidValue, "nothing of this kind begins at " + describe(pointer));
  }
  return *region;
}

}  // namespace

void fail_host_register(bool fails) {
  host_register_fails() = fails;
}

void adopt(void* pointer, size_t bytes, int device) {
  const Invisible invisible;
  if (bytes == 0) return;
  drop_adopted(pointer, bytes);
  if (meets_region(pointer, bytes)) {
    throw Misuse(cudaErrorInvalidValue, "cannot adopt what is in use already: " + describe(pointer));
  }
  add_region({reinterpret_cast<uintptr_t>(pointer), bytes, Space::kDevice, device});
}

void disown(void* pointer) {
  const Invisible invisible;
  remove_region(pointer, Space::kDevice);
}

}  // namespace emulation

using namespace emulation;

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return api(__func__, [&] {
    *pointer = bytes == 0 ? nullptr : allocate_device(bytes, current_device());
    return *pointer != nullptr || bytes == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
  });
}

cudaError_t cudaFree(void* pointer) {
  return api(__func__, [&] {
    if (pointer == nullptr) return cudaSuccess;
    const Region region = begin_of(pointer, Space::kDevice);
    if (!region.ours) throw Misuse(cudaErrorInvalidValue, "not allocated by cudaMalloc: " + describe(pointer));
    drain(region.device);  // as CUDA does, which promises no order to what the host does next
    free_device(region);
    return kept_error();
  });
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return api(__func__, [&] {
    *free = *total = size_t{1} << 30;
    return cudaSuccess;
  });
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  return api(__func__, [&] {
    *pointer = bytes == 0 || host_register_fails() ? nullptr : std::malloc(bytes);
    if (*pointer == nullptr) return bytes == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
    add_region(
        {reinterpret_cast<uintptr_t>(*pointer), bytes, Space::kPinned, -1, (flags & cudaHostAllocMapped) != 0, true});
    return cudaSuccess;
  });
}

cudaError_t cudaFreeHost(void* pointer) {
  return api(__func__, [&] {
    if (pointer == nullptr) return cudaSuccess;
    const Region region = begin_of(pointer, Space::kPinned);
    if (!region.ours) throw Misuse(cudaErrorInvalidValue, "not allocated by cudaHostAlloc: " + describe(pointer));
    drain(-1);
    remove_region(pointer, Space::kPinned);
    std::free(pointer);
    return kept_error();
  });
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned flags) {
  return api(__func__, [&] {
    if (pointer == nullptr || bytes == 0) return cudaErrorInvalidValue;
    if (host_register_fails()) return cudaErrorMemoryAllocation;
    if (meets_region(pointer, bytes)) return cudaErrorHostMemoryAlreadyRegistered;
    add_region({reinterpret_cast<uintptr_t>(pointer), bytes, Space::kPinned, -1, (flags & cudaHostRegisterMapped) != 0,
                false});
    return cudaSuccess;
  });
}

cudaError_t cudaHostUnregister(void* pointer) {
  return api(__func__, [&] {
    const Region region = begin_of(pointer, Space::kPinned);
    if (region.ours) throw Misuse(cudaErrorInvalidValue, "not registered but allocated: " + describe(pointer));
    refuse_while_in_use(region);
    remove_region(pointer, Space::kPinned);
    return cudaSuccess;
  });
}

cudaError_t cudaHostGetDevicePointer(void** device_pointer, void* host_pointer, unsigned) {
  return api(__func__, [&] {
    const auto region = region_of(host_pointer);
    if (!region || region->space != Space::kPinned || !region->mapped) {
      throw Misuse(cudaErrorInvalidValue, "not mapped page-locked memory: " + describe(host_pointer));
    }
    *device_pointer = host_pointer;
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return api(__func__, [&] {
    *attributes = {cudaMemoryTypeUnregistered, -1, nullptr, nullptr};
    const auto region = region_of(pointer);
    auto* address = const_cast<void*>(pointer);
    if (!region) {
      attributes->hostPointer = address;
    } else if (region->space == Space::kDevice) {
      *attributes = {cudaMemoryTypeDevice, region->device, address, nullptr};
    } else {
      *attributes = {cudaMemoryTypeHost, current_device(), region->mapped ? address : nullptr, address};
    }
    return cudaSuccess;
  });
}
