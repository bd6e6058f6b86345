// SPDX-License-Identifier: Apache-2.0
// Kernel launches of the emulated runtime. Arguments are looked through, structs too, for addresses of host memory that
// is not mapped for the device, and of another device's memory.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "block.h"
#include "devices.h"
#include "errors.h"
#include "memory.h"
#include "symbol.h"

namespace emulation {
namespace {

// A launch's own copy of its arguments.
class Arguments {
 public:
  Arguments(const Parameter* parameters, size_t count, void* const* values) {
    for (size_t i = 0; i < count; ++i) {
      const size_t words = (parameters[i].bytes + kWord - 1) / kWord;
      copies_.push_back(std::make_unique<Word[]>(words));
      words_.push_back(words);
      std::memcpy(copies_.back().get(), values[i], parameters[i].bytes);
      addresses_.push_back(copies_.back().get());
    }
  }

  void* const* addresses() const { return addresses_.data(); }

  template <class Visitor>
  void each_word(Visitor visit) const {
    for (size_t i = 0; i < copies_.size(); ++i) {
      for (size_t w = 0; w < words_[i]; ++w) {
        uintptr_t low, high;
        std::memcpy(&low, copies_[i][w].bytes, sizeof(low));
        std::memcpy(&high, copies_[i][w].bytes + sizeof(low), sizeof(high));
        visit(low);
        visit(high);
      }
    }
  }

 private:
  static constexpr size_t kWord = 16;
  struct alignas(kWord) Word {
    char bytes[kWord] = {};
  };
  std::vector<std::unique_ptr<Word[]>> copies_;
  std::vector<size_t> words_;
  std::vector<void*> addresses_;
};

// Whether a number can be an address of this process. Sizes, counts and floats hardly ever are.
bool is_mapped(uintptr_t word) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  constexpr uintptr_t kLowest = uintptr_t{1} << 32, kHighest = uintptr_t{1} << 47;
  if (word < kLowest || word >= kHighest) return false;
  unsigned char resident;
  return mincore(reinterpret_cast<void*>(word / page * page), 1, &resident) == 0;
}

std::vector<Span> check_arguments(const Arguments& arguments, const Stream& stream, const void* function) {
  std::vector<Span> touches;
  arguments.each_word([&](uintptr_t word) {
    if (word == 0) return;
    const auto* address = reinterpret_cast<const char*>(word);
    auto region = region_of(address);
    if (!region) region = region_of(address - 1);  // the end of something
    if (!region && !is_mapped(word)) return;
    const bool good = region && (region->space == Space::kDevice ? region->device == stream.device() : region->mapped);
    if (!good) {
      throw Misuse(cudaErrorIllegalAddress, "an argument of " + symbol_name(function) + " on device " +
                                                std::to_string(stream.device()) + " is " + describe(address));
    }
    touches.push_back({region->begin, region->bytes});
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
    const auto work = [=](Random& random) {
      if (kept_error() != cudaSuccess) return;
      std::string failure;
      {
        const Visible visible;
        failure = run_launch({call, function, arguments->addresses(), grid, block}, random);
      }
      if (!failure.empty()) keep({cudaErrorLaunchFailure, failure});
    };
    stream->queue(work, std::move(touches));
    return cudaSuccess;
  });
}

}  // namespace emulation
