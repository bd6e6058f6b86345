// SPDX-License-Identifier: Apache-2.0
#include "slot_order.h"

#include <utility>

namespace zenflow {

SlotOrder::SlotOrder(std::vector<int32_t> columns, int64_t row_length)
    : columns_(std::move(columns)),
      laid_out_(columns_),
      laid_out_mask_(static_cast<size_t>((row_length + 63) / 64), 0),
      row_length_(row_length) {
  for (const int32_t c : laid_out_) laid_out_mask_[static_cast<size_t>(c / 64)] |= uint64_t{1} << (c % 64);
  kept_mask_ = laid_out_mask_;
  moved_.reserve(columns_.size());  // so that put() never allocates
}

void SlotOrder::put(const std::vector<int32_t>& slots, const std::vector<int32_t>& columns) {
  for (size_t i = 0; i < slots.size(); ++i) columns_[static_cast<size_t>(slots[i])] = columns[i];
  kept_mask_ = laid_out_mask_;
  moved_.clear();
  for (size_t s = 0; s < columns_.size(); ++s) {
    const int32_t before = laid_out_[s];
    if (columns_[s] == before) continue;
    kept_mask_[static_cast<size_t>(before / 64)] &= ~(uint64_t{1} << (before % 64));
    moved_.push_back({static_cast<int32_t>(s), columns_[s]});
  }
}

SlotMap SlotOrder::map() const {
  return {columns_.data(),
          slots(),
          row_length_,
          laid_out_mask_.data(),
          kept_mask_.data(),
          moved_.data(),
          static_cast<int64_t>(moved_.size())};
}

}  // namespace zenflow
