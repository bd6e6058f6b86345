// SPDX-License-Identifier: Apache-2.0
// Every instruction set against docs/arithmetic.md, one element at a time, bit for bit.
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"
#include "isas.h"
#include "random.h"

using namespace zenflow;
using namespace zenflow_test;

namespace {

// Elements aligned as one element only, with nothing of ours before or behind them.
class Array {
 public:
  Array(Random& random, DType dtype, int64_t count)
      : dtype_(dtype), start_(random.between(0, 5)), memory_(static_cast<size_t>((start_ + count) * item_size(dtype))) {
    const int scale = static_cast<int>(random.between(-3, 3));
    for (int64_t i = 0; i < size(); ++i) store_rounded(dtype, memory_.data(), i, std::ldexp(random.any_float(), scale));
  }

  void* data() { return memory_.data() + start_ * item_size(dtype_); }
  float* floats() { return static_cast<float*>(data()); }
  float at(int64_t i) {
    return with_dtype(dtype_, [&]<DType D>() { return widen<D>(static_cast<typename BitsOf<D>::type*>(data())[i]); });
  }
  void set(int64_t i, float value) { store_rounded(dtype_, data(), i, value); }
  bool operator==(const Array& other) const {
    if (memory_ == other.memory_) return true;
    for (int64_t i = 0; i < size(); ++i) {
      if (!same_bits(dtype_, bits_at(dtype_, memory_.data(), i), bits_at(dtype_, other.memory_.data(), i)))
        return false;
    }
    return true;
  }

 private:
  int64_t size() const { return static_cast<int64_t>(memory_.size()) / item_size(dtype_); }

