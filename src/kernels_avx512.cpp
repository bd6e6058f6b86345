// SPDX-License-Identifier: Apache-2.0
#define ZENFLOW_ISA avx512
#include "simd_avx512.h"
//
#include "kernels_body.h"
#include "slots_avx512.h"

namespace zenflow {

const Kernels& avx512_kernels() {
  static const Kernels kernels = [] {
    Kernels k = avx512::make_kernels("avx512");
    k.gather = avx512::gather_by_mask;
    k.scatter = avx512::scatter_by_mask;
    return k;
  }();
  return kernels;
}

}  // namespace zenflow
