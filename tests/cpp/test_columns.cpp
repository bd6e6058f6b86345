// SPDX-License-Identifier: Apache-2.0
// Column norms in their documented order, and the choice of the largest.
#include "cpu_columns.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "check.h"
#include "isas.h"
#include "random.h"

using namespace zenflow;
using namespace zenflow_test;

namespace {

// rows x columns, row-major or column-major, with gaps.
struct Gradient {
  DType dtype;
  std::vector<int64_t> sizes, strides;
  std::vector<uint32_t> memory;

  TensorView view() { return TensorView(memory.data(), dtype, sizes, strides); }
  float at(int64_t r, int64_t c) const {
    const int64_t i = r * strides[0] + c * strides[1];
    return with_dtype(dtype, [&]<DType D>() {
      return widen<D>(static_cast<typename BitsOf<D>::type>(bits_at(dtype, memory.data(), i)));
    });
  }
};

Gradient random_gradient(Random& random) {
  Gradient g;
  g.dtype = random.one_of({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  const int64_t rows = random.chance(5) ? 0 : random.between(1, random.one_of({3, 130, 700}));
  const int64_t columns = random.chance(5) ? 0 : random.between(1, random.one_of({5, 40}));
  g.sizes = {rows, columns};
  const int64_t step = random.between(1, 2), gap = random.between(0, 3);
  g.strides = random.chance(50) ? std::vector<int64_t>{columns * step + gap, step}
                                : std::vector<int64_t>{step, rows * step + gap};
  g.memory.resize(static_cast<size_t>((rows + 3) * (columns + 3) * 2));
  const bool wild = random.chance(20);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const float value = wild ? random.any_float() : std::ldexp(random.uniform(), static_cast<int>(c % 8) - 4);
      store_rounded(g.dtype, g.memory.data(), r * g.strides[0] + c * g.strides[1], value);
    }
  }
  return g;
}

std::vector<float> norms_by_definition(const Gradient& g) {
  std::vector<float> norms;
  for (int64_t c = 0; c < g.sizes[1]; ++c) {
    float norm = 0;
    for (int64_t block = 0; block < g.sizes[0]; block += 128) {
      float sum = 0;
      for (int64_t r = block; r < std::min(g.sizes[0], block + 128); ++r) sum = std::fma(g.at(r, c), g.at(r, c), sum);
      norm += sum;
    }
    norms.push_back(norm);
  }
  return norms;
}

}  // namespace

TEST(column_norms_are_summed_in_the_documented_order) {
  Random random(5);
  ThreadPool one(1), two(2), three(3), four(4);
  for (int i = 0; i < 150; ++i) {
    Gradient g = random_gradient(random);
    const std::vector<float> expected = norms_by_definition(g);
    for (const Kernels* kernels : available_kernels()) {
      for (ThreadPool* pool : {&one, &two, &three, &four}) {
        std::vector<float> norms(7, 1.0f);
        column_norms(g.view(), *kernels, *pool, norms);
        CHECK_EQ(norms.size(), expected.size());
        for (size_t c = 0; c < norms.size(); ++c) {
          CHECK(same_bits(DType::kFloat32, bits_from_float(norms[c]), bits_from_float(expected[c])));
        }
      }
    }
    double sums[256] = {}, total = 0;
    for (size_t c = 0; c < expected.size(); ++c) sums[c % 256] += expected[c];
    for (double sum : sums) total += sum;
    const double squared = squared_norm(expected);
    CHECK(squared == total || (std::isnan(squared) && std::isnan(total)));
  }
}

TEST(the_largest_columns_are_those_of_a_stable_sort) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  Random random(6);
  for (int i = 0; i < 3000; ++i) {
    std::vector<float> norms(static_cast<size_t>(random.between(0, random.one_of({4, 60}))));
    const int64_t distinct = random.one_of({1, 3, 1000});
    for (float& norm : norms) {
      norm = static_cast<float>(random.between(0, distinct)) * random.one_of({1.0f, 0x1p-149f});
      if (random.chance(10)) norm = random.one_of({kInfinity, kNaN, -kNaN, 0.0f, -0.0f, 3e38f});
    }
    std::vector<int32_t> order(norms.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      const float x = norms[static_cast<size_t>(a)], y = norms[static_cast<size_t>(b)];
      return std::isfinite(x) != std::isfinite(y) ? std::isfinite(x) : std::isfinite(x) && x > y;
    });
    const int64_t n = static_cast<int64_t>(norms.size());
    for (int64_t k : {int64_t{0}, n, random.between(0, n)}) {
      std::vector<int32_t> expected(order.begin(), order.begin() + k);
      std::sort(expected.begin(), expected.end());
      CHECK(top_k(norms, k) == expected);
    }
  }
}
