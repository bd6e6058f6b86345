// SPDX-License-Identifier: Apache-2.0
// What this binary was built from and with: constants for zenflow.config(). Says nothing about the machine it
// runs on.
#pragma once

#include <string>

namespace zenflow {

struct BuildInfo {
  std::string version;     // of the package, as in pyproject.toml
  std::string compiler;    // e.g. "GCC 12.2.0"
  std::string build_type;  // CMake's: "Release"
  std::string user_flags;  // CXXFLAGS of whoever built it; empty for a plain build
};

BuildInfo build_info();

}  // namespace zenflow
