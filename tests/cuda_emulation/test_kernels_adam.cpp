// SPDX-License-Identifier: Apache-2.0
// AdamW of whole parameters and of kept gradients, many in one call.
#include <deque>

#include "adam_by_definition.h"

using namespace zenflow;
using namespace zenflow_test;

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
