// SPDX-License-Identifier: Apache-2.0
// Columns on their way: the slot map, scatter and gather, checksums, and edits of deferred columns.
#include "column_places.h"
#include "cuda/edits.h"
#include "cuda/scatter.h"
#include "cuda/slot_map.h"
#include "device_arrays.h"

using namespace zenflow;
using namespace zenflow_test;

namespace {

// Rows first .. first + rows of the columns, compact.
Elements gathered(const Elements& matrix, int64_t stride, int64_t first, int64_t rows,
                  const std::vector<int32_t>& columns) {
  Elements compact{matrix.dtype, {}};
  for (int64_t r = first; r < first + rows; ++r) {
    for (const int32_t c : columns) compact.bits.push_back(matrix.bits[static_cast<size_t>(r * stride + c)]);
  }
  return compact;
}

std::vector<uint64_t> checksums_of(const DeviceElements& weight, DType dtype, const Shape& shape,
                                   const DeviceArray<int32_t>& place, int64_t slots) {
  const DeviceArray<uint64_t> sums(std::vector<uint64_t>(static_cast<size_t>(slots), 77));
  column_checksums(weight.data(), dtype, shape.rows, shape.columns, place.data(), slots, sums.data(), test_stream());
  return sums.read();
}

}  // namespace

TEST(slot_maps) {
  Random random(21);
  for (int round = 0; round < 20; ++round) {
    const Places places = random_places(random, random.one_of<int64_t>({0, 1, 255, 256, 257, random.between(0, 2000)}));
    const DeviceArray<int32_t> slots(places.slot_columns), device(places.device_columns);
    const DeviceArray<int32_t> place(std::vector<int32_t>(places.place.size(), 12345));
    build_place(slots.data(), places.slots(), device.data(), places.width(), place.data(), test_stream());
    CHECK(place.read() == places.place);
  }
}

// A weight published in chunks of rows, whose checksums add up to those of the whole.
TEST(scatter_in_chunks) {
  Random random(22);
  for (int round = 0; round < 25; ++round) {
    const DType dtype = random_dtype(random);
    const Shape shape = round == 0 ? Shape{2, 70000} : random_shape(random);
    const Places places = random_places(random, shape.columns);
    const Elements before = random_elements(random, dtype, shape.count(), true);
    const Elements upload = random_elements(random, dtype, shape.rows * places.slots(), true);
    const DeviceElements weight(before, random.between(0, 3)), source(upload, random.between(0, 3));
    const DeviceArray<int32_t> place(places.place);
    const DeviceArray<uint64_t> sums(std::vector<uint64_t>(static_cast<size_t>(places.slots())));
    const bool counts = random.chance(70);
    for (int64_t first = 0, rows = 0; first < shape.rows; first += rows) {
      rows = random.between(first == 0 ? 0 : 1, shape.rows - first);
      const char* chunk = static_cast<const char*>(source.data()) + first * places.slots() * item_size(dtype);
      scatter({chunk, weight.data(), dtype, first, rows, shape.columns, place.data(), places.slots(),
               counts ? sums.data() : nullptr},
              test_stream());
    }
    const Elements after = weight.read();
    CHECK(gathered(after, shape.columns, 0, shape.rows, places.slot_columns).bits == upload.bits);
    CHECK(gathered(after, shape.columns, 0, shape.rows, places.device_columns).bits ==
          gathered(before, shape.columns, 0, shape.rows, places.device_columns).bits);
    if (counts) CHECK(sums.read() == checksums_of(weight, dtype, shape, place, places.slots()));
  }
}

TEST(gather_and_scatter_of_columns) {
  Random random(23);
  for (int round = 0; round < 25; ++round) {
    const DType dtype = random_dtype(random);
    const Shape shape = random.chance(10) ? Shape{0, 7} : random_shape(random);
    const int64_t stride = shape.columns + random.between(0, 3);
    const Places places = random_places(random, shape.columns);
    const Elements matrix = random_elements(random, dtype, shape.rows * stride, true);
    const DeviceElements memory(matrix, random.between(0, 3)),
        target(random_elements(random, dtype, shape.rows * stride, true));
    const DeviceElements compact({dtype, std::vector<uint32_t>(static_cast<size_t>(shape.rows * places.width()))});
    const DeviceArray<int32_t> columns(places.device_columns);
    gather_columns(memory.data(), item_size(dtype), shape.rows, stride, columns.data(), places.width(), compact.data(),
                   test_stream());
    const Elements expected = gathered(matrix, stride, 0, shape.rows, places.device_columns);
    CHECK(compact.read().bits == expected.bits);

    const Elements before = target.read();
    scatter_columns(target.data(), item_size(dtype), shape.rows, stride, columns.data(), places.width(), compact.data(),
                    test_stream());
    const Elements after = target.read();
    CHECK(gathered(after, stride, 0, shape.rows, places.device_columns).bits == expected.bits);
    CHECK(gathered(after, stride, 0, shape.rows, places.slot_columns).bits ==
          gathered(before, stride, 0, shape.rows, places.slot_columns).bits);
  }
  const DeviceArray<int32_t> columns({0});
  CHECK_THROWS(std::invalid_argument,
               gather_columns(columns.data(), 8, 1, 1, columns.data(), 1, columns.data(), test_stream()));
}

