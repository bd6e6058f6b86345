// SPDX-License-Identifier: Apache-2.0
// ZENFLOW_CUDA_CHECK(call): every CUDA runtime call goes through it. Throws std::runtime_error with the call,
// its place, and CUDA's name and text for the error. The error is taken off CUDA's per-thread record, so that
// it does not surface again in another library's check.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#define ZENFLOW_CUDA_CHECK(call) ::zenflow::check_cuda((call), #call, __FILE__, __LINE__)

namespace zenflow {

inline void check_cuda(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(call) + " failed at " + file + ":" + std::to_string(line) + ": " +
                           cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

}  // namespace zenflow
