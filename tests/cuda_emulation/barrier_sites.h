// SPDX-License-Identifier: Apache-2.0
// The source lines where threads of a block meet: barriers, and operations of a warp. Two variables of the environment
// serve the test that takes them away one by one (mutate_barriers.py):
//   ZENFLOW_EMULATION_LIST_BARRIERS=FILE      at exit, the lines that were met at are written there
//   ZENFLOW_EMULATION_DELETE_BARRIER=FILE:LINE   at that line nobody waits for anybody
#pragma once

#include "site.h"

namespace emulation {

// Called wherever a thread meets others. False if it shall not wait there.
bool barrier_is_kept(Site site);

}  // namespace emulation
