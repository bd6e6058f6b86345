// SPDX-License-Identifier: Apache-2.0
// The inner loops that are compiled once per instruction set, and the choice among them.
//
// Every loop works on contiguous runs of elements. All instruction sets give equal bits (docs/arithmetic.md). Pointers
// need no more than their element's alignment; `written` may not overlap the other arrays. Nothing allocates or throws.
#pragma once

#include <cstdint>

#include "adam.h"
#include "dtype.h"

namespace zenflow {

// One step's gradients of a run of elements, as they came, and how they enter the moments.
struct Lane {
  const void* gradients;
  Fold fold;
};

// Per-column values of AdamStep's three corrections, for columns that had different numbers of updates ("mean").
struct ColumnSteps {
  const float* step;
  const float* root;
  const float* ahead;
};

// A run of elements of one parameter: its state, the gradients to fold in, and, if `move` is set, the weight's move.
struct Update {
  float* master;
  void* exp_avg;
  void* exp_avg_sq;
  DType moments;   // fp32, or bfloat16 that is rounded up or down at random
  uint32_t noise;  // ... as it decides, and the element's index
  float* sum;      // "mean" only: the fp32 sum carried so far, or null
  const Lane* lanes;
  int64_t lane_count;
  const AdamStep* move;   // null: fold only
  void* written;          // what the parameter is to hold, in its dtype; needed if `move` is set
  bool streams;           // ... and is stored past the caches, as stream() does, where it is aligned
  const Fold* mean_fold;  // "mean" only: how the mean enters the moments
  float mean_count;       // "mean" only: how many gradients it is of
  // Element i belongs to column i % row_length of `columns`; null: `move`'s corrections hold for all.
  const ColumnSteps* columns;
  int64_t row_length;
};

// Slot `slot` holds column `column`, out of the order of columns.
struct MovedSlot {
  int32_t slot, column;
};

// Which column each slot of a packed row holds (slot_order.h). Masks have a bit for each column of the row: those that
// the slots held in order when they were laid out, and those of them that their slots still hold.
struct SlotMap {
  const int32_t* columns;  // [slots]
  int64_t slots, row_length;
  const uint64_t *laid_out, *kept;
  const MovedSlot* moved;  // all others
  int64_t moved_count;
};

constexpr int64_t kOverrun = 64;  // bytes behind a packed row that gather() may write

struct Kernels {
  const char* name;
  // Elements [begin, end). "adamw": folds every lane, then moves.
  void (*update)(const Update&, DType lanes, DType written, int64_t begin, int64_t end);
  // "mean": adds every lane to the sum and stores it; if `move` is set, folds the mean, moves, and leaves the sum at
  // zero.
  void (*update_mean)(const Update&, DType lanes, DType written, int64_t begin, int64_t end);
  // sums[i] = fma(x[i], x[i], sums[i])
  void (*add_squares)(const void* x, DType dtype, int64_t count, float* sums);
  void (*round_to)(const float* x, DType dtype, int64_t count, void* rounded);
  void (*widen)(const void* x, DType dtype, int64_t count, float* widened);
  // packed[s] = row[column of slot s], and back; elements of `item` bytes (2 or 4). gather() may write kOverrun more.
  void (*gather)(const SlotMap&, const void* row, int64_t item, void* packed);
  void (*scatter)(const SlotMap&, const void* packed, int64_t item, void* row);
  // A copy that leaves the caches alone; in order with other stores only after finish_streaming().
  void (*stream)(void* to, const void* from, int64_t bytes);
};

const Kernels& scalar_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();

}  // namespace zenflow
