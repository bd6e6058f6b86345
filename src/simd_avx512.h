// SPDX-License-Identifier: Apache-2.0
// Sixteen floats: AVX-512 F, BW, DQ, VL. The bf16 instructions of AVX512_BF16 are not used: they flush denormals.
#pragma once

// g++ 12 warns about its own header (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "adam.h"
#include "dtype.h"

namespace zenflow::ZENFLOW_ISA {

constexpr int64_t kWidth = 16;
constexpr int kBlock = 2;  // vectors at once: more of them spill registers

struct Floats {
  __m512 v;
  Floats() = default;
  ZENFLOW_MEMBER explicit Floats(__m512 x) : v(x) {}
  ZENFLOW_MEMBER explicit Floats(float x) : v(_mm512_set1_ps(x)) {}
};
ZENFLOW_INLINE Floats operator+(Floats a, Floats b) {
  return Floats(_mm512_add_ps(a.v, b.v));
}
ZENFLOW_INLINE Floats operator-(Floats a, Floats b) {
  return Floats(_mm512_sub_ps(a.v, b.v));
}
ZENFLOW_INLINE Floats operator*(Floats a, Floats b) {
  return Floats(_mm512_mul_ps(a.v, b.v));
}
ZENFLOW_INLINE Floats operator/(Floats a, Floats b) {
  return Floats(_mm512_div_ps(a.v, b.v));
}
ZENFLOW_INLINE Floats fma(Floats a, Floats b, Floats c) {
  return Floats(_mm512_fmadd_ps(a.v, b.v, c.v));
}
ZENFLOW_INLINE Floats sqrt(Floats a) {
  return Floats(_mm512_sqrt_ps(a.v));
}

template <DType D>
ZENFLOW_INLINE Floats load(const void* x, int64_t i) {
  if constexpr (D == DType::kFloat32) {
    return Floats(_mm512_loadu_ps(static_cast<const float*>(x) + i));
  } else {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(x) + i));
    if constexpr (D == DType::kFloat16) return Floats(_mm512_cvtph_ps(bits));
    return Floats(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
  }
}

// Round to nearest even on the bits, as round_to_bfloat16: denormals are kept, NaNs stay NaNs.
ZENFLOW_INLINE __m512i bfloat16_bits(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16);
}

template <DType D>
ZENFLOW_INLINE __m256i half_bits(Floats value) {
  if constexpr (D == DType::kFloat16) return _mm512_cvtps_ph(value.v, _MM_FROUND_TO_NEAREST_INT);
  return _mm512_cvtepi32_epi16(bfloat16_bits(value.v));
}

template <DType D>
ZENFLOW_INLINE void store(void* x, int64_t i, Floats value) {
  if constexpr (D == DType::kFloat32) {
    _mm512_storeu_ps(static_cast<float*>(x) + i, value.v);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(x) + i), half_bits<D>(value));
  }
}

struct Integers {
  __m512i v;
};

// Of x and the numbers after it.
ZENFLOW_INLINE Integers hashed(uint32_t first) {
  const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i x = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)), count);
  x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32(0x7feb352d));
  x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 15)),
                         _mm512_set1_epi32(static_cast<int>(0x846ca68bu)));
  return {_mm512_xor_si512(x, _mm512_srli_epi32(x, 16))};
}
ZENFLOW_INLINE Integers low_half(Integers x) {
  return {_mm512_and_si512(x.v, _mm512_set1_epi32(0xffff))};
}
ZENFLOW_INLINE Integers high_half(Integers x) {
  return {_mm512_srli_epi32(x.v, 16)};
}

// As in simd_scalar.h.
ZENFLOW_INLINE void store_either_way(uint16_t* to, Floats value, Integers noise) {
  const __m512i bits = _mm512_castps_si512(value.v);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(value.v, value.v, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_blend_epi32(is_nan, _mm512_add_epi32(bits, noise.v), quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// Past the caches; to aligned vectors only.
template <DType D>
ZENFLOW_INLINE void stream_store(void* x, int64_t i, Floats value) {
  if constexpr (D == DType::kFloat32) {
    _mm512_stream_ps(static_cast<float*>(x) + i, value.v);
  } else {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(x) + i), half_bits<D>(value));
  }
}

ZENFLOW_INLINE void stream_line(char* to, const char* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}

}  // namespace zenflow::ZENFLOW_ISA
