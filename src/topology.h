// SPDX-License-Identifier: Apache-2.0
//
// What of this host the process may use: CPUs, cores' worth of time, bytes of memory. All of it is
// asked of the process's own limits (affinity mask, cgroup v1 and v2, launcher's ranks), never of
// the machine. Nothing is cached: a limit may change while we run. Nothing throws but for memory;
// what cannot be read does not limit. `root` stands for "/" so that tests can build a host.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zenflow {

// The CPUs of the calling thread's affinity mask, ascending; never empty.
std::vector<int> affinity_cpus();

// The tightest CPU quota of the process's cgroup and its ancestors, in cores; infinity if none.
double cgroup_cpu_quota(const std::string& root = "/");

// Bytes that can be allocated before the host or a cgroup runs short: the smallest of MemAvailable
// and, for each cgroup limit, limit - usage + inactive file cache. INT64_MAX if nothing is known.
int64_t available_host_bytes(const std::string& root = "/");

// The threads that host work should use.
struct HostCores {
  std::vector<int> cpus;  // ours, one per physical core where possible, ascending by core
  int threads;            // at least 1
  bool exclusive;         // the cpus are this process's share, one per thread: pinning makes sense
};

// What host_cores() decides from; separate so that any host can be described.
struct HostFacts {
  std::vector<std::vector<int>> cores;  // the mask's CPUs, grouped by physical core
  double quota;                         // cores' worth of time
  int64_t local_rank;                   // of local_world_size processes of one job on this host
  int64_t local_world_size;
};

// Reads the mask, cgroups, LOCAL_RANK and LOCAL_WORLD_SIZE (nonsense there counts as a single rank)
// and the siblings of each CPU in `cpus`.
HostFacts host_facts(const std::vector<int>& cpus, const std::string& root = "/");

// Divides the cores among the ranks of the host if there are enough for all (else the launcher did,
// or the host is oversubscribed: all of them, shared), leaves the first round(reserved_share *
// cores) of them to torch, and keeps to the quota. `requested_threads` > 0 overrules the count.
HostCores host_cores(const HostFacts& facts, int requested_threads, double reserved_share);
HostCores host_cores(int requested_threads, double reserved_share);

}  // namespace zenflow
