// SPDX-License-Identifier: Apache-2.0
// AdamW on the device, selective and whole, against the formulas of docs/arithmetic.md written out in scalars.
#include <cmath>
#include <deque>
#include <memory>
#include <optional>

#include "column_places.h"
#include "cuda/selective_adam.h"
#include "device_arrays.h"

using namespace zenflow;
using namespace zenflow_test;

namespace {

// A block of selected columns (or a whole parameter), with its weights in a matrix.
struct State {
  Elements weight, master, exp_avg, exp_avg_sq;
};

struct Settings {
  Fold fold;
  AdamStep move;
  std::optional<float> coefficient;
  std::vector<float> column_step, column_root;  // empty: the move's own
};

Settings random_settings(Random& random, int64_t width) {
  Hyper h;
  h.lr = random.one_of({0.0, 1e-3, 0.3});
  h.beta1 = random.one_of({0.9, 0.3, 0.0, 0.5});
  h.beta2 = random.one_of({0.999, 0.9, 0.0});
  h.eps = random.one_of({1e-8, 0.0, 1e-2});
  h.weight_decay = random.one_of({0.0, 0.01});
  Settings s{make_fold(h, random.one_of({1.0, -1.0, 0.25})), {}, {}, {}, {}};
  s.move = make_adam_step(h, h.lr, 1.0 - h.lr * h.weight_decay, random.between(1, 50), 0.0);
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
void step_by_definition(const Settings& s, float gradient, int64_t i, int64_t p, int64_t at, State& state) {
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
State random_state(Random& random, DType dtype, const Shape& shape, const std::vector<int32_t>& column_of, bool wild) {
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

Elements packed_by_definition(const Elements& gradient, const Shape& shape, const std::vector<int32_t>& columns,
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

Elements nothing(DType dtype, int64_t count) {
  return {dtype, std::vector<uint32_t>(static_cast<size_t>(count), 0x5a5au)};
}

void check_selective(Random& random, const Shape& shape, DType dtype, DType weight_dtype, DType packed_dtype) {
  const bool wild = random.chance(20);
  const Places places = random_places(random, shape.columns);
  const Elements gradient = random_elements(random, dtype, shape.count(), wild);
  State state = random_state(random, weight_dtype, shape, places.device_columns, wild);
  const Settings settings = random_settings(random, places.width());

  const DeviceElements gradient_memory(gradient, random.between(0, 3));
  const DeviceElements packed(nothing(packed_dtype, shape.rows * places.slots()), random.between(0, 3));
  const DeviceArray<int32_t> place(places.place);
  const DeviceState memory(state, random.between(0, 3));
  const DeviceSettings values(settings);
  SelectivePass pass{gradient_memory.data(),
                     dtype,
                     shape.rows,
                     shape.columns,
                     place.data(),
                     places.slots() > 0 ? packed.data() : nullptr,
                     packed_dtype,
                     places.slots(),
                     memory.weight.data(),
                     weight_dtype,
                     memory.master.floats(),
                     memory.exp_avg.floats(),
                     memory.exp_avg_sq.floats(),
                     places.width(),
                     settings.fold,
                     settings.move,
                     values.scale(),
                     values.steps(),
                     values.roots(),
                     nullptr};
  selective_adam(pass, test_stream());

  for (int64_t i = 0; i < shape.rows * places.width(); ++i) {
    const int64_t p = i % places.width();
    const int64_t at = i / places.width() * shape.columns + places.device_columns[static_cast<size_t>(p)];
    step_by_definition(settings, gradient.at(at), i, p, at, state);
  }
  memory.check(state);
  CHECK_EQ(first_difference(packed.read(), packed_by_definition(gradient, shape, places.slot_columns, packed_dtype)),
           -1);
  CHECK_EQ(first_difference(gradient_memory.read(), gradient), -1);
}

}  // namespace

TEST(selective_pass_in_all_dtypes) {
  Random random(11);
  for (const DType gradient : kDTypes) {
    for (const DType weight : kDTypes) {
      for (const DType packed : {gradient, DType::kFloat32}) {
        for (int round = 0; round < 3; ++round) check_selective(random, random_shape(random), gradient, weight, packed);
      }
    }
  }
}

TEST(selective_pass_of_odd_shapes) {
  Random random(12);
  for (const Shape& shape :
       {Shape{0, 4}, Shape{4, 0}, Shape{1, 1}, Shape{1, 70000}, Shape{700, 3}, Shape{513, 32}, Shape{130, 300}}) {
    check_selective(random, shape, DType::kBFloat16, DType::kBFloat16, DType::kBFloat16);
    check_selective(random, shape, DType::kFloat16, DType::kFloat32, DType::kFloat32);
  }
}

TEST(selective_pass_refuses_to_pack_in_another_dtype) {
  Random random(13);
  CHECK_THROWS(std::invalid_argument,
               check_selective(random, {4, 4}, DType::kFloat32, DType::kFloat32, DType::kBFloat16));
}

TEST(kept_columns_and_their_return) {
  Random random(14);
  for (int round = 0; round < 30; ++round) {
    const DType dtype = random_dtype(random), packed_dtype = random.chance(70) ? dtype : DType::kFloat32;
    const Shape shape = random.chance(10) ? Shape{0, 5} : random_shape(random);
    const Places places = random_places(random, shape.columns);
    const Elements gradient = random_elements(random, dtype, shape.count(), true);
    const DeviceElements gradient_memory(gradient), back(nothing(dtype, shape.count()), 1);
    const DeviceElements packed(nothing(packed_dtype, shape.rows * places.slots()), 1);
    const DeviceElements kept(nothing(dtype, shape.rows * places.width()), 1);
    const DeviceArray<int32_t> place(places.place);
    SelectivePass pass{};
    pass.gradient = gradient_memory.data(), pass.gradient_dtype = dtype;
    pass.rows = shape.rows, pass.columns = shape.columns, pass.place = place.data();
    pass.packed = packed.data(), pass.packed_dtype = packed_dtype, pass.slots = places.slots();
    pass.width = places.width(), pass.kept = kept.data();
    selective_adam(pass, test_stream());
    CHECK_EQ(first_difference(packed.read(), packed_by_definition(gradient, shape, places.slot_columns, packed_dtype)),
             -1);
    CHECK_EQ(first_difference(kept.read(), packed_by_definition(gradient, shape, places.device_columns, dtype)), -1);
    if (packed_dtype != dtype) continue;
    pass.gradient = nullptr;
    unpack(pass, back.data(), test_stream());
    CHECK(back.read().bits == gradient.bits);
  }
}

namespace {

// Whole parameters, and selected columns' kept gradients, as tasks of one call.
struct Parameters {
  std::deque<State> states;
  std::deque<DeviceState> memory;
  std::deque<DeviceElements> gradients;
  std::deque<DeviceArray<int32_t>> columns;
  std::deque<DeviceSettings> values;
  std::optional<float> coefficient;
  std::vector<AdamTask> tasks;

  void add(Random& random, const Shape& shape) {
    const bool whole = random.chance(50), wild = random.chance(20);
    const DType dtype = random_dtype(random), weight_dtype = random_dtype(random);
    Places places = random_places(random, shape.columns);
    if (whole) {
      places.device_columns.clear();
      for (int32_t c = 0; c < shape.columns; ++c) places.device_columns.push_back(c);
    }
    const Elements gradient = random_elements(random, dtype, shape.rows * places.width(), wild);
    State state = random_state(random, weight_dtype, shape, places.device_columns, wild);
    Settings settings = random_settings(random, places.width());
    settings.coefficient = coefficient;
    gradients.emplace_back(gradient, random.one_of({0, 0, 1}));
    memory.emplace_back(state, random.one_of({0, 0, 3}));
    columns.emplace_back(places.device_columns);
    values.emplace_back(settings);
    const DeviceState& m = memory.back();
    tasks.push_back({gradients.back().data(), dtype, m.weight.data(), weight_dtype, shape.rows, places.width(),
                     shape.columns, whole && random.chance(80) ? nullptr : columns.back().data(), m.master.floats(),
                     m.exp_avg.floats(), m.exp_avg_sq.floats(), settings.fold, settings.move, values.back().steps(),
                     values.back().roots()});
    for (int64_t i = 0; i < gradient.count(); ++i) {
      const int64_t p = i % places.width(), column = places.device_columns[static_cast<size_t>(p)];
      step_by_definition(settings, gradient.at(i), i, p, i / places.width() * shape.columns + column, state);
    }
    states.push_back(state);
  }

  void check() {
    const DeviceArray<float> scale({coefficient.value_or(-1.0f)});
    adam(tasks, coefficient ? scale.data() : nullptr, test_stream());
    for (size_t t = 0; t < tasks.size(); ++t) memory[t].check(states[t]);
  }
};

}  // namespace

TEST(adam_of_random_parameters) {
  Random random(15);
  for (int round = 0; round < 12; ++round) {
    Parameters parameters;
    if (random.chance(50)) parameters.coefficient = 0.37f;
    for (int i = 0; i < 8; ++i) parameters.add(random, random_shape(random));
    parameters.check();
  }
}

TEST(adam_of_odd_parameters_and_more_than_a_launch_holds) {
  Random random(16);
  Parameters parameters;
  for (const Shape& shape :
       {Shape{0, 4}, Shape{4, 0}, Shape{1, 1}, Shape{1, 1023}, Shape{1, 1024}, Shape{1, 1025}, Shape{1, 70000}}) {
    parameters.add(random, shape);
  }
  for (int i = 0; i < 400; ++i) parameters.add(random, {1, random.between(0, 9)});
  parameters.check();
  adam({}, nullptr, test_stream());
}
