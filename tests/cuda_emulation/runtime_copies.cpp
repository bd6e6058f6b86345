// SPDX-License-Identifier: Apache-2.0
// Copies of the emulated runtime. Every range must lie in one piece of memory, and be what the direction says. What
// CUDA leaves open is made hard: a copy runs in pieces, and begins anywhere.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "devices.h"
#include "errors.h"
#include "memory.h"
#include "pace.h"

namespace emulation {
namespace {

constexpr size_t kPieces = 4;

Space check_range(const void* begin, size_t bytes, const char* role, const Stream& stream) {
  const auto region = region_of(begin);
  const std::string what = std::string(role) + " " + std::to_string(bytes) + " bytes at " + describe(begin);
  if (!region) {
    if (meets_region(begin, bytes)) throw Misuse(cudaErrorInvalidValue, what + " run into registered memory");
    return Space::kPageable;
  }
  if (reinterpret_cast<uintptr_t>(begin) + bytes > region->end()) {
    throw Misuse(cudaErrorInvalidValue, what + " run over its end");
  }
  if (region->space == Space::kDevice && region->device != stream.device()) {
    throw Misuse(cudaErrorInvalidValue, what + " on a stream of device " + std::to_string(stream.device()));
  }
  return region->space;
}

void check_side(Space space, bool should_be_device, const char* role, const void* address) {
  if ((space == Space::kDevice) == should_be_device) return;
  throw Misuse(cudaErrorInvalidMemcpyDirection, std::string(role) + " " + describe(address) + ", but the kind says " +
                                                    (should_be_device ? "device" : "host") + " memory");
}

struct Copy {
  char* to;
  const char* from;
  size_t to_pitch, from_pitch, width, height;

  Span destination() const { return {reinterpret_cast<uintptr_t>(to), to_pitch * (height - 1) + width}; }
  Span source() const { return {reinterpret_cast<uintptr_t>(from), from_pitch * (height - 1) + width}; }
};

void copy_row(char* to, const char* from, size_t bytes, Random& random) {
  const size_t piece = bytes / kPieces + 1;
  const auto first = static_cast<size_t>(random.below(kPieces));
  for (size_t i = 0; i < kPieces; ++i) {
    const size_t begin = std::min((first + i) % kPieces * piece, bytes);
    std::memcpy(to + begin, from + begin, std::min(piece, bytes - begin));
  }
}

void perform(const Copy& copy, Random& random) {
  const auto height = static_cast<int64_t>(copy.height);
  const int64_t first = random.below(height);
  const Visible visible;
  for (int64_t i = 0; i < height; ++i) {
    const int64_t row = (first + i) % height;
    copy_row(copy.to + row * copy.to_pitch, copy.from + row * copy.from_pitch, copy.width, random);
  }
}

Cost cost_of(const Copy& copy, Space to, Space from) {
  const auto bytes = static_cast<int64_t>(copy.width * copy.height);
  if ((to == Space::kDevice) == (from == Space::kDevice)) return {};
  return {to == Space::kDevice ? Activity::kUp : Activity::kDown, bytes};
}

// Returns whether the call must wait for the copy.
bool queue_copy(Copy copy, cudaMemcpyKind kind, Stream& stream) {
  const Space to = check_range(copy.to, copy.destination().bytes, "to", stream);
  const Space from = check_range(copy.from, copy.source().bytes, "from", stream);
  if (kind != cudaMemcpyDefault) {
    check_side(to, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice, "to", copy.to);
    check_side(from, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice, "from", copy.from);
  }
  std::vector<Span> touches = {copy.destination(), copy.source()};
  std::shared_ptr<std::vector<char>> staged;
  if (from == Space::kPageable) {
    // The call reads pageable memory itself; the caller may change it at once.
    staged = std::make_shared<std::vector<char>>(copy.source().bytes);
    {
      const Visible visible;
      std::memcpy(staged->data(), copy.from, staged->size());
    }
    copy.from = staged->data();
    touches.pop_back();
  }
  const bool pageable = from == Space::kPageable || to == Space::kPageable;
  const bool moves = !is_paced() || pageable || (to == from) || pace().moves_bytes;
  stream.queue(
      [copy, staged, moves](Random& random) {
        if (moves && kept_error() == cudaSuccess) perform(copy, random);
      },
      std::move(touches), cost_of(copy, to, from));
  return to == Space::kPageable;
}

cudaError_t copy_async(const Copy& copy, cudaMemcpyKind kind, cudaStream_t handle) {
  const auto stream = stream_of(handle);
  if (copy.width == 0 || copy.height == 0) return cudaSuccess;
  if (copy.width > copy.to_pitch || copy.width > copy.from_pitch) {
    throw Misuse(cudaErrorInvalidValue, "rows of " + std::to_string(copy.width) + " bytes overlap: the pitches are " +
                                            std::to_string(copy.to_pitch) + " and " + std::to_string(copy.from_pitch));
  }
  if (queue_copy(copy, kind, *stream)) wait_for(stream->record());
  return cudaSuccess;
}

Copy one_row(void* to, const void* from, size_t bytes) {
  return {static_cast<char*>(to), static_cast<const char*>(from), bytes, bytes, bytes, 1};
}

}  // namespace
}  // namespace emulation

using namespace emulation;

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return api(__func__, [&] { return copy_async(one_row(to, from, bytes), kind, stream); });
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return api(__func__, [&] {
    return copy_async({static_cast<char*>(to), static_cast<const char*>(from), to_pitch, from_pitch, width, height},
                      kind, stream);
  });
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return api(__func__, [&] {
    copy_async(one_row(to, from, bytes), kind, nullptr);
    if (kind != cudaMemcpyDeviceToDevice) wait_for(stream_of(nullptr)->record());  // CUDA does not wait for that one
    return kept_error();
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t handle) {
  return api(__func__, [&] {
    const auto stream = stream_of(handle);
    if (bytes == 0) return cudaSuccess;
    if (check_range(to, bytes, "set", *stream) == Space::kPageable) {
      throw Misuse(cudaErrorInvalidValue, "cannot set " + describe(to));
    }
    const auto set = [=](Random&) {
      if (kept_error() != cudaSuccess) return;
      const Visible visible;
      std::memset(to, value, bytes);
    };
    stream->queue(set, {{reinterpret_cast<uintptr_t>(to), bytes}});
    return cudaSuccess;
  });
}
