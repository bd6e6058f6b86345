// SPDX-License-Identifier: Apache-2.0
// The kernels of every instruction set that this machine has, scalar first.
#pragma once

#include <vector>

#include "check.h"
#include "isa.h"

namespace zenflow_test {

inline std::vector<const zenflow::Kernels*> available_kernels() {
  std::vector<const zenflow::Kernels*> kernels;
  for (const std::string& name : zenflow::available_isas()) {
    if (name == "scalar") kernels.push_back(&zenflow::scalar_kernels());
#ifdef ZENFLOW_X86
    if (name == "avx2") kernels.push_back(&zenflow::avx2_kernels());
    if (name == "avx512") kernels.push_back(&zenflow::avx512_kernels());
#endif
    CHECK_EQ(kernels.empty() ? "none" : kernels.back()->name, name);
  }
  return kernels;
}

}  // namespace zenflow_test
