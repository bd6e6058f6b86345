// SPDX-License-Identifier: Apache-2.0
// Stands in for CUDA's header. Conversions are the compiler's, which check zenflow's own.
#pragma once

#include <cstdint>

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half value) {
  return static_cast<float>(emulation::same_bits<_Float16>(value.bits));
}
inline __half __float2half_rn(float value) {
  if (value != value) return {0x7fff};  // as the device does
  return {emulation::same_bits<uint16_t>(static_cast<_Float16>(value))};
}
inline __half __float2half(float value) {
  return __float2half_rn(value);
}
inline unsigned short __half_as_ushort(__half value) {
  return value.bits;
}
inline __half __ushort_as_half(unsigned short bits) {
  return {bits};
}
