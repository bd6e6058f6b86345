// SPDX-License-Identifier: Apache-2.0
#include "topology.h"

#include <stdlib.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

using zenflow::host_cores;
using zenflow::host_facts;
using zenflow::HostCores;
using zenflow::HostFacts;

namespace {

constexpr double kNoQuota = std::numeric_limits<double>::infinity();
constexpr int64_t kMiB = int64_t{1} << 20;

// A directory with the files given, gone at the end of the scope.
class FakeRoot {
 public:
  FakeRoot(std::initializer_list<std::pair<std::string, std::string>> files) {
    std::string path = (std::filesystem::temp_directory_path() / "zenflow-root-XXXXXX").string();
    if (mkdtemp(path.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = path;
    for (const auto& [name, text] : files) {
      std::filesystem::create_directories(std::filesystem::path(path_ + name).parent_path());
      std::ofstream(path_ + name) << text;
    }
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Sets LOCAL_RANK and LOCAL_WORLD_SIZE for a scope.
class Ranks {
 public:
  Ranks(const char* rank, const char* size) {
    setenv("LOCAL_RANK", rank, 1);
    setenv("LOCAL_WORLD_SIZE", size, 1);
  }
  ~Ranks() {
    unsetenv("LOCAL_RANK");
    unsetenv("LOCAL_WORLD_SIZE");
  }
};

// `cores` cores with two threads each, numbered as most x86 hosts do: core i has CPUs i, i + cores.
HostFacts host_of(int cores, double quota, int64_t rank, int64_t ranks) {
  HostFacts facts{{}, quota, rank, ranks};
  for (int core = 0; core < cores; ++core) facts.cores.push_back({core, core + cores});
  return facts;
}

void check_cores(const HostCores& got, const std::vector<int>& cpus, int threads, bool exclusive) {
  CHECK(got.cpus == cpus);
  CHECK_EQ(got.threads, threads);
  CHECK_EQ(got.exclusive, exclusive);
}

}  // namespace

TEST(cpu_quota_v2_takes_the_tightest_ancestor) {
  const FakeRoot root{{"/proc/self/cgroup", "0::/job.slice/task\n"},
                      {"/sys/fs/cgroup/job.slice/task/cpu.max", "max 100000\n"},
                      {"/sys/fs/cgroup/job.slice/cpu.max", "250000 100000\n"}};
  CHECK_EQ(zenflow::cgroup_cpu_quota(root.path()), 2.5);
}

TEST(cpu_quota_v1_in_joint_and_single_mounts) {
  for (const std::string mount : {"cpu,cpuacct", "cpu"}) {
    const std::string base = "/sys/fs/cgroup/" + mount;
    const FakeRoot root{{"/proc/self/cgroup", "5:memory:/\n4:cpu,cpuacct:/a/b\n0::/\n"},
                        {base + "/a/b/cpu.cfs_quota_us", "300000\n"},
                        {base + "/a/b/cpu.cfs_period_us", "100000\n"},
                        {base + "/a/cpu.cfs_quota_us", "150000\n"},
                        {base + "/a/cpu.cfs_period_us", "100000\n"},
                        {base + "/cpu.cfs_quota_us", "-1\n"},
                        {base + "/cpu.cfs_period_us", "100000\n"}};
    CHECK_EQ(zenflow::cgroup_cpu_quota(root.path()), 1.5);
  }
}

TEST(cpu_quota_of_a_container_that_sees_its_cgroup_as_the_top) {
  const FakeRoot v2{{"/proc/self/cgroup", "0::/docker/0123\n"}, {"/sys/fs/cgroup/cpu.max", "50000 100000\n"}};
  CHECK_EQ(zenflow::cgroup_cpu_quota(v2.path()), 0.5);
  const FakeRoot hybrid{{"/proc/self/cgroup", "1:name=systemd:/x\n0::/x\n"},
                        {"/sys/fs/cgroup/unified/x/cpu.max", "400000 100000\n"}};
  CHECK_EQ(zenflow::cgroup_cpu_quota(hybrid.path()), 4.0);
}

TEST(unreadable_and_senseless_quotas_do_not_limit) {
  CHECK_EQ(zenflow::cgroup_cpu_quota("/nonexistent"), kNoQuota);
  for (const std::string text : {"", "max 100000", "0 100000", "100000 0", "lots 100000", "100000"}) {
    const FakeRoot root{{"/proc/self/cgroup", "0::/\nnonsense\n:\n"}, {"/sys/fs/cgroup/cpu.max", text}};
    CHECK_EQ(zenflow::cgroup_cpu_quota(root.path()), kNoQuota);
  }
}

TEST(available_memory_is_the_tightest_of_host_and_cgroups) {
  const std::string meminfo = "MemTotal: 9000 kB\nMemAvailable:    8192 kB\nCached: 1 kB\n";
  const FakeRoot host{
      {"/proc/self/cgroup", "0::/a\n"}, {"/proc/meminfo", meminfo}, {"/sys/fs/cgroup/a/memory.max", "max\n"}};
  CHECK_EQ(zenflow::available_host_bytes(host.path()), 8 * kMiB);

  const FakeRoot v2{{"/proc/self/cgroup", "0::/a/b\n"},
                    {"/proc/meminfo", meminfo},
                    {"/sys/fs/cgroup/a/b/memory.max", "max\n"},
                    {"/sys/fs/cgroup/a/b/memory.current", "1048576\n"},
                    {"/sys/fs/cgroup/a/memory.max", "6291456\n"},      // 6 MiB
                    {"/sys/fs/cgroup/a/memory.current", "3145728\n"},  // 3 MiB, of which 1 is cache
                    {"/sys/fs/cgroup/a/memory.stat", "anon 2097152\ninactive_file 1048576\n"}};
  CHECK_EQ(zenflow::available_host_bytes(v2.path()), 4 * kMiB);

  const std::string v1_base = "/sys/fs/cgroup/memory/a";
  const FakeRoot v1{{"/proc/self/cgroup", "4:memory:/a\n"},
                    {"/proc/meminfo", meminfo},
                    {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
                    {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "5242880\n"},
                    {v1_base + "/memory.limit_in_bytes", "4194304\n"},
                    {v1_base + "/memory.usage_in_bytes", "4194304\n"},
                    {v1_base + "/memory.stat", "inactive_file 1\ntotal_inactive_file 2097152\n"}};
  CHECK_EQ(zenflow::available_host_bytes(v1.path()), 2 * kMiB);

  const FakeRoot full{{"/proc/self/cgroup", "0::/\n"},
                      {"/sys/fs/cgroup/memory.max", "100\n"},
                      {"/sys/fs/cgroup/memory.current", "200\n"}};
  CHECK_EQ(zenflow::available_host_bytes(full.path()), 0);
  CHECK_EQ(zenflow::available_host_bytes("/nonexistent"), INT64_MAX);
}

TEST(facts_group_siblings_and_read_ranks) {
  const std::string cpu = "/sys/devices/system/cpu/cpu";
  const FakeRoot root{{cpu + "0/topology/thread_siblings_list", "0,2\n"},
                      {cpu + "2/topology/thread_siblings_list", "0,2\n"},
                      {cpu + "1/topology/thread_siblings_list", "1-1\n"},
                      {cpu + "9/topology/thread_siblings_list", "nonsense\n"}};
  const HostFacts facts = host_facts({0, 1, 2, 7, 9}, root.path());
  CHECK(facts.cores == (std::vector<std::vector<int>>{{0, 2}, {1}, {7}, {9}}));
  CHECK_EQ(facts.quota, kNoQuota);
  CHECK_EQ(facts.local_world_size, 1);
  {
    const Ranks ranks("1", "4");
    CHECK_EQ(host_facts({0}, root.path()).local_rank, 1);
    CHECK_EQ(host_facts({0}, root.path()).local_world_size, 4);
  }
  for (const auto& [rank, size] : std::initializer_list<std::pair<const char*, const char*>>{
           {"4", "4"}, {"-1", "4"}, {"x", "4"}, {"0", "two"}, {"0", "0"}, {"", ""}, {"1 ", "2"}}) {
    const Ranks ranks(rank, size);
    CHECK_EQ(host_facts({0}, root.path()).local_rank, 0);
    CHECK_EQ(host_facts({0}, root.path()).local_world_size, 1);
  }
}

TEST(one_thread_per_core_and_torch_gets_the_first) {
  check_cores(host_cores(host_of(4, kNoQuota, 0, 1), 0, 0.0), {0, 1, 2, 3}, 4, true);
  check_cores(host_cores(host_of(4, kNoQuota, 0, 1), 0, 0.5), {2, 3}, 2, true);
  check_cores(host_cores(host_of(4, kNoQuota, 0, 1), 0, 1.0), {3}, 1, true);
  check_cores(host_cores(host_of(4, kNoQuota, 0, 1), 0, std::nan("")), {0, 1, 2, 3}, 4, true);
  check_cores(host_cores(host_of(4, kNoQuota, 0, 1), 2, 0.0), {2, 3}, 2, true);
  check_cores(host_cores(host_of(4, kNoQuota, 0, 1), 9, 0.0), {0, 1, 2, 3}, 9, false);
  check_cores(host_cores(host_of(4, kNoQuota, 0, 1), 3, 0.5), {2, 3}, 3, false);
}

TEST(ranks_divide_cores_where_there_are_enough) {
  check_cores(host_cores(host_of(4, kNoQuota, 0, 2), 0, 0.0), {0, 1}, 2, true);
  check_cores(host_cores(host_of(4, kNoQuota, 1, 2), 0, 0.0), {2, 3}, 2, true);
  check_cores(host_cores(host_of(5, kNoQuota, 1, 2), 0, 0.34), {3, 4}, 2, true);
  // Fewer cores than ranks, but CPUs enough: a sibling each.
  check_cores(host_cores(host_of(2, kNoQuota, 1, 4), 0, 0.0), {2}, 1, true);
  // Fewer CPUs than ranks: all of them, shared.
  check_cores(host_cores(host_of(2, kNoQuota, 1, 8), 0, 0.0), {0, 1}, 2, false);
}

TEST(a_quota_limits_threads_and_makes_cores_shared) {
  check_cores(host_cores(host_of(4, 2.9, 0, 1), 0, 0.0), {2, 3}, 2, false);
  check_cores(host_cores(host_of(4, 0.5, 0, 1), 0, 0.0), {3}, 1, false);
  check_cores(host_cores(host_of(8, 4.0, 0, 2), 0, 0.0), {2, 3}, 2, false);
  check_cores(host_cores(host_of(4, 4.0, 0, 1), 0, 0.0), {0, 1, 2, 3}, 4, true);
}

TEST(this_host_has_a_core) {
  CHECK(!zenflow::affinity_cpus().empty());
  CHECK(zenflow::available_host_bytes() > 0);
  CHECK(zenflow::cgroup_cpu_quota() > 0.0);
  const HostCores cores = host_cores(0, 0.0);
  CHECK(cores.threads >= 1 && !cores.cpus.empty());
}
