// SPDX-License-Identifier: Apache-2.0
// A random choice of selected columns, for the kernels' tests: who sits where.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "../cpp/random.h"

namespace zenflow_test {

struct Places {
  std::vector<int32_t> slot_columns, device_columns, place;

  int64_t slots() const { return static_cast<int64_t>(slot_columns.size()); }
  int64_t width() const { return static_cast<int64_t>(device_columns.size()); }
};

// Both lists ascend but for some exchanges, as hand-overs leave the slots.
inline Places random_places(Random& random, int64_t columns) {
  Places places;
  const int percent = random.one_of({0, 1, 10, 50, 100, static_cast<int>(random.between(0, 100))});
  for (int32_t c = 0; c < columns; ++c)
    (random.chance(percent) ? places.device_columns : places.slot_columns).push_back(c);
  for (auto* list : {&places.slot_columns, &places.device_columns}) {
    if (random.chance(50) || list->empty()) continue;
    const auto last = static_cast<int64_t>(list->size()) - 1;
    for (int i = 0; i < 5; ++i) {
      std::swap((*list)[static_cast<size_t>(random.between(0, last))],
                (*list)[static_cast<size_t>(random.between(0, last))]);
    }
  }
  places.place.resize(static_cast<size_t>(columns));
  for (int64_t s = 0; s < places.slots(); ++s)
    places.place[static_cast<size_t>(places.slot_columns[static_cast<size_t>(s)])] = static_cast<int32_t>(s);
  for (int64_t p = 0; p < places.width(); ++p)
    places.place[static_cast<size_t>(places.device_columns[static_cast<size_t>(p)])] = static_cast<int32_t>(-1 - p);
  return places;
}

}  // namespace zenflow_test
