// SPDX-License-Identifier: Apache-2.0
// The engine beside its own background thread: whatever the timing, the threads, the host buffer or a restart, the bits
// are the same. Thread checks watch the same runs for races.
#include "engine.h"

#include "check.h"
#include "training.h"

using namespace zenflow;
using namespace zenflow_test;

namespace {

void check_variants(uint64_t seed, int events) {
  const Script script = random_script(seed, events);
  const std::vector<uint64_t> expected = Training(script, {.name = "ring, 1 thread"}).run();
  for (const Variant& variant : {Variant{.name = "ring, 3 threads", .threads = 3},
                                 Variant{.name = "stream, 1 thread, flushing denormals", .stream = true, .flushes_denormals = true},
                                 Variant{.name = "stream, 3 threads", .threads = 3, .stream = true},
                                 Variant{.name = "restarts, 2 threads", .threads = 2, .restarts = true}}) {
    const std::vector<uint64_t> found = Training(script, variant).run();
    CHECK_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      if (found[i] == expected[i]) continue;
      fail(__FILE__, __LINE__,
           "seed " + std::to_string(seed) + ", " + variant.name + ": comparison " + std::to_string(i) + " of " +
               std::to_string(found.size()) + " differs from one thread with a ring");
    }
  }
}

}  // namespace

TEST(threads_buffers_and_restarts_do_not_change_a_bit) {
  for (uint64_t seed = 1; seed <= 24; ++seed) check_variants(seed, 40);
}
