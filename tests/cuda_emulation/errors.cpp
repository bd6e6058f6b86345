// SPDX-License-Identifier: Apache-2.0
#include "errors.h"

#include <pthread.h>

#include <atomic>
#include <list>
#include <map>
#include <mutex>

#include "sanitizers.h"

namespace emulation {
namespace {

struct Errors {
  std::mutex mutex;
  std::atomic<cudaError_t> kept = cudaSuccess;
  std::list<std::string> texts;  // none is ever dropped: cudaGetErrorString hands them out
  std::map<std::string, cudaError_t> next;
  std::atomic<bool> forked = false;
};

Errors& errors() {
  static auto* all = [] {
    auto* made = new Errors;
    pthread_atfork(nullptr, nullptr, [] { errors().forked = true; });
    return made;
  }();
  return *all;
}

thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

void keep(const Misuse& misuse) {
  const Invisible invisible;
  const std::lock_guard lock(errors().mutex);
  if (errors().kept != cudaSuccess) return;
  errors().texts.push_back(misuse.what());
  errors().kept = misuse.error;
}

cudaError_t kept_error() {
  return errors().kept;
}

std::string kept_text() {
  const Invisible invisible;
  const std::lock_guard lock(errors().mutex);
  return errors().kept == cudaSuccess ? std::string() : errors().texts.back();
}

void clear_error() {
  const Invisible invisible;
  const std::lock_guard lock(errors().mutex);
  errors().kept = cudaSuccess;
  errors().next.clear();
  last_error = cudaSuccess;
}

cudaError_t refusal(const char* call) {
  if (errors().forked) return cudaErrorInitializationError;
  const std::lock_guard lock(errors().mutex);
  if (errors().kept != cudaSuccess) return errors().kept;
  const auto asked = errors().next.find(call);
  if (asked == errors().next.end()) return cudaSuccess;
  const cudaError_t error = asked->second;
  errors().next.erase(asked);
  return error;
}

void remember(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
}

void fail_next(const std::string& call, cudaError_t error) {
  const Invisible invisible;
  const std::lock_guard lock(errors().mutex);
  errors().next[call] = error;
}

}  // namespace emulation

using namespace emulation;

cudaError_t cudaPeekAtLastError() {
  return kept_error() != cudaSuccess ? kept_error() : last_error;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define EMULATION_NAME(name) \
  case name:                 \
    return #name;
    EMULATION_NAME(cudaSuccess)
    EMULATION_NAME(cudaErrorInvalidValue)
    EMULATION_NAME(cudaErrorMemoryAllocation)
    EMULATION_NAME(cudaErrorInitializationError)
    EMULATION_NAME(cudaErrorInvalidConfiguration)
    EMULATION_NAME(cudaErrorInvalidMemcpyDirection)
    EMULATION_NAME(cudaErrorNoDevice)
    EMULATION_NAME(cudaErrorInvalidDevice)
    EMULATION_NAME(cudaErrorInvalidResourceHandle)
    EMULATION_NAME(cudaErrorNotReady)
    EMULATION_NAME(cudaErrorIllegalAddress)
    EMULATION_NAME(cudaErrorHostMemoryAlreadyRegistered)
    EMULATION_NAME(cudaErrorHostMemoryNotRegistered)
    EMULATION_NAME(cudaErrorLaunchFailure)
    EMULATION_NAME(cudaErrorNotSupported)
    EMULATION_NAME(cudaErrorStreamCaptureUnsupported)
    EMULATION_NAME(cudaErrorUnknown)
#undef EMULATION_NAME
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  {
    const Invisible invisible;
    const std::lock_guard lock(errors().mutex);
    if (error != cudaSuccess && error == errors().kept) return errors().texts.back().c_str();
  }
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorInitializationError:
      return "initialization error";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "part or all of the requested memory range is already mapped";
    default:
      return cudaGetErrorName(error);
  }
}
