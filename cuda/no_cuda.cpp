// SPDX-License-Identifier: Apache-2.0
// Stands in for the .cu files where nvcc was absent or switched off: the same symbols, which throw and say
// what to do.
#include <stdexcept>
#include <string>

#include "cuda/column_norms.h"
#include "cuda/cuda_info.h"
#include "cuda/stream.h"

namespace zenflow {
namespace {

[[noreturn]] void refuse(const char* what) {
  throw std::runtime_error(std::string(what) +
                           " needs CUDA, but zenflow was built without it: " ZENFLOW_CUDA_REASON
                           ". Rebuild with CUDACXX naming a working nvcc, or keep the parameters on the CPU.");
}

}  // namespace

void Stream::synchronize() const {
  refuse("Stream::synchronize");
}

int64_t column_norms_scratch(int64_t, int64_t) {
  refuse("column_norms");
}

void column_norms(const DeviceMatrix&, float*, float*, Stream) {
  refuse("column_norms");
}

CudaInfo cuda_info() {
  return {false, ZENFLOW_CUDA_REASON, "", 0};
}

}  // namespace zenflow
