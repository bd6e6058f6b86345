// SPDX-License-Identifier: Apache-2.0
// The loops of kernels.h over the vector type of one instruction set. Included once by each kernels_<isa>.cpp, which
// defines ZENFLOW_ISA and includes simd_<isa>.h first; everything here lives in that namespace, so no code of one
// instruction set can stand in for another's.
#pragma once

#include <cstring>

#include "kernels.h"
#include "update_body.h"
#include "vector_loops.h"

namespace zenflow::ZENFLOW_ISA {

template <class T>
void gather_one_by_one(const SlotMap& map, const void* row, void* packed) {
  for (int64_t s = 0; s < map.slots; ++s) static_cast<T*>(packed)[s] = static_cast<const T*>(row)[map.columns[s]];
}

template <class T>
void scatter_one_by_one(const SlotMap& map, const void* packed, void* row) {
  for (int64_t s = 0; s < map.slots; ++s) static_cast<T*>(row)[map.columns[s]] = static_cast<const T*>(packed)[s];
}

inline void gather(const SlotMap& map, const void* row, int64_t item, void* packed) {
  item == 4 ? gather_one_by_one<uint32_t>(map, row, packed) : gather_one_by_one<uint16_t>(map, row, packed);
}

inline void scatter(const SlotMap& map, const void* packed, int64_t item, void* row) {
  item == 4 ? scatter_one_by_one<uint32_t>(map, packed, row) : scatter_one_by_one<uint16_t>(map, packed, row);
}

inline void stream(void* to, const void* from, int64_t bytes) {
  char* const out = static_cast<char*>(to);
  const char* const in = static_cast<const char*>(from);
  const int64_t before = (kLine - static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) % kLine)) % kLine;
  int64_t i = before < bytes ? before : bytes;
  std::memcpy(out, in, static_cast<size_t>(i));
  for (; i + kLine <= bytes; i += kLine) stream_line(out + i, in + i);
  std::memcpy(out + i, in + i, static_cast<size_t>(bytes - i));
}

template <DType D>
void add_squares(const void* x, int64_t count, float* sums) {
  for_each_vector(0, count, [&](int64_t i, int64_t n) {
    prefetch_ahead(static_cast<const Bits<D>*>(x) + i);
    const Floats value = load_some<D>(x, i, n);
    store_some<kF32>(sums, i, n, fma(value, value, load_some<kF32>(sums, i, n)));
  });
}

// Calls f<G, W, M>() for the dtypes of an update's lanes, output and moments.
template <class Function>
void with_dtypes(const Update& u, DType lanes, DType written, Function&& f) {
  with_dtype(lanes, [&]<DType G>() {
    with_dtype(written, [&]<DType W>() {
      u.moments == kF32 ? f.template operator()<G, W, kF32>() : f.template operator()<G, W, DType::kBFloat16>();
    });
  });
}

inline Kernels make_kernels(const char* name) {
  return {name,
          [](const Update& u, DType lanes, DType written, int64_t begin, int64_t end) {
            with_dtypes(u, lanes, written, [&]<DType G, DType W, DType M>() { update<G, W, M>(u, begin, end); });
          },
          [](const Update& u, DType lanes, DType written, int64_t begin, int64_t end) {
            with_dtypes(u, lanes, written, [&]<DType G, DType W, DType M>() { update_mean<G, W, M>(u, begin, end); });
          },
          [](const void* x, DType dtype, int64_t count, float* sums) {
            with_dtype(dtype, [&]<DType D>() { add_squares<D>(x, count, sums); });
          },
          [](const float* x, DType dtype, int64_t count, void* rounded) {
            with_dtype(dtype, [&]<DType D>() {
              for_each_vector(0, count,
                              [&](int64_t i, int64_t n) { store_some<D>(rounded, i, n, load_some<kF32>(x, i, n)); });
            });
          },
          [](const void* x, DType dtype, int64_t count, float* widened) {
            with_dtype(dtype, [&]<DType D>() {
              for_each_vector(0, count,
                              [&](int64_t i, int64_t n) { store_some<kF32>(widened, i, n, load_some<D>(x, i, n)); });
            });
          },
          gather,
          scatter,
          stream};
}

}  // namespace zenflow::ZENFLOW_ISA
