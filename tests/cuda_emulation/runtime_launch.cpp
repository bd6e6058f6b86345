// SPDX-License-Identifier: Apache-2.0
// Kernel launches of the emulated runtime. A pointer among the arguments must be into memory that the device may touch.
// Words of structs may be leftovers; those that are addresses of registered memory count as in use by the launch.
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "block.h"
#include "devices.h"
#include "errors.h"
#include "memory.h"
#include "pace.h"
#include "symbol.h"

namespace emulation {
namespace {

// A launch's own copy of its arguments.
class Arguments {
 public:
  Arguments(const Parameter* parameters, size_t count, void* const* values)
      : parameters_(parameters, parameters + count) {
    for (size_t i = 0; i < count; ++i) {
      const size_t words = (parameters[i].bytes + kWord - 1) / kWord;
      copies_.push_back(std::make_unique<Word[]>(words));
      std::memcpy(copies_.back().get(), values[i], parameters[i].bytes);
      addresses_.push_back(copies_.back().get());
    }
  }

  void* const* addresses() const { return addresses_.data(); }

  // Calls visit(word, whether a parameter is just this pointer) for all 8-byte words.
  template <class Visitor>
  void each_word(Visitor visit) const {
    for (size_t i = 0; i < copies_.size(); ++i) {
      for (size_t offset = 0; offset + sizeof(uintptr_t) <= parameters_[i].bytes; offset += sizeof(uintptr_t)) {
        uintptr_t word;
        std::memcpy(&word, copies_[i][offset / kWord].bytes + offset % kWord, sizeof(word));
        visit(word, parameters_[i].is_pointer);
      }
    }
  }

 private:
  static constexpr size_t kWord = 16;
  struct alignas(kWord) Word {
    char bytes[kWord] = {};
  };
  std::vector<std::unique_ptr<Word[]>> copies_;
  std::vector<Parameter> parameters_;
  std::vector<void*> addresses_;
};

std::vector<Span> check_arguments(const Arguments& arguments, const Stream& stream, const void* function) {
  std::vector<Span> touches;
  arguments.each_word([&](uintptr_t word, bool is_pointer) {
    if (word == 0) return;
    const auto* address = reinterpret_cast<const char*>(word);
    auto region = region_of(address);
    if (!region) region = region_of(address - 1);  // the end of something
    if (region) touches.push_back({region->begin, region->bytes});
    const bool good = region && (region->space == Space::kDevice ? region->device == stream.device() : region->mapped);
    if (good || !is_pointer) return;
    throw Misuse(cudaErrorIllegalAddress, "an argument of " + symbol_name(function) + " on device " +
                                              std::to_string(stream.device()) + " is " + describe(address));
  });
  return touches;
}

void check_shape(dim3 grid, dim3 block, size_t shared_bytes) {
  const auto shape = [](dim3 d) {
    return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
  };
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64 || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
      grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    throw Misuse(cudaErrorInvalidConfiguration, "grid " + shape(grid) + " of blocks " + shape(block));
  }
  if (shared_bytes != 0) throw Misuse(cudaErrorNotSupported, "dynamic shared memory is not emulated");
}

}  // namespace

cudaError_t launch_kernel(const void* function, KernelCall call, const Parameter* parameters, size_t count, dim3 grid,
                          dim3 block, void** values, size_t shared_bytes, cudaStream_t handle) {
  return api("cudaLaunchKernel", [&] {
    const auto stream = stream_of(handle);
    check_shape(grid, block, shared_bytes);
    if (stream->device() != current_device()) {
      throw Misuse(cudaErrorInvalidResourceHandle, "the stream belongs to device " + std::to_string(stream->device()) +
                                                       ", current is " + std::to_string(current_device()));
    }
    const auto arguments = std::make_shared<const Arguments>(parameters, count, values);
    auto touches = check_arguments(*arguments, *stream, function);
    const bool runs = !is_paced() || runs_in_pace(function);
    const auto work = [=](Random& random) {
      if (kept_error() != cudaSuccess || !runs) return;
      std::string failure;
      {
        const Visible visible;
        failure = run_launch({call, function, arguments->addresses(), grid, block, stream->device()}, random);
      }
      if (!failure.empty()) keep({cudaErrorLaunchFailure, failure});
    };
    stream->queue(work, std::move(touches), {Activity::kKernel, 0, is_paced() ? pace().kernel_seconds : 0});
    return cudaSuccess;
  });
}

}  // namespace emulation
