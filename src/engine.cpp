// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "floating_point_mode.h"
#include "isa.h"

namespace zenflow {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void HostTimes::begin() {
  const std::lock_guard lock(mutex_);
  begin_ = now();
}

void HostTimes::end(bool closes_window) {
  const std::lock_guard lock(mutex_);
  const TimeSpan span{begin_, now()};
  seconds_ += span.end - span.begin;
  if (closes_window) last_ = span;
}

double HostTimes::seconds() const {
  const std::lock_guard lock(mutex_);
  return seconds_;
}

TimeSpan HostTimes::last() const {
  const std::lock_guard lock(mutex_);
  return last_;
}

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
    : pool_(caller_threads),
      context_{active_kernels(), pool_, settings},
      updater_(host_threads, std::move(pin_cpus)),
      lane_tickets_(static_cast<size_t>(1 + settings.update_delay), 0) {
  devices_.push_back(std::make_unique<CpuDevice>(context_));
}

Engine::~Engine() {
  try {
    for (const auto& device : devices_) device->wait();  // for the lanes that no job was going to read
  } catch (const std::exception&) {
    // The device is lost, and nothing of it is in use any more.
  }
}

size_t Engine::add_device(std::unique_ptr<Device> device) {
  devices_.push_back(std::move(device));
  return devices_.size() - 1;
}

void Engine::use_stream(size_t device, uintptr_t stream) {
  devices_.at(device)->use_stream(stream);
}

bool Engine::refuses_page_locks() const {
  return std::any_of(devices_.begin(), devices_.end(), [](const auto& d) { return d->refuses_page_locks(); });
}

int64_t Engine::add(std::vector<int64_t> sizes, DType dtype, bool split, float* step_count, size_t device,
                    uint32_t seed) {
  const std::lock_guard lock(calls_.mutex());
  auto state = std::make_unique<Parameter>(context_, *devices_.at(device), sizes, dtype, split, step_count, seed);
  parameters_.push_back({std::move(sizes), std::move(state)});
  return static_cast<int64_t>(parameters_.size()) - 1;
}

Parameter& Engine::parameter(int64_t index) {
  const Entry& entry = parameters_.at(static_cast<size_t>(index));
  if (entry.state == nullptr) throw std::out_of_range("zenflow: this parameter's state was discarded");
  return *entry.state;
}

TensorView Engine::view(int64_t index, void* data, std::optional<DType> dtype, std::span<const int64_t> strides) const {
  const Entry& entry = parameters_.at(static_cast<size_t>(index));
  return TensorView(data, dtype.value_or(entry.state->dtype()), entry.sizes, strides);
}

void Engine::commit(std::span<const Operand> operands, const StepPlan& plan) {
  const std::lock_guard lock(calls_.mutex());
  const FloatingPointMode mode;
  wait(0);  // an error of earlier work surfaces before anything changes
  join();
  keep_late_norms();
  count_late_sides();
  const int64_t step = clock_.step + 1;

  for (const Operand& o : operands) o.staged ? check_staged(o, plan) : drop_staged(*o.parameter);
  prepare(operands, plan);
  if (plan.selects) {
    wait_for_host();  // the one exception to the visibility rule: a column must never have two owners
    publish(operands);
  }
  const Coefficient coefficient = choose_columns(operands, plan);
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

  owes_sides_ = counts_sides(plan);
  clock_.step = step;
  clock_.window_step = plan.ends_window ? 0 : clock_.window_step + 1;
  if (plan.selects) clock_.last_selection = step;
  ++report_.total.steps;
  if (plan.ends_window) {
    const Counters now = totals();
    report_.last_window = now - std::exchange(window_start_, now);
  }
}

template <class Wanted>
std::vector<Engine::Share> Engine::shares(std::span<const Operand> operands, Wanted&& wanted) const {
  std::vector<Share> shares;
  for (const Operand& o : operands) {
    if (!wanted(o)) continue;
    Device* const device = &o.parameter->device();
    const auto at = std::find_if(shares.begin(), shares.end(), [&](const Share& s) { return s.device == device; });
    (at != shares.end() ? *at : shares.emplace_back(Share{device, {}})).operands.push_back(&o);
  }
  return shares;
}

bool Engine::selects(const Operand& o, const StepPlan& plan) const {
  const Parameter& p = *o.parameter;
  return o.has_gradient() && p.split() && !plan.warm_up && (plan.selects || !p.has_selection());
}

// Those of the step that ends a window come too late to have a say.
bool Engine::counts_sides(const StepPlan& plan) const {
  return settings().automatic && !plan.warm_up && !plan.ends_window;
}

void Engine::count_late_sides() {
  if (!owes_sides_) return;
  for (const auto& device : devices_) {
    for (const auto& [parameter, sides] : device->late_sides()) parameter->count(sides);
  }
  owes_sides_ = false;
}

bool Engine::votes_to_end_window(double share) {
  const std::lock_guard lock(calls_.mutex());
  wait(0);
  count_late_sides();
  int64_t voters = 0, votes = 0;
  for (const Entry& entry : parameters_) {
    if (entry.state == nullptr || entry.state->vote().count == 0) continue;
    ++voters;
    votes += entry.state->vote().ends_window() ? 1 : 0;
  }
  return voters > 0 && static_cast<double>(votes) >= share * static_cast<double>(voters);
}

Vote Engine::vote(int64_t index) {
  const std::lock_guard lock(calls_.mutex());
  count_late_sides();
  return parameter(index).vote();
}

void Engine::set_schedule(int64_t update_interval, int64_t update_delay, double lookahead) {
  const std::lock_guard lock(calls_.mutex());
  if (clock_.window_step > 0 || clock_.publish_at > 0) {
    throw std::logic_error("zenflow: the schedule changes only between windows");
  }
  wait_for_host();
  std::vector<HostUpdater::Ticket> tickets(static_cast<size_t>(1 + update_delay), 0);
  keep_late_norms();
  for (const auto& device : devices_) {
    device->wait();
    device->reserve_steps(update_interval + update_delay);
  }
  context_.settings.update_interval = update_interval;
  context_.settings.update_delay = update_delay;
  context_.settings.lookahead = lookahead;
  lane_tickets_ = std::move(tickets);
}

// State for parameters that have none, and edits; what starts with its selection gets its state in choose_columns().
void Engine::prepare(std::span<const Operand> operands, const StepPlan& plan) {
  if (std::any_of(operands.begin(), operands.end(), [](const Operand& o) { return o.suspect; })) wait_for_host();
  for (const Operand& o : operands) {
    Parameter& p = *o.parameter;
    if (!p.initialised() && !selects(o, plan)) {
      p.device().on_host(p, o.weight, [&](const TensorView& weight) { p.initialise(weight, nullptr); });
    } else if (p.initialised() && o.suspect && !o.has_gradient()) {
      p.device().on_host(p, o.weight, [&](const TensorView& weight) { p.adopt_edits(weight); });
    }
  }
  const auto edited = [](const Operand& o) { return o.parameter->initialised() && o.suspect && o.has_gradient(); };
  for (const Share& s : shares(operands, edited)) s.device->adopt_deferred_edits(s.operands);
}

// Hands columns over where a selection is due, and returns the factor of all gradients; both judge by the raw ones.
Coefficient Engine::choose_columns(std::span<const Operand> operands, const StepPlan& plan) {
  const bool clips = plan.max_grad_norm > 0, counts = counts_sides(plan);
  const auto wanted = [&](const Operand& o) {
    return o.gradient && (clips || selects(o, plan) || (counts && o.parameter->split()));
  };
  const std::vector<Share> measured = shares(operands, wanted);
  for (const Share& s : measured) s.device->measure(s.operands);
  const Coefficient coefficient = clips ? clip(operands, measured, plan.max_grad_norm) : Coefficient();

  Overlap overlap;
  for (const Share& s : measured) select_columns(s, plan, overlap);
  const auto chosen = [](const Operand& o) { return o.staged && o.parameter->staged().selection; };
  for (const Share& s : shares(operands, chosen)) {
    adopt_before_selection(s.operands);
    for (const Operand* o : s.operands) select_columns(*o, *o->parameter->staged().selection, overlap);
  }
  if (overlap.before > 0) {
    report_.selection_overlap = static_cast<double>(overlap.kept) / static_cast<double>(overlap.before);
  }
  for (size_t d = 0; counts && d < devices_.size(); ++d) {
    Operands mine;
    for (const Operand& o : operands) {
      if (&o.parameter->device() == devices_[d].get() && (o.staged || wanted(o))) mine.push_back(&o);
    }
    devices_[d]->sum_sides(mine);  // of none, too: those of the step before are gone
  }
  for (const Operand& o : operands) {
    if (o.staged) o.parameter->take_staged_lanes();
    if (o.gradient && o.parameter->split()) reserve_lanes(o);
  }
  return coefficient;
}

void Engine::reserve_lanes(const Operand& o) {
  Parameter& p = *o.parameter;
  if (p.has_lanes(o.gradient.dtype())) return;
  wait_for_host();  // a job may still read the lanes that are replaced
  p.device().wait();
  p.reserve_lanes(o.gradient.dtype());
}

Coefficient Engine::clip(std::span<const Operand> operands, std::span<const Share> measured, double max_grad_norm) {
  const std::vector<Share> all = shares(operands, [](const Operand& o) { return o.has_gradient(); });
  if (all.size() == 1) {
    if (const auto coefficient = all[0].device->clip(all[0].operands, max_grad_norm)) return *coefficient;
  }
  std::vector<std::pair<const Operand*, double>> squared;  // to be added in the caller's order, whatever the device
  for (const Share& s : measured) {
    const std::vector<double> norms = s.device->squared_norms();
    for (size_t i = 0; i < norms.size(); ++i) squared.emplace_back(s.operands[i], norms[i]);
  }
  for (const Operand& o : operands) {
    if (o.staged) squared.emplace_back(&o, o.parameter->device().staged_norm(*o.parameter));
  }
  std::sort(squared.begin(), squared.end());
  double total = 0;
  for (const auto& [operand, norm] : squared) total += norm;
  const double norm = std::sqrt(total);
  keep_norm(norm);
  return {std::isfinite(norm) ? std::min(1.0, max_grad_norm / (norm + 1e-6)) : 1.0};
}

void Engine::keep_late_norms() {
  for (const auto& device : devices_) {
    if (const auto norm = device->late_norm()) keep_norm(*norm);
  }
}

void Engine::keep_norm(double norm) {
  report_.gradient_norm = norm;
  if (!std::isfinite(norm)) ++report_.total.nonfinite_norms;
}

void Engine::select_columns(const Share& measured, const StepPlan& plan, Overlap& overlap) {
  std::vector<size_t> which;
  std::vector<int64_t> widths;
  Operands selecting;
  for (size_t i = 0; i < measured.operands.size(); ++i) {
    const Operand& o = *measured.operands[i];
    if (!selects(o, plan)) continue;
    which.push_back(i);
    widths.push_back(o.parameter->next_width());
    selecting.push_back(&o);
  }
  if (which.empty()) return;

  const std::vector<std::vector<int32_t>> selections = measured.device->top_k(which, widths);
  adopt_before_selection(selecting);
  for (size_t i = 0; i < which.size(); ++i) select_columns(*selecting[i], selections[i], overlap);
}

void Engine::adopt_before_selection(const Operands& operands) {
  Operands with_state;
  for (const Operand* o : operands) {
    if (o->parameter->initialised()) with_state.push_back(o);
  }
  if (!with_state.empty()) with_state[0]->parameter->device().adopt_deferred_edits(with_state);
}

void Engine::select_columns(const Operand& o, const std::vector<int32_t>& selection, Overlap& overlap) {
  Parameter& p = *o.parameter;
  if (!p.initialised()) {
    p.device().on_host(p, o.weight, [&](const TensorView& weight) { p.initialise(weight, &selection); });
    return;
  }
  const bool hands_over = p.has_selection();  // a first selection moves nothing from the device
  const int64_t width = p.block().width, kept = p.select(o.weight, selection);
  if (!hands_over) return;
  overlap.before += width;
  overlap.kept += kept;
  report_.total.handover_bytes += 12 * p.shape().rows * (width - kept + p.block().width - kept);
}

void Engine::apply_gradients(std::span<const Operand> operands, const Coefficient& coefficient) {
  wait_for_lanes();
  for (const Share& s : shares(operands, [](const Operand& o) { return o.has_gradient(); })) {
    received_.clear();
    for (const Operand* o : s.operands) {
      const double scale = o->maximize ? -coefficient.value : coefficient.value;
      received_.push_back({o, o->parameter->receive(o->hyper, scale, coefficient.late)});
      report_.total.d2h_bytes += o->parameter->deferred_count() * item_size(o->gradient_dtype());
    }
    s.device->apply(received_);
  }
}

void Engine::submit_host_work(std::span<const Operand> operands, const StepPlan& plan) {
  if (plan.ends_window) {
    const auto collected = [](const Operand& o) { return o.parameter->window().count > 0; };
    for (const Share& s : shares(operands, collected)) s.device->adopt_deferred_edits(s.operands);
  }
  std::vector<std::pair<Parameter*, HostJob>> jobs;
  for (const Operand& o : operands) {
    auto job = o.parameter->host_job(plan.ends_window, plan.warm_up ? 0.0 : settings().lookahead);
    if (job) jobs.emplace_back(o.parameter, std::move(*job));
  }
  if (!jobs.empty()) {
    std::vector<std::function<void()>> arrivals;
    for (const auto& device : devices_) {
      if (auto arrival = device->arrival()) arrivals.push_back(std::move(arrival));
    }
    std::vector<HostUpdater::Work> works;
    works.push_back([arrivals = std::move(arrivals), &times = host_times_](ThreadPool&) {
      for (const auto& arrive : arrivals) arrive();
      times.begin();
    });
    // The last parameters first, as backward comes by: publish_early() need not wait for the others.
    for (auto job = jobs.rbegin(); job != jobs.rend(); ++job) {
      works.push_back(
          [job = std::move(job->second), &kernels = context_.kernels](ThreadPool& pool) { job.run(kernels, pool); });
    }
    works.push_back([&times = host_times_, closes = plan.ends_window](ThreadPool&) { times.end(closes); });
    // At once: an error of the first of them is one of a later call, not of this step.
    last_ticket_ = updater_.submit_all(std::move(works));
    for (size_t i = 0; i < jobs.size(); ++i) jobs[i].first->set_host_ticket(last_ticket_ - 1 - i);
    lane_tickets_[lane_round()] = last_ticket_;
  }
  if (!plan.ends_window) return;
  if (plan.warm_up || settings().update_delay == 0) {
    wait_for_host();
    publish(operands);
  } else {
    clock_.publish_at = clock_.step + 1 + settings().update_delay;
  }
}

void Engine::join() const {
  for (const auto& device : devices_) device->join();
}

void Engine::publish(std::span<const Operand> operands) {
  publish_in_flight(operands);
  clock_.publish_at = 0;
}

void Engine::publish_in_flight(std::span<const Operand> operands) {
  for (const Share& s : shares(operands, [](const Operand& o) { return o.parameter->in_flight(); })) {
    for (const Operand* o : s.operands) {
      report_.total.h2d_bytes += o->parameter->deferred_count() * item_size(o->parameter->dtype());
    }
    s.device->publish(s.operands);
  }
}

void Engine::wait(HostUpdater::Ticket ticket) {
  if (broken_) std::rethrow_exception(broken_);
  const double begin = now();
  updater_.wait(ticket);
  report_.total.stall_seconds += now() - begin;
}

// Waits for the host first: what work does needs it idle.
void Engine::on_host(std::span<const Operand> operands, FunctionRef<void(Parameter&, const TensorView&)> work) {
  wait_for_host();
  join();
  for (const Operand& o : operands) {
    Parameter& p = *o.parameter;
    p.device().on_host(p, o.weight, [&](const TensorView& weight) {
      p.initialised() ? p.adopt_edits(weight) : p.initialise(weight, nullptr);
      work(p, weight);
    });
  }
}

void Engine::synchronize(std::span<const Operand> operands) {
  const std::lock_guard lock(calls_.mutex());
  const FloatingPointMode mode;
  settle(operands);
}

void Engine::settle(std::span<const Operand> operands) {
  on_host(operands, [&](Parameter& p, const TensorView& weight) {
    if (p.in_flight()) report_.total.h2d_bytes += p.deferred_count() * item_size(p.dtype());
    p.write_settled(weight);
  });
  clock_.publish_at = 0;
}

void Engine::flush(std::span<const Operand> operands) {
  const std::lock_guard lock(calls_.mutex());
  const FloatingPointMode mode;
  on_host(operands, [](Parameter&, const TensorView&) {});
  count_late_sides();
  submit_host_work(operands, {.ends_window = true});
  clock_.window_step = 0;
  settle(operands);
}

void Engine::show_settled(std::span<const Operand> operands) {
  const std::lock_guard lock(calls_.mutex());
  on_host(operands, [](Parameter& p, const TensorView& weight) { p.show_settled(weight); });
}

void Engine::show_training(std::span<const Operand> operands) {
  const std::lock_guard lock(calls_.mutex());
  on_host(operands, [](Parameter& p, const TensorView& weight) { p.show_training(weight); });
}

void Engine::adopt_edits(std::span<const Operand> operands) {
  const std::lock_guard lock(calls_.mutex());
  on_host(operands, [](Parameter&, const TensorView&) {});
}

void Engine::export_state(int64_t index, const FullState& full) {
  const std::lock_guard lock(calls_.mutex());
  const FloatingPointMode mode;
  wait_for_host();
  Parameter& p = parameter(index);
  p.device().on_host(p, {}, [&](const TensorView&) { p.export_state(full); });
}

void Engine::import_state(int64_t index, const FullState& full, const ImportedClock& clock) {
  const std::lock_guard lock(calls_.mutex());
  wait_for_host();
  Parameter& p = parameter(index);
  p.device().on_host(p, {}, [&](const TensorView&) { p.import_state(full, clock); });
}

void Engine::discard(int64_t index) {
  const std::lock_guard lock(calls_.mutex());
  wait_for_host();
  count_late_sides();
  parameter(index).device().wait();
  parameters_.at(static_cast<size_t>(index)).state.reset();
}

void Engine::set_clock(const Clock& clock) {
  const std::lock_guard lock(calls_.mutex());
  clock_ = clock;
}

Counters Engine::totals() const {
  Counters totals = report_.total;
  totals.host_update_seconds = host_times_.seconds();
  return totals;
}

Report Engine::report() {
  const std::lock_guard lock(calls_.mutex());
  keep_late_norms();
  Report report = report_;
  report.total = totals();
  report.host_update = host_times_.last();
  return report;
}

int64_t Engine::host_bytes() const {
  int64_t bytes = 0;
  for (const Entry& entry : parameters_) bytes += entry.state ? entry.state->host_bytes() : 0;
  return bytes;
}

}  // namespace zenflow
