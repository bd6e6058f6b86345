// SPDX-License-Identifier: Apache-2.0
// _C.host: the pieces of the host's work one by one, for benchmarks. Addresses and dtype codes are integers; tensors
// are contiguous. Nothing is checked or kept alive.
#include <pybind11/stl.h>

#include "bindings.h"
#include "host_benchmark.h"

using namespace py::literals;

namespace zenflow {
namespace {

void* memory(uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

py::int_ address(const void* memory) {
  return reinterpret_cast<uintptr_t>(memory);
}

std::unique_ptr<HostBenchmark> make_benchmark(uintptr_t weight, int64_t rows, int64_t columns,
                                              std::vector<int32_t> selection, int dtype, int gradient_dtype,
                                              int moments, int64_t interval, bool mean, int threads) {
  const BenchmarkSettings settings{{rows, columns},
                                   std::move(selection),
                                   static_cast<DType>(dtype),
                                   static_cast<DType>(gradient_dtype),
                                   static_cast<DType>(moments),
                                   interval,
                                   mean,
                                   threads};
  const py::gil_scoped_release release;
  return std::make_unique<HostBenchmark>(settings, memory(weight));
}

py::dict arrays_of(const HostBenchmark& benchmark) {
  const HostJob& job = benchmark.window();
  py::list lanes;
  for (const LateLane& l : job.lanes) lanes.append(address(l.lane.gradients));
  return py::dict("master"_a = address(job.master), "exp_avg"_a = address(job.exp_avg),
                  "exp_avg_sq"_a = address(job.exp_avg_sq), "written"_a = address(job.written), "lanes"_a = lanes);
}

}  // namespace

void bind_host(py::module_& module) {
  py::module_ m = module.def_submodule("host");
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::enum_<Bypass>(m, "Bypass")
      .value("NOTHING", Bypass::kNothing)
      .value("WRITTEN", Bypass::kWritten)
      .value("EVERYTHING", Bypass::kEverything);
  py::class_<HostBenchmark>(m, "Benchmark")
      .def(py::init(&make_benchmark), py::kw_only(), "weight"_a, "rows"_a, "columns"_a, "selection"_a, "dtype"_a,
           "gradient_dtype"_a, "moments"_a, "interval"_a, "mean"_a, "threads"_a)
      .def("arrays", &arrays_of)
      .def("update", &HostBenchmark::update, no_gil, py::kw_only(), "stream"_a, "isa"_a)
      .def(
          "update_ceiling",
          [](HostBenchmark& b, bool stream, Bypass bypass, int64_t run) { b.update_ceiling(stream, {bypass, run}); },
          no_gil, py::kw_only(), "stream"_a, "bypass"_a, "run"_a)
      .def("update_bytes", &HostBenchmark::update_bytes, py::kw_only(), "stream"_a)
      .def(
          "norms", [](HostBenchmark& b, uintptr_t gradient) { b.norms(memory(gradient)); }, no_gil)
      .def(
          "pack", [](HostBenchmark& b, uintptr_t gradient) { b.pack(memory(gradient)); }, no_gil)
      .def(
          "apply",
          [](HostBenchmark& b, uintptr_t weight, uintptr_t gradient) { b.apply(memory(weight), memory(gradient)); },
          no_gil)
      .def(
          "publish", [](HostBenchmark& b, uintptr_t weight) { b.publish(memory(weight)); }, no_gil)
      .def(
          "find_edits", [](HostBenchmark& b, uintptr_t weight) { b.find_edits(memory(weight)); }, no_gil)
      .def(
          "copy",
          [](HostBenchmark& b, uintptr_t gradient, Bypass bypass, int64_t run) {
            b.copy(memory(gradient), {bypass, run});
          },
          no_gil, "gradient"_a, py::kw_only(), "bypass"_a, "run"_a);
}

}  // namespace zenflow
