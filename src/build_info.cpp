// SPDX-License-Identifier: Apache-2.0
#include "build_info.h"

namespace zenflow {

BuildInfo build_info() {
#if defined(__clang__)
  const std::string compiler = "Clang " __clang_version__;
#else
  const std::string compiler = "GCC " __VERSION__;
#endif
  return {ZENFLOW_VERSION, compiler, ZENFLOW_BUILD_TYPE, ZENFLOW_CXX_FLAGS};
}

}  // namespace zenflow
