// SPDX-License-Identifier: Apache-2.0
//
// A training run as the engine's users make it: tensors of the caller, a schedule, gradients, and everything that may
// happen between steps. A Script says what happens, from a seed; a Training plays it under one Variant. What a variant
// changes (threads, host buffer, restarts, the caller's floating-point mode) must not change a bit.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "function_ref.h"
#include "random.h"

namespace zenflow_test {

enum class Act { kStep, kSynchronize, kFlush, kSettled, kExport, kRestart, kMove };

struct Event {
  Act act;
  uint64_t seed;
  int edited = -1;               // the parameter that the user changes first, if any
  bool tracked = true;           // and whether the optimizer is told
  std::vector<int> dtypes = {};  // steps: each parameter's gradient; -1: none
  bool transposed = false;       // steps: gradients are not contiguous
  bool hashed = false;           // compare weights afterwards
};

struct Script {
  zenflow::Settings settings;
  int64_t select_interval = 4, warm_up = 0;
  double vote_share = 1;  // that ends an automatic window
  double max_grad_norm = 0;
  bool hashes_steps = false;  // compares state right after steps; then every edit is tracked
  std::vector<Event> events;
};

// Parameter 0 is large and 1 is small, the others are in between; all are seen by the script as indices only.
constexpr int kParameters = 6;
Script random_script(uint64_t seed, int events);

struct Variant {
  std::string name;
  int threads = 1;
  bool stream = false;
  bool restarts = false;  // plays kRestart and kMove
  bool flushes_denormals = false;
  bool stages = false;   // gradients leave before the step, most of them, and finished windows come back before it
  bool patient = false;  // lets the host finish after each event, so that no wait is ever needed
};

class Training {
 public:
  Training(const Script& script, const Variant& variant);
  // Plays everything, checks the moments against plain AdamW's where it can, and returns a digest after each hashed
  // event, then one of all state. NaNs count as equal.
  std::vector<uint64_t> run();
  virtual ~Training() = default;

 protected:
  // A parameter as its user sees it.
  struct Tensor {
    std::vector<int64_t> sizes, strides;
    zenflow::DType dtype;
    bool split, maximize;
    double topk_ratio;
    float gradient_scale;
    std::vector<char> weights;
    // What the optimizer keeps for it.
    int64_t index = -1;
    bool suspect = false;
    int64_t width = -1;
    std::list<std::vector<float>> blocks;
    // What AdamW without a schedule would have for moments.
    std::vector<float> exp_avg, exp_avg_sq;

    int64_t count() const { return zenflow::matrix_of(sizes).count(); }
    int64_t columns() const { return zenflow::matrix_of(sizes).columns; }
  };
  // What a new engine needs, the device that a parameter lives on, and a call with operands in their devices' memory.
  virtual void prepare(zenflow::Engine&) {}
  virtual size_t device_of(size_t /*parameter*/) const { return 0; }
  virtual void call(std::vector<zenflow::Operand>& operands,
                    zenflow::FunctionRef<void(std::span<const zenflow::Operand>)> engine_call) {
    engine_call(operands);
  }

  std::unique_ptr<zenflow::Engine> engine_;
  std::vector<Tensor> tensors_;

 private:
  struct Exported;

  std::unique_ptr<zenflow::Engine> make_engine();
  void make_tensors();
  void play(const Event& event);
  void edit(int parameter, uint64_t seed, bool tracked);
  void step(const Event& event);
  void stage(std::vector<zenflow::Operand>& operands, const zenflow::StepPlan& plan, Random random);
  void expect_moments(Tensor& t, const zenflow::Hyper& hyper, zenflow::DType dtype, const std::vector<char>& gradient,
                      bool transposed) const;
  bool knows_moments() const { return variant_.patient && !script_.settings.mean && script_.max_grad_norm == 0; }
  void restart();
  void move(Tensor& t);
  void lend(Tensor& t, int64_t width);
  int64_t add(const Tensor& t);
  void import(Tensor& t, const Exported& state, bool in_flight);
  Exported export_state(const Tensor& t);  // within a call
  Exported export_alone(const Tensor& t);
  std::vector<zenflow::Operand> operands();
  void call_on_weights(void (zenflow::Engine::*method)(std::span<const zenflow::Operand>));
  zenflow::StepPlan plan() const;
  uint64_t weights_digest() const;
  uint64_t state_digest();
  uint64_t exported_digest();

  const Script& script_;
  Variant variant_;
  std::vector<uint64_t> digests_;
};

}  // namespace zenflow_test
