// SPDX-License-Identifier: Apache-2.0
#include "cuda/adam_element.h"
#include "cuda/batch.h"
#include "cuda/selective_adam.h"

namespace zenflow {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 4;  // for each thread

struct Part {
  const void* gradient;
  void* weight;
  float *master, *exp_avg, *exp_avg_sq;
  int64_t count, width, columns;  // count = rows * width
  const int32_t* device_columns;
  Rule rule;
  unsigned first_block, blocks;
};

// Four adjacent elements a thread. Bound by memory: 24 bytes of state and two to four low-precision ones an element, in
// accesses of 16 and 8 bytes.
template <DType G, DType W>
__global__ void __launch_bounds__(kThreads) update_packs(const Batch<Part> batch) {
  const Part& part = batch.mine();
  const int64_t i = (static_cast<int64_t>(blockIdx.x - part.first_block) * kThreads + threadIdx.x) * kElements;
  if (i >= part.count) return;
  Bits<W>* weight = static_cast<Bits<W>*>(part.weight) + i;
  const auto g = load<kElements>(static_cast<const Bits<G>*>(part.gradient) + i);
  auto w = load<kElements>(weight);
  auto master = load<kElements>(part.master + i);
  auto m = load<kElements>(part.exp_avg + i);
  auto v = load<kElements>(part.exp_avg_sq + i);
  const float scale = part.rule.scale();
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    w.item[e] = update_element<G, W>(part.rule, scale, 0, g.item[e], w.item[e], master.item[e], m.item[e], v.item[e]);
  }
  store(weight, w);
  store(part.master + i, master);
  store(part.exp_avg + i, m);
  store(part.exp_avg_sq + i, v);
}

// The same where weights lie apart, columns have their own corrections, or addresses or sizes do not suit packs: lanes
// are neighbours in the state. Bound by memory; the scattered weights cost a 32-byte sector each.
template <DType G, DType W>
__global__ void __launch_bounds__(kThreads) update_columns(const Batch<Part> batch) {
  const Part& part = batch.mine();
  const int64_t start = static_cast<int64_t>(blockIdx.x - part.first_block) * kThreads * kElements;
  const int64_t start_row = start / part.width, start_position = start % part.width;
  // One slow 64-bit division a thread, then fast ones.
  const auto first = static_cast<uint32_t>(start_position + threadIdx.x), width = static_cast<uint32_t>(part.width);
  const int in_range =
      static_cast<int>(part.count - start < kThreads * kElements ? part.count - start : kThreads * kElements);
  const auto for_elements = [&](auto&& body) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      const int ahead = e * kThreads + static_cast<int>(threadIdx.x);
      if (ahead < in_range) body(e, start + ahead);
    }
  };
  const float scale = part.rule.scale();
  Bits<G> gradient[kElements];
  Bits<W>*weight[kElements], written[kElements];
  int64_t position[kElements];
  float master[kElements], m[kElements], v[kElements];
  for_elements([&](int e, int64_t i) {
    const uint32_t from_row = first + e * kThreads;
    position[e] = from_row % width;
    const int64_t column = part.device_columns != nullptr ? part.device_columns[position[e]] : position[e];
    weight[e] = static_cast<Bits<W>*>(part.weight) + (start_row + from_row / width) * part.columns + column;
    written[e] = *weight[e];
    gradient[e] = static_cast<const Bits<G>*>(part.gradient)[i];
    master[e] = part.master[i], m[e] = part.exp_avg[i], v[e] = part.exp_avg_sq[i];
  });
  for_elements([&](int e, int64_t i) {
    *weight[e] = update_element<G, W>(part.rule, scale, position[e], gradient[e], written[e], master[e], m[e], v[e]);
    part.master[i] = master[e], part.exp_avg[i] = m[e], part.exp_avg_sq[i] = v[e];
  });
}

bool suits_packs(const AdamTask& task) {
  for (const void* address :
       {task.gradient, static_cast<const void*>(task.weight), static_cast<const void*>(task.master),
        static_cast<const void*>(task.exp_avg), static_cast<const void*>(task.exp_avg_sq)}) {
    if (!is_aligned(address, 16)) return false;
  }
  return task.device_columns == nullptr && task.column_step == nullptr && task.rows * task.width % kElements == 0;
}

// The tasks of one pair of dtypes.
template <DType G, DType W>
void launch_adam(const std::vector<AdamTask>& tasks, const float* coefficient, Stream stream) {
  std::vector<Part> packs, columns;
  for (const AdamTask& task : tasks) {
    const int64_t count = task.rows * task.width;
    if (task.gradient_dtype != G || task.weight_dtype != W || count == 0) continue;
    const Rule rule{task.fold, task.move, coefficient, task.column_step, task.column_root};
    const auto blocks = static_cast<unsigned>((count - 1) / (kThreads * kElements) + 1);
    (suits_packs(task) ? packs : columns)
        .push_back({task.gradient, task.weight, task.master, task.exp_avg, task.exp_avg_sq, count, task.width,
                    task.columns, task.device_columns, rule, 0, blocks});
  }
  launch_batches(update_packs<G, W>, packs, kThreads, stream);
  launch_batches(update_columns<G, W>, columns, kThreads, stream);
}

}  // namespace

void adam(const std::vector<AdamTask>& tasks, const float* coefficient, Stream stream) {
  for (DType gradient : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (DType weight : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      with_dtype_constant(gradient, [&](auto G) {
        with_dtype_constant(weight, [&](auto W) { launch_adam<G(), W()>(tasks, coefficient, stream); });
      });
    }
  }
}

}  // namespace zenflow
