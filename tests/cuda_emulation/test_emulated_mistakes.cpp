// SPDX-License-Identifier: Apache-2.0
// Mistakes in the order of things, each in a program of its own (programs.cpp): that they are noticed, by a wrong
// result, by an error of the emulated device, or by the sanitizer that this is built with.
#include <sys/wait.h>

#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"

namespace {

const bool kThreadSanitizer = std::string(ZENFLOW_SANITIZE) == "thread";
const bool kAddressSanitizer = std::string(ZENFLOW_SANITIZE) == "address";

struct Outcome {
  int status;
  std::string output;

  bool mentions(const std::string& text) const { return output.find(text) != std::string::npos; }
  bool is_race() const { return status == 66 && mentions("ThreadSanitizer: data race"); }
};

Outcome run(const std::string& arguments) {
  FILE* pipe = popen((std::string("'" EMULATION_PROGRAMS "' ") + arguments + " 2>&1").c_str(), "r");
  if (pipe == nullptr) throw zenflow_test::Failure("popen failed");
  std::string output;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) output += static_cast<char>(c);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, output};
}

std::string quoted(const std::string& fields) {
  std::string result = "'";
  for (const char c : fields) result += c == '\t' ? "' '" : std::string(1, c);
  return result + "'";
}

// By a wrong result, or, where threads are checked, as a race.
void check_noticed(const std::string& arguments) {
  const Outcome outcome = run(arguments);
  if (outcome.status == 1 || (kThreadSanitizer && outcome.is_race())) return;
  throw zenflow_test::Failure("not noticed: " + arguments + ": status " + std::to_string(outcome.status) + "\n" +
                              outcome.output);
}

}  // namespace

TEST(each_deleted_wait_is_noticed) {
  const Outcome correct = run("pipeline");
  CHECK_EQ(correct.status, 0);
  std::istringstream sites(correct.output);
  int count = 0;
  for (std::string site; std::getline(sites, site); ++count) check_noticed("pipeline " + quoted(site));
  CHECK_EQ(count, 4);
}

TEST(a_missing_barrier_is_noticed) {
  CHECK_EQ(run("barrier").status, 0);
  check_noticed("missing_barrier");
}

TEST(a_missing_barrier_in_a_warp_is_noticed) {
  CHECK_EQ(run("warp_barrier").status, 0);
  check_noticed("missing_warp_barrier");
}

TEST(a_host_write_during_a_copy_is_noticed) {
  check_noticed("host_write_during_copy");
}

TEST(a_write_to_freed_memory_is_noticed) {
  const Outcome outcome = run("write_after_free");
  CHECK_EQ(outcome.status, kAddressSanitizer ? 1 : 2);
  CHECK(outcome.mentions(kAddressSanitizer ? "AddressSanitizer: use-after-poison" : "freed"));
}
