// SPDX-License-Identifier: Apache-2.0
#define ZENFLOW_ISA avx512
#include "simd_avx512.h"
//
#include "kernels_body.h"

namespace zenflow {

const Kernels& avx512_kernels() {
  static const Kernels kernels = avx512::make_kernels("avx512");
  return kernels;
}

}  // namespace zenflow
