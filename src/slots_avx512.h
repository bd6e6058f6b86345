// SPDX-License-Identifier: Apache-2.0
// gather() and scatter() of kernels.h for AVX-512: a vector of columns is compressed by the mask of those that have
// slots, or expanded; moved slots follow one by one. 16-bit elements need AVX512_VBMI2, which is asked for at run time.
#pragma once

#include "kernels_body.h"

namespace zenflow::ZENFLOW_ISA {

#define ZENFLOW_VBMI2 __attribute__((target("avx512vbmi2,popcnt")))

// So many bits of a mask of 64-bit words, from bit `first` on: as many as Mask has, which divide 64.
template <class Mask>
ZENFLOW_INLINE Mask mask_at(const uint64_t* words, int64_t first) {
  return static_cast<Mask>(words[first / 64] >> (first % 64));
}

template <class Mask>
ZENFLOW_INLINE Mask lowest(int64_t count) {
  return count >= static_cast<int64_t>(8 * sizeof(Mask)) ? static_cast<Mask>(~Mask{0})
                                                         : static_cast<Mask>((Mask{1} << count) - 1);
}

template <class T>
void gather_moved(const SlotMap& map, const T* row, T* packed) {
  for (int64_t i = 0; i < map.moved_count; ++i) packed[map.moved[i].slot] = row[map.moved[i].column];
}

template <class T>
void scatter_moved(const SlotMap& map, const T* packed, T* row) {
  for (int64_t i = 0; i < map.moved_count; ++i) row[map.moved[i].column] = packed[map.moved[i].slot];
}

// A masked load or store takes several times as long as a whole one: only the row's last vector is masked.
ZENFLOW_VBMI2 inline void gather_half(const SlotMap& map, const uint16_t* row, uint16_t* packed) {
  uint16_t* next = packed;
  int64_t c = 0;
  const auto take = [&](__m512i values) __attribute__((target("avx512vbmi2,popcnt"))) {
    const __mmask32 held = mask_at<__mmask32>(map.laid_out, c);
    prefetch_ahead(row + c);
    _mm512_storeu_si512(next, _mm512_maskz_compress_epi16(held, values));
    next += __builtin_popcount(held);
  };
  for (; c + 32 <= map.row_length; c += 32) take(_mm512_loadu_si512(row + c));
  if (c < map.row_length) take(_mm512_maskz_loadu_epi16(lowest<__mmask32>(map.row_length - c), row + c));
  gather_moved(map, row, packed);
}

inline void gather_word(const SlotMap& map, const uint32_t* row, uint32_t* packed) {
  uint32_t* next = packed;
  int64_t c = 0;
  const auto take = [&](__m512i values) {
    const __mmask16 held = mask_at<__mmask16>(map.laid_out, c);
    prefetch_ahead(row + c);
    _mm512_storeu_si512(next, _mm512_maskz_compress_epi32(held, values));
    next += __builtin_popcount(held);
  };
  for (; c + 16 <= map.row_length; c += 16) take(_mm512_loadu_si512(row + c));
  if (c < map.row_length) take(_mm512_maskz_loadu_epi32(lowest<__mmask16>(map.row_length - c), row + c));
  gather_moved(map, row, packed);
}

// Columns without a slot get the bits back that they had.
ZENFLOW_VBMI2 inline void scatter_half(const SlotMap& map, const uint16_t* packed, uint16_t* row) {
  const uint16_t *next = packed, *const end = packed + map.slots;
  for (int64_t c = 0; c < map.row_length; c += 32) {
    const __mmask32 held = mask_at<__mmask32>(map.laid_out, c), kept = mask_at<__mmask32>(map.kept, c);
    const int64_t count = __builtin_popcount(held);
    prefetch_ahead(next);
    const __m512i run =
        end - next >= 32 ? _mm512_loadu_si512(next) : _mm512_maskz_loadu_epi16(lowest<__mmask32>(count), next);
    const __m512i values = _mm512_maskz_expand_epi16(held, run);
    if (c + 32 <= map.row_length) {
      _mm512_storeu_si512(row + c, _mm512_mask_mov_epi16(_mm512_loadu_si512(row + c), kept, values));
    } else {
      _mm512_mask_storeu_epi16(row + c, kept, values);
    }
    next += count;
  }
  scatter_moved(map, packed, row);
}

inline void scatter_word(const SlotMap& map, const uint32_t* packed, uint32_t* row) {
  const uint32_t *next = packed, *const end = packed + map.slots;
  for (int64_t c = 0; c < map.row_length; c += 16) {
    const __mmask16 held = mask_at<__mmask16>(map.laid_out, c), kept = mask_at<__mmask16>(map.kept, c);
    const int64_t count = __builtin_popcount(held);
    prefetch_ahead(next);
    const __m512i run =
        end - next >= 16 ? _mm512_loadu_si512(next) : _mm512_maskz_loadu_epi32(lowest<__mmask16>(count), next);
    const __m512i values = _mm512_maskz_expand_epi32(held, run);
    if (c + 16 <= map.row_length) {
      _mm512_storeu_si512(row + c, _mm512_mask_mov_epi32(_mm512_loadu_si512(row + c), kept, values));
    } else {
      _mm512_mask_storeu_epi32(row + c, kept, values);
    }
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
