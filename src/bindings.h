// SPDX-License-Identifier: Apache-2.0
// The parts of the module.
#pragma once

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace zenflow {

void bind_engine(py::module_& m);

}  // namespace zenflow
