// SPDX-License-Identifier: Apache-2.0
#include "cuda/cuda_info.h"

#include <cuda_runtime.h>

namespace zenflow {

CudaInfo cuda_info() {
  int version = 0, devices = 0;
  if (cudaRuntimeGetVersion(&version) != cudaSuccess) version = CUDART_VERSION;
  // Fails where there is no driver or no device: that is an answer here, not an error to leave behind for
  // somebody's next check.
  if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
  (void)cudaGetLastError();
  return {true, ZENFLOW_CUDA_REASON, std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10),
          devices};
}

}  // namespace zenflow
