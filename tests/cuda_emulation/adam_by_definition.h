// SPDX-License-Identifier: Apache-2.0
// AdamW on the device in scalars: docs/arithmetic.md written out, with random states and settings to try it on.
#pragma once

#include <cmath>
#include <optional>

#include "column_places.h"
#include "cuda/selective_adam.h"
#include "device_arrays.h"

namespace zenflow_test {

// A block of selected columns (or a whole parameter), with its weights in a matrix.
struct State {
  Elements weight, master, exp_avg, exp_avg_sq;
};

struct Settings {
  zenflow::Fold fold;
  zenflow::AdamStep move;
  std::optional<float> coefficient;
  std::vector<float> column_step, column_root;  // empty: the move's own
};

inline Settings random_settings(Random& random, int64_t width) {
  zenflow::Hyper h;
  h.lr = random.one_of({0.0, 1e-3, 0.3});
  h.beta1 = random.one_of({0.9, 0.3, 0.0, 0.5});
  h.beta2 = random.one_of({0.999, 0.9, 0.0});
  h.eps = random.one_of({1e-8, 0.0, 1e-2});
  h.weight_decay = random.one_of({0.0, 0.01});
  Settings s{zenflow::make_fold(h, random.one_of({1.0, -1.0, 0.25})), {}, {}, {}, {}};
  s.move = zenflow::make_adam_step(h, h.lr, 1.0 - h.lr * h.weight_decay, random.between(1, 50), 0.0);
  if (random.chance(50)) s.coefficient = std::fabs(random.uniform());
  for (int64_t p = 0; p < width && random.chance(99); ++p) {
    s.column_step.push_back(std::fabs(random.uniform()));
    s.column_root.push_back(std::fabs(random.uniform()) + 1.0f);
  }
  if (random.chance(50) || static_cast<int64_t>(s.column_step.size()) != width)
    s.column_step.clear(), s.column_root.clear();
  return s;
}

// Element i of the state and element at of the weight take gradient g.
inline void step_by_definition(const Settings& s, float gradient, int64_t i, int64_t p, int64_t at, State& state) {
  float w = state.master.at(i), m = state.exp_avg.at(i), v = state.exp_avg_sq.at(i);
  Elements shown{state.weight.dtype, {0}};
  shown.set(0, w);
  if (!same_bits(shown.dtype, shown.bits[0], state.weight.bits[static_cast<size_t>(at)])) w = state.weight.at(at);

  const float g = gradient * (s.coefficient ? s.fold.scale * *s.coefficient : s.fold.scale);
  const float d = g - m;
  m = s.fold.take1 < 0.5f ? std::fma(s.fold.take1, d, m) : std::fma(-s.fold.keep1, d, g);
  v = std::fma(s.fold.keep2, v, (s.fold.take2 * g) * g);
  const float step = s.column_step.empty() ? s.move.step : s.column_step[static_cast<size_t>(p)];
  const float root = s.column_root.empty() ? s.move.root : s.column_root[static_cast<size_t>(p)];
  const float q = m / std::fma(root, std::sqrt(v), s.move.eps);
  if (s.move.moves) w = w - std::fma(step, q, s.move.decay == 0.0f ? 0.0f : s.move.decay * w);

  state.master.set(i, w);
  state.exp_avg.set(i, m);
  state.exp_avg_sq.set(i, v);
  state.weight.set(at, w);
}

// Masters round to the weights, but for edits here and there. `column_of` is the column of each position.
inline State random_state(Random& random, DType dtype, const Shape& shape, const std::vector<int32_t>& column_of,
                          bool wild) {
  const auto width = static_cast<int64_t>(column_of.size());
  State state{random_elements(random, dtype, shape.count(), wild),
              random_elements(random, DType::kFloat32, shape.rows * width, wild),
              random_elements(random, DType::kFloat32, shape.rows * width, wild),
              random_elements(random, DType::kFloat32, shape.rows * width, wild)};
  const bool edits = random.chance(50);
  for (int64_t i = 0; i < shape.rows * width; ++i) {
    if (!wild) state.exp_avg_sq.set(i, std::fabs(state.exp_avg_sq.at(i)));
    if (edits && random.chance(5)) continue;
    const int64_t at = i / width * shape.columns + column_of[static_cast<size_t>(i % width)];
    state.weight.set(at, state.master.at(i));
  }
  return state;
}

struct DeviceState {
  DeviceElements weight, master, exp_avg, exp_avg_sq;

  DeviceState(const State& s, int64_t offset)
      : weight(s.weight, offset),
        master(s.master, offset),
        exp_avg(s.exp_avg, offset),
        exp_avg_sq(s.exp_avg_sq, offset) {}

  void check(const State& expected) const {
    CHECK_EQ(first_difference(exp_avg.read(), expected.exp_avg), -1);
    CHECK_EQ(first_difference(exp_avg_sq.read(), expected.exp_avg_sq), -1);
    CHECK_EQ(first_difference(master.read(), expected.master), -1);
    CHECK_EQ(first_difference(weight.read(), expected.weight), -1);
  }
};

// Settings in device memory.
struct DeviceSettings {
  DeviceArray<float> coefficient, step, root;
  bool scaled, by_column;

  explicit DeviceSettings(const Settings& s)
      : coefficient({s.coefficient.value_or(-1.0f)}),
        step(s.column_step),
        root(s.column_root),
        scaled(s.coefficient.has_value()),
        by_column(!s.column_step.empty()) {}

  const float* scale() const { return scaled ? coefficient.data() : nullptr; }
  const float* steps() const { return by_column ? step.data() : nullptr; }
  const float* roots() const { return by_column ? root.data() : nullptr; }
};

inline Elements packed_by_definition(const Elements& gradient, const Shape& shape, const std::vector<int32_t>& columns,
                                     DType dtype) {
  Elements packed{dtype, {}};
  packed.bits.resize(static_cast<size_t>(shape.rows) * columns.size());
  for (int64_t i = 0; i < packed.count(); ++i) {
    const auto count = static_cast<int64_t>(columns.size());
    const int64_t at = i / count * shape.columns + columns[static_cast<size_t>(i % count)];
    if (dtype == gradient.dtype) {
      packed.bits[static_cast<size_t>(i)] = gradient.bits[static_cast<size_t>(at)];
    } else {
      packed.set(i, gradient.at(at));
    }
  }
  return packed;
}

inline Elements nothing(DType dtype, int64_t count) {
  return {dtype, std::vector<uint32_t>(static_cast<size_t>(count), 0x5a5au)};
}

}  // namespace zenflow_test
