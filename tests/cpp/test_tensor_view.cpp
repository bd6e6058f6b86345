// SPDX-License-Identifier: Apache-2.0
// Views of random shapes and strides against a naive walk over every index.
#include "tensor_view.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "check.h"
#include "random.h"

using namespace zenflow;
using namespace zenflow_test;

namespace {

// A tensor inside a larger piece of memory: dimensions permuted, sliced with steps, and, if asked for, expanded.
struct Strided {
  std::vector<int64_t> sizes, strides, offsets;  // offsets of all elements, in logical order
  int64_t start = 0, span = 1;
};

Strided random_tensor(Random& random, bool expands) {
  Strided t;
  const size_t dimensions = static_cast<size_t>(random.between(0, 5));
  std::vector<size_t> order(dimensions);
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = dimensions; i > 1; --i) {
    if (random.chance(50))
      std::swap(order[i - 1], order[static_cast<size_t>(random.between(0, static_cast<int64_t>(i) - 1))]);
  }
  t.sizes.resize(dimensions);
  t.strides.resize(dimensions);
  for (size_t i = dimensions; i-- > 0;) {
    const size_t d = order[i];
    t.sizes[d] = random.chance(25) ? 1 : random.chance(3) ? 0 : random.between(2, 5);
    const int64_t step = random.chance(80) ? 1 : random.between(2, 3);
    const int64_t margin = random.chance(80) ? 0 : random.between(1, 2);
    t.strides[d] = t.span * step;
    t.start += t.span * margin;
    t.span *= std::max<int64_t>(1, t.sizes[d]) * step + margin;
    if (t.sizes[d] == 1 && random.chance(50)) t.strides[d] = random.between(0, 99);  // means nothing
    if (expands && random.chance(20)) t.strides[d] = 0;
  }
  t.offsets.assign(1, 0);
  for (size_t d = 0; d < dimensions; ++d) {
    std::vector<int64_t> wider;
    for (int64_t offset : t.offsets) {
      for (int64_t j = 0; j < t.sizes[d]; ++j) wider.push_back(offset + j * t.strides[d]);
    }
    t.offsets = wider;
  }
  return t;
}

Matrix naive_matrix(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  switch (sizes.size()) {
    case 0:
    case 1:
      return {1, count};
    case 3:
      return {sizes[0] * sizes[1], sizes[2]};
    default: {
      int64_t columns = 1;
      for (size_t d = 1; d < sizes.size(); ++d) columns *= sizes[d];
      return {sizes[0], columns};
    }
  }
}

std::vector<int32_t> random_columns(Random& random, int64_t columns) {
  std::vector<int32_t> some;
  for (int32_t c = 0; c < columns; ++c) {
    if (random.chance(50)) some.push_back(c);
  }
  if (random.chance(50)) std::reverse(some.begin(), some.end());
  return some;
}

