// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu_columns.h"
#include "floating_point_mode.h"
#include "isa.h"

namespace zenflow {

Counters Counters::operator-(const Counters& o) const {
  return {steps - o.steps,
          stall_seconds - o.stall_seconds,
          host_update_seconds - o.host_update_seconds,
          d2h_bytes - o.d2h_bytes,
          h2d_bytes - o.h2d_bytes,
          handover_bytes - o.handover_bytes,
          nonfinite_norms - o.nonfinite_norms};
}

Engine::Engine(const Settings& settings, int host_threads, std::vector<int> pin_cpus, int caller_threads)
    : settings_(settings),
      pool_(caller_threads),
      context_{active_kernels(), pool_, settings_},
      updater_(host_threads, std::move(pin_cpus)),
      lane_tickets_(static_cast<size_t>(1 + settings.update_delay), 0) {}

int64_t Engine::add(std::vector<int64_t> sizes, DType dtype, bool split, float* step_count) {
  const std::lock_guard lock(calls_.mutex());
  auto state = std::make_unique<Parameter>(context_, sizes, dtype, split, step_count);
  parameters_.push_back({std::move(sizes), std::move(state)});
  return static_cast<int64_t>(parameters_.size()) - 1;
}

TensorView Engine::view(int64_t index, void* data, std::optional<DType> dtype, std::span<const int64_t> strides) const {
  const Entry& entry = parameters_.at(static_cast<size_t>(index));
  return TensorView(data, dtype.value_or(entry.state->dtype()), entry.sizes, strides);
}

void Engine::commit(std::span<const Operand> operands, const StepPlan& plan) {
  const std::lock_guard lock(calls_.mutex());
  const FloatingPointMode mode;
  wait(0);  // an error of earlier work surfaces before anything changes
  const int64_t step = clock_.step + 1;

  prepare(operands, plan);
  if (plan.selects) {
    wait_for_host();  // the one exception to the visibility rule: a column must never have two owners
    publish(operands);
  }
  const double coefficient = choose_columns(operands, plan);
  try {
    apply_gradients(operands, coefficient);
    if (clock_.publish_at == step) {
      wait_for_host();
      publish(operands);
    }
    submit_host_work(operands, plan);
  } catch (const std::exception& error) {
    const std::string what = error.what();
    broken_ = std::make_exception_ptr(std::runtime_error("zenflow: an earlier step failed half-way (" + what +
                                                         "): load a checkpoint into a new optimizer"));
    throw;
  }

  clock_.step = step;
  clock_.window_step = plan.ends_window ? 0 : clock_.window_step + 1;
  if (plan.selects) clock_.last_selection = step;
  report_.total.steps = step;
  if (plan.ends_window) {
    const Counters now = report().total;
    report_.last_window = now - std::exchange(window_start_, now);
  }
}

bool Engine::selects(const Operand& o, const StepPlan& plan) {
  return o.gradient && of(o).split() && !plan.warm_up && (plan.selects || !of(o).has_selection());
}

void Engine::prepare(std::span<const Operand> operands, const StepPlan& plan) {
  if (std::any_of(operands.begin(), operands.end(), [](const Operand& o) { return o.suspect; })) wait_for_host();
  for (const Operand& o : operands) {
    const bool starts_split = !of(o).initialised() && selects(o, plan);  // by its selection, in choose_columns()
    if (!starts_split && (o.suspect || !of(o).initialised())) adopt(o);
  }
}

void Engine::adopt(const Operand& o) {
  of(o).initialised() ? of(o).adopt_edits(o.weight) : of(o).initialise(o.weight, nullptr);
}

// Hands columns over where a selection is due, and returns the clipping coefficient; both judge by the raw gradients.
double Engine::choose_columns(std::span<const Operand> operands, const StepPlan& plan) {
  double total = 0;
  int64_t kept = 0, selected_before = 0;
  for (const Operand& o : operands) {
    Parameter& p = of(o);
    if (!o.gradient) continue;
    if (plan.max_grad_norm > 0) total += squared_norm(o.gradient, context_.kernels, pool_, norms_);
    if (selects(o, plan)) {
      if (plan.max_grad_norm == 0) column_norms(o.gradient, context_.kernels, pool_, norms_);
      const std::vector<int32_t> selection = top_k(norms_, p.next_width());
      if (!p.initialised()) {
        p.initialise(o.weight, &selection);
      } else {
        p.adopt_edits(o.weight);
        const bool hands_over = p.has_selection();  // a first selection moves nothing from the device
        const int64_t width = p.selected_width(), stayed = p.select(o.weight, selection);
        if (hands_over) {
          selected_before += width;
          kept += stayed;
          report_.total.handover_bytes += 12 * p.shape().rows * (width - stayed + p.selected_width() - stayed);
        }
      }
    }
    if (p.split() && !p.has_lanes(o.gradient.dtype())) {
      wait_for_host();  // a job may still read the lanes that are replaced
      p.reserve_lanes(o.gradient.dtype());
    }
  }
  if (selected_before > 0) report_.selection_overlap = static_cast<double>(kept) / static_cast<double>(selected_before);
  if (plan.max_grad_norm == 0) return 1.0;

  const double norm = report_.gradient_norm = std::sqrt(total);
  if (std::isfinite(norm)) return std::min(1.0, plan.max_grad_norm / (norm + 1e-6));
  ++report_.total.nonfinite_norms;
  return 1.0;
}

void Engine::apply_gradients(std::span<const Operand> operands, double coefficient) {
  // Streaming: the job that read these lanes a round ago must be done with them.
  if (settings_.stream) wait(lane_tickets_[static_cast<size_t>(clock_.step % (1 + settings_.update_delay))]);
  for (const Operand& o : operands) {
    if (!o.gradient) continue;
    of(o).apply_gradient(o.weight, o.gradient, o.hyper, o.maximize ? -coefficient : coefficient);
    report_.total.d2h_bytes += of(o).deferred_count() * item_size(o.gradient.dtype());
  }
}

void Engine::submit_host_work(std::span<const Operand> operands, const StepPlan& plan) {
  std::vector<HostJob> jobs;
  for (const Operand& o : operands) {
    Parameter& p = of(o);
    if (plan.ends_window && p.window().count > 0) p.adopt_deferred_edits(o.weight);
    auto job = p.host_job(plan.ends_window, plan.warm_up ? 0.0 : settings_.lookahead);
    if (job) jobs.push_back(std::move(*job));
  }
  if (!jobs.empty()) {
    last_ticket_ = updater_.submit([jobs = std::move(jobs), &kernels = context_.kernels](ThreadPool& pool) {
      for (const HostJob& job : jobs) job.run(kernels, pool);
    });
    lane_tickets_[static_cast<size_t>(clock_.step % (1 + settings_.update_delay))] = last_ticket_;
  }
  if (!plan.ends_window) return;
  if (plan.warm_up || settings_.update_delay == 0) {
    wait_for_host();
    publish(operands);
  } else {
    clock_.publish_at = clock_.step + 1 + settings_.update_delay;
  }
}

void Engine::publish(std::span<const Operand> operands) {
  for (const Operand& o : operands) {
    Parameter& p = of(o);
    if (!p.in_flight()) continue;
    p.publish(o.weight);
    report_.total.h2d_bytes += p.deferred_count() * item_size(p.dtype());
  }
  clock_.publish_at = 0;
}

void Engine::wait(HostUpdater::Ticket ticket) {
  if (broken_) std::rethrow_exception(broken_);
  const auto start = std::chrono::steady_clock::now();
  updater_.wait(ticket);
  report_.total.stall_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Engine::synchronize(std::span<const Operand> operands) {
  const std::lock_guard lock(calls_.mutex());
  const FloatingPointMode mode;
  settle(operands);
}

void Engine::settle(std::span<const Operand> operands) {
  wait_for_host();
  for (const Operand& o : operands) {
    Parameter& p = of(o);
    adopt(o);
    if (p.in_flight()) report_.total.h2d_bytes += p.deferred_count() * item_size(p.dtype());
    p.write_settled(o.weight);
  }
  clock_.publish_at = 0;
}

void Engine::flush(std::span<const Operand> operands) {
  const std::lock_guard lock(calls_.mutex());
  const FloatingPointMode mode;
  wait_for_host();
  for (const Operand& o : operands) adopt(o);
  submit_host_work(operands, {.ends_window = true});
  clock_.window_step = 0;
  settle(operands);
}

void Engine::show_settled(std::span<const Operand> operands) {
  const std::lock_guard lock(calls_.mutex());
  wait_for_host();
  for (const Operand& o : operands) adopt(o), of(o).show_settled(o.weight);
}

void Engine::show_training(std::span<const Operand> operands) {
  const std::lock_guard lock(calls_.mutex());
  wait_for_host();
  for (const Operand& o : operands) adopt(o), of(o).show_training(o.weight);
}

void Engine::adopt_edits(std::span<const Operand> operands) {
  const std::lock_guard lock(calls_.mutex());
  wait_for_host();
  for (const Operand& o : operands) adopt(o);
}

void Engine::export_state(int64_t index, const FullState& full) {
  const std::lock_guard lock(calls_.mutex());
  const FloatingPointMode mode;
  wait_for_host();
  parameter(index).export_state(full);
}

void Engine::import_state(int64_t index, const FullState& full, const ImportedClock& clock) {
  const std::lock_guard lock(calls_.mutex());
  wait_for_host();
  parameter(index).import_state(full, clock);
}

void Engine::discard(int64_t index) {
  const std::lock_guard lock(calls_.mutex());
  wait_for_host();
  parameters_.at(static_cast<size_t>(index)).state.reset();
}

void Engine::set_clock(const Clock& clock) {
  const std::lock_guard lock(calls_.mutex());
  clock_ = clock;
}

Report Engine::report() const {
  Report report = report_;
  report.total.host_update_seconds = updater_.busy_seconds();
  return report;
}

int64_t Engine::host_bytes() const {
  int64_t bytes = 0;
  for (const Entry& entry : parameters_) bytes += entry.state ? entry.state->host_bytes() : 0;
  return bytes;
}

}  // namespace zenflow
