// SPDX-License-Identifier: Apache-2.0
// The source lines that wait: cudaStreamWaitEvent, cudaEventSynchronize, cudaStreamSynchronize. A test may take one
// away and hold its producers, to see whether anything notices.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "site.h"
#include "stream.h"

namespace emulation {

struct WaitSite {
  std::string place;  // file:line
  std::string call;
  int64_t hits = 0;
  std::set<std::string> producers;  // labels of the streams that it waited for
};

// Called by each waiting call. Remembers it; false if the wait is deleted.
bool wait_is_kept(Site site, const char* call, const Stream* producer);

// What was remembered since the last forget_wait_sites().
std::vector<WaitSite> wait_sites();
void forget_wait_sites();

// Makes the waits of this place no-ops and holds these streams (hold()); restore_waits() undoes both.
void delete_wait(const std::string& place, const std::vector<std::string>& producers);
void restore_waits();

}  // namespace emulation
