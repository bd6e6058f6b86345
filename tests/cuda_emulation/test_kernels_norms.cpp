// SPDX-License-Identifier: Apache-2.0
// Column norms, what follows from them, and the choice of the largest.
#include <algorithm>
#include <cmath>
#include <deque>
#include <numeric>

#include "cuda/column_norms.h"
#include "cuda/top_k.h"
#include "device_arrays.h"

using namespace zenflow;
using namespace zenflow_test;

namespace {

Elements floats(const std::vector<float>& values) {
  Elements elements{DType::kFloat32, {}};
  for (const float value : values) elements.bits.push_back(bits_from_float(value));
  return elements;
}

std::vector<float> norms_by_definition(const Elements& gradient, const Shape& shape) {
  std::vector<float> norms;
  for (int64_t c = 0; c < shape.columns; ++c) {
    float norm = 0;
    for (int64_t block = 0; block < shape.rows; block += 128) {
      float sum = 0;
      for (int64_t r = block; r < std::min(shape.rows, block + 128); ++r) {
        const float g = gradient.at(r * shape.columns + c);
        sum = std::fma(g, g, sum);
      }
      norm += sum;
    }
    norms.push_back(norm);
  }
  return norms;
}

double squared_by_definition(const std::vector<float>& norms) {
  double partials[256] = {}, total = 0;
  for (size_t c = 0; c < norms.size(); ++c) partials[c % 256] += norms[c];
  for (const double partial : partials) total += partial;
  return total;
}

// ... of the columns on one side.
double squared_by_definition(std::vector<float> norms, const std::vector<int32_t>& place, bool selected) {
  for (size_t c = 0; c < norms.size(); ++c) {
    if ((place[c] < 0) != selected) norms[c] = 0;
  }
  return squared_by_definition(norms);
}

bool same(double a, double b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

// Gradients, some of them unaligned, as tasks of one call.
struct Gradients {
  std::vector<Shape> shapes;
  std::deque<DeviceElements> memory, norms;
  std::vector<std::vector<float>> expected;
  std::vector<NormTask> tasks;

  void add(Random& random, DType dtype, const Shape& shape, bool wild) {
    const Elements gradient = random_elements(random, dtype, shape.count(), wild);
    shapes.push_back(shape);
    expected.push_back(norms_by_definition(gradient, shape));
    memory.emplace_back(gradient, random.chance(30) ? random.between(1, 7) : 0);
    norms.emplace_back(floats(std::vector<float>(static_cast<size_t>(shape.columns), -1.0f)), random.between(0, 3));
    tasks.push_back({memory.back().data(), dtype, shape.rows, shape.columns, norms.back().floats()});
  }

  void check() {
    DeviceArray<float> scratch(std::vector<float>(static_cast<size_t>(column_norms_scratch(tasks)), -1.0f));
    DeviceArray<double> squared(std::vector<double>(tasks.size(), -1.0));
    column_norms(tasks, scratch.data(), test_stream());
    squared_norms(tasks, squared.data(), test_stream());
    const std::vector<double> sums = squared.read();
    scratch.read();
    for (size_t t = 0; t < tasks.size(); ++t) {
      CHECK_EQ(first_difference(norms[t].read(), floats(expected[t])), -1);
      CHECK(same(sums[t], squared_by_definition(expected[t])));
    }
  }
};

}  // namespace

TEST(column_norms_of_random_gradients) {
  Random random(1);
  for (int round = 0; round < 25; ++round) {
    Gradients gradients;
    const int64_t count = random.between(1, 12);
    for (int64_t i = 0; i < count; ++i)
      gradients.add(random, random_dtype(random), random_shape(random), random.chance(20));
    gradients.check();
  }
}

TEST(column_norms_of_odd_gradients) {
  Random random(2);
  Gradients gradients;
  for (const DType dtype : kDTypes) {
    for (const Shape& shape : {Shape{0, 5}, Shape{3, 0}, Shape{0, 0}, Shape{1, 1}, Shape{128, 8}, Shape{129, 8},
                               Shape{8193, 1}, Shape{8200, 8}, Shape{1, 1000}, Shape{2, 66000}}) {
      gradients.add(random, dtype, shape, false);
    }
  }
  gradients.check();
}

TEST(column_norms_of_more_tasks_than_a_launch_holds) {
  Random random(3);
  Gradients gradients;
  for (int i = 0; i < 300; ++i)
    gradients.add(random, random_dtype(random), {random.between(0, 130), random.between(0, 9)}, false);
  gradients.check();
  column_norms({}, nullptr, test_stream());
  squared_norms({}, nullptr, test_stream());
}

TEST(norms_of_either_side) {
  Random random(6);
  std::vector<std::vector<float>> norms;
  std::vector<std::vector<int32_t>> places;
  std::deque<DeviceElements> norms_there;
  std::deque<DeviceArray<int32_t>> places_there;
  DeviceArray<double> sides(std::vector<double>(2 * 300, -1.0));
  std::vector<SideTask> tasks;
  for (int t = 0; t < 300; ++t) {
    const auto columns = static_cast<size_t>(t < 290 ? random.between(0, 600) : random.between(600, 70000));
    norms.emplace_back(columns);
    for (float& norm : norms.back()) norm = random.chance(2) ? INFINITY : random.uniform() * random.uniform();
    places.emplace_back(columns);
    for (int32_t& place : places.back()) place = static_cast<int32_t>(random.between(-5, 5));
    norms_there.emplace_back(floats(norms.back()), random.between(0, 3));
    places_there.emplace_back(places.back());
    tasks.push_back(
        {norms_there.back().floats(), places_there.back().data(), static_cast<int64_t>(columns), sides.data() + 2 * t});
  }
  side_norms(tasks, test_stream());
  const std::vector<double> sums = sides.read();
  for (size_t t = 0; t < 300; ++t) {
    CHECK(same(sums[2 * t], squared_by_definition(norms[t], places[t], true)));
    CHECK(same(sums[2 * t + 1], squared_by_definition(norms[t], places[t], false)));
  }
}

TEST(clip_coefficients) {
  Random random(4);
  for (int round = 0; round < 40; ++round) {
    std::vector<double> squared;
    const int64_t count = random.one_of<int64_t>({0, 1, 31, 32, 33, random.between(2, 300)});
    for (int64_t i = 0; i < count; ++i) squared.push_back(std::exp(8.0 * random.uniform()));
    if (count > 0 && random.chance(30)) squared.back() = random.one_of({HUGE_VAL, std::nan("")});
    const double limit = random.one_of({1.0, 1e-3, 1e6, 0.0});
    const double norm = std::sqrt(std::accumulate(squared.begin(), squared.end(), 0.0));
    const float coefficient = std::isfinite(norm) ? static_cast<float>(std::min(1.0, limit / (norm + 1e-6))) : 1.0f;

    DeviceArray<double> memory(squared), found_norm({-1.0});
    DeviceArray<float> found({-1.0f});
    clip_coefficient(memory.data(), count, limit, found_norm.data(), found.data(), test_stream());
    CHECK(same(found_norm.read()[0], norm));
    CHECK_EQ(found.read()[0], coefficient);
  }
}

namespace {

std::vector<int32_t> largest_by_definition(const std::vector<float>& norms, int64_t k) {
  std::vector<int32_t> columns(norms.size());
  std::iota(columns.begin(), columns.end(), 0);
  const auto rank = [&](int32_t c) {
    return std::isfinite(norms[static_cast<size_t>(c)]) ? norms[static_cast<size_t>(c)] : -1.0f;
  };
  std::stable_sort(columns.begin(), columns.end(), [&](int32_t a, int32_t b) { return rank(a) > rank(b); });
  columns.resize(static_cast<size_t>(k));
  std::sort(columns.begin(), columns.end());
  return columns;
}

// Distinct norms, or few values and so many ties, or neither number nor finite here and there.
std::vector<float> random_norms(Random& random, int64_t columns) {
  std::vector<float> norms(static_cast<size_t>(columns));
  const int kind = static_cast<int>(random.between(0, 3));
  for (float& norm : norms) {
    norm = std::fabs(kind == 0 ? static_cast<float>(random.between(0, 2))
                               : std::ldexp(random.uniform(), static_cast<int>(random.between(-20, 20))));
    if (kind == 1) norm = std::fabs(random.any_float());
    if (kind == 2 && random.chance(60))
      norm = random.one_of({HUGE_VALF, std::nanf(""), -std::nanf(""), 0.0f, 0x1p-149f});
  }
  return norms;
}

void check_top_k(Random& random, const std::vector<int64_t>& sizes) {
  std::deque<DeviceArray<float>> memory;
  std::deque<DeviceArray<int32_t>> selected;
  std::vector<std::vector<int32_t>> expected;
  std::vector<TopKTask> tasks;
  for (const int64_t columns : sizes) {
    const std::vector<float> norms = random_norms(random, columns);
    const int64_t k =
        random.one_of<int64_t>({0, std::min<int64_t>(1, columns), columns, columns / 10, random.between(0, columns)});
    expected.push_back(largest_by_definition(norms, k));
    memory.emplace_back(norms);
    selected.emplace_back(std::vector<int32_t>(static_cast<size_t>(k), -1));
    tasks.push_back({memory.back().data(), columns, k, selected.back().data()});
  }
  top_k(tasks, test_stream());
  for (size_t t = 0; t < tasks.size(); ++t) CHECK(selected[t].read() == expected[t]);
}

}  // namespace

TEST(top_k_of_random_norms) {
  Random random(5);
  for (int round = 0; round < 12; ++round) {
    check_top_k(random, {0, 1, 31, 32, 33, random.between(2, 1500), random.between(2, 5000)});
  }
}

TEST(top_k_of_many_columns) {
  Random random(6);
  check_top_k(random, {4096, 4097, 28672, 32768, 32769, 70000});
  check_top_k(random, {4096, 4097, 32768, 33000});
}

TEST(top_k_of_more_tasks_than_a_launch_holds) {
  Random random(7);
  std::vector<int64_t> sizes;
  for (int i = 0; i < 130; ++i) sizes.push_back(random.between(0, 12));
  check_top_k(random, sizes);
  top_k({}, test_stream());
}
