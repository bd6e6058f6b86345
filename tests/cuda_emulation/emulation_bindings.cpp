// SPDX-License-Identifier: Apache-2.0
// _C.emulation: what Python tests say to the emulated device. Addresses and stream handles are integers; a stream of 0
// is the current device's default one. Errors raise RuntimeError, with the device's text.
#include "bindings.h"

#include <pybind11/stl.h>

#include "cuda/check.h"
#include "cuda/event.h"
#include "emulation.h"
#include "memory.h"

using namespace py::literals;

namespace zenflow {
namespace {

cudaStream_t stream_of(uintptr_t handle) {
  return reinterpret_cast<cudaStream_t>(handle);
}

void* address_of(uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

uintptr_t create_stream(int device) {
  const DeviceScope scope(device);
  cudaStream_t stream = nullptr;
  ZENFLOW_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return reinterpret_cast<uintptr_t>(stream);
}

void synchronize_stream(uintptr_t stream) {
  ZENFLOW_CUDA_CHECK(cudaStreamSynchronize(stream_of(stream)));
}

void synchronize_device(int device) {
  const DeviceScope scope(device);
  ZENFLOW_CUDA_CHECK(cudaDeviceSynchronize());
}

// As torch's Stream.wait_stream.
void wait_stream(uintptr_t consumer, uintptr_t producer, int producers_device) {
  const DeviceScope scope(producers_device);
  const Event event;
  ZENFLOW_CUDA_CHECK(cudaEventRecord(event.handle(), stream_of(producer)));
  ZENFLOW_CUDA_CHECK(cudaStreamWaitEvent(stream_of(consumer), event.handle()));
}

py::list wait_sites() {
  py::list sites;
  for (const auto& site : emulation::wait_sites()) {
    sites.append(
        py::dict("place"_a = site.place, "call"_a = site.call, "hits"_a = site.hits, "producers"_a = site.producers));
  }
  return sites;
}

// (stream, what it did, bytes, begin and end in seconds of time.monotonic()) of each.
py::list take_occupied() {
  static constexpr const char* names[] = {"", "work", "kernel", "down", "up"};
  const auto seconds = [](emulation::Instant t) { return std::chrono::duration<double>(t.time_since_epoch()).count(); };
  py::list all;
  for (const auto& o : emulation::take_occupied()) {
    all.append(
        py::make_tuple(o.stream, names[static_cast<int>(o.activity)], o.bytes, seconds(o.begin), seconds(o.end)));
  }
  return all;
}

bool in_use(uintptr_t address, size_t bytes) {
  return emulation::queued_work_touches({address, bytes});
}

}  // namespace

void bind_emulation(py::module_& module) {
  py::module_ m = module.def_submodule("emulation");
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  m.def(
      "adopt",
      [](uintptr_t address, size_t bytes, int device) { emulation::adopt(address_of(address), bytes, device); },
      "address"_a, "bytes"_a, "device"_a);
  m.def("disown", [](uintptr_t address) { emulation::disown(address_of(address)); }, "address"_a);
  m.def("in_use", &in_use, "address"_a, "bytes"_a);
  m.def("check_freed", &emulation::check_freed);

  m.def("create_stream", &create_stream, "device"_a);
  m.def(
      "destroy_stream", [](uintptr_t stream) { ZENFLOW_CUDA_CHECK(cudaStreamDestroy(stream_of(stream))); }, "stream"_a);
  m.def("synchronize_stream", &synchronize_stream, "stream"_a, no_gil);
  m.def("synchronize_device", &synchronize_device, "device"_a, no_gil);
  m.def("wait_stream", &wait_stream, "consumer"_a, "producer"_a, "producers_device"_a);
  m.def(
      "set_capturing", [](uintptr_t stream, bool capturing) { emulation::set_capturing(stream_of(stream), capturing); },
      "stream"_a, "capturing"_a);
  m.def("set_device_count", &emulation::set_device_count, "count"_a);

  m.def("set_seed", &emulation::set_seed, "seed"_a);
  m.def("set_delay", &emulation::set_delay, "microseconds"_a);
  m.def("restart_numbering", &emulation::restart_numbering);
  m.def("hold", &emulation::hold, "streams"_a);
  m.def("wait_sites", &wait_sites);
  m.def("forget_wait_sites", &emulation::forget_wait_sites);
  m.def("delete_wait", &emulation::delete_wait, "place"_a, "producers"_a);
  m.def("restore_waits", &emulation::restore_waits);

  m.def(
      "set_pace",
      [](double link, double kernel, bool moves_bytes, std::vector<std::string> runs) {
        emulation::set_pace({link, kernel, moves_bytes, std::move(runs)});
      },
      py::kw_only(), "link_bytes_per_second"_a, "kernel_seconds"_a, "moves_bytes"_a, "runs"_a);
  m.def(
      "queue_work", [](uintptr_t stream, double seconds) { emulation::queue_work(stream_of(stream), seconds); },
      "stream"_a, "seconds"_a);
  m.def("take_occupied", &take_occupied);

  m.def("fail_host_register", &emulation::fail_host_register, "fails"_a);
  m.def(
      "fail_next",
      [](const std::string& call, int error) { emulation::fail_next(call, static_cast<cudaError_t>(error)); }, "call"_a,
      "error"_a);
  m.def("error", &emulation::kept_text);
  m.def("clear_error", &emulation::clear_error);
}

}  // namespace zenflow
