// SPDX-License-Identifier: Apache-2.0
#include "cuda/selective_adam.h"

#include <stdexcept>
#include <type_traits>

#include "cuda/adam_element.h"
#include "cuda/tiles.h"

namespace zenflow {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kWarps = kTileThreads / 32;

struct Columns {
  int64_t width, slots;
  const int32_t* place;
};

struct State {
  void* weight;
  float *master, *exp_avg, *exp_avg_sq;
  Rule rule;
};

struct Selected {
  int32_t column, position;
};

template <DType From, DType To>
__device__ __forceinline__ Bits<To> converted(Bits<From> gradient) {
  if constexpr (From == To) {
    return gradient;
  } else {
    return from_float<To>(to_float<From>(gradient));
  }
}

template <DType G, DType W>
__device__ __forceinline__ void update_selected(const State& state, float scale, Bits<G> gradient, int64_t i, int64_t p,
                                                Bits<W>* weight) {
  const Bits<W> live = *weight;
  float master = state.master[i], m = state.exp_avg[i], v = state.exp_avg_sq[i];
  const Bits<W> written = update_element<G, W>(state.rule, scale, p, gradient, live, master, m, v);
  state.master[i] = master;
  state.exp_avg[i] = m;
  state.exp_avg_sq[i] = v;
  if (written != live) *weight = written;  // a low-precision weight seldom changes, and its sector costs 32 bytes
}

// Deferred columns go from registers to `packed`, lanes side by side but for the gaps. Selected ones are few in a row,
// so the block gathers those of a batch of rows in shared memory and then updates them with full warps, side by side in
// the state. Bound by memory: the gradient and `packed` once, 24 bytes of state and two 32-byte sectors of weight for a
// selected element. Two buffers, so that one barrier a batch of rows is enough.
template <DType G, DType P, DType W>
__global__ void __launch_bounds__(kTileThreads)
    update_and_pack(const Tiles tiles, const Columns columns, const Bits<G>* gradient, Bits<P>* packed,
                    const State state) {
  __shared__ Bits<G> staged[2][kRowsInFlight * kTileThreads];
  __shared__ Selected selected[kTileThreads];
  __shared__ int selected_in[kWarps];
  const ColumnPart part = tiles.mine();
  const int place = part.column < tiles.columns ? columns.place[part.column] : 0;

  // The place of this thread's column among the block's selected ones, and their number.
  const int warp = static_cast<int>(threadIdx.x / 32), warps = 1 << (tiles.shift - 5);  // warps that share a row
  const unsigned lower = (1u << threadIdx.x % 32) - 1, ballot = __ballot_sync(kAll, place < 0);
  if (threadIdx.x % 32 == 0) selected_in[warp] = __popc(ballot);
  __syncthreads();
  int index = __popc(ballot & lower), count = 0;
  for (int w = 0; w < warps; ++w) {
    if (w < warp % warps) index += selected_in[w];
    count += selected_in[w];
  }
  if (place < 0 && warp < warps) selected[index] = {static_cast<int32_t>(part.column), -1 - place};

  const int block_rows = static_cast<int>(tiles.end_row() - tiles.first_row());
  const int lane_row = static_cast<int>(part.first - tiles.first_row());
  const auto whole = part.walk(gradient + part.column, tiles.columns);
  const float scale = state.rule.scale();
  int buffer = 0;
  for (int done = 0; done * part.step < block_rows; done += kRowsInFlight, buffer ^= 1) {
    const auto rows = load_rows(part, done, [&](int k) { return whole[k]; });
    if (place >= 0) {
      const auto slot = part.walk(packed + place, columns.slots);
      store_rows(part, done, rows, [&](int k, Bits<G> g) { slot[k] = converted<G, P>(g); });
    } else {
      Bits<G>* own = staged[buffer] + lane_row * count + index;
      store_rows(part, done, rows, [&](int k, Bits<G> g) { own[(k - done) * part.step * count] = g; });
    }
    if (count == 0) continue;
    __syncthreads();
    const int64_t first = tiles.first_row() + done * part.step;
    const int left = block_rows - done * part.step, most = kRowsInFlight * part.step;
    const int elements = (left < most ? left : most) * count;
#pragma unroll 1  // few turns, so more of them at once would only take registers
    for (int e = static_cast<int>(threadIdx.x); e < elements; e += kTileThreads) {
      const int row = e / count;
      const Selected s = selected[e - row * count];
      update_selected<G, W>(state, scale, staged[buffer][e], (first + row) * columns.width + s.position, s.position,
                            static_cast<Bits<W>*>(state.weight) + (first + row) * tiles.columns + s.column);
    }
  }
}

// Copies deferred columns between the gradient and `packed`, and selected ones between the gradient and `kept`: there
// (kPacks) or back. Bound by memory: either side once, lanes side by side but for the gaps.
template <DType G, DType P, bool kPacks>
__global__ void __launch_bounds__(kTileThreads)
    split_columns(const Tiles tiles, const Columns columns, Bits<G>* gradient, Bits<P>* packed, Bits<G>* kept) {
  const ColumnPart part = tiles.mine();
  if (part.column >= tiles.columns) return;
  const int64_t place = columns.place[part.column];
  const auto whole = part.walk(gradient + part.column, tiles.columns);
  if (place >= 0) {
    const auto slot = part.walk(packed + place, columns.slots);
    if constexpr (kPacks) {
      move_rows(part, [&](int k) { return whole[k]; }, [&](int k, Bits<G> g) { slot[k] = converted<G, P>(g); });
    } else {
      move_rows(part, [&](int k) { return slot[k]; }, [&](int k, Bits<P> g) { whole[k] = converted<P, G>(g); });
    }
  } else {
    const auto own = part.walk(kept - 1 - place, columns.width);
    move_rows(
        part, [&](int k) { return kPacks ? whole[k] : own[k]; },
        [&](int k, Bits<G> g) { (kPacks ? own : whole)[k] = g; });
  }
}

template <DType G, DType P>
void launch_pass(const SelectivePass& pass, Stream stream) {
  const Tiles tiles(pass.rows, pass.columns);
  const Columns columns{pass.width, pass.slots, pass.place};
  const auto* gradient = static_cast<const Bits<G>*>(pass.gradient);
  auto* packed = static_cast<Bits<P>*>(pass.packed);
  if (pass.kept != nullptr) {
    launch(split_columns<G, P, true>, tiles.grid(), stream, tiles, columns, const_cast<Bits<G>*>(gradient), packed,
           static_cast<Bits<G>*>(pass.kept));
    return;
  }
  const State state{pass.weight,
                    pass.master,
                    pass.exp_avg,
                    pass.exp_avg_sq,
                    {pass.fold, pass.move, pass.coefficient, pass.column_step, pass.column_root}};
  with_dtype_constant(pass.weight_dtype, [&](auto W) {
    launch(update_and_pack<G, P, W()>, tiles.grid(), stream, tiles, columns, gradient, packed, state);
  });
}

// Calls f with the gradient's dtype and the packed one as constants.
template <class F>
void with_dtypes(const SelectivePass& pass, F&& f) {
  with_dtype_constant(pass.gradient_dtype, [&](auto G) {
    if (pass.packed_dtype == G()) return f(G, G);
    if (pass.packed_dtype == DType::kFloat32) return f(G, std::integral_constant<DType, DType::kFloat32>());
    throw std::invalid_argument("a selective pass packs in the gradient's dtype or fp32, not in another");
  });
}

}  // namespace

void selective_adam(const SelectivePass& pass, Stream stream) {
  if (pass.rows == 0 || pass.columns == 0) return;
  with_dtypes(pass, [&](auto G, auto P) { launch_pass<G(), P()>(pass, stream); });
}

void unpack(const SelectivePass& pass, void* gradient, Stream stream) {
  if (pass.rows == 0 || pass.columns == 0) return;
  const Tiles tiles(pass.rows, pass.columns);
  const Columns columns{pass.width, pass.slots, pass.place};
  with_dtypes(pass, [&](auto G, auto P) {
    launch(split_columns<G(), P(), false>, tiles.grid(), stream, tiles, columns, static_cast<Bits<G()>*>(gradient),
           static_cast<Bits<P()>*>(pass.packed), static_cast<Bits<G()>*>(pass.kept));
  });
}

}  // namespace zenflow
