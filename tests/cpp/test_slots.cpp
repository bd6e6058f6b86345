// SPDX-License-Identifier: Apache-2.0
// Packing and unpacking of rows by their slots, and copies past the caches.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "check.h"
#include "isas.h"
#include "random.h"
#include "slot_order.h"
#include "streaming.h"

using namespace zenflow;
using namespace zenflow_test;

namespace {

// An order as training makes it: some columns have slots, and hand-overs have put others into single slots.
SlotOrder random_order(Random& random, int64_t row_length) {
  const int share = static_cast<int>(random.one_of({0, 50, 90, 97, 100}));
  std::vector<int32_t> held, free;
  for (int32_t c = 0; c < row_length; ++c) (random.chance(share) ? held : free).push_back(c);
  SlotOrder order(held, row_length);
  for (int64_t swaps = random.between(0, 4); swaps > 0 && !free.empty() && !held.empty(); --swaps) {
    std::vector<int32_t> slots, columns;
    for (int64_t i = std::min<int64_t>(random.between(1, 9), static_cast<int64_t>(std::min(free.size(), held.size())));
         i > 0; --i) {
      const auto slot = static_cast<int32_t>(random.between(0, order.slots() - 1));
      if (std::find(slots.begin(), slots.end(), slot) != slots.end()) continue;
      const auto at = static_cast<size_t>(random.between(0, static_cast<int64_t>(free.size()) - 1));
      slots.push_back(slot), columns.push_back(free[at]);
      free[at] = order.columns()[static_cast<size_t>(slot)];
    }
    std::vector<int32_t> expected = order.columns();
    for (size_t i = 0; i < slots.size(); ++i) expected[static_cast<size_t>(slots[i])] = columns[i];
    order.put(slots, columns);
    CHECK(order.columns() == expected);
  }
  return order;
}

template <class T>
void check_slots(uint64_t seed) {
  Random random(seed);
  for (int round = 0; round < 1500; ++round) {
    const int64_t row_length = random.one_of<int64_t>({0, 1, 31, 32, 33, 64, random.between(1, 300)});
    const SlotOrder order = random_order(random, row_length);
    const int64_t slots = order.slots();
    std::vector<T> row(static_cast<size_t>(row_length)), packed(static_cast<size_t>(slots));
    for (T& x : row) x = static_cast<T>(random.bits());
    for (T& x : packed) x = static_cast<T>(random.bits());
    std::vector<T> gathered, scattered = row;
    for (const int32_t c : order.columns()) gathered.push_back(row[static_cast<size_t>(c)]);
    for (int64_t s = 0; s < slots; ++s) scattered[order.columns()[s]] = packed[static_cast<size_t>(s)];

    for (const Kernels* kernels : available_kernels()) {
      std::vector<T> out(static_cast<size_t>(slots) + kOverrun / sizeof(T));  // ASan guards its end
      kernels->gather(order.map(), row.data(), sizeof(T), out.data());
      CHECK(std::equal(gathered.begin(), gathered.end(), out.begin()));
      std::vector<T> into = row;
      kernels->scatter(order.map(), packed.data(), sizeof(T), into.data());
      CHECK(into == scattered);
    }
  }
}

}  // namespace

TEST(rows_are_packed_and_unpacked_by_their_slots) {
  check_slots<uint16_t>(1);
  check_slots<uint32_t>(2);
}

TEST(a_copy_past_the_caches_copies_so_many_bytes) {
  Random random(3);
  for (int round = 0; round < 500; ++round) {
    const int64_t bytes = random.one_of<int64_t>({0, 1, 63, 64, 65, random.between(0, 1000)});
    const int64_t from = random.between(0, 70), to = random.between(0, 70);
    std::vector<char> source(1100), before(1100);
    for (char& c : source) c = static_cast<char>(random.bits());
    for (char& c : before) c = static_cast<char>(random.bits());
    std::vector<char> expected = before;
    std::memcpy(expected.data() + to, source.data() + from, static_cast<size_t>(bytes));
    for (const Kernels* kernels : available_kernels()) {
      std::vector<char> out = before;
      kernels->stream(out.data() + to, source.data() + from, bytes);
      finish_streaming();
      CHECK(out == expected);
    }
  }
}
