// SPDX-License-Identifier: Apache-2.0
// Gradients that leave during backward: they lie as the coming step will read them, and count only once it takes them.
#include <algorithm>
#include <utility>

#include "device.h"
#include "parameter.h"
#include "rows.h"

namespace zenflow {

// The order of columns after the coming step's selection, which hand_over() and repartition() will then make true.
void Parameter::foresee_layout(StagedGradient& staged) const {
  if (!staged.selection) {
    staged.order = SlotOrder(columns_without({}), shape_.columns);
  } else if (hands_over()) {
    const ColumnSwap swap = swap_for(*staged.selection);
    staged.block_columns = block_columns_;
    staged.order = order_;
    swap_places(swap, staged.block_columns, staged.order);
  } else {
    staged.block_columns = *staged.selection;
    staged.order = SlotOrder(columns_without(*staged.selection), shape_.columns);
  }
}

void Parameter::prepare_staging(DType gradient, std::optional<std::vector<int32_t>> selection, bool measured,
                                std::optional<double> squared_norm) {
  StagedGradient staged;
  staged.dtype = gradient;
  staged.measured = measured;
  staged.squared_norm = squared_norm;
  staged.selection = std::move(selection);
  staged.moves_columns = staged.selection || !initialised_;
  if (staged.moves_columns) foresee_layout(staged);
  if (!keeps_lanes(staged.selection.has_value())) {
    staged.lane_count = wanted_lanes(staged.selection.has_value());
    staged.lanes = make_array(staged.lane_count * shape_.rows * staged.order.slots(), item_size(gradient), locker());
  }
  staged.selected = std::move(staged_.selected);
  staged_ = std::move(staged);
}

char* Parameter::staged_selected() {
  const size_t width = staged_.moves_columns ? staged_.block_columns.size() : block_columns_.size();
  staged_.selected.resize(static_cast<size_t>(shape_.rows * item_size(staged_.dtype)) * width);
  return staged_.selected.data();
}

StagedPlaces Parameter::staged_places() {
  StagedGradient& s = staged_;
  const bool own_lanes = s.lane_count > 0;
  return {s.moves_columns ? s.block_columns : block_columns_, s.moves_columns ? s.order : order_, s.selected.data(),
          own_lanes ? static_cast<char*>(s.lanes.data()) : lane(next_lane_), own_lanes ? s.dtype : lane_dtype_};
}

void Parameter::stage(const TensorView& gradient) {
  staged_selected();
  const StagedPlaces to = staged_places();
  const int64_t item = item_size(gradient.dtype()), width = static_cast<int64_t>(to.block_columns.size());
  for_rows(context_.pool, shape_, [&](int64_t r) {
    Scratch staging(gradient.staging_bytes());
    const void* row = gradient.row(r, staging.data());
    pack(row, gradient.dtype(), r, to.order, to.lane_dtype, to.lane);  // a vector at a time: into the cache
    gather_run(gradient.dtype(), row, to.block_columns, to.selected + r * width * item);
  });
  staged_.present = true;
}

void Parameter::unstage(void* gradient) {
  const StagedPlaces from = staged_places();
  const DType dtype = staged_.dtype;
  const int64_t width = static_cast<int64_t>(from.block_columns.size());
  const int64_t slots = from.order.slots();
  with_bits(dtype, [&]<class Bits>() {
    for_rows(context_.pool, shape_, [&](int64_t r) {
      Bits* row = static_cast<Bits*>(gradient) + r * shape_.columns;
      const char* packed = from.lane + r * slots * item_size(from.lane_dtype);
      Scratch narrow(slots * item_size(dtype));
      if (from.lane_dtype != dtype) {
        context_.kernels.round_to(reinterpret_cast<const float*>(packed), dtype, slots, narrow.data());
        packed = static_cast<const char*>(narrow.data());
      }
      scatter_row(reinterpret_cast<const Bits*>(from.selected), width, r, from.block_columns, row);
      scatter_row(reinterpret_cast<const Bits*>(packed), slots, 0, from.order.columns(), row);
    });
  });
  discard_staged();
}

void Parameter::take_staged_lanes() {
  if (staged_.lane_count == 0) return;
  open_lanes_.reserve(static_cast<size_t>(staged_.lane_count));
  lanes_ = std::move(staged_.lanes);
  lane_dtype_ = staged_.dtype;
  lane_count_ = std::exchange(staged_.lane_count, 0);
  next_lane_ = 0;
}

void Parameter::discard_staged() {
  if (!staged_.present && staged_.lane_count == 0) return;
  std::vector<char> selected = std::move(staged_.selected);  // kept: a steady step allocates nothing
  staged_ = {};
  staged_.selected = std::move(selected);
}

}  // namespace zenflow
