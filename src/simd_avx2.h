// SPDX-License-Identifier: Apache-2.0
// Eight floats: AVX2, FMA, F16C.
#pragma once

#include <immintrin.h>

#include "adam.h"
#include "dtype.h"

namespace zenflow::ZENFLOW_ISA {

constexpr int64_t kWidth = 8;
constexpr int kBlock = 4;  // vectors at once

struct Floats {
  __m256 v;
  Floats() = default;
  ZENFLOW_MEMBER explicit Floats(__m256 x) : v(x) {}
  ZENFLOW_MEMBER explicit Floats(float x) : v(_mm256_set1_ps(x)) {}
};
ZENFLOW_INLINE Floats operator+(Floats a, Floats b) {
  return Floats(_mm256_add_ps(a.v, b.v));
}
ZENFLOW_INLINE Floats operator-(Floats a, Floats b) {
  return Floats(_mm256_sub_ps(a.v, b.v));
}
ZENFLOW_INLINE Floats operator*(Floats a, Floats b) {
  return Floats(_mm256_mul_ps(a.v, b.v));
}
ZENFLOW_INLINE Floats operator/(Floats a, Floats b) {
  return Floats(_mm256_div_ps(a.v, b.v));
}
ZENFLOW_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return Floats(_mm256_fmadd_ps(a.v, b.v, c.v));
}
ZENFLOW_INLINE Floats sqrt(Floats a) {
  return Floats(_mm256_sqrt_ps(a.v));
}

template <DType D>
ZENFLOW_INLINE Floats load(const void* x, int64_t i) {
  if constexpr (D == DType::kFloat32) {
    return Floats(_mm256_loadu_ps(static_cast<const float*>(x) + i));
  } else {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(x) + i));
    if constexpr (D == DType::kFloat16) return Floats(_mm256_cvtph_ps(bits));
    return Floats(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
  }
}

// Round to nearest even on the bits, as round_to_bfloat16: denormals are kept, NaNs stay NaNs.
ZENFLOW_INLINE __m256i bfloat16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}

template <DType D>
ZENFLOW_INLINE __m128i half_bits(Floats value) {
  if constexpr (D == DType::kFloat16) return _mm256_cvtps_ph(value.v, _MM_FROUND_TO_NEAREST_INT);
  const __m256i wide = bfloat16_bits(value.v);
  return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}

template <DType D>
ZENFLOW_INLINE void store(void* x, int64_t i, Floats value) {
  if constexpr (D == DType::kFloat32) {
    _mm256_storeu_ps(static_cast<float*>(x) + i, value.v);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(x) + i), half_bits<D>(value));
  }
}

struct Integers {
  __m256i v;
};

// Of x and the numbers after it.
ZENFLOW_INLINE Integers hashed(uint32_t first) {
  const __m256i count = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i x = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)), count);
  x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)), _mm256_set1_epi32(0x7feb352d));
  x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)),
                         _mm256_set1_epi32(static_cast<int>(0x846ca68bu)));
  return {_mm256_xor_si256(x, _mm256_srli_epi32(x, 16))};
}
ZENFLOW_INLINE Integers low_half(Integers x) {
  return {_mm256_and_si256(x.v, _mm256_set1_epi32(0xffff))};
}
ZENFLOW_INLINE Integers high_half(Integers x) {
  return {_mm256_srli_epi32(x.v, 16)};
}

// As in simd_scalar.h.
ZENFLOW_INLINE void store_either_way(uint16_t* to, Floats value, Integers noise) {
  const __m256i bits = _mm256_castps_si256(value.v);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value.v, value.v, _CMP_UNORD_Q));
  const __m256i rounded = _mm256_srli_epi32(_mm256_blendv_epi8(_mm256_add_epi32(bits, noise.v), quiet, is_nan), 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}

// Past the caches; to aligned vectors only.
template <DType D>
ZENFLOW_INLINE void stream_store(void* x, int64_t i, Floats value) {
  if constexpr (D == DType::kFloat32) {
    _mm256_stream_ps(static_cast<float*>(x) + i, value.v);
  } else {
    _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(x) + i), half_bits<D>(value));
  }
}

ZENFLOW_INLINE void stream_line(char* to, const char* from) {
  for (int half = 0; half < 2; ++half) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + half);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + half, bits);
  }
}

}  // namespace zenflow::ZENFLOW_ISA
