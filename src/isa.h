// SPDX-License-Identifier: Apache-2.0
// Which instruction set the kernels use: the widest that CPU and operating system support, or the one that ZENFLOW_ISA
// names.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace zenflow {

// Narrowest first; "scalar" always.
std::vector<std::string> available_isas();

// One of these by name. Throws std::invalid_argument if it is unknown or not available.
const Kernels& kernels_named(const std::string& isa);

// Chosen once per process. Throws std::invalid_argument if ZENFLOW_ISA names one that is unknown or not available.
const Kernels& active_kernels();

}  // namespace zenflow
