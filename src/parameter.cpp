// SPDX-License-Identifier: Apache-2.0
// Layout and selection: which column lives where, and how it moves. Updates are in parameter_update.cpp, state in
// parameter_state.cpp.
#include "parameter.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "device.h"
#include "rows.h"

namespace zenflow {

void Window::add(const Hyper& h) {
  ++count;
  lr_sum += h.lr;
  keep *= 1.0 - h.lr * h.weight_decay;
  last = h;
}

Parameter::Parameter(const Context& context, Device& device, std::span<const int64_t> sizes, DType dtype, bool split,
                     float* step_count, uint32_t seed)
    : context_(context),
      device_(device),
      shape_(matrix_of(sizes)),
      dtype_(dtype),
      split_(split),
      step_count_(step_count),
      seed_(seed) {}

Parameter::~Parameter() {
  device_.forget(*this);
}

void Parameter::set_steps(int64_t steps) {
  steps_ = steps;
  if (step_count_ != nullptr) *step_count_ = static_cast<float>(steps);
}

void Parameter::load_moments(const HostArray& array, int64_t r, int64_t count, float* row) const {
  const DType dtype = context_.settings.moments;
  const char* const from = static_cast<const char*>(array.data()) + r * count * item_size(dtype);
  context_.kernels.widen(from, dtype, count, row);
}

void Parameter::store_moments(const HostArray& array, int64_t r, const float* row) const {
  const DType dtype = context_.settings.moments;
  char* const to = static_cast<char*>(array.data()) + r * slots() * item_size(dtype);
  context_.kernels.round_to(row, dtype, slots(), to);
}

std::vector<int32_t> Parameter::selection() const {
  std::vector<int32_t> columns = block_columns_;
  std::sort(columns.begin(), columns.end());
  return columns;
}

char* Parameter::lane(int64_t index) const {
  return static_cast<char*>(lanes_.data()) + index * deferred_count() * item_size(lane_dtype_);
}

int64_t Parameter::host_bytes() const {
  const HostArrays& a = arrays_;
  return a.master.bytes() + a.exp_avg.bytes() + a.exp_avg_sq.bytes() + a.last_written.bytes() + a.pending.bytes() +
         a.sum.bytes() + lanes_.bytes() + staged_.lanes.bytes() + static_cast<int64_t>(staged_.selected.size());
}

PageLocker* Parameter::locker() const {
  return device_.page_locker();
}

HostArray Parameter::make_array(int64_t elements, int64_t element_bytes, PageLocker* locker) const {
  HostArray array(elements * element_bytes, locker);
  array.first_touch(context_.pool, element_bytes, kHostGrain);
  array.page_lock();
  return array;
}

HostArrays Parameter::make_host_arrays(int64_t slots) const {
  const int64_t count = shape_.rows * slots, item = item_size(dtype_), moment = item_size(context_.settings.moments);
  const bool sums = context_.settings.mean && context_.settings.stream;
  return {make_array(count, 4, locker()),     make_array(count, moment, nullptr),
          make_array(count, moment, nullptr), make_array(count, item, locker()),
          make_array(count, item, locker()),  sums ? make_array(count, 4, nullptr) : HostArray()};
}

int64_t Parameter::wanted_lanes(bool has_selection) const {
  if (!has_selection) return 1;  // warm-up: each step is a window of its own
  return (context_.settings.stream ? 1 : context_.settings.update_interval) + context_.settings.update_delay;
}

bool Parameter::has_lanes(DType gradient) const {
  return lane_count_ == wanted_lanes(has_selection_) && (lane_dtype_ == gradient || lane_dtype_ == DType::kFloat32);
}

void Parameter::reserve_lanes(DType gradient) {
  const int64_t wanted = wanted_lanes(has_selection_);
  // Gradients of two dtypes in one window: fp32 holds both exactly.
  const DType dtype = open_lanes_.empty() ? gradient : DType::kFloat32;
  HostArray lanes = make_array(wanted * deferred_count(), item_size(dtype), locker());
  for (const OpenLane& open : open_lanes_) {
    context_.kernels.widen(lane(open.index), lane_dtype_, deferred_count(),
                           static_cast<float*>(lanes.data()) + open.index * deferred_count());
  }
  lanes_ = std::move(lanes);
  open_lanes_.reserve(static_cast<size_t>(wanted));
  lane_dtype_ = dtype;
  if (lane_count_ != wanted) next_lane_ = 0;
  lane_count_ = wanted;
}

std::vector<int32_t> Parameter::columns_without(const std::vector<int32_t>& selection) const {
  std::vector<int32_t> deferred;
  size_t i = 0;
  for (int32_t c = 0; c < shape_.columns; ++c) {
    if (i < selection.size() && selection[i] == c) {
      ++i;
    } else {
      deferred.push_back(c);
    }
  }
  return deferred;
}

int64_t Parameter::live_staging_bytes(const TensorView& weight) const {
  return split_ ? block_.width * item_size(dtype_) : weight.staging_bytes();
}

const void* Parameter::live_selected(const TensorView& weight, int64_t r, void* staging) const {
  if (!split_) return weight.row(r, staging);
  weight.gather(r, block_index(), block_.width, staging);
  return staging;
}

void Parameter::initialise(const TensorView& weight, const std::vector<int32_t>* selection) {
  std::vector<int32_t> columns = selection != nullptr ? *selection : std::vector<int32_t>();
  SlotOrder order = split_ ? SlotOrder(columns_without(columns), shape_.columns) : SlotOrder();
  HostArrays arrays = split_ ? make_host_arrays(order.slots()) : HostArrays();
  if (split_ && context_.settings.mean) column_steps_.assign(static_cast<size_t>(shape_.columns), 0);
  reserve_scratch(context_.pool, 4 * (split_ || !weight.contiguous() ? shape_.columns : kRun) + kOverrun);
  // Nothing has changed yet, and nothing throws from here on.
  arrays_ = std::move(arrays);
  order_ = std::move(order);
  block_columns_ = std::move(columns);
  if (!split_ || selection != nullptr) block_ = take_lent_block();
  has_selection_ = selection != nullptr;
  std::fill_n(block_.exp_avg, shape_.rows * block_.width, 0.0f);
  std::fill_n(block_.exp_avg_sq, shape_.rows * block_.width, 0.0f);
  for_rows(context_.pool, shape_, [&](int64_t r) {
    Scratch staging(live_staging_bytes(weight));
    context_.kernels.widen(live_selected(weight, r, staging.data()), dtype_, block_.width,
                           block_.master + r * block_.width);
    if (slots() == 0) return;
    weight.gather(r, slot_columns().data(), slots(), host_row(arrays_.last_written, r));
    context_.kernels.widen(host_row(arrays_.last_written, r), dtype_, slots(), host_master(r));
  });
  initialised_ = true;
}

int64_t Parameter::select(const TensorView& weight, const std::vector<int32_t>& selection) {
  const std::vector<int32_t> before = this->selection();
  std::vector<int32_t> stayed;
  std::set_intersection(before.begin(), before.end(), selection.begin(), selection.end(), std::back_inserter(stayed));
  if (hands_over()) {
    hand_over(weight, selection);
  } else {
    device_.on_host(*this, weight, [&](const TensorView& view) {
      adopt_edits(view);
      repartition(view, selection);
    });
  }
  has_selection_ = true;
  return static_cast<int64_t>(stayed.size());
}

// From the selection in force to another one of its size: every column that neither joins nor leaves keeps its place.
ColumnSwap Parameter::swap_for(const std::vector<int32_t>& selection) const {
  const std::vector<int32_t> before = this->selection();
  ColumnSwap swap;
  std::set_difference(before.begin(), before.end(), selection.begin(), selection.end(),
                      std::back_inserter(swap.leaving));
  std::set_difference(selection.begin(), selection.end(), before.begin(), before.end(),
                      std::back_inserter(swap.joining));
  std::vector<int32_t> place(static_cast<size_t>(shape_.columns));
  for (size_t i = 0; i < block_columns_.size(); ++i) place[block_columns_[i]] = static_cast<int32_t>(i);
  for (int64_t s = 0; s < slots(); ++s) place[slot_columns()[s]] = static_cast<int32_t>(s);
  for (int32_t c : swap.leaving) swap.positions.push_back(place[c]);
  for (int32_t c : swap.joining) swap.slots.push_back(place[c]);
  return swap;
}

void Parameter::swap_places(const ColumnSwap& swap, std::vector<int32_t>& block_columns, SlotOrder& order) {
  for (size_t i = 0; i < swap.leaving.size(); ++i) block_columns[swap.positions[i]] = swap.joining[i];
  order.put(swap.slots, swap.leaving);
}

void Parameter::hand_over(const TensorView& weight, const std::vector<int32_t>& selection) {
  const ColumnSwap swap = swap_for(selection);
  if (swap.count() == 0) return;
  device_.swap_columns(*this, weight, swap);
  swap_places(swap, block_columns_, order_);
  device_.columns_moved(*this, weight);
}

void Parameter::swap_row(const ColumnSwap& swap, const ColumnState& block, bool compact, int64_t r, const void* left,
                         void* joined) {
  const int64_t count = swap.count(), block_row = r * block.width, host_row = r * slots();
  float* const master = static_cast<float*>(arrays_.master.data());
  const auto position = [&](int64_t i) { return block_row + (compact ? i : swap.positions[i]); };
  Scratch outgoing(count * 4), incoming(count * 4);
  for (int64_t i = 0; i < count; ++i) outgoing.floats()[i] = block.master[position(i)];
  adopt_run(context_.kernels, dtype_, left, count, outgoing.floats());
  with_bits(dtype_, [&]<class Bits>() {
    Bits* last = static_cast<Bits*>(arrays_.last_written.data()) + host_row;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot = host_row + swap.slots[i];
      incoming.floats()[i] = block.master[position(i)] = std::exchange(master[slot], outgoing.floats()[i]);
      last[swap.slots[i]] = static_cast<const Bits*>(left)[i];
    }
  });
  with_dtype(context_.settings.moments, [&]<DType M>() {
    for (auto [ours, theirs] : {std::pair{block.exp_avg, &arrays_.exp_avg}, {block.exp_avg_sq, &arrays_.exp_avg_sq}}) {
      auto* const moments = static_cast<typename BitsOf<M>::type*>(theirs->data()) + host_row;
      for (int64_t i = 0; i < count; ++i) {
        const float leaves = std::exchange(ours[position(i)], widen<M>(moments[swap.slots[i]]));
        moments[swap.slots[i]] = round_to<M>(leaves);
      }
    }
  });
  context_.kernels.round_to(incoming.floats(), dtype_, count, joined);
}

