// SPDX-License-Identifier: Apache-2.0
// Stores past the caches (Kernels::stream) are not ordered with others: this puts them before all that follows.
#pragma once

namespace zenflow {

inline void finish_streaming() {
#ifdef ZENFLOW_X86
  __builtin_ia32_sfence();
#endif
}

}  // namespace zenflow
