// SPDX-License-Identifier: Apache-2.0
// Layout and selection: which column lives where, and how it moves. Updates are in parameter_update.cpp, state in
// parameter_state.cpp.
#include "parameter.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "rows.h"

namespace zenflow {

void Window::add(const Hyper& h) {
  ++count;
  lr_sum += h.lr;
  keep *= 1.0 - h.lr * h.weight_decay;
  last = h;
}

Parameter::Parameter(const Context& context, std::span<const int64_t> sizes, DType dtype, bool split, float* step_count)
    : context_(context), shape_(matrix_of(sizes)), dtype_(dtype), split_(split), step_count_(step_count) {}

void Parameter::set_steps(int64_t steps) {
  steps_ = steps;
  if (step_count_ != nullptr) *step_count_ = static_cast<float>(steps);
}

ColumnState Parameter::host() const {
  return {static_cast<float*>(arrays_.master.data()), static_cast<float*>(arrays_.exp_avg.data()),
          static_cast<float*>(arrays_.exp_avg_sq.data()), slots()};
}

std::vector<int32_t> Parameter::selection() const {
  std::vector<int32_t> columns = device_columns_;
  std::sort(columns.begin(), columns.end());
  return columns;
}

char* Parameter::lane(int64_t index) const {
  return static_cast<char*>(lanes_.data()) + index * deferred_count() * item_size(lane_dtype_);
}

int64_t Parameter::host_bytes() const {
  const HostArrays& a = arrays_;
  return a.master.bytes() + a.exp_avg.bytes() + a.exp_avg_sq.bytes() + a.last_written.bytes() + a.pending.bytes() +
         a.sum.bytes() + lanes_.bytes();
}

HostArrays Parameter::make_host_arrays(int64_t slots) const {
  const auto make = [&](int64_t element_bytes) {
    HostArray array(shape_.rows * slots * element_bytes);
    array.first_touch(context_.pool, element_bytes, kHostGrain);
    return array;
  };
  const int64_t item = item_size(dtype_);
  return {make(4),    make(4),    make(4),
          make(item), make(item), context_.settings.mean && context_.settings.stream ? make(4) : HostArray()};
}

int64_t Parameter::wanted_lanes() const {
  if (!has_selection_) return 1;  // warm-up: each step is a window of its own
  return (context_.settings.stream ? 1 : context_.settings.update_interval) + context_.settings.update_delay;
}

bool Parameter::has_lanes(DType gradient) const {
  return lane_count_ == wanted_lanes() && (lane_dtype_ == gradient || lane_dtype_ == DType::kFloat32);
}

void Parameter::reserve_lanes(DType gradient) {
  const int64_t wanted = wanted_lanes();
  // Gradients of two dtypes in one window: fp32 holds both exactly.
  const DType dtype = open_lanes_.empty() ? gradient : DType::kFloat32;
  HostArray lanes(wanted * deferred_count() * item_size(dtype));
  lanes.first_touch(context_.pool, item_size(dtype), kHostGrain);
  for (int64_t open : open_lanes_) {
    context_.kernels.widen(lane(open), lane_dtype_, deferred_count(),
                           static_cast<float*>(lanes.data()) + open * deferred_count());
  }
  lanes_ = std::move(lanes);
  open_lanes_.reserve(static_cast<size_t>(wanted));
  open_folds_.reserve(static_cast<size_t>(wanted));
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
  return split_ ? device_.width * item_size(dtype_) : weight.staging_bytes();
}

const void* Parameter::live_selected(const TensorView& weight, int64_t r, void* staging) const {
  if (!split_) return weight.row(r, staging);
  weight.gather(r, device_index(), device_.width, staging);
  return staging;
}

void Parameter::initialise(const TensorView& weight, const std::vector<int32_t>* selection) {
  std::vector<int32_t> columns = selection != nullptr ? *selection : std::vector<int32_t>();
  std::vector<int32_t> deferred = split_ ? columns_without(columns) : std::vector<int32_t>();
  HostArrays arrays = split_ ? make_host_arrays(static_cast<int64_t>(deferred.size())) : HostArrays();
  if (split_ && context_.settings.mean) column_steps_.assign(static_cast<size_t>(shape_.columns), 0);
  reserve_scratch(context_.pool, 4 * (split_ || !weight.contiguous() ? shape_.columns : kRun));
  // Nothing has changed yet, and nothing throws from here on.
  arrays_ = std::move(arrays);
  slot_columns_ = std::move(deferred);
  device_columns_ = std::move(columns);
  if (!split_ || selection != nullptr) device_ = take_lent_block();
  has_selection_ = selection != nullptr;
  std::fill_n(device_.exp_avg, shape_.rows * device_.width, 0.0f);
  std::fill_n(device_.exp_avg_sq, shape_.rows * device_.width, 0.0f);
  const ColumnState host = this->host();
  for_rows(context_.pool, shape_, [&](int64_t r) {
    Scratch staging(live_staging_bytes(weight));
    context_.kernels.widen(live_selected(weight, r, staging.data()), dtype_, device_.width,
                           device_.master + r * device_.width);
    if (slots() == 0) return;
    weight.gather(r, slot_columns_.data(), slots(), host_row(arrays_.last_written, r));
    context_.kernels.widen(host_row(arrays_.last_written, r), dtype_, slots(), host.master + r * slots());
  });
  initialised_ = true;
}

int64_t Parameter::select(const TensorView& weight, const std::vector<int32_t>& selection) {
  std::vector<int32_t> before = this->selection(), leaving, joining;
  std::set_difference(before.begin(), before.end(), selection.begin(), selection.end(), std::back_inserter(leaving));
  std::set_difference(selection.begin(), selection.end(), before.begin(), before.end(), std::back_inserter(joining));
  if (has_selection_ && !lent_) {
    hand_over(weight, leaving, joining);
  } else {
    repartition(weight, selection);
  }
  has_selection_ = true;
  return static_cast<int64_t>(before.size() - leaving.size());
}

// Swaps each leaving column with a joining one, so that every other column keeps its place.
void Parameter::hand_over(const TensorView& weight, std::span<const int32_t> leaving,
                          std::span<const int32_t> joining) {
  if (leaving.empty()) return;
  const int64_t count = static_cast<int64_t>(leaving.size());
  std::vector<int32_t> place(static_cast<size_t>(shape_.columns));
  for (size_t i = 0; i < device_columns_.size(); ++i) place[device_columns_[i]] = static_cast<int32_t>(i);
  for (size_t s = 0; s < slot_columns_.size(); ++s) place[slot_columns_[s]] = static_cast<int32_t>(s);

  const ColumnState host = this->host();
  with_bits(dtype_, [&]<class Bits>() {
    for_rows(context_.pool, shape_, [&](int64_t r) {
      Scratch left(count * item_size(dtype_)), joined(count * item_size(dtype_)), masters(count * 4);
      weight.gather(r, leaving.data(), count, left.data());
      Bits* last = reinterpret_cast<Bits*>(host_row(arrays_.last_written, r));
      for (int64_t i = 0; i < count; ++i) {
        const int64_t position = r * device_.width + place[leaving[i]];
        const int64_t slot = place[joining[i]];
        std::swap(device_.master[position], host.master[r * host.width + slot]);
        std::swap(device_.exp_avg[position], host.exp_avg[r * host.width + slot]);
        std::swap(device_.exp_avg_sq[position], host.exp_avg_sq[r * host.width + slot]);
        last[slot] = static_cast<const Bits*>(left.data())[i];
        masters.floats()[i] = device_.master[position];
      }
      context_.kernels.round_to(masters.floats(), dtype_, count, joined.data());
      weight.scatter(r, joining.data(), count, joined.data());
    });
  });
  for (int64_t i = 0; i < count; ++i) {
    device_columns_[place[leaving[i]]] = joining[i];
    slot_columns_[place[joining[i]]] = leaving[i];
  }
}

// Lays both sides out anew: the first selection, or one of another size.
void Parameter::repartition(const TensorView& weight, const std::vector<int32_t>& selection) {
  std::vector<int32_t> deferred = columns_without(selection);
  std::vector<int32_t> columns = selection;
  HostArrays arrays = make_host_arrays(static_cast<int64_t>(deferred.size()));
  // Nothing has changed yet, and nothing throws from here on.
  const ColumnState old_device = std::exchange(device_, take_lent_block()), old_host = host();
  const HostArrays old_arrays = std::exchange(arrays_, std::move(arrays));
  const std::vector<int32_t> old_columns = std::exchange(device_columns_, std::move(columns));
  const std::vector<int32_t> old_slots = std::exchange(slot_columns_, std::move(deferred));
  lanes_ = HostArray();
  lane_count_ = 0;

  const ColumnState host = this->host();
  for_rows(context_.pool, shape_, [&](int64_t r) {
    Scratch full(shape_.columns * 4), settled(device_.width * item_size(dtype_));
    for (auto array : {&ColumnState::exp_avg, &ColumnState::exp_avg_sq, &ColumnState::master}) {
      scatter_row(old_device.*array, old_device.width, r, old_columns, full.floats());
      scatter_row(old_host.*array, old_host.width, r, old_slots, full.floats());
      gather_row(full.floats(), device_columns_, r, device_.*array, device_.width);
      gather_row(full.floats(), slot_columns_, r, host.*array, host.width);
    }
    weight.gather(r, slot_columns_.data(), slots(), host_row(arrays_.last_written, r));
    context_.kernels.round_to(device_.master + r * device_.width, dtype_, device_.width, settled.data());
    weight.scatter(r, device_columns_.data(), device_.width, settled.data());
  });
}

}  // namespace zenflow
