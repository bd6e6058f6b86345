// SPDX-License-Identifier: Apache-2.0
// Streams and events of the emulated runtime. Streams that synchronise with the legacy default stream by themselves are
// refused: zenflow makes none.
#include <map>
#include <mutex>
#include <utility>

#include "devices.h"
#include "emulation.h"
#include "errors.h"
#include "wait_sites.h"

namespace emulation {
namespace {

struct Event {
  int device;
  unsigned flags;
  std::shared_ptr<Record> last;
};

struct Events {
  std::mutex mutex;
  std::map<cudaEvent_t, std::shared_ptr<Event>> all;
};

Events& events() {
  static auto* all = new Events;
  return *all;
}

std::shared_ptr<Event> event_of(cudaEvent_t handle) {
  const std::lock_guard lock(events().mutex);
  const auto found = events().all.find(handle);
  if (found == events().all.end()) {
    throw Misuse(cudaErrorInvalidResourceHandle, "no such event, or it was destroyed");
  }
  return found->second;
}

std::shared_ptr<Record> last_record(const Event& event) {
  const std::lock_guard lock(events().mutex);
  return event.last;
}

const Stream* producer_of(const std::shared_ptr<Record>& record) {
  return record != nullptr ? record->stream.get() : nullptr;
}

}  // namespace
}  // namespace emulation

using namespace emulation;

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return api(__func__, [&] {
    if (flags != cudaStreamNonBlocking) {
      throw Misuse(cudaErrorNotSupported, "only streams with cudaStreamNonBlocking are emulated");
    }
    *stream = add_stream(current_device());
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return api(__func__, [&] {
    if (stream == nullptr) throw Misuse(cudaErrorInvalidResourceHandle, "the default stream cannot be destroyed");
    remove_stream(stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return api(__func__, [&] { return stream_of(stream)->query() ? kept_error() : cudaErrorNotReady; });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream, Site site) {
  return api(__func__, [&] {
    const auto producer = stream_of(stream);
    if (wait_is_kept(site, "cudaStreamSynchronize", producer.get())) wait_for(producer->record());
    return kept_error();
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned, Site site) {
  return api(__func__, [&] {
    const auto consumer = stream_of(stream);
    const auto record = last_record(*event_of(event));
    const bool kept = wait_is_kept(site, "cudaStreamWaitEvent", producer_of(record));
    if (record != nullptr && kept) consumer->wait(record);
    return cudaSuccess;
  });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return api(__func__, [&] {
    *status = stream_of(stream)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return api(__func__, [&] {
    const auto made = std::make_shared<Event>(Event{current_device(), flags, nullptr});
    *event = reinterpret_cast<cudaEvent_t>(made.get());
    const std::lock_guard lock(events().mutex);
    events().all[*event] = made;
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return api(__func__, [&] {
    const auto kept = event_of(event);
    const std::lock_guard lock(events().mutex);
    events().all.erase(event);
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return api(__func__, [&] {
    const auto recorded = event_of(event);
    const auto producer = stream_of(stream);
    if (recorded->device != producer->device()) {
      throw Misuse(cudaErrorInvalidResourceHandle, "the event belongs to device " + std::to_string(recorded->device) +
                                                       ", the stream to device " + std::to_string(producer->device()));
    }
    const auto record = producer->record();
    const std::lock_guard lock(events().mutex);
    recorded->last = record;
    return cudaSuccess;
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return api(__func__, [&] {
    const auto record = last_record(*event_of(event));
    return record == nullptr || is_done(record) ? kept_error() : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event, Site site) {
  return api(__func__, [&] {
    const auto record = last_record(*event_of(event));
    const bool kept = wait_is_kept(site, "cudaEventSynchronize", producer_of(record));
    if (record != nullptr && kept) wait_for(record);
    return kept_error();
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return api(__func__, [&] {
    const auto from = event_of(start), to = event_of(end);
    if (((from->flags | to->flags) & cudaEventDisableTiming) != 0) {
      throw Misuse(cudaErrorInvalidResourceHandle, "an event was made with cudaEventDisableTiming");
    }
    const auto first = last_record(*from), last = last_record(*to);
    if (first == nullptr || last == nullptr) {
      throw Misuse(cudaErrorInvalidResourceHandle, "an event was never recorded");
    }
    if (!is_done(first) || !is_done(last)) return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(last->time - first->time).count();
    return cudaSuccess;
  });
}

void emulation::queue_work(cudaStream_t stream, double seconds) {
  const Invisible invisible;
  stream_of(stream)->queue([](Random&) {}, {}, {Activity::kWork, 0, seconds});
}

void emulation::set_capturing(cudaStream_t stream, bool capturing) {
  const Invisible invisible;
  stream_of(stream)->capturing = capturing;
}
