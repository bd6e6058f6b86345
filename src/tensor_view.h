// SPDX-License-Identifier: Apache-2.0
// A parameter or gradient seen as a matrix [rows, columns], whatever its shape and strides.
//
// 2-D as it is; 3-D [d0*d1, d2]; 4-D and more [d0, rest]; 0-D and 1-D [1, n]. An element's offset is row_offset(r) +
// column_offset(c), both linear or from a table. Views do not own the memory. Sizes, strides and offsets count
// elements.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dtype.h"

namespace zenflow {

struct Matrix {
  int64_t rows = 0, columns = 0;
  int64_t count() const { return rows * columns; }
};

Matrix matrix_of(std::span<const int64_t> sizes);

class TensorView {
 public:
  TensorView() = default;
  // Empty strides mean contiguous.
  TensorView(void* data, DType dtype, std::span<const int64_t> sizes, std::span<const int64_t> strides);

  DType dtype() const { return dtype_; }
  const Matrix& shape() const { return shape_; }
  explicit operator bool() const { return data_ != nullptr; }

  bool contiguous() const { return rows_contiguous() && row_stride_ == shape_.columns && row_offsets_.empty(); }
  bool rows_contiguous() const { return column_stride_ == 1 && column_offsets_.empty(); }

  // Columns `columns[0..count)` of row r, to and from a contiguous run; null columns: the first `count`.
  void gather(int64_t r, const int32_t* columns, int64_t count, void* run) const;
  void scatter(int64_t r, const int32_t* columns, int64_t count, const void* run) const;

  // A pointer to row r as a contiguous run: its own memory, or a copy in `staging` (staging_bytes() of it).
  const void* row(int64_t r, void* staging) const;
  int64_t staging_bytes() const { return rows_contiguous() ? 0 : shape_.columns * item_size(dtype_); }

  // Row r's own memory; only where rows are contiguous.
  void* row(int64_t r) const { return at(row_offset(r)); }

  // Contiguous views only.
  void* at(int64_t element) const { return data_ + element * item_size(dtype_); }

 private:
  int64_t row_offset(int64_t r) const {
    return row_offsets_.empty() ? r * row_stride_ : row_offsets_[static_cast<size_t>(r)];
  }
  int64_t column_offset(int64_t c) const {
    return column_offsets_.empty() ? c * column_stride_ : column_offsets_[static_cast<size_t>(c)];
  }
  template <class Bits, class Move>
  void for_columns(int64_t r, const int32_t* columns, int64_t count, Move&& move) const;

  char* data_ = nullptr;
  DType dtype_ = DType::kFloat32;
  Matrix shape_;
  int64_t row_stride_ = 0, column_stride_ = 1;
  std::vector<int64_t> row_offsets_, column_offsets_;
};

}  // namespace zenflow
