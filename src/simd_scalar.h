// SPDX-License-Identifier: Apache-2.0
// The portable stand-in for a vector: one float. For correctness on any machine; without hardware fma each one is a
// library call.
#pragma once

#include <cstring>

#include "adam.h"
#include "dtype.h"

namespace zenflow::ZENFLOW_ISA {

constexpr int64_t kWidth = 1;
using Floats = float;

template <DType D>
ZENFLOW_INLINE Floats load(const void* x, int64_t i) {
  return widen<D>(static_cast<const typename BitsOf<D>::type*>(x)[i]);
}

template <DType D>
ZENFLOW_INLINE void store(void* x, int64_t i, Floats value) {
  static_cast<typename BitsOf<D>::type*>(x)[i] = round_to<D>(value);
}

template <DType D>
ZENFLOW_INLINE void stream_store(void* x, int64_t i, Floats value) {
  store<D>(x, i, value);
}

ZENFLOW_INLINE void stream_line(char* to, const char* from) {
  std::memcpy(to, from, 64);
}

}  // namespace zenflow::ZENFLOW_ISA
