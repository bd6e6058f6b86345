// SPDX-License-Identifier: Apache-2.0
// One parameter's optimizer state: its selected columns on the device side, its deferred columns and their gradients on
// the host side.
//
// Layout. The device block holds the selected columns as [rows, width] fp32 arrays in memory lent by the caller; the
// host arrays hold the deferred columns as [rows, slots]. A column has exactly one owner. A parameter that is not split
// has every column in the block and no host arrays; one that is split but has no selection yet (warm-up) has every
// column on the host.
//
// Order. All methods are called by one thread. Those marked [idle] need every host job of this parameter finished; the
// others may run beside a job, which touches only its own lanes, the moments, and, if it closes a window, master and
// pending.
//
// The rules are those of docs/design.md, the formulas those of docs/arithmetic.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "host_job.h"
#include "host_memory.h"
#include "kernels.h"
#include "slot_order.h"
#include "tensor_view.h"
#include "thread_pool.h"

namespace zenflow {

class Device;

struct Settings {
  bool mean = false;            // deferred_rule
  bool stream = false;          // host_buffer
  int64_t update_interval = 4;  // of an automatic one, the longest
  int64_t update_delay = 1;
  double lookahead = 1;
  bool automatic = false;           // parameters vote on when a window ends
  DType moments = DType::kFloat32;  // of deferred columns, on the host; or bfloat16
};

// What the methods work with; outlives the parameters.
struct Context {
  const Kernels& kernels;
  ThreadPool& pool;
  Settings settings;
};

// fp32 state of a set of columns, [rows, width] each. Does not own the memory.
struct ColumnState {
  float* master = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  int64_t width = 0;
};

// What the open window has gathered: the settings of its last gradient and the sums over all of them.
struct Window {
  int64_t count = 0;
  double lr_sum = 0;
  double keep = 1;
  Hyper last;

  void add(const Hyper& h);
};

// Squared norms of what a gradient holds for its selected and for its deferred columns.
struct SideNorms {
  double selected = 0, deferred = 0;
};

// On the end of the open window: what its gradients' root mean squares add up to, of either side. Empty if the
// parameter had no gradient, or has one side only.
struct Vote {
  double selected = 0, deferred = 0;
  int64_t count = 0;

  // The deferred columns have collected as much as the selected ones get in one step.
  bool ends_window() const { return count > 0 && deferred >= selected / static_cast<double>(count); }
};

// Contiguous full-shaped tensors [rows, columns] of the canonical state dict; window_sum and column_steps for "mean"
// only.
struct FullState {
  float* exp_avg;
  float* exp_avg_sq;
  float* master;
  void* last_written;
  void* pending_output;
  bool* selected;  // [columns]
  float* window_sum;
  int32_t* column_steps;  // [columns]
};

// The counters that go with an imported FullState.
struct ImportedClock {
  int64_t steps = 0;
  bool has_selection = false;
  bool in_flight = false;
  Window window;
  Vote vote = {};
};

// The host side of one parameter, [rows, slots] each.
struct HostArrays {
  HostArray master;                 // fp32
  HostArray exp_avg, exp_avg_sq;    // of Settings::moments
  HostArray last_written, pending;  // parameter's dtype: what it holds, and what the window in flight will write
  HostArray sum;                    // fp32, "mean" while streaming or resumed within a window
};

// How one gradient is applied: the move of the selected columns, and where the deferred ones are collected.
struct GradientStep {
  Fold fold;
  AdamStep move;
  ColumnCorrections corrections;  // of the selected columns; empty: `move` holds for all
  char* lane = nullptr;           // [rows, slots] of lane_dtype; nullptr: nothing is deferred
  const float* late = nullptr;    // as in Coefficient
};

// Columns that change sides, in pairs: leaving[i] gives its position in the block to joining[i] and takes its slot.
struct ColumnSwap {
  std::vector<int32_t> leaving, joining, positions, slots;
  int64_t count() const { return static_cast<int64_t>(leaving.size()); }
};

// A gradient of a backward pass that counts only once a step takes it: the deferred columns in the next lane, the
// selected ones beside it.
struct StagedGradient {
  bool present = false;
  DType dtype = DType::kFloat32;
  bool measured = false;  // its squared norm is known, here or to the device
  std::optional<double> squared_norm;
  SideNorms sides;                                // here or on the device likewise, where parameters vote
  std::optional<std::vector<int32_t>> selection;  // that the coming step makes, ascending
  bool moves_columns = false;                     // the coming step does: to these places
  std::vector<int32_t> block_columns;
  SlotOrder order;
  HostArray lanes;  // where the coming step needs other ones than there are, `lane_count` of them
  int64_t lane_count = 0;
  std::vector<char> selected;  // [rows, width] of dtype; empty while the device has them
};

// Where a staged gradient lies, by the columns of the block's positions and of the slots.
struct StagedPlaces {
  const std::vector<int32_t>& block_columns;
  const SlotOrder& order;
  char* selected;
  char* lane;  // [rows, slots] of lane_dtype
  DType lane_dtype;
};

class Parameter {
 public:
  // `device` holds weight, gradients and block. `step_count`, if not null, always holds steps(). Both outlive the
  // parameter. `seed`: for moments that are rounded at random.
  Parameter(const Context& context, Device& device, std::span<const int64_t> sizes, DType dtype, bool split,
            float* step_count, uint32_t seed);
  ~Parameter();
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  Device& device() const { return device_; }
  const Matrix& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  bool split() const { return split_; }
  bool initialised() const { return initialised_; }
  bool has_selection() const { return has_selection_; }
  bool in_flight() const { return in_flight_; }
  // The background job that works on the host arrays, or did last.
  uint64_t host_ticket() const { return host_ticket_; }
  void set_host_ticket(uint64_t ticket) { host_ticket_ = ticket; }
  int64_t steps() const { return steps_; }
  int64_t slots() const { return order_.slots(); }
  int64_t deferred_count() const { return shape_.rows * slots(); }
  bool has_both_sides() const { return deferred_count() > 0 && block_.width > 0; }
  const Window& window() const { return window_; }
  const Vote& vote() const { return vote_; }
  std::vector<int32_t> selection() const;  // ascending

