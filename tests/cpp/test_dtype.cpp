// SPDX-License-Identifier: Apache-2.0
// The conversions against their definition in double arithmetic, which knows no bits of a float.
#include "dtype.h"

#include <cmath>
#include <limits>

#include "check.h"
#include "random.h"

using namespace zenflow;
using namespace zenflow_test;

namespace {

// A 16-bit binary format: sign, exponent, `fraction` bits of mantissa.
struct Format {
  DType dtype;
  int fraction, bias;
  int largest() const { return bias; }       // exponent of the largest finite values
  int smallest() const { return 1 - bias; }  // of the smallest normal ones
};

constexpr Format kBF16{DType::kBFloat16, 7, 127};
constexpr Format kFP16{DType::kFloat16, 10, 15};

double value_of(const Format& f, uint32_t bits) {
  const int exponent = static_cast<int>((bits & 0x7fffu) >> f.fraction);
  const double mantissa = bits & ((1u << f.fraction) - 1u);
  const double one = std::ldexp(1.0, f.fraction);
  double magnitude = std::ldexp(one + mantissa, exponent - f.bias - f.fraction);
  if (exponent == 0) magnitude = std::ldexp(mantissa, f.smallest() - f.fraction);
  if (exponent == 2 * f.bias + 1) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  return (bits & 0x8000u) != 0 ? -magnitude : magnitude;
}

// The nearest multiple of the format's spacing around the value, ties to the even multiple; its bits.
uint32_t nearest(const Format& f, float value) {
  const uint32_t sign = std::signbit(value) ? 0x8000u : 0u;
  const uint32_t infinity = static_cast<uint32_t>(2 * f.bias + 1) << f.fraction;
  if (std::isnan(value)) return sign | infinity | 1u;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(magnitude)) return sign | infinity;
  if (magnitude == 0) return sign;

  int exponent = std::max(std::ilogb(magnitude), f.smallest());
  const double scaled = std::ldexp(magnitude, f.fraction - exponent);
  double multiple = std::floor(scaled);
  const double rest = scaled - multiple;
  if (rest > 0.5 || (rest == 0.5 && std::fmod(multiple, 2.0) == 1.0)) multiple += 1;
  const double one = std::ldexp(1.0, f.fraction);
  if (multiple < one) return sign | static_cast<uint32_t>(multiple);  // a denormal
  if (multiple == 2 * one) multiple = one, ++exponent;
  if (exponent > f.largest()) return sign | infinity;
  return sign | (static_cast<uint32_t>(exponent + f.bias) << f.fraction) | static_cast<uint32_t>(multiple - one);
}

uint32_t rounded(const Format& f, float value) {
  return f.dtype == DType::kBFloat16 ? round_to_bfloat16(value) : round_to_float16(value);
}

float widened(const Format& f, uint32_t bits) {
  return f.dtype == DType::kBFloat16 ? widen_bfloat16(static_cast<uint16_t>(bits))
                                     : widen_float16(static_cast<uint16_t>(bits));
}

void check_rounding(const Format& f, float value) {
  if (same_bits(f.dtype, rounded(f, value), nearest(f, value))) return;
  std::ostringstream message;
  message << std::hexfloat << value << " rounds to bits " << std::hex << rounded(f, value) << ", not "
          << nearest(f, value);
  fail(__FILE__, __LINE__, message.str());
}

void check_rounding_around(const Format& f, float value) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (float x : {value, std::nextafter(value, kInfinity), std::nextafter(value, -kInfinity)}) check_rounding(f, x);
}

}  // namespace

TEST(every_16_bit_pattern_widens_to_its_value_and_rounds_back) {
  for (const Format& f : {kBF16, kFP16}) {
    for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
      const float value = widened(f, bits);
      CHECK_EQ(std::isnan(value), is_nan_pattern(f.dtype, bits));
      CHECK_EQ(std::signbit(value), (bits & 0x8000u) != 0);
      if (!std::isnan(value)) CHECK_EQ(static_cast<double>(value), value_of(f, bits));
      CHECK(same_bits(f.dtype, rounded(f, value), bits));
    }
  }
}

TEST(rounding_is_to_nearest_even_at_every_value_and_halfway_between) {
  for (const Format& f : {kBF16, kFP16}) {
    const uint32_t infinity = static_cast<uint32_t>(2 * f.bias + 1) << f.fraction;
    for (uint32_t bits = 0; bits < infinity; ++bits) {
      const double here = value_of(f, bits);
      const double next = bits + 1 == infinity ? std::ldexp(1.0, f.largest() + 1) : value_of(f, bits + 1);
      for (double sign : {1.0, -1.0}) {
        check_rounding_around(f, static_cast<float>(sign * here));
        check_rounding_around(f, static_cast<float>(sign * (here + next) / 2));  // exact: a float has more bits
      }
    }
  }
}

TEST(rounding_is_to_nearest_even_for_any_float) {
  for (const Format& f : {kBF16, kFP16}) {
    Random random(1);
    for (int i = 0; i < 2000000; ++i) check_rounding(f, random.any_bits());
    for (int i = 0; i < 1000000; ++i) check_rounding(f, random.any_float());
    // Around each power of two, denormal floats included, and at the edges of the exponents.
    for (int exponent = -149; exponent <= 127; ++exponent) {
      for (float sign : {1.0f, -1.0f}) check_rounding_around(f, std::ldexp(sign, exponent));
    }
    for (uint32_t exponent = 0; exponent < 256; ++exponent) {
      for (uint32_t mantissa : {0x000000u, 0x000001u, 0x400000u, 0x7fffffu}) {
        for (uint32_t sign : {0u, 0x80000000u}) check_rounding(f, float_from_bits(sign | (exponent << 23) | mantissa));
      }
    }
  }
}

TEST(float32_is_its_own_bits) {
  Random random(2);
  for (int i = 0; i < 100000; ++i) {
    const uint32_t bits = bits_from_float(random.any_bits());
    CHECK_EQ(round_to<DType::kFloat32>(widen<DType::kFloat32>(bits)), bits);
  }
}
