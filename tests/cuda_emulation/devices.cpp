// SPDX-License-Identifier: Apache-2.0
#include "devices.h"

#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <vector>

#include "errors.h"
#include "memory.h"

namespace emulation {
namespace {

struct Devices {
  std::mutex mutex;
  std::atomic<int> count = 2;
  std::map<int, std::shared_ptr<Stream>> defaults;
  std::map<cudaStream_t, std::shared_ptr<Stream>> streams;
  int made = 0;
};

Devices& devices() {
  static auto* all = new Devices;
  return *all;
}

thread_local int current = 0;

void check_device(int device) {
  if (device < 0 || device >= devices().count) {
    throw Misuse(cudaErrorInvalidDevice, "there is no device " + std::to_string(device));
  }
}

std::vector<std::shared_ptr<Stream>> streams_of(int device) {
  const std::lock_guard lock(devices().mutex);
  std::vector<std::shared_ptr<Stream>> found;
  for (const auto& [number, stream] : devices().defaults) {
    if (device < 0 || number == device) found.push_back(stream);
  }
  for (const auto& [handle, stream] : devices().streams) {
    if (device < 0 || stream->device() == device) found.push_back(stream);
  }
  return found;
}

}  // namespace

int device_count() {
  return devices().count;
}

void set_device_count(int count) {
  devices().count = count;
}

int current_device() {
  return current;
}

std::shared_ptr<Stream> default_stream(int device) {
  check_device(device);
  const std::lock_guard lock(devices().mutex);
  auto& stream = devices().defaults[device];
  if (stream == nullptr) stream = Stream::make(device, "default " + std::to_string(device));
  return stream;
}

std::shared_ptr<Stream> stream_of(cudaStream_t handle) {
  if (handle == nullptr) return default_stream(current);
  const std::lock_guard lock(devices().mutex);
  const auto found = devices().streams.find(handle);
  if (found == devices().streams.end()) {
    throw Misuse(cudaErrorInvalidResourceHandle, "no such stream, or it was destroyed");
  }
  return found->second;
}

cudaStream_t add_stream(int device) {
  const std::lock_guard lock(devices().mutex);
  const auto stream = Stream::make(device, "stream " + std::to_string(++devices().made));
  const auto handle = reinterpret_cast<cudaStream_t>(stream.get());
  devices().streams[handle] = stream;
  return handle;
}

void remove_stream(cudaStream_t handle) {
  const auto stream = stream_of(handle);
  stream->close();
  const std::lock_guard lock(devices().mutex);
  devices().streams.erase(handle);
}

void restart_numbering() {
  const Invisible invisible;
  const std::lock_guard lock(devices().mutex);
  devices().made = 0;
}

void drain(int device) {
  for (const auto& stream : streams_of(device)) await(stream->record());
}

}  // namespace emulation

using namespace emulation;

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  return api(__func__, [&] {
    *count = device_count();
    return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return api(__func__, [&] {
    *device = current;
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return api(__func__, [&] {
    check_device(device);
    current = device;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return api(__func__, [&] {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return api(__func__, [&] {
    check_device(device);
    *properties = {};
    std::snprintf(properties->name, sizeof(properties->name), "Emulated device %d", device);
    properties->totalGlobalMem = size_t{1} << 30;
    properties->multiProcessorCount = 4;
    properties->maxThreadsPerBlock = kMaxThreads;
    properties->maxThreadsPerMultiProcessor = 2 * kMaxThreads;
    properties->warpSize = kWarpSize;
    properties->major = 9;
    properties->asyncEngineCount = 2;
    properties->canMapHostMemory = 1;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device)) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = properties.maxThreadsPerBlock;
      break;
    case cudaDevAttrWarpSize:
      *value = properties.warpSize;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = properties.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrAsyncEngineCount:
      *value = properties.asyncEngineCount;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      break;
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
      *value = 1;
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  return api(__func__, [&] {
    for (const auto& stream : streams_of(current)) wait_for(stream->record());
    check_freed();
    return kept_error();
  });
}