  // For the device.
  ColumnState& block() { return block_; }
  std::optional<ColumnState>& lent_block() { return lent_; }
  const std::vector<int32_t>& block_columns() const { return block_columns_; }  // of each position; empty: not split
  const std::vector<int32_t>& slot_columns() const { return order_.columns(); }
  const HostArrays& arrays() const { return arrays_; }
  DType lane_dtype() const { return lane_dtype_; }
  // Whether edits are found by comparing with what was last written, and nothing else needs a look.
  bool shows_last_written() const { return !shows_settled_ && !imported_; }
  // Swaps row r of a block whose positions are swap.positions, or 0, 1, ... if `compact`: `left` holds the leaving
  // columns' live weights, `joined` gets the joining ones' settled masters.
  void swap_row(const ColumnSwap& swap, const ColumnState& block, bool compact, int64_t r, const void* left,
                void* joined);

  // Memory for the selected columns, taken over by the next initialise (not split), select or import. Its width is how
  // many columns the next selection takes; without a new block that stays as it is.
  void lend(const ColumnState& block) { lent_ = block; }
  int64_t next_width() const { return lent_ ? lent_->width : block_.width; }

  // Masters from the weight, moments zero; split by the selection, or for warm-up (null) with every column on the host.
  void initialise(const TensorView& weight, const std::vector<int32_t>* selection);
  // Whether the next gradient of this dtype has a lane; if not, reserve_lanes makes them. [idle]
  bool has_lanes(DType gradient) const;
  void reserve_lanes(DType gradient);

  // By value: where the weight's bits differ from those last written, the live value becomes the master. [idle]
  void adopt_edits(const TensorView& weight);
  // The same for deferred columns only, beside jobs that do not close a window.
  void adopt_deferred_edits(const TensorView& weight);

  // Hands columns over to a new selection; newly selected weights become their settled masters. Returns how many
  // columns stayed selected. Needs an empty window and deferred edits adopted. [idle]
  int64_t select(const TensorView& weight, const std::vector<int32_t>& selection);

  // Counts one gradient, whose deferred columns will be in the next lane. It is scaled by `scale`, and by `late` once
  // that is known.
  GradientStep receive(const Hyper& hyper, double scale, const float* late);
  // AdamW on the selected columns; the deferred ones packed into the lane.
  void apply(const TensorView& weight, const TensorView& gradient, const GradientStep& step);

  // A split parameter's gradient during backward, in place of the one staged before. prepare_staging makes room in the
  // places that the coming step will read; `selection`: what that step will select, if it does. Where keeps_lanes() it
  // needs has_lanes(). The device then moves the columns there, or back into a contiguous gradient.
  void prepare_staging(DType gradient, std::optional<std::vector<int32_t>> selection, bool measured,
                       std::optional<double> squared_norm);
  StagedPlaces staged_places();
  void staged_sides(const SideNorms& sides) { staged_.sides = sides; }
  void staged_on_device() { staged_.present = true; }
  const StagedGradient& staged() const { return staged_; }
  void stage(const TensorView& gradient);
  void unstage(void* gradient);
  void discard_staged();
  // Whether the coming step, which may select, uses the lanes that there are.
  bool keeps_lanes(bool selects) const { return initialised_ && (!selects || hands_over()); }
  // In the step that takes it: lanes after the selection and before receive(), then the selected columns.
  void take_staged_lanes();
  void apply_staged(const TensorView& weight, const GradientStep& step);

  // Of a gradient of the open window.
  void count(const SideNorms& sides);

