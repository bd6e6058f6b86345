// SPDX-License-Identifier: Apache-2.0
// The parts of the module.
#pragma once

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace zenflow {

void bind_engine(py::module_& m);
void bind_kernels(py::module_& m);
void bind_host(py::module_& m);
void bind_emulation(py::module_& m);  // of tests/cuda_emulation, in the builds that use it

}  // namespace zenflow
