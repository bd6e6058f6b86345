// SPDX-License-Identifier: Apache-2.0
#include "cpu_columns.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "scratch.h"

namespace zenflow {
namespace {

constexpr size_t kNormSums = 256;  // interleaved partial sums of squared_norm: a GPU adds them side by side

}  // namespace

void column_norms(const TensorView& gradient, const Kernels& kernels, ThreadPool& pool, std::vector<float>& norms) {
  const Matrix shape = gradient.shape();
  norms.assign(static_cast<size_t>(shape.columns), 0.0f);
  if (shape.count() == 0) return;

  const int64_t blocks = (shape.rows + kNormRows - 1) / kNormRows;
  Scratch partial_memory(blocks * shape.columns * 4);
  float* partial = partial_memory.floats();
  std::fill_n(partial, blocks * shape.columns, 0.0f);
  pool.parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
    Scratch staging(gradient.staging_bytes());
    for (int64_t block = begin; block < end; ++block) {
      const int64_t stop = std::min(shape.rows, (block + 1) * kNormRows);
      for (int64_t r = block * kNormRows; r < stop; ++r) {
        kernels.add_squares(gradient.row(r, staging.data()), gradient.dtype(), shape.columns,
                            partial + block * shape.columns);
      }
    }
  });
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t c = 0; c < shape.columns; ++c) norms[c] += partial[block * shape.columns + c];
  }
}

double squared_norm(const std::vector<float>& norms) {
  return side_norms(norms, {}).deferred;
}

SideNorms side_norms(const std::vector<float>& norms, const std::vector<int32_t>& selected) {
  Scratch mask(static_cast<int64_t>(norms.size()));
  auto* is_selected = static_cast<uint8_t*>(mask.data());
  std::fill_n(is_selected, norms.size(), uint8_t{0});
  for (const int32_t c : selected) is_selected[c] = 1;
  std::array<double, kNormSums> sums[2] = {};
  for (size_t c = 0; c < norms.size(); ++c) sums[is_selected[c]][c % kNormSums] += norms[c];
  const auto added = [](const auto& partial) { return std::accumulate(partial.begin(), partial.end(), 0.0); };
  return {added(sums[1]), added(sums[0])};
}

std::vector<int32_t> top_k(const std::vector<float>& norms, int64_t k) {
  std::vector<int32_t> columns(norms.size());
  std::iota(columns.begin(), columns.end(), 0);
  const auto rank = [&](int32_t c) { return std::isfinite(norms[c]) ? norms[c] : -1.0f; };
  const auto before = [&](int32_t a, int32_t b) { return rank(a) != rank(b) ? rank(a) > rank(b) : a < b; };
  if (k < static_cast<int64_t>(columns.size()))
    std::nth_element(columns.begin(), columns.begin() + k, columns.end(), before);
  columns.resize(static_cast<size_t>(k));
  std::sort(columns.begin(), columns.end());
  return columns;
}

}  // namespace zenflow
