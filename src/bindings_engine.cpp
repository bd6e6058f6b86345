// SPDX-License-Identifier: Apache-2.0
// The engine for Python. Tensors cross as address, dtype code and strides (None: contiguous); python/zenflow/tensors.py
// makes these and nobody else does. What takes the engine's lock goes without the GIL: who holds the lock may need the
// GIL for GPU memory.
#include <pybind11/stl.h>

#include <exception>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "bindings.h"
#include "cuda/device.h"
#include "engine.h"
#include "topology.h"

using namespace py::literals;

namespace zenflow {
namespace {

template <class T>
T* address(const py::handle& value) {
  return reinterpret_cast<T*>(value.cast<uintptr_t>());
}

std::vector<int64_t> strides_of(const py::handle& value) {
  return value.is_none() ? std::vector<int64_t>() : value.cast<std::vector<int64_t>>();
}

// (index, weight, strides, suspect, gradient or 0, dtype or -1: staged, strides, group); groups: (lr, beta1, beta2,
// eps, weight_decay, maximize)
std::vector<Operand> operands_of(Engine& engine, const py::list& rows, const py::list& groups) {
  std::vector<Operand> operands;
  operands.reserve(rows.size());
  for (const py::handle row : rows) {
    const auto t = py::reinterpret_borrow<py::tuple>(row);
    Operand& o = operands.emplace_back();
    const auto index = t[0].cast<int64_t>();
    o.parameter = &engine.parameter(index);
    o.weight = engine.view(index, address<void>(t[1]), std::nullopt, strides_of(t[2]));
    o.suspect = t[3].cast<bool>();
    if (void* gradient = address<void>(t[4])) {
      o.gradient = engine.view(index, gradient, static_cast<DType>(t[5].cast<int>()), strides_of(t[6]));
    }
    o.staged = !o.gradient && t[5].cast<int>() < 0;
    if (groups.empty()) continue;
    const auto group = py::reinterpret_borrow<py::tuple>(groups[t[7].cast<size_t>()]);
    o.hyper = {group[0].cast<double>(), group[1].cast<double>(), group[2].cast<double>(), group[3].cast<double>(),
               group[4].cast<double>()};
    o.maximize = group[5].cast<bool>();
  }
  return operands;
}

py::list rows_of(const py::tuple& row) {
  py::list rows;
  rows.append(row);
  return rows;
}

FullState full_state_of(const py::dict& a) {
  return {address<float>(a["exp_avg"]),     address<float>(a["exp_avg_sq"]),    address<float>(a["master"]),
          address<void>(a["last_written"]), address<void>(a["pending_output"]), address<bool>(a["selected"]),
          address<float>(a["window_sum"]),  address<int32_t>(a["column_steps"])};
}

// [count, lr_sum, keep, lr, beta1, beta2, eps, weight_decay]
py::tuple window_tuple(const Window& w) {
  return py::make_tuple(w.count, w.lr_sum, w.keep, w.last.lr, w.last.beta1, w.last.beta2, w.last.eps,
                        w.last.weight_decay);
}

// [sum of the selected columns' root mean squares, of the deferred ones', count]
py::tuple vote_tuple(const Vote& v) {
  return py::make_tuple(v.selected, v.deferred, v.count);
}

Vote vote_of(const std::array<double, 3>& v) {
  return {v[0], v[1], static_cast<int64_t>(v[2])};
}

Window window_of(const std::array<double, 8>& w) {
  return {static_cast<int64_t>(w[0]), w[1], w[2], {w[3], w[4], w[5], w[6], w[7]}};
}

py::dict counters_dict(const Counters& c) {
  return py::dict("steps"_a = c.steps, "stall_seconds"_a = c.stall_seconds,
                  "host_update_seconds"_a = c.host_update_seconds, "d2h_bytes"_a = c.d2h_bytes,
                  "h2d_bytes"_a = c.h2d_bytes, "handover_bytes"_a = c.handover_bytes,
                  "nonfinite_norms"_a = c.nonfinite_norms);
}

// python/zenflow/devices.py's DeviceMemory. Where the main thread runs Python code, handlers of signals run too: they
// may raise, or call the engine, whose lock this thread holds. So the engine's calls run that code in a thread of its
// own.
class PythonDeviceMemory : public DeviceMemory {
 public:
  explicit PythonDeviceMemory(py::object memory) : memory_(std::move(memory)) {}
  ~PythonDeviceMemory() override {
    const py::gil_scoped_acquire gil;
    memory_ = py::object();
  }
  void use_stream(uintptr_t stream) override { stream_ = stream; }
  void* allocate(int64_t bytes) override {
    void* memory = nullptr;
    without_signals([&] { memory = address<void>(memory_.attr("allocate")(bytes)); });
    return memory;
  }
  void* try_allocate(int64_t bytes) override {
    void* memory = nullptr;
    without_signals([&] { memory = address<void>(memory_.attr("try_allocate")(bytes)); });
    return memory;
  }
  void release(void* memory, uintptr_t stream) noexcept override {
    try {
      without_signals([&] { memory_.attr("release")(reinterpret_cast<uintptr_t>(memory), stream); });
    } catch (py::error_already_set& error) {
      const py::gil_scoped_acquire gil;
      error.discard_as_unraisable("zenflow: DeviceMemory.release");
    }
  }

