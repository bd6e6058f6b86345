// SPDX-License-Identifier: Apache-2.0
//
// Random test data that is the same on every machine: a seed decides everything. And the comparison
// that goes with it: equal bits, where any NaN equals any NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "dtype.h"

namespace zenflow_test {

// splitmix64
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u) {}

  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t between(int64_t low, int64_t high) {  // both included
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(int percent) { return between(1, 100) <= percent; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int64_t>(values.size()) - 1)];
  }

  // In (-1, 1).
  float uniform() { return static_cast<float>(static_cast<int32_t>(bits() >> 40) - (1 << 23)) * 0x1p-23f; }
  float any_bits() { return zenflow::float_from_bits(static_cast<uint32_t>(bits())); }
  // Mostly ordinary values; sometimes zeros, denormals, huge values, infinities, NaNs or any bits at all.
  float any_float() {
    if (!chance(20)) return std::ldexp(uniform(), static_cast<int>(between(-12, 4)));
    using limits = std::numeric_limits<float>;
    // NaNs that would round to infinity, or carry into the sign, if they were rounded as numbers.
    const float signalling = zenflow::float_from_bits(0x7f800001u), full = zenflow::float_from_bits(0x7fffffffu);
    if (chance(20)) return any_bits();
    return one_of({0.0f, -0.0f, 0x1p-149f, -0x1.8p-140f, limits::min(), 0x1p-14f, 0x1p-24f, 65504.0f, 65520.0f, 1e19f,
                   -3e38f, limits::max(), limits::infinity(), -limits::infinity(), signalling, full, -full});
  }

 private:
  uint64_t state_;
};

constexpr zenflow::DType kDTypes[] = {zenflow::DType::kFloat32, zenflow::DType::kBFloat16, zenflow::DType::kFloat16};

inline uint32_t bits_at(zenflow::DType dtype, const void* array, int64_t i) {
  return zenflow::item_size(dtype) == 4 ? static_cast<const uint32_t*>(array)[i]
                                        : static_cast<const uint16_t*>(array)[i];
}

inline bool is_nan_pattern(zenflow::DType dtype, uint32_t bits) {
  if (dtype == zenflow::DType::kFloat32) return (bits & 0x7fffffffu) > 0x7f800000u;
  return (bits & 0x7fffu) > (dtype == zenflow::DType::kBFloat16 ? 0x7f80u : 0x7c00u);
}

inline bool same_bits(zenflow::DType dtype, uint32_t a, uint32_t b) {
  return a == b || (is_nan_pattern(dtype, a) && is_nan_pattern(dtype, b));
}

inline void store_rounded(zenflow::DType dtype, void* array, int64_t i, float value) {
  zenflow::with_dtype(dtype, [&]<zenflow::DType D>() {
    static_cast<typename zenflow::BitsOf<D>::type*>(array)[i] = zenflow::round_to<D>(value);
  });
}

}  // namespace zenflow_test
