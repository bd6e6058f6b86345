// SPDX-License-Identifier: Apache-2.0
// The module zenflow._C. Files named bindings* alone know Python: they convert, release the GIL, call. No logic.
#include "bindings.h"

#include <pybind11/stl.h>

#include "build_info.h"
#include "cuda/cuda_info.h"
#include "fork.h"
#include "host_memory.h"
#include "isa.h"
#include "topology.h"

using namespace py::literals;

namespace zenflow {
namespace {

py::dict config_dict() {
  const BuildInfo build = build_info();
  const CudaInfo cuda = cuda_info();
  const HostCores cores = host_cores(0, 0.5);
  return py::dict("version"_a = build.version, "isa"_a = active_kernels().name, "isa_available"_a = available_isas(),
                  "compiler"_a = build.compiler, "cuda_built"_a = cuda.built, "cuda_reason"_a = cuda.reason,
                  "cuda_runtime"_a = cuda.runtime, "cuda_devices"_a = cuda.devices, "cpus"_a = cores.cpus,
                  "threads"_a = cores.threads, "host_memory"_a = available_host_bytes());
}

// A call may need the GIL, with which Python forks, and a fork waits for calls: so none may be under way by then.
void before_fork() {
  PyThreadState* const state = PyEval_SaveThread();
  hold_calls_for_fork([&] { PyEval_RestoreThread(state); });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("__version__") = build_info().version;
  m.def("config", &config_dict);
  m.def("available_host_bytes", [] { return available_host_bytes(); });
  m.def("host_bytes_held", &HostArray::host_bytes_held);
  m.def("before_fork", &before_fork);
  m.def("shutdown", &shutdown_all, py::call_guard<py::gil_scoped_release>());

  bind_engine(m);
  bind_kernels(m);
  bind_host(m);
#ifdef ZENFLOW_EMULATED
  bind_emulation(m);
#endif
}

}  // namespace zenflow
