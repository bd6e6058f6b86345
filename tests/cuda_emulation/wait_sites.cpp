// SPDX-License-Identifier: Apache-2.0
#include "wait_sites.h"

#include <map>
#include <mutex>

#include "sanitizers.h"

namespace emulation {
namespace {

struct Sites {
  std::mutex mutex;
  std::map<std::string, WaitSite> seen;
  std::set<std::string> deleted;
};

Sites& sites() {
  static auto* all = new Sites;
  return *all;
}

}  // namespace

bool wait_is_kept(Site site, const char* call, const Stream* producer) {
  const std::lock_guard lock(sites().mutex);
  const std::string place = std::string(site.file) + ":" + std::to_string(site.line);
  WaitSite& seen = sites().seen[place];
  seen.place = place;
  seen.call = call;
  ++seen.hits;
  if (producer != nullptr) seen.producers.insert(producer->label());
  return sites().deleted.count(place) == 0;
}

std::vector<WaitSite> wait_sites() {
  const Invisible invisible;
  const std::lock_guard lock(sites().mutex);
  std::vector<WaitSite> all;
  for (const auto& [place, site] : sites().seen) all.push_back(site);
  return all;
}

void forget_wait_sites() {
  const Invisible invisible;
  const std::lock_guard lock(sites().mutex);
  sites().seen.clear();
}

void delete_wait(const std::string& place, const std::vector<std::string>& producers) {
  const Invisible invisible;
  {
    const std::lock_guard lock(sites().mutex);
    sites().deleted.insert(place);
  }
  hold(producers);
}

void restore_waits() {
  const Invisible invisible;
  {
    const std::lock_guard lock(sites().mutex);
    sites().deleted.clear();
  }
  hold({});
}

}  // namespace emulation
