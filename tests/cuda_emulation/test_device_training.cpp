// SPDX-License-Identifier: Apache-2.0
// The whole engine with its parameters on the emulated device: random trainings, in which everything may happen, give
// the bits that the CPU gives.
#include <list>

#include "check.h"
#include "emulated_training.h"

namespace zenflow_test {
namespace {

void same_as_on_the_cpu(uint64_t seed, int events, const Variant& variant, const zenflow::TransferSizes& sizes,
                        int gpus = 1, bool some_on_cpu = false) {
  const Script script = random_script(seed, events);
  const std::vector<uint64_t> expected =
      Training(script, {.name = "CPU", .stream = variant.stream, .restarts = variant.restarts}).run();
  const std::vector<uint64_t> found = EmulatedTraining(script, variant, sizes, gpus, some_on_cpu).run();
  CHECK_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) CHECK_EQ(found[i], expected[i]);
}

TEST(a_training_on_the_device_gives_the_bits_of_the_cpu) {
  emulation::set_delay(200);
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    emulation::set_seed(seed);
    same_as_on_the_cpu(seed, 24, {.name = "device", .threads = 2, .stream = seed % 2 == 0}, {4096, 2});
  }
}

TEST(a_training_that_is_saved_and_moved_on_the_device_gives_the_bits_of_the_cpu) {
  emulation::set_delay(200);
  for (uint64_t seed = 11; seed <= 14; ++seed) {
    emulation::set_seed(seed);
    same_as_on_the_cpu(seed, 24, {.name = "device", .threads = 1, .restarts = true}, {1 << 16, 3});
  }
}

TEST(a_training_whose_gradients_leave_early_gives_the_bits_of_the_cpu) {
  emulation::set_delay(200);
  for (uint64_t seed = 31; seed <= 36; ++seed) {
    emulation::set_seed(seed);
    same_as_on_the_cpu(seed, 24,
                       {.name = "hooks", .threads = 2, .stream = seed % 2 == 0, .restarts = true, .stages = true},
                       {4096, 3});
  }
}

TEST(a_training_on_two_gpus_and_the_cpu_gives_the_bits_of_the_cpu) {
  emulation::set_delay(200);
  for (uint64_t seed = 41; seed <= 44; ++seed) {
    emulation::set_seed(seed);
    const Variant variant{.name = "two GPUs", .threads = 2, .stream = seed % 2 == 0, .stages = seed > 42};
    same_as_on_the_cpu(seed, 20, variant, {4096, 2}, 2, seed % 2 == 1);
  }
}

TEST(a_training_with_pageable_host_memory_gives_the_same_bits) {
  emulation::fail_host_register(true);
  same_as_on_the_cpu(21, 24, {.name = "pageable", .threads = 1}, {4096, 2});
  emulation::fail_host_register(false);
}

}  // namespace
}  // namespace zenflow_test
