// SPDX-License-Identifier: Apache-2.0
#define ZENFLOW_ISA scalar
#include "simd_scalar.h"
//
#include "kernels_body.h"

namespace zenflow {

const Kernels& scalar_kernels() {
  static const Kernels kernels = scalar::make_kernels("scalar");
  return kernels;
}

}  // namespace zenflow
