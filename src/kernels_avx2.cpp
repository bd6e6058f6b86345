// SPDX-License-Identifier: Apache-2.0
#define ZENFLOW_ISA avx2
#include "simd_avx2.h"
//
#include "kernels_body.h"

namespace zenflow {

const Kernels& avx2_kernels() {
  static const Kernels kernels = avx2::make_kernels("avx2");
  return kernels;
}

}  // namespace zenflow
