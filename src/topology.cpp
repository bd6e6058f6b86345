// SPDX-License-Identifier: Apache-2.0
#include "topology.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

namespace zenflow {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

std::optional<int64_t> parse_int(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// The words of a file's first line; none if it cannot be read.
std::vector<std::string> first_words(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  std::istringstream words(line);
  std::vector<std::string> result;
  for (std::string word; words >> word;) result.push_back(word);
  return result;
}

// The number in a file of one number. "max", -1 (no quota in v1) and nonsense are nothing.
std::optional<int64_t> read_number(const std::string& path) {
  const auto words = first_words(path);
  const auto value = words.size() == 1 ? parse_int(words[0]) : std::nullopt;
  return value && *value >= 0 ? value : std::nullopt;
}

// The value behind `key` in a file of "key value" lines; a unit behind it is ignored.
std::optional<int64_t> read_field(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name, value;
    if (words >> name >> value && name == key) return parse_int(value);
  }
  return std::nullopt;
}

// The directories of the process's own cgroup and its ancestors for `controller`, in v1 and v2. A
// container may see its own cgroup mounted as the top while /proc names the host's path to it:
// then only the mount's top exists, and it is the right one. Directories that don't exist are harmless.
std::vector<std::string> cgroup_directories(const std::string& root, const std::string& controller) {
  std::vector<std::string> directories;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "4:cpu,cpuacct:/path", or "0::/path" in v2
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const auto names = split(controllers, ',');
    std::vector<std::string> mounts;
    if (controllers.empty()) {
      mounts = {"", "/unified"};
    } else if (std::find(names.begin(), names.end(), controller) != names.end()) {
      mounts = {"/" + controller};
      if (names.size() > 1) mounts.push_back("/" + controllers);
    }
    for (const std::string& mount : mounts) {
      std::string path = line.substr(second + 1);
      for (;;) {
        directories.push_back(root + "/sys/fs/cgroup" + mount + path + "/");
        if (path.find_first_not_of('/') == std::string::npos) break;
        path.resize(path.rfind('/'));
      }
    }
  }
  return directories;
}

