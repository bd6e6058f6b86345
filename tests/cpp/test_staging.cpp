// SPDX-License-Identifier: Apache-2.0
// What the engine promises of staged gradients beyond equal bits (test_engine.cpp): when they count, when not, and what
// is a mistake.
#include <limits>
#include <stdexcept>

#include "check.h"
#include "engine.h"

using namespace zenflow;
using namespace zenflow_test;

namespace {

constexpr int64_t kRows = 6, kColumns = 8, kCount = kRows * kColumns;
constexpr StepPlan kSelects{.selects = true}, kSteady{}, kEnds{.ends_window = true};

// One parameter of one selected column, column 0, whose weights are all 1.
struct Run {
  Engine engine;
  int64_t index;
  std::vector<float> weights = std::vector<float>(kCount, 1.0f), gradient = std::vector<float>(kCount, 0.5f);
  std::vector<float> blocks = std::vector<float>(6 * kCount);

  explicit Run(const Settings& settings = {.update_interval = 1}, bool split = true)
      : engine(settings, 1, {}, 1), index(engine.add({kRows, kColumns}, DType::kFloat32, split)) {
    for (int64_t r = 0; r < kRows; ++r) gradient[static_cast<size_t>(r * kColumns)] = 2.0f;
    lend(split ? 1 : kColumns, 0);
  }
  void lend(int64_t width, int64_t which) {
    float* block = blocks.data() + which * 3 * kCount;
    engine.parameter(index).lend({block, block + kCount, block + 2 * kCount, width});
  }
  Operand weight() {
    Operand o;
    o.parameter = &engine.parameter(index);
    o.weight = engine.view(index, weights.data(), std::nullopt, {});
    o.hyper = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
    return o;
  }
  Operand with_gradient() {
    Operand o = weight();
    o.gradient = engine.view(index, gradient.data(), std::nullopt, {});
    return o;
  }
  Operand with_staged() {
    Operand o = weight();
    o.staged = true;
    return o;
  }
  void stage(const StepPlan& plan, bool measures = false) { engine.stage(with_gradient(), plan, measures); }
  void commit(const Operand& o, const StepPlan& plan) { engine.commit({&o, 1}, plan); }
  bool untouched() const { return weights == std::vector<float>(kCount, 1.0f); }
};

}  // namespace

TEST(a_staged_gradient_counts_only_when_a_step_takes_it) {
  Run run;
  run.stage(kSelects);
  CHECK(run.engine.staged(run.index) && run.untouched());
  CHECK_EQ(run.engine.parameter(run.index).steps(), 0);
  run.commit(run.with_staged(), kSelects);
  CHECK(!run.engine.staged(run.index) && !run.untouched());
  CHECK_EQ(run.engine.parameter(run.index).steps(), 1);
}

TEST(a_step_for_which_nothing_fitting_was_staged_throws_and_changes_nothing) {
  Run run;
  CHECK_THROWS(std::logic_error, run.commit(run.with_staged(), kSelects));
  run.stage(kSelects);
  CHECK_THROWS(std::logic_error, run.commit(run.with_staged(), {.warm_up = true, .ends_window = true}));
  CHECK_THROWS(std::logic_error, run.commit(run.with_staged(), {.selects = true, .max_grad_norm = 1.0}));
  run.lend(2, 1);
  CHECK_THROWS(std::logic_error, run.commit(run.with_staged(), kSelects));
  CHECK(run.engine.staged(run.index) && run.untouched());
  run.lend(1, 0);
  run.commit(run.with_staged(), kSelects);
  CHECK_EQ(run.engine.parameter(run.index).steps(), 1);
}

TEST(a_step_without_the_staged_gradient_drops_it) {
  for (bool ordinary : {false, true}) {
    Run run;
    run.stage(kSelects);
    run.commit(ordinary ? run.with_gradient() : run.weight(), kSelects);
    CHECK(!run.engine.staged(run.index));
    CHECK_EQ(run.engine.parameter(run.index).steps(), ordinary ? 1 : 0);
  }
}

TEST(what_is_not_staged_does_not_come_back) {
  Run run;
  std::vector<float> back(kCount);
  CHECK_THROWS(std::logic_error, run.engine.unstage(run.index, back.data()));
  run.stage(kSelects);
  run.engine.unstage(run.index, back.data());
  CHECK(back == run.gradient);
  CHECK_THROWS(std::logic_error, run.engine.unstage(run.index, back.data()));
  run.stage(kSelects);
  run.engine.discard_staged(run.index);
  CHECK_THROWS(std::logic_error, run.engine.unstage(run.index, back.data()));
}

TEST(only_gradients_of_split_parameters_are_staged) {
  Run whole({.update_interval = 1}, false);
  CHECK_THROWS(std::invalid_argument, whole.stage(kSelects));
  Run run;
  CHECK_THROWS(std::invalid_argument, run.engine.stage(run.weight(), kSelects, false));
  run.engine.discard(run.index);
  CHECK_THROWS(std::out_of_range, run.engine.staged(run.index));
}

TEST(a_staged_gradient_is_finite_if_its_norms_are) {
  Run run;
  run.stage(kSelects);
  CHECK_THROWS(std::logic_error, run.engine.staged_finite(run.index));
  run.stage(kSelects, true);
  CHECK(run.engine.staged_finite(run.index));
  run.gradient[3] = std::numeric_limits<float>::infinity();
  run.stage(kSelects, true);
  CHECK(!run.engine.staged_finite(run.index));
}

TEST(what_is_published_early_is_not_published_again) {
  Run run({.update_interval = 1, .update_delay = 1});
  run.commit(run.with_gradient(), {.selects = true, .ends_window = true});
  run.stage(kEnds);
  const float before = run.weights[1];
  CHECK(run.engine.publish_early(run.weight()));
  CHECK(run.weights[1] != before);
  CHECK(!run.engine.publish_early(run.weight()));
  const std::vector<float> published = run.weights;
  run.commit(run.with_staged(), kEnds);
  for (int64_t i = 0; i < kCount; ++i) {
    if (i % kColumns != 0) CHECK_EQ(run.weights[static_cast<size_t>(i)], published[static_cast<size_t>(i)]);
  }
}

TEST(staging_again_in_a_steady_step_allocates_nothing) {
  Run run({.update_interval = 4});
  run.commit(run.with_gradient(), kSelects);
  run.stage(kSteady);
  const int64_t held = run.engine.host_bytes();
  for (int step = 0; step < 3; ++step) {
    run.stage(kSteady);
    run.commit(run.with_staged(), kSteady);
    CHECK_EQ(run.engine.host_bytes(), held);
  }
}
