// SPDX-License-Identifier: Apache-2.0
// The element types of parameters and gradients, and their exact conversions.
//
// Widening is exact. Rounding is to nearest even and keeps denormals, whatever the caller's floating-point mode,
// because it is done on the bits; a NaN stays a NaN. Nothing here depends on the instruction set.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace zenflow {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int64_t item_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

// The bits of one element, as an integer of its size.
template <DType>
struct BitsOf {
  using type = uint16_t;
};
template <>
struct BitsOf<DType::kFloat32> {
  using type = uint32_t;
};

ZENFLOW_INLINE float float_from_bits(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
ZENFLOW_INLINE uint32_t bits_from_float(float value) {
  return __builtin_bit_cast(uint32_t, value);
}

ZENFLOW_INLINE float widen_bfloat16(uint16_t bits) {
  return float_from_bits(static_cast<uint32_t>(bits) << 16);
}

ZENFLOW_INLINE uint16_t round_to_bfloat16(float value) {
  const uint32_t bits = bits_from_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

ZENFLOW_INLINE float widen_float16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) return float_from_bits(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return float_from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  // A denormal half is a normal float: mantissa * 2^-24 is exact.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return float_from_bits(sign | bits_from_float(magnitude));
}

ZENFLOW_INLINE uint16_t round_to_float16(float value) {
  const uint32_t bits = bits_from_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude < 0x33000001u) return static_cast<uint16_t>(sign);             // 2^-25 and less round to zero
  if (magnitude < 0x38800000u) {                                               // below 2^-14: a denormal half
    const uint32_t shift = 126u - (magnitude >> 23);
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1u);
    return static_cast<uint16_t>(sign | (kept + (rest > half || (rest == half && (kept & 1u)) ? 1u : 0u)));
  }
  const uint32_t rebiased = magnitude - (112u << 23);
  return static_cast<uint16_t>(sign | ((rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13));
}

template <DType D>
ZENFLOW_INLINE float widen(typename BitsOf<D>::type bits) {
  if constexpr (D == DType::kFloat32) {
    return float_from_bits(bits);
  } else if constexpr (D == DType::kBFloat16) {
    return widen_bfloat16(bits);
  } else {
    return widen_float16(bits);
  }
}

template <DType D>
ZENFLOW_INLINE typename BitsOf<D>::type round_to(float value) {
  if constexpr (D == DType::kFloat32) {
    return bits_from_float(value);
  } else if constexpr (D == DType::kBFloat16) {
    return round_to_bfloat16(value);
  } else {
    return round_to_float16(value);
  }
}

ZENFLOW_INLINE bool is_nan_bits(DType dtype, uint32_t bits) {
  switch (dtype) {
    case DType::kBFloat16:
      return (bits & 0x7fffu) > 0x7f80u;
    case DType::kFloat16:
      return (bits & 0x7fffu) > 0x7c00u;
    default:
      return (bits & 0x7fffffffu) > 0x7f800000u;
  }
}

// Calls f with the dtype as a compile-time constant: `with_dtype(d, [&]<DType D>() { ... })`.
template <class Function>
static inline auto with_dtype(DType dtype, Function&& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f.template operator()<DType::kBFloat16>();
    case DType::kFloat16:
      return f.template operator()<DType::kFloat16>();
    default:
      return f.template operator()<DType::kFloat32>();
  }
}

}  // namespace zenflow