std::optional<double> cpu_quota_of(const std::string& directory) {
  const auto max = first_words(directory + "cpu.max");  // "quota period" or "max period"
  const auto quota = max.size() == 2 ? parse_int(max[0]) : read_number(directory + "cpu.cfs_quota_us");
  const auto period = max.size() == 2 ? parse_int(max[1]) : read_number(directory + "cpu.cfs_period_us");
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

std::optional<int64_t> memory_left_in(const std::string& directory) {
  struct Names {
    const char *limit, *usage, *cache;
  };
  for (const Names& names : {Names{"memory.max", "memory.current", "inactive_file"},
                             Names{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"}}) {
    const auto limit = read_number(directory + names.limit);
    const auto usage = read_number(directory + names.usage);
    if (!limit || !usage) continue;
    const int64_t cache = read_field(directory + "memory.stat", names.cache).value_or(0);
    return std::max<int64_t>(0, *limit - std::max<int64_t>(0, *usage - cache));
  }
  return std::nullopt;
}

// The lowest CPU of those that share a core with `cpu`, from a list like "3,35" or "6-7".
int core_of(int cpu, const std::string& root) {
  const auto list =
      first_words(root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
  if (list.empty()) return cpu;
  const auto first = parse_int(list[0].substr(0, list[0].find_first_of(",-")));
  return first && *first >= 0 && *first <= cpu ? static_cast<int>(*first) : cpu;
}

int64_t environment_number(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : parse_int(text).value_or(otherwise);
}

// Part `index` of `parts` of a list, contiguous.
template <typename T>
std::vector<T> share_of(const std::vector<T>& list, int64_t index, int64_t parts) {
  const int64_t size = static_cast<int64_t>(list.size());
  return {list.begin() + size * index / parts, list.begin() + size * (index + 1) / parts};
}

}  // namespace

std::vector<int> affinity_cpus() {
  // The kernel refuses a set smaller than its own; grow until it fits.
  for (int capacity = CPU_SETSIZE; capacity <= 1 << 18; capacity *= 2) {
    std::vector<unsigned long> words(CPU_ALLOC_SIZE(capacity) / sizeof(unsigned long));
    const size_t bytes = words.size() * sizeof(unsigned long);
    auto* const set = reinterpret_cast<cpu_set_t*>(words.data());
    if (sched_getaffinity(0, bytes, set) != 0) continue;
    std::vector<int> cpus;
    for (int cpu = 0; cpu < capacity; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    }
    if (!cpus.empty()) return cpus;
  }
  return {0};
}

double cgroup_cpu_quota(const std::string& root) {
  double tightest = std::numeric_limits<double>::infinity();
  for (const std::string& directory : cgroup_directories(root, "cpu")) {
    if (const auto quota = cpu_quota_of(directory)) tightest = std::min(tightest, *quota);
  }
  return tightest;
}

int64_t available_host_bytes(const std::string& root) {
  int64_t available = kUnlimited;
  if (const auto kib = read_field(root + "/proc/meminfo", "MemAvailable:")) available = *kib * 1024;
  for (const std::string& directory : cgroup_directories(root, "memory")) {
    if (const auto left = memory_left_in(directory)) available = std::min(available, *left);
  }
  return available;
}

HostFacts host_facts(const std::vector<int>& cpus, const std::string& root) {
  HostFacts facts{{}, cgroup_cpu_quota(root), 0, 1};
  std::map<int, std::vector<int>> cores;
  for (const int cpu : cpus) cores[core_of(cpu, root)].push_back(cpu);
  for (auto& [core, siblings] : cores) facts.cores.push_back(std::move(siblings));

  const int64_t rank = environment_number("LOCAL_RANK", -1);
  const int64_t ranks = environment_number("LOCAL_WORLD_SIZE", -1);
  if (rank >= 0 && rank < ranks) {
    facts.local_rank = rank;
    facts.local_world_size = ranks;
  }
  return facts;
}

HostCores host_cores(const HostFacts& facts, int requested_threads, double reserved_share) {
  const int64_t ranks = facts.local_world_size;
  std::vector<std::vector<int>> cores = facts.cores;
  // Siblings serve as cores where there are fewer cores than ranks.
  if (static_cast<int64_t>(cores.size()) < ranks) {
    cores.clear();
    for (const auto& siblings : facts.cores) {
      for (const int cpu : siblings) cores.push_back({cpu});
    }
  }
  bool exclusive = static_cast<int64_t>(cores.size()) >= ranks;
  cores = exclusive ? share_of(cores, facts.local_rank, ranks) : facts.cores;

  // A quota is time on any of the CPUs, so others run on these too.
  const int64_t count = static_cast<int64_t>(cores.size());
  const double quota = std::max(1.0, std::floor(facts.quota / static_cast<double>(ranks)));
  const int64_t usable = quota < static_cast<double>(count) ? static_cast<int64_t>(quota) : count;
  exclusive = exclusive && usable == count;

  const double share = reserved_share > 0.0 ? std::min(reserved_share, 1.0) : 0.0;
  const int64_t left = usable - std::llround(share * static_cast<double>(usable));
  const int64_t ours = std::max<int64_t>(1, left);
  const int64_t threads = requested_threads > 0 ? requested_threads : ours;

  HostCores result{{}, static_cast<int>(threads), exclusive && threads <= ours};
  for (int64_t core = count - std::min({threads, ours, count}); core < count; ++core) {
    result.cpus.push_back(cores[core].front());
  }
  return result;
}

HostCores host_cores(int requested_threads, double reserved_share) {
  return host_cores(host_facts(affinity_cpus()), requested_threads, reserved_share);
}

}  // namespace zenflow
