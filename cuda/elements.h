// SPDX-License-Identifier: Apache-2.0
// Elements of a dtype in kernels: conversions in the fewest instructions, and several elements in one access.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "dtype.h"

namespace zenflow {

template <DType D>
using Bits = typename BitsOf<D>::type;

// Exact, denormals and all.
template <DType D>
__device__ __forceinline__ float to_float(Bits<D> bits) {
  if constexpr (D == DType::kFloat16) {
    return __half2float(__ushort_as_half(bits));
  } else {
    return widen<D>(bits);
  }
}

// To nearest even, denormals kept.
template <DType D>
__device__ __forceinline__ Bits<D> from_float(float value) {
  if constexpr (D == DType::kFloat16) {
    return __half_as_ushort(__float2half_rn(value));
  } else {
    return round_to<D>(value);
  }
}

// Equal bits, where any NaN equals any NaN.
template <DType D>
__device__ __forceinline__ bool same_bits(Bits<D> a, Bits<D> b) {
  return a == b || (is_nan_bits(D, a) && is_nan_bits(D, b));
}

// N adjacent elements, read or written by one instruction; N = 1 for what is not aligned.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T item[N];
};

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load(const T* address) {
  return *reinterpret_cast<const Pack<T, N>*>(address);
}

template <class T, int N>
__device__ __forceinline__ void store(T* address, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(address) = pack;
}

inline bool is_aligned(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
}

// Calls f with the dtype as a constant, in the C++17 of .cu files: `with_dtype_constant(d, [&](auto D) { ... D() ...
// })`.
template <class Function>
auto with_dtype_constant(DType dtype, Function&& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f(std::integral_constant<DType, DType::kBFloat16>());
    case DType::kFloat16:
      return f(std::integral_constant<DType, DType::kFloat16>());
    default:
      return f(std::integral_constant<DType, DType::kFloat32>());
  }
}

}  // namespace zenflow
