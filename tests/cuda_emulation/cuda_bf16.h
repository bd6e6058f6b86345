// SPDX-License-Identifier: Apache-2.0
// Stands in for CUDA's header. Written without zenflow's own conversions, which it checks.
#pragma once

#include <cstdint>

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (value != value) return {0x7fff};  // as the device does
  const unsigned bits = __float_as_uint(value), low = bits & 0xffffu;
  const unsigned up = low > 0x8000u || (low == 0x8000u && (bits & 0x10000u) != 0) ? 1 : 0;
  return {static_cast<uint16_t>((bits >> 16) + up)};
}
inline __nv_bfloat16 __float2bfloat16(float value) {
  return __float2bfloat16_rn(value);
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) {
  return value.bits;
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  return {bits};
}
