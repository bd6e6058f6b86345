// SPDX-License-Identifier: Apache-2.0
// What the engine asks of the memory in which weights, gradients and selected columns live: the host's own
// (cpu_device.h) or a GPU's (cuda/device.h).
//
// Every method does its work in order with the caller's: on a GPU it is queued behind what the caller's stream holds,
// what the caller queues later sees its results, and nothing waits for the GPU unless it says so [waits]. Calls come
// from one thread. Host arrays that the device still reads or writes are safe to touch after wait() or, in a host job,
// after the arrival it was submitted with.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "function_ref.h"
#include "host_memory.h"
#include "parameter.h"
#include "tensor_view.h"

namespace zenflow {

// A parameter's weight and, for step(), its gradient, if it has one, as the caller brought them.
struct Operand {
  Parameter* parameter = nullptr;
  TensorView weight;
  TensorView gradient;
  Hyper hyper;
  bool maximize = false;
  bool suspect = false;  // version or storage changed since the last write: look for edits
  bool staged = false;   // the gradient is the parameter's staged one, and `gradient` empty

  bool has_gradient() const { return staged || gradient; }
  DType gradient_dtype() const { return staged ? parameter->staged().dtype : gradient.dtype(); }
};

using Operands = std::vector<const Operand*>;

// A gradient that its parameter has received (Parameter::receive) and that is to be applied.
struct ReceivedGradient {
  const Operand* operand;
  GradientStep step;
};

// The factor of every gradient of a step. What a device computes is known to the host only later: `late`, page-locked
// memory that holds the factor once the step's arrival is in.
struct Coefficient {
  double value = 1.0;
  const float* late = nullptr;
};

class Device {
 public:
  virtual ~Device() = default;

  // The caller's stream from now on, as an integer; the host has none.
  virtual void use_stream(uintptr_t) {}

  // Runs `work` on the host with the weight and the parameter's selected columns in host memory, and brings both back
  // if `work` returns. An empty weight stays where it is. [waits]
  virtual void on_host(Parameter& parameter, const TensorView& weight, FunctionRef<void(const TensorView&)> work) = 0;

  // Squared norms of the gradients' columns, kept until the next call.
  virtual void measure(std::span<const Operand* const> operands) = 0;
  // Of what was measured: each gradient's squared norm, in order. [waits]
  virtual std::vector<double> squared_norms() = 0;
  // The clipping coefficient without a wait, where the device makes it itself. The operands are all of a step, in the
  // caller's order, each with a staged gradient or the next one that was measured.
  virtual std::optional<Coefficient> clip(std::span<const Operand* const>, double) { return std::nullopt; }
  // The global norm of the last clip(), if it was not yet asked for. [waits for that step]
  virtual std::optional<double> late_norm() { return std::nullopt; }
  // Of the measured gradient number `which[i]`, the `widths[i]` columns that come first. [waits]
  virtual std::vector<std::vector<int32_t>> top_k(std::span<const size_t> which, std::span<const int64_t> widths) = 0;

  // What each of a step's gradients holds for either side, kept for late_sides(), in place of what was kept before. The
  // operands each have a staged gradient or the next one that was measured; those without both sides are left out.
  virtual void sum_sides(std::span<const Operand* const> operands) = 0;
  virtual std::vector<std::pair<Parameter*, SideNorms>> late_sides() = 0;  // [waits for that step]

  // The squared norm of the one gradient that was measured last, which is about to be staged: at once, or kept here
  // until staged_norm() [waits].
  virtual std::optional<double> norm_to_stage(const Parameter&) { return squared_norms()[0]; }
  virtual double staged_norm(const Parameter& parameter) { return *parameter.staged().squared_norm; }
  // A gradient, of a parameter prepared for it, into its staged places; and from there back into a contiguous gradient
  // [waits].
  virtual void stage(const Operand& operand) = 0;
  // Of the one gradient that was measured last and is staged now, for sum_sides(). Its parameter will have both sides.
  virtual void sum_staged_sides(Parameter& parameter) = 0;
  virtual void unstage(Parameter& parameter, void* gradient) = 0;

  // Selected columns of AdamW in place; deferred ones packed and on their way into the step's lane, if not staged
  // there.
  virtual void apply(std::span<const ReceivedGradient> gradients) = 0;

  // Swaps the state of leaving columns with that of as many joining ones and writes the latters' settled masters.
  virtual void swap_columns(Parameter& parameter, const TensorView& weight, const ColumnSwap& swap) = 0;
  // The same for all deferred columns that a user changed since they were written.
  virtual void adopt_deferred_edits(std::span<const Operand* const> operands) = 0;
  // Edits excepted, writes `pending` into the deferred columns. The parameters' finished windows end there.
  virtual void publish(std::span<const Operand* const> operands) = 0;
  // The same for weights that the caller queues no use of before join().
  virtual void publish_ahead(std::span<const Operand* const> operands) { publish(operands); }
  // What the caller queues later sees what was published ahead.
  virtual void join() {}

  // What a host job that reads lanes, or writes what the device reads, has to call first; empty: nothing.
  virtual std::function<void()> arrival() { return {}; }
  // Everything queued by earlier calls. [waits]
  virtual void wait() {}

  // Nothing is under way: from now on the lanes of so many steps may wait for their jobs.
  virtual void reserve_steps(int64_t) {}

  // For the host arrays that the device reads or writes.
  virtual PageLocker* page_locker() { return nullptr; }
  virtual bool refuses_page_locks() const { return false; }  // some arrays stay pageable: slower, with the same results
  // The parameter's columns have new places; the weight holds what was last written.
  virtual void columns_moved(Parameter&, const TensorView&) {}
  // The parameter is about to go.
  virtual void forget(const Parameter&) {}
};

}  // namespace zenflow
