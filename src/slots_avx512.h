// SPDX-License-Identifier: Apache-2.0
// gather() and scatter() of kernels.h for AVX-512: a vector of columns is compressed by the mask of those that have
// slots, or expanded; moved slots follow one by one. 16-bit elements need AVX512_VBMI2, which is asked for at run time.
#pragma once

#include "kernels_body.h"

namespace zenflow::ZENFLOW_ISA {

#define ZENFLOW_VBMI2 __attribute__((target("avx512vbmi2,popcnt")))

// Bits [first, first + kCount) of a mask of 64-bit words, of which the row has `row_length`; kCount divides 64.
template <class Mask, int kCount>
ZENFLOW_INLINE Mask mask_at(const uint64_t* words, int64_t first) {
  return static_cast<Mask>(words[first / 64] >> (first % 64));
}

template <class Mask>
ZENFLOW_INLINE Mask lowest(int64_t count, int64_t width) {
  return count >= width ? static_cast<Mask>(~Mask{0}) : static_cast<Mask>((Mask{1} << count) - 1);
}

template <class T>
void gather_moved(const SlotMap& map, const T* row, T* packed) {
  for (int64_t i = 0; i < map.moved_count; ++i) packed[map.moved[i].slot] = row[map.moved[i].column];
}

template <class T>
void scatter_moved(const SlotMap& map, const T* packed, T* row) {
  for (int64_t i = 0; i < map.moved_count; ++i) row[map.moved[i].column] = packed[map.moved[i].slot];
}

ZENFLOW_VBMI2 inline void gather_half(const SlotMap& map, const uint16_t* row, uint16_t* packed) {
  uint16_t* next = packed;
  for (int64_t c = 0; c < map.row_length; c += 32) {
    const __mmask32 inside = lowest<__mmask32>(map.row_length - c, 32), held = mask_at<__mmask32, 32>(map.laid_out, c);
    const __m512i values = _mm512_maskz_loadu_epi16(inside, row + c);
    _mm512_storeu_si512(next, _mm512_maskz_compress_epi16(held, values));
    next += __builtin_popcount(held);
  }
  gather_moved(map, row, packed);
}

inline void gather_word(const SlotMap& map, const uint32_t* row, uint32_t* packed) {
  uint32_t* next = packed;
  for (int64_t c = 0; c < map.row_length; c += 16) {
    const __mmask16 inside = lowest<__mmask16>(map.row_length - c, 16), held = mask_at<__mmask16, 16>(map.laid_out, c);
    const __m512i values = _mm512_maskz_loadu_epi32(inside, row + c);
    _mm512_storeu_si512(next, _mm512_maskz_compress_epi32(held, values));
    next += __builtin_popcount(held);
  }
  gather_moved(map, row, packed);
}

// Columns without a slot get the bits back that they had.
ZENFLOW_VBMI2 inline void scatter_half(const SlotMap& map, const uint16_t* packed, uint16_t* row) {
  const uint16_t* next = packed;
  for (int64_t c = 0; c < map.row_length; c += 32) {
    const __mmask32 inside = lowest<__mmask32>(map.row_length - c, 32), held = mask_at<__mmask32, 32>(map.laid_out, c);
    const int64_t count = __builtin_popcount(held);
    const __m512i values =
        _mm512_maskz_expand_epi16(held, _mm512_maskz_loadu_epi16(lowest<__mmask32>(count, 32), next));
    const __m512i before = _mm512_maskz_loadu_epi16(inside, row + c);
    const __m512i after = _mm512_mask_mov_epi16(before, mask_at<__mmask32, 32>(map.kept, c), values);
    if (map.row_length - c >= 32) {
      _mm512_storeu_si512(row + c, after);
    } else {
      _mm512_mask_storeu_epi16(row + c, inside, after);
    }
    next += count;
  }
  scatter_moved(map, packed, row);
}

inline void scatter_word(const SlotMap& map, const uint32_t* packed, uint32_t* row) {
  const uint32_t* next = packed;
  for (int64_t c = 0; c < map.row_length; c += 16) {
    const __mmask16 held = mask_at<__mmask16, 16>(map.laid_out, c);
    const int64_t count = __builtin_popcount(held);
    const __m512i values =
        _mm512_maskz_expand_epi32(held, _mm512_maskz_loadu_epi32(lowest<__mmask16>(count, 16), next));
    _mm512_mask_storeu_epi32(row + c, mask_at<__mmask16, 16>(map.kept, c), values);
    next += count;
  }
  scatter_moved(map, packed, row);
}

inline void gather_by_mask(const SlotMap& map, const void* row, int64_t item, void* packed) {
  if (item == 4) return gather_word(map, static_cast<const uint32_t*>(row), static_cast<uint32_t*>(packed));
  if (!__builtin_cpu_supports("avx512vbmi2")) return gather_one_by_one<uint16_t>(map, row, packed);
  gather_half(map, static_cast<const uint16_t*>(row), static_cast<uint16_t*>(packed));
}

inline void scatter_by_mask(const SlotMap& map, const void* packed, int64_t item, void* row) {
  if (item == 4) return scatter_word(map, static_cast<const uint32_t*>(packed), static_cast<uint32_t*>(row));
  if (!__builtin_cpu_supports("avx512vbmi2")) return scatter_one_by_one<uint16_t>(map, packed, row);
  scatter_half(map, static_cast<const uint16_t*>(packed), static_cast<uint16_t*>(row));
}

#undef ZENFLOW_VBMI2

}  // namespace zenflow::ZENFLOW_ISA