 private:
  template <class Call>
  void without_signals(Call&& call) {
    if (PyGILState_Check() != 0) return call();  // a destructor's: no lock is held
    std::exception_ptr error = std::make_exception_ptr(std::runtime_error("zenflow: the interpreter is shutting down"));
    const auto run = [&] {
      const py::gil_scoped_acquire gil;  // does not return where the interpreter is shutting down
      try {
        memory_.attr("use_stream")(stream_);
        call();
        error = nullptr;
      } catch (...) {
        error = std::current_exception();
      }
    };
    std::thread thread;
    try {
      thread = std::thread(run);
    } catch (const std::system_error&) {
      run();  // there can be no thread
    }
    if (thread.joinable()) thread.join();
    if (error) std::rethrow_exception(error);
  }

  py::object memory_;
  uintptr_t stream_ = 0;
};

size_t add_cuda_device(Engine& engine, int ordinal, py::object memory, int64_t chunk_bytes, int64_t chunks) {
  return engine.add_device(make_cuda_device(ordinal, std::make_unique<PythonDeviceMemory>(std::move(memory)),
                                            engine.context(), {chunk_bytes, chunks}));
}

std::unique_ptr<Engine> make_engine(bool mean, bool stream, int64_t update_interval, int64_t update_delay,
                                    double lookahead, bool automatic, int moments, int num_threads,
                                    double reserved_share, bool pin_threads) {
  const HostCores host = host_cores(num_threads, reserved_share);
  const HostCores caller = host_cores(num_threads, 0.0);
  return std::make_unique<Engine>(
      Settings{mean, stream, update_interval, update_delay, lookahead, automatic, static_cast<DType>(moments)},
      host.threads, pin_threads && host.exclusive ? host.cpus : std::vector<int>(), caller.threads);
}

Report report_of(Engine& engine) {
  const py::gil_scoped_release release;
  return engine.report();
}

// Every call on all weights: convert with the GIL, work without.
template <void (Engine::*Method)(std::span<const Operand>)>
void on_weights(Engine& engine, const py::list& rows) {
  const std::vector<Operand> operands = operands_of(engine, rows, py::list());
  const py::gil_scoped_release release;
  (engine.*Method)(operands);
}

}  // namespace

void bind_engine(py::module_& m) {
  py::class_<Engine>(m, "Engine")
      .def(py::init(&make_engine), py::kw_only(), "mean"_a, "stream"_a, "update_interval"_a, "update_delay"_a,
           "lookahead"_a, "automatic"_a, "moments"_a, "num_threads"_a, "reserved_share"_a, "pin_threads"_a)
      .def("add_cuda_device", &add_cuda_device, "ordinal"_a, "memory"_a, "chunk_bytes"_a = TransferSizes().chunk_bytes,
           "chunks"_a = TransferSizes().chunks)
      .def("use_stream", &Engine::use_stream)
      .def("refuses_page_locks", &Engine::refuses_page_locks)
      .def("add",
           [](Engine& e, std::vector<int64_t> sizes, int dtype, bool split, uintptr_t step_count, size_t device,
              uint32_t seed) {
             const py::gil_scoped_release release;
             return e.add(std::move(sizes), static_cast<DType>(dtype), split, reinterpret_cast<float*>(step_count),
                          device, seed);
           })
      .def("lend",
           [](Engine& e, int64_t index, uintptr_t master, uintptr_t exp_avg, uintptr_t exp_avg_sq, int64_t width) {
             e.parameter(index).lend({reinterpret_cast<float*>(master), reinterpret_cast<float*>(exp_avg),
                                      reinterpret_cast<float*>(exp_avg_sq), width});
           })
      .def("commit",
           [](Engine& e, const py::list& rows, const py::list& groups, bool warm_up, bool selects, bool ends_window,
              double max_grad_norm) {
             const std::vector<Operand> operands = operands_of(e, rows, groups);
             const py::gil_scoped_release release;
             e.commit(operands, {warm_up, selects, ends_window, max_grad_norm});
           })
      .def("votes_to_end_window", &Engine::votes_to_end_window, py::call_guard<py::gil_scoped_release>())
      .def("set_schedule", &Engine::set_schedule, py::call_guard<py::gil_scoped_release>())
      .def("stage",
           [](Engine& e, const py::tuple& row, bool warm_up, bool selects, bool with_norms) {
             const std::vector<Operand> operands = operands_of(e, rows_of(row), py::list());
             const py::gil_scoped_release release;
             e.stage(operands[0], {.warm_up = warm_up, .selects = selects}, with_norms);
           })
      .def("unstage",
           [](Engine& e, int64_t index, uintptr_t gradient) {
             const py::gil_scoped_release release;
             e.unstage(index, reinterpret_cast<void*>(gradient));
           })
      .def("discard_staged", &Engine::discard_staged, py::call_guard<py::gil_scoped_release>())
      .def("staged", &Engine::staged)
      .def("staged_finite", &Engine::staged_finite, py::call_guard<py::gil_scoped_release>())
      .def("publish_early",
           [](Engine& e, const py::tuple& row) {
             const std::vector<Operand> operands = operands_of(e, rows_of(row), py::list());
             const py::gil_scoped_release release;
             return e.publish_early(operands[0]);
           })
      .def("join_publications", &Engine::join_publications, py::call_guard<py::gil_scoped_release>())
      .def("synchronize", &on_weights<&Engine::synchronize>)
      .def("flush", &on_weights<&Engine::flush>)
      .def("show_settled", &on_weights<&Engine::show_settled>)
      .def("show_training", &on_weights<&Engine::show_training>)
      .def("adopt_edits", &on_weights<&Engine::adopt_edits>)
      .def("export_state",
           [](Engine& e, int64_t index, const py::dict& tensors) {
             const FullState full = full_state_of(tensors);
             const py::gil_scoped_release release;
             e.export_state(index, full);
           })
      .def("import_state",
           [](Engine& e, int64_t index, const py::dict& tensors, int64_t steps, bool has_selection, bool in_flight,
              const std::array<double, 8>& window, const std::array<double, 3>& vote) {
             const FullState full = full_state_of(tensors);
             const py::gil_scoped_release release;
             e.import_state(index, full, {steps, has_selection, in_flight, window_of(window), vote_of(vote)});
           })
      .def("window", [](Engine& e, int64_t index) { return window_tuple(e.parameter(index).window()); })
      .def("vote",
           [](Engine& e, int64_t index) {
             const Vote vote = [&] {
               const py::gil_scoped_release release;
               return e.vote(index);
             }();
             return vote_tuple(vote);
           })
      .def("discard", &Engine::discard, py::call_guard<py::gil_scoped_release>())
      .def("next_width", [](Engine& e, int64_t index) { return e.parameter(index).next_width(); })
      .def("block_in_use",
           [](Engine& e, int64_t index) { return reinterpret_cast<uintptr_t>(e.parameter(index).block().master); })
      .def("in_flight", [](Engine& e, int64_t index) { return e.parameter(index).in_flight(); })
      .def("steps", [](Engine& e, int64_t index) { return e.parameter(index).steps(); })
      .def("has_selection", [](Engine& e, int64_t index) { return e.parameter(index).has_selection(); })
      .def_property_readonly("clock",
                             [](const Engine& e) {
                               const Clock c = e.clock();
                               return py::make_tuple(c.step, c.window_step, c.last_selection, c.publish_at);
                             })
      .def(
          "set_clock",
          [](Engine& e, int64_t step, int64_t window_step, int64_t last_selection, int64_t publish_at) {
            e.set_clock({step, window_step, last_selection, publish_at});
          },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("host_bytes", &Engine::host_bytes)
      .def("report", [](Engine& e) {
        const Report r = report_of(e);
        return py::dict("total"_a = counters_dict(r.total), "last_window"_a = counters_dict(r.last_window),
                        "host_update_span"_a = py::make_tuple(r.host_update.begin, r.host_update.end),
                        "gradient_norm"_a = r.gradient_norm, "selection_overlap"_a = r.selection_overlap);
      });
}

}  // namespace zenflow
