// SPDX-License-Identifier: Apache-2.0
// The order of things: what one step does to all parameters, and when the background update's results become visible.
//
// The caller decides what a step is (StepPlan) and brings addresses; the engine owns the parameters' state, the host
// threads and the clock, and commits a whole step in one call. Calls are serialised by a mutex; an error of the
// background thread is rethrown by every later call. Weights must stay valid during a call only.
// Memory runs out either before any gradient counts, and the same call can be repeated, with the same bits; or, rarely,
// after, and every later call throws. No fork happens during a call.
#pragma once

#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "cpu_device.h"
#include "device.h"
#include "fork.h"
#include "host_updater.h"
#include "parameter.h"

namespace zenflow {

struct Clock {
  int64_t step = 0;            // steps committed
  int64_t window_step = 0;     // of them, in the open window
  int64_t last_selection = 0;  // the step of the last selection; 0: none yet
  int64_t publish_at = 0;      // the step that publishes the window in flight; 0: none in flight
};

struct StepPlan {
  bool warm_up = false;
  bool selects = false;
  bool ends_window = false;
  double max_grad_norm = 0;  // 0: no clipping
};

struct Counters {
  int64_t steps = 0;
  double stall_seconds = 0;        // step() waited for the host
  double host_update_seconds = 0;  // the background thread worked, once its gradients were there
  int64_t d2h_bytes = 0;           // gradients packed for the host
  int64_t h2d_bytes = 0;           // deferred weights published
  int64_t handover_bytes = 0;      // state of columns that changed sides, both ways
  int64_t nonfinite_norms = 0;

  Counters operator-(const Counters& other) const;
};

// By the steady clock, in seconds.
struct TimeSpan {
  double begin = 0, end = 0;
};

struct Report {
  Counters total, last_window;
  TimeSpan host_update;                                             // the last one that closed a window and has ended
  double gradient_norm = std::numeric_limits<double>::quiet_NaN();  // of the last clipped step
  double selection_overlap = std::numeric_limits<double>::quiet_NaN();  // share of columns that the last selection kept
};

// Selected columns before a selection, and how many of them it keeps.
struct Overlap {
  int64_t before = 0, kept = 0;
};

// What host updates took.
class HostTimes {
 public:
  void begin();  // these two on the background thread
  void end(bool closes_window);
  double seconds() const;
  TimeSpan last() const;  // of those that closed a window

 private:
  mutable std::mutex mutex_;
  double begin_ = 0, seconds_ = 0;
  TimeSpan last_;
};

class Engine {
 public:
  // `host_threads` and `pin_cpus` drive the background update, `caller_threads` what step() does itself.
  Engine(const Settings& settings, int host_threads, std::vector<int> pin_cpus, int caller_threads);
  ~Engine();

  // Device 0 is the host; returns the new one's number.
  size_t add_device(std::unique_ptr<Device> device);
  // The caller's stream on that device in the calls to come.
  void use_stream(size_t device, uintptr_t stream);
  bool refuses_page_locks() const;  // of any device
  const Context& context() const { return context_; }
  // `step_count` and `seed` as for Parameter.
  int64_t add(std::vector<int64_t> sizes, DType dtype, bool split, float* step_count = nullptr, size_t device = 0,
              uint32_t seed = 0);
  Parameter& parameter(int64_t index);  // throws if it was discarded
  TensorView view(int64_t index, void* data, std::optional<DType> dtype, std::span<const int64_t> strides) const;

  // One step for all parameters that have state or a gradient.
  void commit(std::span<const Operand> operands, const StepPlan& plan);

  // Whether of the parameters that can vote on the end of an automatic window at least this share votes for it. The
  // last step's gradients count too; waits for their norms.
  bool votes_to_end_window(double share);
  Vote vote(int64_t index);
  // Another schedule, where no window is open and nothing in flight.
  void set_schedule(int64_t update_interval, int64_t update_delay, double lookahead);