TEST(checksums_see_one_changed_bit) {
  Random random(24);
  for (int round = 0; round < 40; ++round) {
    const DType dtype = random_dtype(random);
    const Shape shape = random_shape(random);
    const Places places = random_places(random, shape.columns);
    if (places.slots() == 0) continue;
    const DeviceArray<int32_t> place(places.place);
    Elements weight = random_elements(random, dtype, shape.count(), random.chance(50));
    const auto before = checksums_of(DeviceElements(weight, 1), dtype, shape, place, places.slots());

    const int64_t slot = random.between(0, places.slots() - 1), row = random.between(0, shape.rows - 1);
    uint32_t& bits =
        weight.bits[static_cast<size_t>(row * shape.columns + places.slot_columns[static_cast<size_t>(slot)])];
    const uint32_t old = bits;
    bits ^= 1u << random.between(0, 8 * item_size(dtype) - 1);
    const auto after = checksums_of(DeviceElements(weight), dtype, shape, place, places.slots());
    for (int64_t s = 0; s < places.slots(); ++s) {
      const bool equal = before[static_cast<size_t>(s)] == after[static_cast<size_t>(s)];
      CHECK_EQ(equal, s != slot || same_bits(dtype, old, bits));
    }
  }
}

// Rows that change places are seen: a row's key is its own.
TEST(checksums_see_the_order_of_rows) {
  const DeviceArray<int32_t> place({0});
  const Shape shape{2, 1};
  const auto sum = [&](uint32_t a, uint32_t b) {
    return checksums_of(DeviceElements({DType::kFloat32, {a, b}}), DType::kFloat32, shape, place, 1);
  };
  CHECK(sum(1, 2) != sum(2, 1));
  CHECK(sum(0x7fc00000u, 0) == sum(0xffffffffu, 0));
}

namespace {

// [rows, slots] in page-locked host memory.
struct HostElements {
  DType dtype;
  int64_t count;
  void *memory = nullptr, *device = nullptr;

  explicit HostElements(const Elements& elements) : dtype(elements.dtype), count(elements.count()) {
    const auto bytes = static_cast<size_t>((count + 1) * item_size(dtype));
    ZENFLOW_CUDA_CHECK(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped));
    ZENFLOW_CUDA_CHECK(cudaHostGetDevicePointer(&device, memory, 0));
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(at(i), &elements.bits[static_cast<size_t>(i)], static_cast<size_t>(item_size(dtype)));
  }
  HostElements(const HostElements&) = delete;
  ~HostElements() { cudaFreeHost(memory); }
  char* at(int64_t i) const { return static_cast<char*>(memory) + i * item_size(dtype); }
  Elements read() const {
    Elements elements{dtype, {}};
    for (int64_t i = 0; i < count; ++i) elements.bits.push_back(bits_at(dtype, memory, i));
    return elements;
  }
};

}  // namespace

TEST(edits_are_adopted_by_value) {
  Random random(25);
  for (int round = 0; round < 30; ++round) {
    const DType dtype = random_dtype(random);
    const Shape shape = random.chance(10) ? Shape{0, 3} : random.chance(5) ? Shape{2, 70000} : random_shape(random);
    const Places places = random_places(random, shape.columns);
    const int64_t slots = places.slots();
    Elements weight = random_elements(random, dtype, shape.count(), random.chance(50));
    const DeviceArray<int32_t> place(places.place), slot_columns(places.slot_columns);
    const auto written = checksums_of(DeviceElements(weight), dtype, shape, place, slots);
    Elements last = gathered(weight, shape.columns, 0, shape.rows, places.slot_columns);
    Elements pending = random_elements(random, dtype, last.count(), false);
    Elements master = random_elements(random, DType::kFloat32, last.count(), false);
    const HostElements host_last(last), host_pending(pending), host_master(master);

    const int percent = random.one_of({0, 1, 50});
    for (int64_t i = 0; i < weight.count(); ++i) {
      if (random.chance(percent)) weight.set(i, random.any_float());
    }
    const DeviceElements live(weight, random.between(0, 3));
    const DeviceArray<uint64_t> expected(written), found(std::vector<uint64_t>(static_cast<size_t>(slots), 5));
    adopt_edits(
        {live.data(), dtype, shape.rows, shape.columns, slot_columns.data(), place.data(), slots, expected.data(),
         found.data(), host_last.device, host_pending.device, static_cast<float*>(host_master.device)},
        test_stream());
    const auto now = expected.read();

    const Elements edited = gathered(weight, shape.columns, 0, shape.rows, places.slot_columns);
    for (int64_t i = 0; i < last.count(); ++i) {
      const auto at = static_cast<size_t>(i);
      if (same_bits(dtype, edited.bits[at], last.bits[at])) continue;
      last.bits[at] = pending.bits[at] = edited.bits[at];
      master.set(i, edited.at(i));
    }
    CHECK(host_last.read().bits == last.bits);
    CHECK(host_pending.read().bits == pending.bits);
    CHECK_EQ(first_difference(host_master.read(), master), -1);
    CHECK(now == checksums_of(live, dtype, shape, place, slots));
  }
}
