// SPDX-License-Identifier: Apache-2.0
// Columns to and from matrices in device memory: the publication of uploaded deferred columns, and the moves of a
// hand-over. Arrays do not overlap; work is queued on `stream` without waiting; what has no elements is skipped. Throws
// if a launch fails.
#pragma once

#include <cstdint>

#include "cuda/stream.h"
#include "dtype.h"

namespace zenflow {

// Deferred columns of rows first_row .. first_row + rows of a weight.
struct ScatterPass {
  const void* upload;  // [rows, slots]
  void* weight;        // row 0 of the matrix, rows of `columns` elements; selected columns are left alone
  DType dtype;
  int64_t first_row, rows, columns;
  const int32_t* place;  // [columns], see slot_map.h
  int64_t slots;
  uint64_t* checksums;  // [slots]: what these rows add to the columns' checksums (edits.h) is added; null: none
};
void scatter(const ScatterPass& pass, Stream stream);

// out[r, i] = matrix[r, columns[i]] for i < count, and back. Rows of the matrix are `stride` elements apart, `out` and
// `in` are [rows, count]; item_bytes is 2 or 4; `columns`, in device memory, names no column twice.
void gather_columns(const void* matrix, int64_t item_bytes, int64_t rows, int64_t stride, const int32_t* columns,
                    int64_t count, void* out, Stream stream);
void scatter_columns(void* matrix, int64_t item_bytes, int64_t rows, int64_t stride, const int32_t* columns,
                     int64_t count, const void* in, Stream stream);

}  // namespace zenflow
