// SPDX-License-Identifier: Apache-2.0
// The name of the function that holds an address of this process's code, from its module's symbol table; the address
// where there is none.
#pragma once

#include <string>

namespace emulation {

std::string symbol_name(const void* code);

}  // namespace emulation
