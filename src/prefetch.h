// SPDX-License-Identifier: Apache-2.0
// The processor prefetches by itself, but no further than a page ends.
#pragma once

#include "host_device.h"

namespace zenflow {

// Of a loop that reads on at x: what it will read a page later.
ZENFLOW_INLINE void prefetch_ahead(const void* x) {
  __builtin_prefetch(static_cast<const char*>(x) + 4096);
}

}  // namespace zenflow
