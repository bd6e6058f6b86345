// SPDX-License-Identifier: Apache-2.0
// The portable stand-in for a vector: one float. For correctness on any machine; without hardware fma each one is a
// library call.
#pragma once

#include <cstring>

#include "adam.h"
#include "dtype.h"

namespace zenflow::ZENFLOW_ISA {

constexpr int64_t kWidth = 1;
constexpr int kBlock = 1;  // vectors at once
using Floats = float;

template <DType D>
ZENFLOW_INLINE Floats load(const void* x, int64_t i) {
  return widen<D>(static_cast<const typename BitsOf<D>::type*>(x)[i]);
}

template <DType D>
ZENFLOW_INLINE void store(void* x, int64_t i, Floats value) {
  static_cast<typename BitsOf<D>::type*>(x)[i] = round_to<D>(value);
}

using Integers = uint32_t;

ZENFLOW_INLINE Integers hashed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}
ZENFLOW_INLINE Integers low_half(Integers x) {
  return x & 0xffff;
}
ZENFLOW_INLINE Integers high_half(Integers x) {
  return x >> 16;
}

// bfloat16 below or above, as often as it is near: `noise` is even in [0, 2^16).
ZENFLOW_INLINE void store_either_way(uint16_t* to, Floats value, Integers noise) {
  const uint32_t bits = bits_from_float(value);
  *to = static_cast<uint16_t>((value != value ? bits | 0x00400000u : bits + noise) >> 16);
}

template <DType D>
ZENFLOW_INLINE void stream_store(void* x, int64_t i, Floats value) {
  store<D>(x, i, value);
}

ZENFLOW_INLINE void stream_line(char* to, const char* from) {
  std::memcpy(to, from, 64);
}

}  // namespace zenflow::ZENFLOW_ISA
