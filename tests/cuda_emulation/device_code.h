// SPDX-License-Identifier: Apache-2.0
// What device code may use: qualifiers, built-in variables, barriers, warp operations; intrinsics.h has the rest. A
// CUDA thread is a fiber; __shared__ is thread_local because the blocks of one stream run one after another on that
// stream's thread, and it holds what the block before left in it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "block.h"
#include "intrinsics.h"
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