  // In backward: takes a split parameter's gradient, which counts only once commit() finds it under the same plan; only
  // `warm_up` and `selects` matter. `measures`: that plan has a max_grad_norm, staged_finite() will be asked, or
  // parameters vote.
  void stage(const Operand& operand, const StepPlan& plan, bool measures);
  // Gives it back, bit for bit, into contiguous memory [rows, columns] of its dtype.
  void unstage(int64_t index, void* gradient);
  void discard_staged(int64_t index);
  bool staged(int64_t index) { return parameter(index).staged().present; }
  // Whether the norms that were measured are finite. If so, the gradient is.
  bool staged_finite(int64_t index);
  // For a parameter that this backward needs no more: what the coming step, which does not select, would publish.
  // Whether there was anything.
  bool publish_early(const Operand& operand);
  // At the end of that backward, with its stream: what the caller queues later sees what came early.
  void join_publications();

  void synchronize(std::span<const Operand> operands);
  void flush(std::span<const Operand> operands);
  void show_settled(std::span<const Operand> operands);
  void show_training(std::span<const Operand> operands);
  // Waits for the host, then takes over what the user changed; for state_dict().
  void adopt_edits(std::span<const Operand> operands);
  void export_state(int64_t index, const FullState& full);
  void import_state(int64_t index, const FullState& full, const ImportedClock& clock);

  // Frees the parameter's state; its index is not used again.
  void discard(int64_t index);

  Clock clock() const { return clock_; }
  void set_clock(const Clock& clock);
  Report report();  // waits for a GPU's last gradient norm
  int64_t host_bytes() const;

 private:
  struct Entry {
    std::vector<int64_t> sizes;
    std::unique_ptr<Parameter> state;
  };

  // Operands whose parameters live on one device.
  struct Share {
    Device* device;
    Operands operands;
  };
  template <class Wanted>
  std::vector<Share> shares(std::span<const Operand> operands, Wanted&& wanted) const;

  bool selects(const Operand& operand, const StepPlan& plan) const;
  bool counts_sides(const StepPlan& plan) const;
  void count_late_sides();
  void prepare(std::span<const Operand> operands, const StepPlan& plan);
  Coefficient choose_columns(std::span<const Operand> operands, const StepPlan& plan);
  void check_staged(const Operand& operand, const StepPlan& plan) const;
  Coefficient clip(std::span<const Operand> operands, std::span<const Share> measured, double max_grad_norm);
  void select_columns(const Share& measured, const StepPlan& plan, Overlap& overlap);
  void select_columns(const Operand& operand, const std::vector<int32_t>& selection, Overlap& overlap);
  void adopt_before_selection(const Operands& operands);
  void reserve_lanes(const Operand& operand);
  static void drop_staged(Parameter& parameter);
  void apply_gradients(std::span<const Operand> operands, const Coefficient& coefficient);
  void submit_host_work(std::span<const Operand> operands, const StepPlan& plan);
  void join() const;
  void publish(std::span<const Operand> operands);
  void publish_in_flight(std::span<const Operand> operands);
  void settle(std::span<const Operand> operands);
  void on_host(std::span<const Operand> operands, FunctionRef<void(Parameter&, const TensorView&)> work);
  void keep_norm(double norm);
  void keep_late_norms();
  Counters totals() const;
  void wait(HostUpdater::Ticket ticket);
  void wait_for_host() { wait(last_ticket_); }
  // Streaming: the job that last read the coming step's lanes.
  void wait_for_lanes() { wait(settings().stream ? lane_tickets_[lane_round()] : 0); }
  size_t lane_round() const { return static_cast<size_t>(clock_.step % (1 + settings().update_delay)); }
  const Settings& settings() const { return context_.settings; }

  CallMutex calls_;
  ThreadPool pool_;
  Context context_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<Entry> parameters_;
  HostTimes host_times_;
  HostUpdater updater_;  // after what its jobs write: its destructor finishes them
  Clock clock_;
  bool owes_sides_ = false;  // the last step's are not counted yet
  HostUpdater::Ticket last_ticket_ = 0;
  std::vector<HostUpdater::Ticket> lane_tickets_;  // streaming: the job that last read each step's lanes
  std::vector<ReceivedGradient> received_;
  Report report_;
  Counters window_start_;
  std::exception_ptr broken_;  // what later calls throw, since a step failed half-way
};

}  // namespace zenflow
