// SPDX-License-Identifier: Apache-2.0
// What a thread of device code does by itself: atomics, loads and stores with hints, bits, arithmetic.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "access.h"

// Atomics are relaxed, as CUDA's are. The compiler does not instrument them, so they check their access themselves.

namespace emulation {
template <class T>
T* checked(T* address) {
  check_access(reinterpret_cast<uintptr_t>(address), sizeof(T));
  return address;
}
}  // namespace emulation

template <class T>
T atomicAdd(T* address, std::common_type_t<T> value) {
  static_assert(std::is_integral_v<T>, "float atomics depend on the order");
  return __atomic_fetch_add(emulation::checked(address), value, __ATOMIC_RELAXED);
}
template <class T>
T atomicOr(T* address, std::common_type_t<T> value) {
  return __atomic_fetch_or(emulation::checked(address), value, __ATOMIC_RELAXED);
}
template <class T>
T atomicAnd(T* address, std::common_type_t<T> value) {
  return __atomic_fetch_and(emulation::checked(address), value, __ATOMIC_RELAXED);
}
template <class T>
T atomicXor(T* address, std::common_type_t<T> value) {
  return __atomic_fetch_xor(emulation::checked(address), value, __ATOMIC_RELAXED);
}
template <class T>
T atomicExch(T* address, std::common_type_t<T> value) {
  return __atomic_exchange_n(emulation::checked(address), value, __ATOMIC_RELAXED);
}
template <class T>
T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
  __atomic_compare_exchange_n(emulation::checked(address), &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
template <class T>
T atomicMax(T* address, std::common_type_t<T> value) {
  T old = __atomic_load_n(emulation::checked(address), __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
template <class T>
T atomicMin(T* address, std::common_type_t<T> value) {
  T old = __atomic_load_n(emulation::checked(address), __ATOMIC_RELAXED);
  while (value < old && !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

// Fences: only TSan and other streams' threads could tell.
inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

// Loads and stores with cache hints.
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
void __stcs(T* address, std::common_type_t<T> value) {
  *address = value;
}
template <class T>
void __stcg(T* address, std::common_type_t<T> value) {
  *address = value;
}

// Bits.

inline int __popc(unsigned value) {
  return __builtin_popcount(value);
}
inline int __popcll(unsigned long long value) {
  return __builtin_popcountll(value);
}
inline int __ffs(int value) {
  return __builtin_ffs(value);
}
inline int __ffsll(long long value) {
  return __builtin_ffsll(value);
}
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
inline int __clzll(long long value) {
  return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value));
}

namespace emulation {
template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}
}  // namespace emulation

inline unsigned __float_as_uint(float value) {
  return emulation::same_bits<unsigned>(value);
}
inline int __float_as_int(float value) {
  return emulation::same_bits<int>(value);
}
inline float __uint_as_float(unsigned value) {
  return emulation::same_bits<float>(value);
}
inline float __int_as_float(int value) {
  return emulation::same_bits<float>(value);
}
inline long long __double_as_longlong(double value) {
  return emulation::same_bits<long long>(value);
}
inline double __longlong_as_double(long long value) {
  return emulation::same_bits<double>(value);
}

// Arithmetic, rounded to nearest even, never contracted: this is compiled with -ffp-contract=off.

inline float __fmaf_rn(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fsqrt_rn(float a) {
  return __builtin_sqrtf(a);
}
inline double __fma_rn(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}
inline double __dadd_rn(double a, double b) {
  return a + b;
}
inline double __dsub_rn(double a, double b) {
  return a - b;
}
inline double __dmul_rn(double a, double b) {
  return a * b;
}
inline double __ddiv_rn(double a, double b) {
  return a / b;
}
inline double __dsqrt_rn(double a) {
  return __builtin_sqrt(a);
}
inline float __double2float_rn(double a) {
  return static_cast<float>(a);
}
inline float __int2float_rn(int a) {
  return static_cast<float>(a);
}

// CUDA's global min and max.
template <class T>
std::enable_if_t<std::is_arithmetic_v<T>, T> min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
std::enable_if_t<std::is_arithmetic_v<T>, T> max(T a, T b) {
  return a < b ? b : a;
}
