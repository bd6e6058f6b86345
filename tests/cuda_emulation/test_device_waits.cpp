// SPDX-License-Identifier: Apache-2.0
// Every wait of the device class is needed: without it, a training gives other bits, an error or a reported race.
//
// A wait is taken away in a process of its own, in which its producers are as slow as CUDA allows.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "emulated_training.h"

extern char** environ;

namespace zenflow_test {
namespace {

constexpr const char* kDeleted = "ZENFLOW_TEST_DELETED_WAIT";  // "file:line,producer,producer ..."

// Trainings in which every wait is made: clipped and not, with edits, saves, votes, staged gradients, small chunks.
struct Scenario {
  uint64_t seed;
  bool stages, stream, clips, votes;
  zenflow::TransferSizes sizes;
};
const Scenario kScenarios[] = {{1, false, false, true, false, {4096, 2}},
                               {33, true, true, true, true, {4096, 3}},
                               {34, true, false, false, true, {1 << 14, 2}},
                               {5, false, true, false, false, {1 << 20, 1}}};

bool trains_like_the_cpu(const Scenario& s) {
  Script script = random_script(s.seed, 24);
  script.settings.update_interval = 3;  // so that lanes stay open over some steps
  script.settings.update_delay = 1;
  script.settings.automatic = s.votes;
  script.select_interval = 6;
  script.max_grad_norm = s.clips ? 1.0 : 0.0;
  script.hashes_steps = true;
  for (size_t i = 0; i < script.events.size(); ++i) {
    Event& event = script.events[i];
    event.hashed = true;
    if (i % 2 == 0)
      event.edited = 3, event.tracked = false;  // which has no selected columns, whose way would imply waits
  }
  const std::vector<uint64_t> expected = Training(script, {.name = "CPU", .stream = s.stream}).run();
  const Variant variant{.name = "device", .threads = 1, .stream = s.stream, .stages = s.stages};
  emulation::restart_numbering();
  return EmulatedTraining(script, variant, s.sizes).run() == expected;
}

std::string own_path() {
  std::string path(4096, '\0');
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size());
  path.resize(length > 0 ? static_cast<size_t>(length) : 0);
  return path;
}

// The exit status of this program's mutant, or minus the signal that ended it.
int run_without(const std::string& wait) {
  std::string path = own_path(), test = "one_wait_is_gone", entry = std::string(kDeleted) + "=" + wait;
  char* arguments[] = {path.data(), test.data(), nullptr};
  std::vector<char*> environment{entry.data()};
  for (char** e = environ; *e != nullptr; ++e) environment.push_back(*e);
  environment.push_back(nullptr);
  pid_t child = 0;
  CHECK_EQ(posix_spawn(&child, path.c_str(), nullptr, nullptr, arguments, environment.data()), 0);
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(one_wait_is_gone) {
  const char* const deleted = std::getenv(kDeleted);
  if (deleted == nullptr) return;
  alarm(120);  // waiting for ever is no way to notice
  std::istringstream text(deleted);
  std::vector<std::string> words;
  for (std::string word; std::getline(text, word, ',');) words.push_back(word);
  emulation::delete_wait(words[0], {words.begin() + 1, words.end()});
  for (const Scenario& s : kScenarios) CHECK(trains_like_the_cpu(s));
}

TEST(every_wait_of_the_device_is_needed) {
  if (std::getenv(kDeleted) != nullptr) return;
  emulation::forget_wait_sites();
  for (const Scenario& s : kScenarios) CHECK(trains_like_the_cpu(s));
  int waits = 0;
  std::string unneeded;
  for (const emulation::WaitSite& site : emulation::wait_sites()) {
    if (site.place.find("cuda/") != 0) continue;
    std::string mutant = site.place;
    for (const std::string& producer : site.producers) mutant += "," + producer;
    const int status = run_without(mutant);
    std::printf("        %s %s (%lld times): %d\n", site.place.c_str(), site.call.c_str(),
                static_cast<long long>(site.hits), status);
    ++waits;
    if (status == 0 || status == -SIGALRM) unneeded += " " + site.place;
  }
  CHECK(waits >= 10);
  CHECK_EQ(unneeded, std::string());
}

}  // namespace
}  // namespace zenflow_test
