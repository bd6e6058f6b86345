// SPDX-License-Identifier: Apache-2.0
// What the core allocates once a training runs: no host array, nothing that stays, nothing that grows with the model.
#include <optional>
#include <vector>

#include "allocations.h"
#include "check.h"
#include "engine.h"

using namespace zenflow;
using namespace zenflow_test;

namespace {

struct Case {
  bool mean = false, stream = false, automatic = false, clips = false, staged = false;
};

constexpr Case kCases[] = {{},
                           {.clips = true},
                           {.automatic = true},
                           {.staged = true},
                           {.stream = true},
                           {.stream = true, .clips = true},
                           {.stream = true, .automatic = true, .staged = true}};
constexpr int kTensors = 4;  // three are split
constexpr int64_t kInterval = 4, kSteps = 2 * kInterval;

// Trains tensors of [rows, columns] without selections after the first, for whole windows.
class SteadyTraining {
 public:
  SteadyTraining(const Case& c, int64_t rows, int64_t columns)
      : case_(c),
        engine_({.mean = c.mean,
                 .stream = c.stream,
                 .update_interval = kInterval,
                 .update_delay = 1,
                 .lookahead = 1,
                 .automatic = c.automatic},
                2, {}, 2),
        count_(static_cast<size_t>(rows * columns)) {
    for (int i = 0; i < kTensors; ++i) {
      const bool split = i > 0;
      const int64_t width = split ? columns / 8 : columns;
      weights_.emplace_back(count_, 1.0f), gradients_.emplace_back(count_, 0.25f);
      const int64_t index = engine_.add({rows, columns}, DType::kFloat32, split);
      float* arrays[3];
      for (float*& array : arrays) array = blocks_.emplace_back(static_cast<size_t>(rows * width)).data();
      engine_.parameter(index).lend({arrays[0], arrays[1], arrays[2], width});
      Operand& o = operands_.emplace_back();
      o.parameter = &engine_.parameter(index);
      o.weight = engine_.view(index, weights_.back().data(), std::nullopt, {});
      o.gradient = engine_.view(index, gradients_.back().data(), std::nullopt, {});
      o.hyper = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
    }
    steps_.reserve(operands_.size());
    train(3);
  }

  void train(int windows) {
    for (int step = 0; step < windows * kInterval; ++step) {
      const bool ends = (step + 1) % kInterval == 0;
      const StepPlan plan{.selects = engine_.clock().step == 0, .ends_window = ends, .max_grad_norm = clip()};
      steps_ = operands_;
      for (Operand& o : steps_) {
        if (!case_.staged || !o.parameter->split()) continue;
        engine_.stage(o, plan, case_.clips || case_.automatic);
        o.gradient = TensorView(), o.staged = true;
      }
      engine_.commit(steps_, plan);
    }
    engine_.adopt_edits({});  // waits for the host
  }
  int64_t host_bytes() const { return engine_.host_bytes(); }

 private:
  double clip() const { return case_.clips ? 1.0 : 0.0; }

  Case case_;
  Engine engine_;
  size_t count_;
  std::vector<std::vector<float>> weights_, gradients_, blocks_;
  std::vector<Operand> operands_, steps_;
};

Allocations of_two_windows(const Case& c, int64_t rows, int64_t columns) {
  SteadyTraining training(c, rows, columns);
  const int64_t before = training.host_bytes();
  const AllocationCount allocated;
  training.train(2);
  const Allocations found = allocated.so_far();
  CHECK_EQ(training.host_bytes(), before);
  return found;
}

}  // namespace

// What a steady step still allocates: lists of the parameters' tasks, one entry each, gone when the window's update is.
TEST(steady_steps_allocate_short_lists_whatever_the_model_is_large) {
  for (const Case& c : kCases) {
    const Allocations small = of_two_windows(c, 40, 64), large = of_two_windows(c, 400, 640);
    CHECK_EQ(small.kept, 0);
    CHECK_EQ(large.kept, 0);
    // Not the same for both: the queue of jobs takes memory by how far the host happens to be behind.
    for (const Allocations& a : {small, large}) CHECK(a.bytes <= 1024 * kTensors * kSteps);
  }
}

// And under the "mean" rule three floats for each column, however long it is: columns count their own updates.
TEST(steady_steps_under_the_mean_rule_allocate_corrections_for_columns_too) {
  for (Case c : kCases) {
    c.mean = true;
    const Allocations small = of_two_windows(c, 40, 640), large = of_two_windows(c, 400, 640);
    CHECK_EQ(small.kept, 0);
    CHECK_EQ(large.kept, 0);
    for (const Allocations& a : {small, large}) CHECK(a.bytes <= (1024 + 24 * 640) * kTensors * kSteps);
  }
}
