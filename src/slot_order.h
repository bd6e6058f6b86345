// SPDX-License-Identifier: Apache-2.0
// Which column each slot of a packed row holds, and how kernels find that out at the speed of a copy.
//
// Slots are laid out in the order of their columns. A hand-over puts other columns into single slots, so that nothing
// else moves: most columns can be packed a vector at a time by a mask, and the moved ones follow one by one.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace zenflow {

class SlotOrder {
 public:
  SlotOrder() = default;
  // `columns`: of each slot, ascending; of a row of `row_length` columns.
  SlotOrder(std::vector<int32_t> columns, int64_t row_length);

  const std::vector<int32_t>& columns() const { return columns_; }
  int64_t slots() const { return static_cast<int64_t>(columns_.size()); }
  // Slot slots[i] holds column columns[i] from now on.
  void put(const std::vector<int32_t>& slots, const std::vector<int32_t>& columns);
  SlotMap map() const;

 private:
  std::vector<int32_t> columns_, laid_out_;
  std::vector<uint64_t> laid_out_mask_, kept_mask_;
  std::vector<MovedSlot> moved_;
  int64_t row_length_ = 0;
};

}  // namespace zenflow
