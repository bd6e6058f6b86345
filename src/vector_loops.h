// SPDX-License-Identifier: Apache-2.0
// Loops over the vectors of one instruction set; in its namespace, as all that kernels_body.h includes.
#pragma once

#include "kernels.h"
#include "prefetch.h"

namespace zenflow::ZENFLOW_ISA {

constexpr int64_t kLine = 64;  // bytes of a cache line

template <DType D>
using Bits = typename BitsOf<D>::type;

// The last elements of a run go through buffers of one full vector, so that the loop's body stands once.
template <DType D>
ZENFLOW_INLINE Floats load_some(const void* x, int64_t i, int64_t count) {
  if (count == kWidth) return load<D>(x, i);
  Bits<D> buffer[kWidth] = {};
  for (int64_t j = 0; j < count; ++j) buffer[j] = static_cast<const Bits<D>*>(x)[i + j];
  return load<D>(buffer, 0);
}

template <DType D>
ZENFLOW_INLINE void store_some(void* x, int64_t i, int64_t count, Floats value) {
  if (count == kWidth) return store<D>(x, i, value);
  Bits<D> buffer[kWidth];
  store<D>(buffer, 0, value);
  for (int64_t j = 0; j < count; ++j) static_cast<Bits<D>*>(x)[i + j] = buffer[j];
}

// Calls body(first element, how many) for whole vectors, then for the rest.
template <class Body>
ZENFLOW_INLINE void for_each_vector(int64_t begin, int64_t end, Body&& body) {
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) body(i, kWidth);
  if (i < end) body(i, end - i);
}

constexpr DType kF32 = DType::kFloat32;

// Calls body.operator()<vectors>(first element, elements of each vector) for blocks of several vectors, so that what a
// lane needs is fetched once for all of them; then for single ones, the last of which may be shorter.
template <class Body>
ZENFLOW_INLINE void for_each_block(int64_t begin, int64_t end, Body&& body) {
  int64_t i = begin;
  for (; i + kBlock * kWidth <= end; i += kBlock * kWidth) body.template operator()<kBlock>(i, kWidth);
  for_each_vector(i, end, [&](int64_t at, int64_t count) { body.template operator()<1>(at, count); });
}

}  // namespace zenflow::ZENFLOW_ISA
