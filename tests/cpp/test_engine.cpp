// SPDX-License-Identifier: Apache-2.0
// The engine beside its own background thread: whatever the timing, the threads, the host buffer or a restart, the bits
// are the same. Thread checks watch the same runs for races.
#include "engine.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "check.h"
#include "cpu_device.h"
#include "training.h"

using namespace zenflow;
using namespace zenflow_test;

namespace {

void check_variants(uint64_t seed, int events) {
  const Script script = random_script(seed, events);
  const std::vector<uint64_t> expected =
      Training(script, {.name = "ring, 1 thread, no overlap", .patient = true}).run();
  for (const Variant& variant :
       {Variant{.name = "ring, 3 threads", .threads = 3},
        Variant{.name = "stream, 1 thread, flushing denormals", .stream = true, .flushes_denormals = true},
        Variant{.name = "stream, 3 threads", .threads = 3, .stream = true},
        Variant{.name = "restarts, 2 threads", .threads = 2, .restarts = true},
        Variant{.name = "staged gradients", .threads = 2, .restarts = true, .stages = true}}) {
    const std::vector<uint64_t> found = Training(script, variant).run();
    CHECK_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      if (found[i] == expected[i]) continue;
      fail(__FILE__, __LINE__,
           "seed " + std::to_string(seed) + ", " + variant.name + ": comparison " + std::to_string(i) + " of " +
               std::to_string(found.size()) + " differs from one thread with a ring and no overlap");
    }
  }
}

constexpr Hyper kHyper{.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
constexpr int64_t kRows = 1000, kColumns = 500, kCount = kRows * kColumns;

// A large parameter whose first window has just ended: the host is at work on it.
struct InFlight {
  std::vector<float> weights = std::vector<float>(kCount, 1.0f), gradient = std::vector<float>(kCount, 0.5f);
  std::vector<float> block = std::vector<float>(3 * kRows);
  Engine engine;
  int64_t index = engine.add({kRows, kColumns}, DType::kFloat32, true);

  explicit InFlight(const Settings& settings = {.update_interval = 1}) : engine(settings, 1, {}, 1) {
    engine.parameter(index).lend({block.data(), block.data() + kRows, block.data() + 2 * kRows, 1});
    const Operand o = with_gradient();
    engine.commit({&o, 1}, {.selects = true, .ends_window = settings.update_interval == 1});
  }
  Operand with_gradient() {
    Operand o = weight();
    o.gradient = engine.view(index, gradient.data(), std::nullopt, {});
    o.hyper = kHyper;
    return o;
  }
  Operand weight() {
    Operand o;
    o.parameter = &engine.parameter(index);
    o.weight = engine.view(index, weights.data(), std::nullopt, {});
    return o;
  }
};

// Its copies do not arrive while `loses` says so.
class Losing : public CpuDevice {
 public:
  Losing(const Context& context, const bool& loses) : CpuDevice(context), loses_(loses) {}
  std::function<void()> arrival() override {
    return loses_ ? [] { throw std::runtime_error("lost"); } : std::function<void()>();
  }

 private:
  const bool& loses_;
};

}  // namespace

TEST(threads_buffers_restarts_and_timing_do_not_change_a_bit) {
#ifdef __SANITIZE_THREAD__
  constexpr uint64_t kSeeds = 6;  // each costs twenty times as much
#else
  constexpr uint64_t kSeeds = 24;
#endif
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) check_variants(seed, 40);
}

TEST(an_edit_wins_over_the_job_in_flight_whatever_is_called_next) {
  using Method = void (Engine::*)(std::span<const Operand>);
  for (Method method : {&Engine::flush, &Engine::synchronize, &Engine::adopt_edits, &Engine::show_settled,
                        &Engine::show_training, Method{nullptr}}) {
    InFlight run;
    std::fill(run.weights.end() - kColumns, run.weights.end(), 7.0f);  // the last row: the host reaches it last
    Operand o = run.weight();
    o.suspect = true;
    if (method != nullptr) {
      (run.engine.*method)({&o, 1});
    } else {
      run.engine.commit({&o, 1}, {.ends_window = true});
    }
    run.engine.synchronize({&o, 1});
    for (int64_t i = kCount - kColumns; i < kCount; ++i) CHECK_EQ(run.weights[static_cast<size_t>(i)], 7.0f);
    CHECK(run.weights[1] < 1.0f);
  }
}

