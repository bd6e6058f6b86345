// SPDX-License-Identifier: Apache-2.0
// Site: the source line that made a call. As a default argument it names the caller.
#pragma once

namespace emulation {

struct Site {
  const char* file = "";
  int line = 0;

  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
  bool operator==(const Site& other) const { return line == other.line && __builtin_strcmp(file, other.file) == 0; }
  bool operator!=(const Site& other) const { return !(*this == other); }
};

}  // namespace emulation
