// SPDX-License-Identifier: Apache-2.0
#include "cuda/scatter.h"

#include <stdexcept>
#include <string>

#include "cuda/checksum.h"

namespace zenflow {
namespace {

// Bound by memory: the upload once, the weight's sectors once or, where a selected column splits them, twice. Lanes
// follow the weight's columns, so that stores are side by side; slots mostly follow too. A thread adds up its rows'
// share of the checksum, so atomics are few.
template <DType D, bool kSums>
__global__ void __launch_bounds__(kTileThreads) scatter_rows(const Tiles tiles, const ScatterPass pass) {
  __shared__ RowKeys keys;
  if constexpr (kSums) keys.fill(tiles, pass.first_row);
  const ColumnPart part = tiles.mine();
  const int64_t slot = part.column < tiles.columns ? pass.place[part.column] : -1;
  if (slot < 0) return;
  const auto from = part.walk(static_cast<const Bits<D>*>(pass.upload) + slot, pass.slots);
  const auto to =
      part.walk(static_cast<Bits<D>*>(pass.weight) + pass.first_row * pass.columns + part.column, pass.columns);
  const uint64_t* key = keys.key + (part.first - tiles.first_row());
  uint64_t sum = 0;
  move_rows(
      part, [&](int k) { return from[k]; },
      [&](int k, Bits<D> bits) {
        to[k] = bits;
        if constexpr (kSums) sum += key[k * part.step] * checked_bits<D>(bits);
      });
  if constexpr (kSums) add_to(pass.checksums + slot, sum);
}

// Between a matrix's columns and a compact array: out of the matrix (kGathers) or into it. Bound by memory: a sector of
// the matrix for an element; lanes are side by side in the compact array.
template <class Item, bool kGathers>
__global__ void __launch_bounds__(kTileThreads)
    move_columns(const Tiles tiles, Item* matrix, int64_t stride, const int32_t* columns, Item* compact) {
  const ColumnPart part = tiles.mine();
  if (part.column >= tiles.columns) return;
  const auto inside = part.walk(matrix + columns[part.column], stride);
  const auto apart = part.walk(compact + part.column, tiles.columns);
  move_rows(
      part, [&](int k) { return kGathers ? inside[k] : apart[k]; },
      [&](int k, Item item) { (kGathers ? apart : inside)[k] = item; });
}

template <bool kGathers>
void launch_move(void* matrix, int64_t item_bytes, int64_t rows, int64_t stride, const int32_t* columns, int64_t count,
                 void* compact, Stream stream) {
  if (rows == 0 || count == 0) return;
  const Tiles tiles(rows, count);
  if (item_bytes == 2) {
    launch(move_columns<uint16_t, kGathers>, tiles.grid(), stream, tiles, static_cast<uint16_t*>(matrix), stride,
           columns, static_cast<uint16_t*>(compact));
  } else if (item_bytes == 4) {
    launch(move_columns<uint32_t, kGathers>, tiles.grid(), stream, tiles, static_cast<uint32_t*>(matrix), stride,
           columns, static_cast<uint32_t*>(compact));
  } else {
    throw std::invalid_argument("columns are moved in items of 2 or 4 bytes, not " + std::to_string(item_bytes));
  }
}

}  // namespace

void scatter(const ScatterPass& pass, Stream stream) {
  if (pass.rows == 0 || pass.slots == 0) return;
  const Tiles tiles(pass.rows, pass.columns);
  with_dtype_constant(pass.dtype, [&](auto D) {
    launch(pass.checksums != nullptr ? scatter_rows<D(), true> : scatter_rows<D(), false>, tiles.grid(), stream, tiles,
           pass);
  });
}

void gather_columns(const void* matrix, int64_t item_bytes, int64_t rows, int64_t stride, const int32_t* columns,
                    int64_t count, void* out, Stream stream) {
  launch_move<true>(const_cast<void*>(matrix), item_bytes, rows, stride, columns, count, out, stream);
}

void scatter_columns(void* matrix, int64_t item_bytes, int64_t rows, int64_t stride, const int32_t* columns,
                     int64_t count, const void* in, Stream stream) {
  launch_move<false>(matrix, item_bytes, rows, stride, columns, count, const_cast<void*>(in), stream);
}

}  // namespace zenflow
