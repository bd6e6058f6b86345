// SPDX-License-Identifier: Apache-2.0
// _C.kernels: the device's kernels one by one, for tests and benchmarks. Addresses, dtype codes, sizes and streams are
// integers; a kernel with many arguments takes them as a dict, named as in its header. Nothing is checked or kept
// alive.
#include <pybind11/stl.h>

#include "bindings.h"
#include "cuda/column_norms.h"
#include "cuda/edits.h"
#include "cuda/scatter.h"
#include "cuda/selective_adam.h"
#include "cuda/slot_map.h"
#include "cuda/top_k.h"

using namespace py::literals;

namespace zenflow {
namespace {

using Tasks = std::vector<py::dict>;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <class T>
T* pointer(const py::dict& d, const char* name) {
  return pointer<T>(d[name].cast<uintptr_t>());
}

int64_t size(const py::dict& d, const char* name) {
  return d[name].cast<int64_t>();
}

DType dtype(const py::dict& d, const char* name) {
  return static_cast<DType>(d[name].cast<int>());
}

template <class Task>
std::vector<Task> each(const Tasks& dicts, Task (*convert)(const py::dict&)) {
  std::vector<Task> tasks;
  for (const py::dict& d : dicts) tasks.push_back(convert(d));
  return tasks;
}

NormTask norm_task(const py::dict& d) {
  return {pointer<void>(d, "gradient"), dtype(d, "dtype"), size(d, "rows"), size(d, "columns"),
          pointer<float>(d, "norms")};
}

SideTask side_task(const py::dict& d) {
  return {pointer<float>(d, "norms"), pointer<int32_t>(d, "place"), size(d, "columns"), pointer<double>(d, "sides")};
}

TopKTask top_k_task(const py::dict& d) {
  return {pointer<float>(d, "norms"), size(d, "columns"), size(d, "k"), pointer<int32_t>(d, "selected")};
}

// "hyper": (lr, beta1, beta2, eps, weight_decay); "step": the number of this update of the moments.
Hyper hyper(const py::dict& d) {
  const auto h = d["hyper"].cast<std::array<double, 5>>();
  return {h[0], h[1], h[2], h[3], h[4]};
}

Fold fold(const py::dict& d) {
  return make_fold(hyper(d), d["scale"].cast<double>());
}

AdamStep move(const py::dict& d) {
  const Hyper h = hyper(d);
  return make_adam_step(h, h.lr, 1.0 - h.lr * h.weight_decay, size(d, "step"), 0.0);
}

SelectivePass selective_pass(const py::dict& d) {
  return {pointer<void>(d, "gradient"),
          dtype(d, "gradient_dtype"),
          size(d, "rows"),
          size(d, "columns"),
          pointer<int32_t>(d, "place"),
          pointer<void>(d, "packed"),
          dtype(d, "packed_dtype"),
          size(d, "slots"),
          pointer<void>(d, "weight"),
          dtype(d, "weight_dtype"),
          pointer<float>(d, "master"),
          pointer<float>(d, "exp_avg"),
          pointer<float>(d, "exp_avg_sq"),
          size(d, "width"),
          fold(d),
          move(d),
          pointer<float>(d, "coefficient"),
          pointer<float>(d, "column_step"),
          pointer<float>(d, "column_root"),
          pointer<void>(d, "kept")};
}

AdamTask adam_task(const py::dict& d) {
  return {pointer<void>(d, "gradient"),
          dtype(d, "gradient_dtype"),
          pointer<void>(d, "weight"),
          dtype(d, "weight_dtype"),
          size(d, "rows"),
          size(d, "width"),
          size(d, "columns"),
          pointer<int32_t>(d, "device_columns"),
          pointer<float>(d, "master"),
          pointer<float>(d, "exp_avg"),
          pointer<float>(d, "exp_avg_sq"),
          fold(d),
          move(d),
          pointer<float>(d, "column_step"),
          pointer<float>(d, "column_root")};
}

ScatterPass scatter_pass(const py::dict& d) {
  return {pointer<void>(d, "upload"),
          pointer<void>(d, "weight"),
          dtype(d, "dtype"),
          size(d, "first_row"),
          size(d, "rows"),
          size(d, "columns"),
          pointer<int32_t>(d, "place"),
          size(d, "slots"),
          pointer<uint64_t>(d, "checksums")};
}

EditSearch edit_search(const py::dict& d) {
  return {pointer<void>(d, "weight"),
          dtype(d, "dtype"),
          size(d, "rows"),
          size(d, "columns"),
          pointer<int32_t>(d, "slot_columns"),
          pointer<int32_t>(d, "place"),
          size(d, "slots"),
          pointer<uint64_t>(d, "expected"),
          pointer<uint64_t>(d, "found"),
          pointer<void>(d, "last_written"),
          pointer<void>(d, "pending"),
          pointer<float>(d, "master")};
}

// A kernel that takes one task: convert, call.
template <auto Convert, auto Kernel>
void run_task(const py::dict& fields, uintptr_t stream) {
  const auto task = Convert(fields);
  const py::gil_scoped_release release;
  Kernel(task, Stream::from_handle(stream));
}

void bind_norms(py::module_& m) {
  m.def(
      "column_norms_scratch", [](const Tasks& tasks) { return column_norms_scratch(each(tasks, norm_task)); },
      py::kw_only(), "tasks"_a);
  m.def(
      "column_norms",
      [](const Tasks& dicts, uintptr_t scratch, uintptr_t stream) {
        const auto tasks = each(dicts, norm_task);
        const py::gil_scoped_release release;
        column_norms(tasks, pointer<float>(scratch), Stream::from_handle(stream));
      },
      py::kw_only(), "tasks"_a, "scratch"_a, "stream"_a);
  m.def(
      "squared_norms",
      [](const Tasks& dicts, uintptr_t squared, uintptr_t stream) {
        const auto tasks = each(dicts, norm_task);
        const py::gil_scoped_release release;
        squared_norms(tasks, pointer<double>(squared), Stream::from_handle(stream));
      },
      py::kw_only(), "tasks"_a, "squared"_a, "stream"_a);
  m.def(
      "side_norms",
      [](const Tasks& dicts, uintptr_t stream) {
        const auto tasks = each(dicts, side_task);
        const py::gil_scoped_release release;
        side_norms(tasks, Stream::from_handle(stream));
      },
      py::kw_only(), "tasks"_a, "stream"_a);
  m.def(
      "clip_coefficient",
      [](uintptr_t squared, int64_t count, double max_norm, uintptr_t norm, uintptr_t coefficient, uintptr_t stream) {
        const py::gil_scoped_release release;
        clip_coefficient(pointer<double>(squared), count, max_norm, pointer<double>(norm), pointer<float>(coefficient),
                         Stream::from_handle(stream));
      },
      py::kw_only(), "squared"_a, "count"_a, "max_norm"_a, "norm"_a, "coefficient"_a, "stream"_a);
  m.def(
      "top_k",
      [](const Tasks& dicts, uintptr_t stream) {
        const auto tasks = each(dicts, top_k_task);
        const py::gil_scoped_release release;
        top_k(tasks, Stream::from_handle(stream));
      },
      py::kw_only(), "tasks"_a, "stream"_a);
}

void bind_updates(py::module_& m) {
  m.def("selective_adam", &run_task<&selective_pass, &zenflow::selective_adam>, py::kw_only(), "task"_a, "stream"_a);
  m.def(
      "unpack",
      [](const py::dict& task, uintptr_t gradient, uintptr_t stream) {
        const SelectivePass pass = selective_pass(task);
        const py::gil_scoped_release release;
        unpack(pass, pointer<void>(gradient), Stream::from_handle(stream));
      },
      py::kw_only(), "task"_a, "gradient"_a, "stream"_a);
  m.def(
      "adam",
      [](const Tasks& dicts, uintptr_t coefficient, uintptr_t stream) {
        const auto tasks = each(dicts, adam_task);
        const py::gil_scoped_release release;
        adam(tasks, pointer<float>(coefficient), Stream::from_handle(stream));
      },
      py::kw_only(), "tasks"_a, "coefficient"_a, "stream"_a);
}

void bind_columns(py::module_& m) {
  m.def(
      "build_place",
      [](uintptr_t slot_columns, int64_t slots, uintptr_t device_columns, int64_t width, uintptr_t place,
         uintptr_t stream) {
        const py::gil_scoped_release release;
        build_place(pointer<int32_t>(slot_columns), slots, pointer<int32_t>(device_columns), width,
                    pointer<int32_t>(place), Stream::from_handle(stream));
      },
      py::kw_only(), "slot_columns"_a, "slots"_a, "device_columns"_a, "width"_a, "place"_a, "stream"_a);
  m.def("scatter", &run_task<&scatter_pass, &zenflow::scatter>, py::kw_only(), "task"_a, "stream"_a);
  m.def(
      "gather_columns",
      [](uintptr_t matrix, int64_t item_bytes, int64_t rows, int64_t stride, uintptr_t columns, int64_t count,
         uintptr_t out, uintptr_t stream) {
        const py::gil_scoped_release release;
        gather_columns(pointer<void>(matrix), item_bytes, rows, stride, pointer<int32_t>(columns), count,
                       pointer<void>(out), Stream::from_handle(stream));
      },
      py::kw_only(), "matrix"_a, "item_bytes"_a, "rows"_a, "stride"_a, "columns"_a, "count"_a, "out"_a, "stream"_a);
  m.def(
      "scatter_columns",
      [](uintptr_t matrix, int64_t item_bytes, int64_t rows, int64_t stride, uintptr_t columns, int64_t count,
         uintptr_t source, uintptr_t stream) {
        const py::gil_scoped_release release;
        scatter_columns(pointer<void>(matrix), item_bytes, rows, stride, pointer<int32_t>(columns), count,
                        pointer<void>(source), Stream::from_handle(stream));
      },
      py::kw_only(), "matrix"_a, "item_bytes"_a, "rows"_a, "stride"_a, "columns"_a, "count"_a, "source"_a, "stream"_a);
  m.def(
      "column_checksums",
      [](uintptr_t weight, int dtype, int64_t rows, int64_t columns, uintptr_t place, int64_t slots,
         uintptr_t checksums, uintptr_t stream) {
        const py::gil_scoped_release release;
        column_checksums(pointer<void>(weight), static_cast<DType>(dtype), rows, columns, pointer<int32_t>(place),
                         slots, pointer<uint64_t>(checksums), Stream::from_handle(stream));
      },
      py::kw_only(), "weight"_a, "dtype"_a, "rows"_a, "columns"_a, "place"_a, "slots"_a, "checksums"_a, "stream"_a);
  m.def("adopt_edits", &run_task<&edit_search, &zenflow::adopt_edits>, py::kw_only(), "task"_a, "stream"_a);
}

}  // namespace

void bind_kernels(py::module_& module) {
  py::module_ m = module.def_submodule("kernels");
  bind_norms(m);
  bind_updates(m);
  bind_columns(m);
}

}  // namespace zenflow