template <class Bits>
void check_tensor(Random& random, DType dtype, bool expands) {
  const Strided t = random_tensor(random, expands);
  std::vector<Bits> memory(static_cast<size_t>(t.span));
  std::iota(memory.begin(), memory.end(), Bits{1});
  Bits* const first = memory.data() + t.start;
  const TensorView view(first, dtype, t.sizes, t.strides);
  const auto [rows, columns] = naive_matrix(t.sizes);
  CHECK_EQ(view.shape().rows, rows);
  CHECK_EQ(view.shape().columns, columns);
  const auto offset = [&](int64_t r, int64_t c) { return t.offsets[static_cast<size_t>(r * columns + c)]; };

  if (view.contiguous()) {
    for (int64_t i = 0; i < rows * columns; ++i) CHECK_EQ(view.at(i), first + t.offsets[static_cast<size_t>(i)]);
  }
  for (int64_t r = 0; columns > 0 && r < rows; ++r) {
    const std::vector<int32_t> some = random_columns(random, columns);
    std::vector<Bits> all(static_cast<size_t>(columns)), run(some.size());
    const Bits* row = static_cast<const Bits*>(view.row(r, all.data()));
    for (int64_t c = 0; c < columns; ++c) CHECK_EQ(row[c], first[offset(r, c)]);

    const int64_t count = random.between(0, columns);
    std::vector<Bits> start(static_cast<size_t>(count));
    view.gather(r, nullptr, count, start.data());
    for (int64_t c = 0; c < count; ++c) CHECK_EQ(start[static_cast<size_t>(c)], first[offset(r, c)]);

    view.gather(r, some.data(), static_cast<int64_t>(some.size()), run.data());
    for (size_t i = 0; i < some.size(); ++i) CHECK_EQ(run[i], first[offset(r, some[i])]);
    if (expands) continue;

    std::vector<Bits> expected = memory;
    for (size_t i = 0; i < some.size(); ++i) {
      run[i] = static_cast<Bits>(random.bits());
      expected[static_cast<size_t>(t.start + offset(r, some[i]))] = run[i];
    }
    view.scatter(r, some.data(), static_cast<int64_t>(some.size()), run.data());
    CHECK(memory == expected);
    for (int64_t c = 0; c < count; ++c) {
      start[static_cast<size_t>(c)] = static_cast<Bits>(random.bits());
      expected[static_cast<size_t>(t.start + offset(r, c))] = start[static_cast<size_t>(c)];
    }
    view.scatter(r, nullptr, count, start.data());
    CHECK(memory == expected);
  }
}

}  // namespace

TEST(views_read_and_write_the_elements_of_any_strided_tensor) {
  Random random(3);
  for (int i = 0; i < 4000; ++i) {
    const bool expands = random.chance(25);
    random.chance(50) ? check_tensor<uint32_t>(random, DType::kFloat32, expands)
                      : check_tensor<uint16_t>(random, random.one_of({DType::kBFloat16, DType::kFloat16}), expands);
  }
}

TEST(no_strides_mean_contiguous) {
  Random random(4);
  for (int i = 0; i < 200; ++i) {
    std::vector<int64_t> sizes(static_cast<size_t>(random.between(0, 5)));
    for (int64_t& size : sizes) size = random.between(1, 4);
    const Matrix shape = naive_matrix(sizes);
    std::vector<float> memory(static_cast<size_t>(shape.count()));
    const TensorView view(memory.data(), DType::kFloat32, sizes, {});
    CHECK(view.contiguous());
    for (int64_t r = 0; r < shape.rows; ++r)
      CHECK_EQ(view.row(r, nullptr), &memory[static_cast<size_t>(r * shape.columns)]);
  }
}

TEST(transposed_and_sliced_views_are_not_contiguous) {
  float memory[24] = {};
  const auto contiguous = [&](std::vector<int64_t> sizes, std::vector<int64_t> strides) {
    return TensorView(memory, DType::kFloat32, sizes, strides).contiguous();
  };
  CHECK(contiguous({4, 6}, {6, 1}));
  CHECK(!contiguous({4, 6}, {1, 4}));
  CHECK(!contiguous({4, 5}, {6, 1}));
  CHECK(!contiguous({4, 3}, {6, 2}));
  CHECK(!contiguous({4, 6}, {0, 1}));
  CHECK(contiguous({2, 3, 4}, {12, 4, 1}));
  CHECK(!contiguous({2, 3, 4}, {4, 8, 1}));
  CHECK(!contiguous({2, 3, 2, 2}, {12, 1, 6, 3}));
  CHECK(contiguous({1, 24}, {99, 1}));
  CHECK(contiguous({6, 1, 4}, {4, 99, 1}));
  CHECK(!contiguous({12}, {2}));
}

TEST(an_empty_view_is_false_and_one_on_memory_is_true) {
  float x = 0;
  CHECK(!TensorView());
  CHECK(static_cast<bool>(TensorView(&x, DType::kFloat32, {}, {})));
}
