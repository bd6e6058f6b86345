// SPDX-License-Identifier: Apache-2.0
#include "pace.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "sanitizers.h"
#include "symbol.h"

namespace emulation {
namespace {

struct Pacer {
  std::mutex mutex;
  Pace pace;
  std::atomic<bool> paced = false;
  Instant down_free, up_free;
  std::vector<Occupied> occupied;
  std::map<const void*, std::string> names;  // of kernels: looking one up reads the whole module
};

Pacer& pacer() {
  static auto* all = new Pacer;
  return *all;
}

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

}  // namespace

void set_pace(const Pace& pace) {
  const Invisible invisible;
  const std::lock_guard lock(pacer().mutex);
  pacer().pace = pace;
  pacer().paced = true;
}

void clear_pace() {
  pacer().paced = false;
}

bool is_paced() {
  return pacer().paced;
}

Pace pace() {
  const Invisible invisible;
  const std::lock_guard lock(pacer().mutex);
  return pacer().pace;
}

bool runs_in_pace(const void* function) {
  const Invisible invisible;
  const std::lock_guard lock(pacer().mutex);
  const auto [named, is_new] = pacer().names.try_emplace(function);
  if (is_new) named->second = symbol_name(function);
  const auto& runs = pacer().pace.runs;
  return std::any_of(runs.begin(), runs.end(),
                     [&](const std::string& part) { return named->second.find(part) != std::string::npos; });
}

Instant occupy(const Cost& cost, Instant ready, const std::string& stream) {
  const std::lock_guard lock(pacer().mutex);
  Instant begin = ready;
  double seconds = cost.seconds;
  const bool is_copy = cost.activity == Activity::kDown || cost.activity == Activity::kUp;
  if (is_copy) seconds = static_cast<double>(cost.bytes) / pacer().pace.link_bytes_per_second;
  Instant& link = cost.activity == Activity::kDown ? pacer().down_free : pacer().up_free;
  if (is_copy) begin = std::max(begin, link);
  const Instant end = begin + nanoseconds(seconds);
  if (is_copy) link = end;
  pacer().occupied.push_back({stream, cost.activity, cost.bytes, begin, end});
  return end;
}

std::vector<Occupied> take_occupied() {
  const Invisible invisible;
  const std::lock_guard lock(pacer().mutex);
  return std::exchange(pacer().occupied, {});
}

}  // namespace emulation
