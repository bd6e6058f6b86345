// SPDX-License-Identifier: Apache-2.0
// What device code may use: qualifiers, built-in variables, barriers, warp operations, atomics, intrinsics. A CUDA
// thread is a fiber; __shared__ is thread_local because the blocks of one stream run one after another on that
// stream's thread, and it holds what the block before left in it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "access.h"
#include "block.h"
#include "vector_types.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static thread_local
#define __constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

#define threadIdx (::emulation::here.thread)
#define blockIdx (::emulation::here.block)
#define blockDim (::emulation::here.block_size)
#define gridDim (::emulation::here.grid_size)

constexpr int warpSize = 32;

// Barriers of a block: all of its threads must come, and to the same line.

inline void __syncthreads(emulation::Site site = emulation::Site::here()) {
  emulation::block_barrier(emulation::Barrier::kPlain, 0, site);
}
inline int __syncthreads_count(int predicate, emulation::Site site = emulation::Site::here()) {
  return emulation::block_barrier(emulation::Barrier::kCount, predicate, site);
}
inline int __syncthreads_and(int predicate, emulation::Site site = emulation::Site::here()) {
  return emulation::block_barrier(emulation::Barrier::kAnd, predicate, site);
}
inline int __syncthreads_or(int predicate, emulation::Site site = emulation::Site::here()) {
  return emulation::block_barrier(emulation::Barrier::kOr, predicate, site);
}

// Operations of a warp: all lanes in `mask` must come, with the same mask, and to the same line. Only __syncwarp
// orders memory.

inline void __syncwarp(unsigned mask = 0xffffffffu, emulation::Site site = emulation::Site::here()) {
  emulation::warp_operation(emulation::Warp::kSync, mask, 0, 0, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, emulation::Site site = emulation::Site::here()) {
  return static_cast<unsigned>(emulation::warp_operation(emulation::Warp::kBallot, mask, predicate != 0, 0, site));
}
inline int __any_sync(unsigned mask, int predicate, emulation::Site site = emulation::Site::here()) {
  return __ballot_sync(mask, predicate, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, emulation::Site site = emulation::Site::here()) {
  return __ballot_sync(mask, predicate, site) == mask;
}

template <class T>
unsigned __match_any_sync(unsigned mask, T value, emulation::Site site = emulation::Site::here()) {
  static_assert(std::is_integral_v<T>);
  return static_cast<unsigned>(
      emulation::warp_operation(emulation::Warp::kMatch, mask, static_cast<uint64_t>(value), 0, site));
}

// Reductions of int and unsigned (sm_80). Signed values are ordered by flipping their sign bit.
#define EMULATION_REDUCE(name, operation, flip)                                                                    \
  template <class T>                                                                                               \
  T name(unsigned mask, T value, emulation::Site site = emulation::Site::here()) {                                 \
    static_assert(std::is_integral_v<T> && sizeof(T) == 4);                                                        \
    const unsigned bias = (flip) && std::is_signed_v<T> ? 0x80000000u : 0;                                         \
    const uint64_t result =                                                                                        \
        emulation::warp_operation(emulation::Warp::operation, mask, static_cast<unsigned>(value) ^ bias, 0, site); \
    return static_cast<T>(static_cast<unsigned>(result) ^ bias);                                                   \
  }
EMULATION_REDUCE(__reduce_add_sync, kAdd, false)
EMULATION_REDUCE(__reduce_min_sync, kMin, true)
EMULATION_REDUCE(__reduce_max_sync, kMax, true)
EMULATION_REDUCE(__reduce_and_sync, kAnd, false)
EMULATION_REDUCE(__reduce_or_sync, kOr, false)
EMULATION_REDUCE(__reduce_xor_sync, kXor, false)
#undef EMULATION_REDUCE

namespace emulation {

// Gives `value` to the warp and takes that of lane `source`.
template <class T>
T exchange(unsigned mask, T value, int source, Site site) {
  static_assert(std::is_arithmetic_v<T>, "shuffles move numbers");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = warp_operation(Warp::kShuffle, mask, bits, source, site);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

inline int lane() {
  const auto& h = here;
  return static_cast<int>((h.thread.x + h.block_size.x * (h.thread.y + h.block_size.y * h.thread.z)) % warpSize);
}

}  // namespace emulation

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize,
              emulation::Site site = emulation::Site::here()) {
  return emulation::exchange(mask, value, (emulation::lane() & ~(width - 1)) | (source & (width - 1)), site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                 emulation::Site site = emulation::Site::here()) {
  const int lane = emulation::lane(), from = lane - static_cast<int>(delta);
  return emulation::exchange(mask, value, from < (lane & ~(width - 1)) ? lane : from, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                   emulation::Site site = emulation::Site::here()) {
  const int lane = emulation::lane(), from = lane + static_cast<int>(delta);
  return emulation::exchange(mask, value, from > (lane | (width - 1)) ? lane : from, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize,
                  emulation::Site site = emulation::Site::here()) {
  const int lane = emulation::lane(), from = lane ^ bits;
  return emulation::exchange(mask, value, from > (lane | (width - 1)) ? lane : from, site);
}

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
