// SPDX-License-Identifier: Apache-2.0
// Checks single loads and stores, where the emulation is built without a sanitizer: the compiler calls the checks that
// it would make for the kernel's address sanitizer (-fsanitize=kernel-address), and access.cpp answers them.
//
// Device code may touch its device's memory, mapped page-locked host memory, its stack, and the module's own data
// (shared memory, constants). Host code of zenflow may not touch device memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulation {

// `code` is where the access is made.
#ifdef EMULATION_CHECKS_ACCESS
void check_access(uintptr_t address, size_t bytes, const void* code = nullptr);
#else
inline void check_access(uintptr_t, size_t, const void* = nullptr) {}
#endif

}  // namespace emulation
