// SPDX-License-Identifier: Apache-2.0
//
// Counts what `operator new` gives out in this program, on all threads, while an AllocationCount lives.
#pragma once

#include <cstdint>

namespace zenflow_test {

struct Allocations {
  int64_t count = 0, bytes = 0;
  int64_t kept = 0;  // bytes that were not given back again; less than zero if older ones were
};

// One at a time.
class AllocationCount {
 public:
  AllocationCount();
  ~AllocationCount();
  Allocations so_far() const;
};

}  // namespace zenflow_test