// Lays both sides out anew: the first selection, or one of another size.
void Parameter::repartition(const TensorView& weight, const std::vector<int32_t>& selection) {
  SlotOrder order(columns_without(selection), shape_.columns);
  std::vector<int32_t> columns = selection;
  HostArrays arrays = make_host_arrays(order.slots());
  // Nothing has changed yet, and nothing throws from here on.
  const ColumnState old_block = std::exchange(block_, take_lent_block());
  const HostArrays old_arrays = std::exchange(arrays_, std::move(arrays));
  const std::vector<int32_t> old_columns = std::exchange(block_columns_, std::move(columns));
  const SlotOrder old_order = std::exchange(order_, std::move(order));
  lanes_ = HostArray();
  lane_count_ = 0;

  for_rows(context_.pool, shape_, [&](int64_t r) {
    Scratch full(shape_.columns * 4), packed(shape_.columns * 4), settled(block_.width * item_size(dtype_));
    const auto move = [&](auto in_block, auto&& load, auto&& store) {
      scatter_row(old_block.*in_block, old_block.width, r, old_columns, full.floats());
      load(packed.floats());
      scatter_row(packed.floats(), old_order.slots(), 0, old_order.columns(), full.floats());
      gather_row(full.floats(), block_columns_, r, block_.*in_block, block_.width);
      gather_row(full.floats(), slot_columns(), 0, packed.floats(), slots());
      store(packed.floats());
    };
    for (auto [in_block, in_host] : {std::pair{&ColumnState::exp_avg, &HostArrays::exp_avg},
                                     {&ColumnState::exp_avg_sq, &HostArrays::exp_avg_sq}}) {
      move(
          in_block, [&](float* row) { load_moments(old_arrays.*in_host, r, old_order.slots(), row); },
          [&](const float* row) { store_moments(arrays_.*in_host, r, row); });
    }
    const float* const old_master = static_cast<const float*>(old_arrays.master.data()) + r * old_order.slots();
    move(
        &ColumnState::master, [&](float* row) { std::copy_n(old_master, old_order.slots(), row); },
        [&](const float* row) { std::copy_n(row, slots(), host_master(r)); });
    weight.gather(r, slot_columns().data(), slots(), host_row(arrays_.last_written, r));
    context_.kernels.round_to(block_.master + r * block_.width, dtype_, block_.width, settled.data());
    weight.scatter(r, block_columns_.data(), block_.width, settled.data());
  });
}

}  // namespace zenflow
