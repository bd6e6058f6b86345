// SPDX-License-Identifier: Apache-2.0
// The errors of the emulated runtime. A misuse is kept: from then on every call returns it, as after an illegal address
// on a real device, until a test clears it. Any thread may call.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda_runtime.h"
#include "sanitizers.h"

namespace emulation {

// Thrown inside a call of the runtime: kept, with its text for cudaGetErrorString.
struct Misuse : std::runtime_error {
  Misuse(cudaError_t error, const std::string& text) : std::runtime_error(text), error(error) {}
  const cudaError_t error;
};

// Keeps an error that no call can return; the first one wins.
void keep(const Misuse& misuse);
cudaError_t kept_error();
// The kept error's text; empty without one.
std::string kept_text();
void clear_error();

// The next call of this name fails with `error` and does nothing.
void fail_next(const std::string& call, cudaError_t error);

// The error that a call returns before it does anything: the kept one, or one that a test asked for.
cudaError_t refusal(const char* call);
void remember(cudaError_t error);

// Every call of the runtime is `return api(__func__, [&] { ... return cudaSuccess; });`
template <class Body>
cudaError_t api(const char* call, Body body) {
  const Invisible invisible;
  cudaError_t error = refusal(call);
  if (error == cudaSuccess) {
    try {
      error = body();
    } catch (const Misuse& misuse) {
      keep({misuse.error, std::string(call) + ": " + misuse.what()});
      error = misuse.error;
    }
  }
  remember(error);
  return error;
}

}  // namespace emulation
