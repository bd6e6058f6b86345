// SPDX-License-Identifier: Apache-2.0
#include "tensor_view.h"

#include <cstring>

#include "prefetch.h"

namespace zenflow {

namespace {

int64_t product(std::span<const int64_t> sizes) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return count;
}

// How many leading dimensions become the rows.
size_t row_dimensions(size_t dimensions) {
  if (dimensions <= 1) return 0;
  return dimensions == 3 ? 2 : 1;
}

// The offsets of the elements of one group of dimensions, in logical order: one stride if they are linear, else a
// table.
void flatten(std::span<const int64_t> sizes, std::span<const int64_t> strides, int64_t& stride,
             std::vector<int64_t>& table) {
  bool linear = true;
  int64_t expected = 0;
  stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] == 1) continue;
    if (expected == 0) stride = strides[i];
    linear = linear && (expected == 0 || strides[i] == expected);
    expected = strides[i] * sizes[i];
    if (expected == 0) expected = -1;  // an expanded dimension: nothing outside it continues it
  }
  if (linear) return;
  table.assign(1, 0);
  for (size_t i = 0; i < sizes.size(); ++i) {
    std::vector<int64_t> wider;
    wider.reserve(table.size() * static_cast<size_t>(sizes[i]));
    for (int64_t offset : table) {
      for (int64_t j = 0; j < sizes[i]; ++j) wider.push_back(offset + j * strides[i]);
    }
    table.swap(wider);
  }
}

}  // namespace

Matrix matrix_of(std::span<const int64_t> sizes) {
  const size_t split = row_dimensions(sizes.size());
  return {product(sizes.first(split)), product(sizes.subspan(split))};
}

TensorView::TensorView(void* data, DType dtype, std::span<const int64_t> sizes, std::span<const int64_t> strides)
    : data_(static_cast<char*>(data)), dtype_(dtype), shape_(matrix_of(sizes)), row_stride_(shape_.columns) {
  if (strides.empty() || shape_.count() == 0) return;
  const size_t split = row_dimensions(sizes.size());
  flatten(sizes.first(split), strides.first(split), row_stride_, row_offsets_);
  flatten(sizes.subspan(split), strides.subspan(split), column_stride_, column_offsets_);
  if (shape_.rows == 1) row_stride_ = shape_.columns;
}

template <class Bits, class Move>
void TensorView::for_columns(int64_t r, const int32_t* columns, int64_t count, Move&& move) const {
  Bits* row = reinterpret_cast<Bits*>(data_) + row_offset(r);
  if (rows_contiguous() && columns != nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      prefetch_ahead(row + columns[i]);
      move(row[columns[i]], i);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) move(row[column_offset(columns != nullptr ? columns[i] : i)], i);
  }
}

void TensorView::gather(int64_t r, const int32_t* columns, int64_t count, void* run) const {
  if (count == 0) return;  // `run` may be null
  if (rows_contiguous() && columns == nullptr) {
    std::memcpy(run, at(row_offset(r)), static_cast<size_t>(count * item_size(dtype_)));
  } else if (item_size(dtype_) == 4) {
    for_columns<uint32_t>(r, columns, count, [&](uint32_t& x, int64_t i) { static_cast<uint32_t*>(run)[i] = x; });
  } else {
    for_columns<uint16_t>(r, columns, count, [&](uint16_t& x, int64_t i) { static_cast<uint16_t*>(run)[i] = x; });
  }
}

void TensorView::scatter(int64_t r, const int32_t* columns, int64_t count, const void* run) const {
  if (count == 0) return;  // `run` may be null
  if (rows_contiguous() && columns == nullptr) {
    std::memcpy(at(row_offset(r)), run, static_cast<size_t>(count * item_size(dtype_)));
  } else if (item_size(dtype_) == 4) {
    for_columns<uint32_t>(r, columns, count, [&](uint32_t& x, int64_t i) { x = static_cast<const uint32_t*>(run)[i]; });
  } else {
    for_columns<uint16_t>(r, columns, count, [&](uint16_t& x, int64_t i) { x = static_cast<const uint16_t*>(run)[i]; });
  }
}

const void* TensorView::row(int64_t r, void* staging) const {
  if (rows_contiguous()) return at(row_offset(r));
  gather(r, nullptr, shape_.columns, staging);
  return staging;
}

}  // namespace zenflow