// The small parameter's gradient waits behind the large one's, while further steps come to use its lane again.
TEST(a_streaming_lane_is_written_again_only_when_the_host_has_read_it) {
  constexpr int64_t kSide = 8, kSmall = kSide * kSide;
  for (int i = 0; i < 5; ++i) {
    InFlight run({.stream = true, .update_interval = 100});
    std::vector<float> weights(kSmall), block(3 * kSide), gradient(kSmall);
    Operand o;
    const int64_t index = run.engine.add({kSide, kSide}, DType::kFloat32, true);
    o.parameter = &run.engine.parameter(index);
    o.parameter->lend({&block[0], &block[kSide], &block[2 * kSide], 1});
    o.weight = run.engine.view(index, weights.data(), std::nullopt, {});
    o.gradient = run.engine.view(index, gradient.data(), std::nullopt, {});
    o.hyper = kHyper;
    float m = 0, v = 0;
    for (int step = 0; step < 5; ++step) {
      std::fill(gradient.begin(), gradient.end(), static_cast<float>(step + 1));
      fold_gradient(make_fold(kHyper, 1.0), gradient[0], m, v);
      const Operand both[] = {run.with_gradient(), o};
      run.engine.commit(std::span(both).subspan(step == 0 ? 0 : 1), {});
    }
    std::vector<float> exp_avg(kSmall), exp_avg_sq(kSmall), master(kSmall), written(kSmall);
    bool selected[kSide];
    run.engine.export_state(index, {exp_avg.data(), exp_avg_sq.data(), master.data(), written.data(), written.data(),
                                    selected, nullptr, nullptr});
    CHECK(exp_avg == std::vector<float>(kSmall, m));
    CHECK(exp_avg_sq == std::vector<float>(kSmall, v));
  }
}

TEST(an_engine_that_ends_lets_its_host_finish_first) {
  for (int i = 0; i < 10; ++i) {
    InFlight run;
  }
}

TEST(a_parameter_is_discarded_only_when_the_host_has_done_its_jobs) {
  for (int i = 0; i < 10; ++i) {
    InFlight run;
    run.engine.discard(run.index);
    CHECK_EQ(run.engine.host_bytes(), 0);
  }
}

TEST(an_imported_state_is_not_overwritten_by_a_job_of_the_state_before_it) {
  for (int i = 0; i < 10; ++i) {
    InFlight run;
    std::vector<float> exp_avg(kCount, 1.0f), exp_avg_sq(kCount, 2.0f), master(kCount, 3.0f), written(kCount, 4.0f);
    bool selected[kColumns] = {};
    const FullState state{exp_avg.data(), exp_avg_sq.data(), master.data(), written.data(),
                          written.data(), selected,          nullptr,       nullptr};
    run.block.assign(1, 0.0f);
    run.engine.parameter(run.index).lend({run.block.data(), run.block.data(), run.block.data(), 0});
    run.engine.import_state(run.index, state, {1, true, false, {}});
    std::vector<float> exported(kCount);
    const FullState out{exported.data(), exp_avg_sq.data(), master.data(), written.data(),
                        written.data(),  selected,          nullptr,       nullptr};
    run.engine.export_state(run.index, out);
    CHECK(exported == exp_avg);
    CHECK(master == std::vector<float>(kCount, 3.0f));
  }
}

TEST(an_error_of_the_background_thread_surfaces_in_every_later_call_and_no_weight_changes) {
  bool loses = false;
  InFlight run;
  run.engine.add_device(std::make_unique<Losing>(run.engine.context(), loses));
  loses = true;
  const Operand o = run.with_gradient(), weight = run.weight();
  run.engine.commit({&o, 1}, {.ends_window = true});
  const std::vector<float> before = run.weights;
  std::vector<float> exported(kCount);
  bool selected[kColumns];
  const FullState full{exported.data(), exported.data(), exported.data(), exported.data(),
                       exported.data(), selected,        nullptr,         nullptr};
  for (int i = 0; i < 2; ++i) {
    for (const std::function<void()>& call : std::initializer_list<std::function<void()>>{
             [&] { run.engine.synchronize({&weight, 1}); },  // waits until it has failed
             [&] { run.engine.commit({&o, 1}, {.ends_window = true}); },
             [&] { run.engine.flush({&weight, 1}); },
             [&] { run.engine.show_settled({&weight, 1}); },
             [&] { run.engine.adopt_edits({&weight, 1}); },
             [&] { run.engine.export_state(run.index, full); },
         }) {
      std::string message;
      try {
        call();
      } catch (const std::runtime_error& error) {
        message = error.what();
      }
      CHECK_EQ(message, "lost");
      CHECK(run.weights == before);
    }
  }
}
