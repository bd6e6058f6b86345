// SPDX-License-Identifier: Apache-2.0
// Whether this binary has the CUDA half, and what it finds at run time: for zenflow.config(). Never throws.
#pragma once

#include <string>

namespace zenflow {

struct CudaInfo {
  bool built;
  std::string reason;   // built: with which nvcc and for which architectures; not built: why not
  std::string runtime;  // e.g. "13.0"; empty where not built
  int devices;          // devices visible now; 0 without a driver
};

CudaInfo cuda_info();

}  // namespace zenflow
