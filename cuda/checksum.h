// SPDX-License-Identifier: Apache-2.0
// The checksum of edits.h, as kernels over tiles compute it.
#pragma once

#include "cuda/elements.h"
#include "cuda/tiles.h"

namespace zenflow {

// What an element's bits in row r are multiplied by: splitmix64, made odd.
__device__ __forceinline__ uint64_t row_key(int64_t r) {
  uint64_t z = (static_cast<uint64_t>(r) + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (z ^ (z >> 31)) | 1;
}

// The keys of a block's rows, computed once for all its columns.
struct RowKeys {
  static constexpr int kCapacity = kTileRows * (kTileThreads / 32);
  uint64_t key[kCapacity];

  // By all threads of the block; ends with a barrier. Row 0 of the tiles is the matrix's row first_row.
  __device__ void fill(const Tiles& tiles, int64_t first_row) {
    const int64_t begin = tiles.first_row(), count = tiles.end_row() - begin;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kTileThreads) key[i] = row_key(first_row + begin + i);
    __syncthreads();
  }
};

template <DType D>
__device__ __forceinline__ uint32_t checked_bits(Bits<D> bits) {
  return is_nan_bits(D, bits) ? (D == DType::kFloat32 ? 0x7fffffffu : 0x7fffu) : bits;
}

__device__ __forceinline__ void add_to(uint64_t* checksum, uint64_t sum) {
  atomicAdd(reinterpret_cast<unsigned long long*>(checksum), static_cast<unsigned long long>(sum));
}

}  // namespace zenflow
