// SPDX-License-Identifier: Apache-2.0
// The name of a function of this process, from its module's symbol table; its address where there is none.
#pragma once

#include <string>

namespace emulation {

std::string symbol_name(const void* function);

}  // namespace emulation
