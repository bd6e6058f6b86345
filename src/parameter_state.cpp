// SPDX-License-Identifier: Apache-2.0
// The canonical state: full-shaped tensors that do not show where a column lives or which gradients still wait in
// lanes.
#include <algorithm>
#include <cstring>
#include <utility>

#include "parameter.h"
#include "rows.h"

namespace zenflow {

namespace {

// Row r of a side's [rows, width] array into its columns' places, or back; no columns means all, in order.
template <class T>
void spread(const T* run, const std::vector<int32_t>& columns, int64_t width, T* full) {
  if (columns.empty()) {
    std::copy_n(run, width, full);
  } else {
    scatter_row(run, width, 0, columns, full);
  }
}

template <class T>
void collect(const T* full, const std::vector<int32_t>& columns, int64_t width, T* run) {
  if (columns.empty()) {
    std::copy_n(full, width, run);
  } else {
    gather_row(full, columns, 0, run, width);
  }
}

}  // namespace

// Moments as if every gradient had been folded in: those that wait in lanes are folded into a copy of the row.
void Parameter::fold_open_lanes(int64_t r, float* exp_avg, float* exp_avg_sq, float* sum) const {
  const int64_t offset = r * slots();
  load_moments(arrays_.exp_avg, r, slots(), exp_avg);
  load_moments(arrays_.exp_avg_sq, r, slots(), exp_avg_sq);
  if (arrays_.sum.data() != nullptr) {
    std::copy_n(static_cast<const float*>(arrays_.sum.data()) + offset, slots(), sum);
  } else {
    std::fill_n(sum, slots(), 0.0f);
  }
  std::vector<Lane> lanes = known_lanes(late_lanes());
  for (Lane& lane : lanes) {
    lane.gradients = static_cast<const char*>(lane.gradients) + offset * item_size(lane_dtype_);
  }
  Update update{};
  update.exp_avg = exp_avg;
  update.exp_avg_sq = exp_avg_sq;
  update.sum = sum;
  update.lanes = lanes.data();
  update.lane_count = static_cast<int64_t>(lanes.size());
  const auto kernel = context_.settings.mean ? context_.kernels.update_mean : context_.kernels.update;
  kernel(update, lane_dtype_, dtype_, 0, slots());
}

void Parameter::export_state(const FullState& full) const {
  const int64_t columns = shape_.columns;
  for_rows(context_.pool, shape_, [&](int64_t r) {
    const int64_t row = r * columns, block_row = r * block_.width;
    spread(block_.exp_avg + block_row, block_columns_, block_.width, full.exp_avg + row);
    spread(block_.exp_avg_sq + block_row, block_columns_, block_.width, full.exp_avg_sq + row);
    spread(block_.master + block_row, block_columns_, block_.width, full.master + row);
    if (full.window_sum != nullptr) std::fill_n(full.window_sum + row, columns, 0.0f);
    if (slots() > 0) {
      Scratch exp_avg(slots() * 4), exp_avg_sq(slots() * 4), sum(slots() * 4);
      fold_open_lanes(r, exp_avg.floats(), exp_avg_sq.floats(), sum.floats());
      spread(exp_avg.floats(), slot_columns(), slots(), full.exp_avg + row);
      spread(exp_avg_sq.floats(), slot_columns(), slots(), full.exp_avg_sq + row);
      spread(host_master(r), slot_columns(), slots(), full.master + row);
      if (full.window_sum != nullptr) spread(sum.floats(), slot_columns(), slots(), full.window_sum + row);
    }
    with_bits(dtype_, [&]<class Bits>() {
      Scratch settled(block_.width * item_size(dtype_));
      context_.kernels.round_to(block_.master + block_row, dtype_, block_.width, settled.data());
      const HostArray& pending = in_flight_ ? arrays_.pending : arrays_.last_written;
      for (auto [tensor, array] :
           {std::pair{full.last_written, &arrays_.last_written}, std::pair{full.pending_output, &pending}}) {
        Bits* out = static_cast<Bits*>(tensor) + row;
        spread(static_cast<const Bits*>(settled.data()), block_columns_, block_.width, out);
        if (slots() > 0) spread(reinterpret_cast<const Bits*>(host_row(*array, r)), slot_columns(), slots(), out);
      }
    });
  });
  std::fill_n(full.selected, columns, !split_);
  for (int32_t c : block_columns_) full.selected[c] = true;
  if (full.column_steps != nullptr) {
    std::fill_n(full.column_steps, columns, static_cast<int32_t>(steps_));
    std::copy(column_steps_.begin(), column_steps_.end(), full.column_steps);
  }
}

void Parameter::import_state(const FullState& full, const ImportedClock& clock) {
  const int64_t columns = shape_.columns;
  std::vector<int32_t> selected, deferred;
  for (int32_t c = 0; split_ && c < columns; ++c) (full.selected[c] ? selected : deferred).push_back(c);
  SlotOrder order(std::move(deferred), columns);
  HostArrays arrays = split_ ? make_host_arrays(order.slots()) : HostArrays();
  if (full.window_sum != nullptr && clock.window.count > 0 && order.slots() > 0 && arrays.sum.data() == nullptr) {
    arrays.sum = HostArray(shape_.rows * order.slots() * 4);
  }
  arrays_ = std::move(arrays);
  block_columns_ = std::move(selected);
  order_ = std::move(order);
  block_ = take_lent_block();
  has_selection_ = split_ && clock.has_selection;
  set_steps(clock.steps);
  window_ = split_ ? clock.window : Window();
  vote_ = split_ ? clock.vote : Vote();
  in_flight_ = split_ && clock.in_flight;
  shows_settled_ = false;
  imported_ = true;
  lanes_ = HostArray();
  lane_count_ = 0;
  open_lanes_.clear();
  discard_staged();
  column_steps_.clear();
  if (context_.settings.mean && split_) column_steps_.assign(full.column_steps, full.column_steps + columns);

  for_rows(context_.pool, shape_, [&](int64_t r) {
    const int64_t row = r * columns, block_row = r * block_.width, host_offset = r * slots();
    collect(full.exp_avg + row, block_columns_, block_.width, block_.exp_avg + block_row);
    collect(full.exp_avg_sq + row, block_columns_, block_.width, block_.exp_avg_sq + block_row);
    collect(full.master + row, block_columns_, block_.width, block_.master + block_row);
    if (slots() == 0) return;
    Scratch packed(slots() * 4);
    for (auto [from, to] : {std::pair{full.exp_avg, &arrays_.exp_avg}, {full.exp_avg_sq, &arrays_.exp_avg_sq}}) {
      collect(from + row, slot_columns(), slots(), packed.floats());
      store_moments(*to, r, packed.floats());
    }
    collect(full.master + row, slot_columns(), slots(), host_master(r));
    if (arrays_.sum.data() != nullptr && full.window_sum != nullptr) {
      collect(full.window_sum + row, slot_columns(), slots(), static_cast<float*>(arrays_.sum.data()) + host_offset);
    }
    with_bits(dtype_, [&]<class Bits>() {
      collect(static_cast<const Bits*>(full.last_written) + row, slot_columns(), slots(),
              reinterpret_cast<Bits*>(host_row(arrays_.last_written, r)));
      collect(static_cast<const Bits*>(full.pending_output) + row, slot_columns(), slots(),
              reinterpret_cast<Bits*>(host_row(arrays_.pending, r)));
    });
  });
  initialised_ = true;
}

}  // namespace zenflow