  DType dtype_;
  int64_t start_;
  std::vector<char> memory_;
};

// Everything that one call of update() or update_mean() reads, and what it may write.
struct Case {
  DType lane_dtype, written_dtype, moments;
  uint32_t noise;
  int64_t count, begin, end, row_length;
  bool moves_weight, has_sum, has_columns;
  std::vector<Array> gradients;
  std::vector<Fold> folds;
  Fold mean_fold;
  AdamStep move;
  std::vector<float> step, root, ahead;
};

struct State {
  Array master, exp_avg, exp_avg_sq, sum, written;
  State(Random& random, const Case& c)
      : master(random, DType::kFloat32, c.count),
        exp_avg(random, c.moments, c.count),
        exp_avg_sq(random, c.moments, c.count),
        sum(random, DType::kFloat32, c.count),
        written(random, c.written_dtype, c.count) {
    // A second moment is rarely negative.
    for (int64_t i = 0; i < c.count; ++i) {
      if (random.chance(95)) exp_avg_sq.set(i, std::fabs(exp_avg_sq.at(i)));
    }
  }
  bool operator==(const State&) const = default;
};

Fold random_fold(Random& random) {
  const Hyper h{.beta1 = random.one_of({0.9, 0.5, 0.3, 0.0, 0.51}), .beta2 = random.one_of({0.999, 0.95, 0.0})};
  return make_fold(h, random.one_of({1.0, -1.0, 0.37, 0.0}));
}

Case random_case(Random& random, DType lanes, DType written) {
  Case c{};
  c.lane_dtype = lanes, c.written_dtype = written;
  c.moments = random.one_of({DType::kFloat32, DType::kBFloat16}), c.noise = static_cast<uint32_t>(random.bits());
  c.count = random.chance(80) ? random.between(0, 200) : random.between(201, 1600);  // up to several tiles
  c.begin = random.chance(50) ? 0 : random.between(0, c.count);
  c.end = random.chance(50) ? c.count : random.between(c.begin, c.count);
  c.moves_weight = random.chance(80), c.has_sum = random.chance(50), c.has_columns = random.chance(40);
  const int64_t some = random.chance(80) ? random.between(1, 6) : random.between(7, 21);
  for (int64_t lane = random.chance(95) ? some : 0; lane > 0; --lane) {
    c.gradients.emplace_back(random, lanes, c.count);
    c.folds.push_back(random_fold(random));
  }
  c.mean_fold = random_fold(random);

  const Hyper h{.lr = random.one_of({1e-3, 0.0, 2.0, 1e-42}),
                .beta1 = 0.9,
                .beta2 = 0.999,
                .eps = random.one_of({1e-8, 0.0, 1e-3})};
  const double keep = random.chance(40) ? 1.0 : 1.0 - h.lr * random.one_of({0.01, 0.5});
  const double lookahead = random.one_of({0.0, 1.0, 2.5});
  const auto step_at = [&](int64_t t) { return make_adam_step(h, h.lr, keep, t, lookahead); };
  c.move = step_at(random.between(1, 3000));
  c.row_length = random.chance(70) ? random.between(1, 20) : random.between(500, 1100);
  for (int64_t column = 0; column < c.row_length; ++column) {
    const AdamStep s = step_at(random.between(1, 50));
    c.step.push_back(s.step), c.root.push_back(s.root), c.ahead.push_back(s.ahead);
  }
  return c;
}

// docs/arithmetic.md, in the order that it gives.
void fold_by_definition(const Fold& f, float g, float& m, float& v) {
  const float d = g - m;
  m = f.take1 < 0.5f ? std::fma(f.take1, d, m) : std::fma(-f.keep1, d, g);
  const float scaled = f.take2 * g;
  v = std::fma(f.keep2, v, scaled * g);
}

// fp32 as it is; bfloat16 up with the chance that noise of 16 bits gives it.
void set_moment(Array& moments, DType dtype, int64_t i, float value, uint32_t noise) {
  if (dtype == DType::kFloat32 || std::isnan(value)) return moments.set(i, value);
  const uint32_t bits = bits_from_float(value);
  moments.set(i, float_from_bits((bits + noise) & 0xffff0000u));
}

uint32_t lowbias32(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du;
  x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

void update_by_definition(Case& c, State& s, bool mean) {
  for (int64_t i = c.begin; i < c.end; ++i) {
    float m = s.exp_avg.at(i), v = s.exp_avg_sq.at(i), sum = c.has_sum ? s.sum.at(i) : 0.0f;
    for (size_t lane = 0; lane < c.gradients.size(); ++lane) {
      const float g = c.gradients[lane].at(i) * c.folds[lane].scale;
      mean ? void(sum = sum + g) : fold_by_definition(c.folds[lane], g, m, v);
    }
    if (mean && c.has_sum) s.sum.set(i, c.moves_weight ? 0.0f : sum);
    if (mean && c.moves_weight) fold_by_definition(c.mean_fold, sum / static_cast<float>(c.gradients.size()), m, v);
    const uint32_t noise = lowbias32(c.noise + static_cast<uint32_t>(i));
    if (!mean || c.moves_weight) {
      set_moment(s.exp_avg, c.moments, i, m, noise & 0xffff);
      set_moment(s.exp_avg_sq, c.moments, i, v, noise >> 16);
    }
    if (!c.moves_weight) continue;

    const size_t column = static_cast<size_t>(i % c.row_length);
    const float step = c.has_columns ? c.step[column] : c.move.step;
    const float root = c.has_columns ? c.root[column] : c.move.root;
    const float ahead = c.has_columns ? c.ahead[column] : c.move.ahead;
    const float q = m / std::fma(root, std::sqrt(v), c.move.eps), w = s.master.at(i);
    const float decayed = c.move.decay == 0 ? 0.0f : c.move.decay * w;
    const float moved = c.move.step == 0 && c.move.decay == 0 ? w : w - std::fma(step, q, decayed);
    s.master.set(i, moved);
    s.written.set(i, c.move.ahead == 0 ? moved : std::fma(-ahead, q, moved));
  }
}

// One call per piece of a random cut of [begin, end).
void update_in_pieces(Random& random, const Kernels& kernels, Case& c, State& s, bool mean) {
  std::vector<Lane> lanes;
  for (size_t i = 0; i < c.gradients.size(); ++i) lanes.push_back({c.gradients[i].data(), c.folds[i]});
  const ColumnSteps columns{c.step.data(), c.root.data(), c.ahead.data()};
  Update u{};
  u.master = s.master.floats(), u.exp_avg = s.exp_avg.data(), u.exp_avg_sq = s.exp_avg_sq.data();
  u.moments = c.moments, u.noise = c.noise;
  u.sum = c.has_sum ? s.sum.floats() : nullptr;
  u.lanes = lanes.data(), u.lane_count = static_cast<int64_t>(lanes.size());
  u.move = c.moves_weight ? &c.move : nullptr;
  u.written = s.written.data();
  u.streams = random.chance(50);
  u.mean_fold = &c.mean_fold, u.mean_count = static_cast<float>(lanes.size());
  u.columns = c.has_columns ? &columns : nullptr, u.row_length = c.row_length;

  const int64_t pieces = random.between(1, 3);
  for (int64_t piece = 1, begin = c.begin; piece <= pieces; ++piece) {
    const int64_t end = piece == pieces ? c.end : random.between(begin, c.end);
    (mean ? kernels.update_mean : kernels.update)(u, c.lane_dtype, c.written_dtype, begin, end);
    begin = end;
  }
}

void check_updates(bool mean) {
  Random random(mean ? 8 : 7);
  for (DType lanes : kDTypes) {
    for (DType written : kDTypes) {
      for (int i = 0; i < 150; ++i) {
        Case c = random_case(random, lanes, written);
        const State before(random, c);
        State expected = before;
        update_by_definition(c, expected, mean);
        for (const Kernels* kernels : available_kernels()) {
          State s = before;
          update_in_pieces(random, *kernels, c, s, mean);
          if (s == expected) continue;
          std::ostringstream message;
          message << kernels->name << ", lanes " << static_cast<int>(lanes) << ", written " << static_cast<int>(written)
                  << ", case " << i << ":" << (s.master == expected.master ? "" : " master")
                  << (s.exp_avg == expected.exp_avg ? "" : " exp_avg")
                  << (s.exp_avg_sq == expected.exp_avg_sq ? "" : " exp_avg_sq") << (s.sum == expected.sum ? "" : " sum")
                  << (s.written == expected.written ? "" : " written");
          fail(__FILE__, __LINE__, message.str());
        }
      }
    }
  }
}

}  // namespace

TEST(update_equals_the_formula_on_every_instruction_set) {
  check_updates(false);
}

TEST(update_mean_equals_the_formula_on_every_instruction_set) {
  check_updates(true);
}

// The mean of many updates that only round is the value: 2^16 elements, so each bit of noise counts.
TEST(bfloat16_moments_are_rounded_without_bias) {
  constexpr int64_t kCount = 1 << 16;
  const float value = float_from_bits(0x3f804000u);  // a quarter of the way from 1 to the next bfloat16
  const std::vector<float> gradients(kCount, value);
  std::vector<uint16_t> exp_avg(kCount), exp_avg_sq(kCount);
  const Lane lane{gradients.data(), make_fold({.beta1 = 0.0, .beta2 = 1.0}, 1.0)};
  for (const Kernels* kernels : available_kernels()) {
    std::fill(exp_avg.begin(), exp_avg.end(), uint16_t{0});
    Update u{};
    u.exp_avg = exp_avg.data(), u.exp_avg_sq = exp_avg_sq.data();
    u.moments = DType::kBFloat16, u.noise = 7;
    u.lanes = &lane, u.lane_count = 1;
    kernels->update(u, DType::kFloat32, DType::kFloat32, 0, kCount);
    int64_t up = 0;
    for (const uint16_t bits : exp_avg) {
      CHECK(bits == 0x3f80 || bits == 0x3f81);
      up += bits == 0x3f81;
    }
    CHECK(std::abs(static_cast<double>(up) / kCount - 0.25) < 0.01);  // six standard deviations
  }
}

TEST(squares_are_added_with_one_rounding_on_every_instruction_set) {
  Random random(9);
  for (int i = 0; i < 600; ++i) {
    const DType dtype = kDTypes[i % 3];
    const int64_t count = random.between(0, 200), used = random.between(0, count);
    Array x(random, dtype, count);
    const Array before(random, DType::kFloat32, count);
    Array expected = before;
    for (int64_t j = 0; j < used; ++j) expected.set(j, std::fma(x.at(j), x.at(j), expected.at(j)));
    for (const Kernels* kernels : available_kernels()) {
      Array sums = before;
      kernels->add_squares(x.data(), dtype, used, sums.floats());
      CHECK(sums == expected);
    }
  }
}

TEST(conversions_equal_the_scalar_ones_on_every_instruction_set) {
  Random random(10);
  for (int i = 0; i < 1500; ++i) {
    const DType dtype = kDTypes[i % 3];
    const int64_t count = random.between(0, 200), used = random.between(0, count);
    Array floats(random, DType::kFloat32, count), narrow(random, dtype, count);
    for (int64_t j = 0; j < count; ++j) {
      floats.set(j, random.chance(50) ? random.any_bits() : random.any_float());
      if (random.chance(20)) floats.set(j, std::nextafter(narrow.at(j), random.uniform()));
    }
    const Array floats_before(random, DType::kFloat32, count), narrow_before(random, dtype, count);
    Array widened = floats_before, rounded = narrow_before;
    for (int64_t j = 0; j < used; ++j) widened.set(j, narrow.at(j)), rounded.set(j, floats.at(j));
    for (const Kernels* kernels : available_kernels()) {
      Array w = floats_before, r = narrow_before;
      kernels->widen(narrow.data(), dtype, used, w.floats());
      kernels->round_to(floats.floats(), dtype, used, r.data());
      CHECK(w == widened);
      CHECK(r == rounded);
    }
  }
}

TEST(every_16_bit_pattern_survives_every_instruction_set) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<uint16_t> patterns(0x10000), back(0x10000);
    std::vector<float> values(0x10000);
    for (uint32_t bits = 0; bits < 0x10000u; ++bits) patterns[bits] = static_cast<uint16_t>(bits);
    for (const Kernels* kernels : available_kernels()) {
      kernels->widen(patterns.data(), dtype, 0x10000, values.data());
      kernels->round_to(values.data(), dtype, 0x10000, back.data());
      for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
        CHECK(same_bits(dtype, bits, back[bits]));
        const float value = dtype == DType::kBFloat16 ? widen_bfloat16(patterns[bits]) : widen_float16(patterns[bits]);
        CHECK(same_bits(DType::kFloat32, bits_from_float(value), bits_from_float(values[bits])));
      }
    }
  }
}