  // The host work that is due after this step's gradient: of the whole window if it closes, of one lane if streaming.
  std::optional<HostJob> host_job(bool closes_window, double lookahead);

  // Writes the finished window's result into the deferred columns, edits excepted. [idle]
  void publish(const TensorView& weight);
  void published();  // ... by the device
  // Shows settled masters in the deferred columns, for good (`last_written` follows) or until show_training. [idle]
  void write_settled(const TensorView& weight);
  void show_settled(const TensorView& weight);
  void show_training(const TensorView& weight);

  // Copies out, every received gradient folded in; or takes over all of it. [idle]
  void export_state(const FullState& full) const;
  void import_state(const FullState& full, const ImportedClock& clock);

  int64_t host_bytes() const;

 private:
  struct OpenLane {
    int64_t index;
    Fold fold;
    const float* late;
  };

  float* host_master(int64_t r) const { return static_cast<float*>(arrays_.master.data()) + r * slots(); }
  // One row of the host's moments, to and from fp32, each of `count` elements; rounded to nearest.
  void load_moments(const HostArray& array, int64_t r, int64_t count, float* row) const;
  void store_moments(const HostArray& array, int64_t r, const float* row) const;
  const int32_t* block_index() const { return split_ ? block_columns_.data() : nullptr; }
  PageLocker* locker() const;
  HostArray make_array(int64_t elements, int64_t element_bytes, PageLocker* locker) const;
  char* host_row(const HostArray& array, int64_t r) const {
    return static_cast<char*>(array.data()) + r * slots() * item_size(dtype_);
  }
  char* lane(int64_t index) const;

  ColumnState take_lent_block() { return std::exchange(lent_, std::nullopt).value_or(ColumnState()); }
  void set_steps(int64_t steps);
  // The live weights of one row's selected columns: in place, or gathered into `staging` of so many bytes.
  const void* live_selected(const TensorView& weight, int64_t r, void* staging) const;
  int64_t live_staging_bytes(const TensorView& weight) const;
  int64_t wanted_lanes(bool has_selection) const;
  // Whether the next selection swaps columns; else it lays both sides out anew.
  bool hands_over() const { return has_selection_ && !lent_; }
  ColumnSwap swap_for(const std::vector<int32_t>& selection) const;
  static void swap_places(const ColumnSwap& swap, std::vector<int32_t>& block_columns, SlotOrder& order);
  void foresee_layout(StagedGradient& staged) const;
  char* staged_selected();  // host memory for the selected columns
  std::vector<int32_t> columns_without(const std::vector<int32_t>& selection) const;
  HostArrays make_host_arrays(int64_t slots) const;
  void repartition(const TensorView& weight, const std::vector<int32_t>& selection);
  void hand_over(const TensorView& weight, const std::vector<int32_t>& selection);
  void fold_open_lanes(int64_t r, float* exp_avg, float* exp_avg_sq, float* sum) const;
  void adopt_selected_edits(const TensorView& weight);
  void adopt_deferred_row(const TensorView& weight, int64_t r);
  std::vector<LateLane> late_lanes() const;
  template <class Work>
  void with_update(const GradientStep& step, Work&& work) const;
  void update_selected(const TensorView& weight, const void* gradients, DType gradient, int64_t r,
                       const Update& all) const;
  void update_flat(const TensorView& weight, const TensorView& gradient, const Update& all) const;
  void pack(const void* row, DType gradient, int64_t r, const SlotOrder& order, DType lane_dtype, char* lane) const;
  // One row's deferred elements, between the weight and a packed row with room for kOverrun more.
  void gather_deferred(const TensorView& weight, int64_t r, void* packed) const;
  void scatter_deferred(const TensorView& weight, int64_t r, const void* packed) const;
  ColumnCorrections column_corrections(const std::vector<int32_t>& columns, const Hyper& h, double lookahead) const;

  const Context& context_;
  Device& device_;
  Matrix shape_;
  DType dtype_;
  bool split_;
  uint64_t host_ticket_ = 0;
  bool initialised_ = false, has_selection_ = false, in_flight_ = false, shows_settled_ = false;
  bool imported_ = false;  // until edits are looked for the first time

  ColumnState block_;
  std::optional<ColumnState> lent_;
  std::vector<int32_t> block_columns_;  // column of each position in the block; empty if not split
  SlotOrder order_;                     // of the deferred columns
  HostArrays arrays_;
  HostArray lanes_;  // [lane_count, rows, slots] of lane_dtype
  DType lane_dtype_ = DType::kFloat32;
  int64_t lane_count_ = 0, next_lane_ = 0;
  std::vector<OpenLane> open_lanes_;
  StagedGradient staged_;

  int64_t steps_ = 0;
  float* step_count_;
  const uint32_t seed_;
  std::vector<int32_t> column_steps_;  // "mean" only: AdamW updates of each column
  Window window_;
  Vote vote_;
};

}  // namespace zenflow
