// SPDX-License-Identifier: Apache-2.0
// Memory of the emulated device: poison, page-locking, copies, and whose addresses may go where.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "device_arrays.h"
#include "dtype.h"
#include "emulation.h"

using zenflow::Grid;
using zenflow::launch;
using zenflow_test::DeviceArray;
using zenflow_test::test_stream;

namespace {

const bool kChecksAccess = std::string(ZENFLOW_SANITIZE) == "none";
const bool kChecksThreads = std::string(ZENFLOW_SANITIZE) == "thread";

struct Pair {
  int* to;
  const int* from;
};

__global__ void copy(Pair pair) {
  pair.to[threadIdx.x] = pair.from[threadIdx.x];
}
__global__ void fill(int* data, int value) {
  data[threadIdx.x] = value;
}

// The kept error must say so; it is cleared.
void check_misuse(const std::string& part) {
  if (emulation::kept_error() == cudaSuccess) cudaDeviceSynchronize();
  const std::string text = emulation::kept_text();
  emulation::clear_error();
  if (text.find(part) == std::string::npos) throw zenflow_test::Failure("no '" + part + "' in: " + text);
}

// Host memory that is page-locked while this lives.
class Pinned {
 public:
  explicit Pinned(int count, unsigned flags = cudaHostRegisterMapped) : values_(count) {
    ZENFLOW_CUDA_CHECK(cudaHostRegister(values_.data(), bytes(), flags));
  }
  ~Pinned() { cudaHostUnregister(values_.data()); }
  int* data() { return values_.data(); }
  size_t bytes() const { return values_.size() * sizeof(int); }

 private:
  std::vector<int> values_;
};

// What is copied while `stream` is held runs only once somebody waits.
struct Held {
  Held() {
    emulation::restart_numbering();
    emulation::hold({"stream 1"});
    ZENFLOW_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  ~Held() {
    cudaStreamDestroy(stream);
    emulation::hold({});
  }
  cudaStream_t stream = nullptr;
};

}  // namespace

TEST(device_memory_is_poisoned) {
  void* memory = nullptr;
  ZENFLOW_CUDA_CHECK(cudaMalloc(&memory, 64));
  std::vector<uint16_t> words(32);
  ZENFLOW_CUDA_CHECK(cudaMemcpy(words.data(), memory, 64, cudaMemcpyDeviceToHost));
  ZENFLOW_CUDA_CHECK(cudaFree(memory));
  float single;
  std::memcpy(&single, words.data(), sizeof(single));
  CHECK(std::isnan(single) && std::isnan(zenflow::widen_bfloat16(words[0])) &&
        std::isnan(zenflow::widen_float16(words[0])));
}

TEST(copies_stay_within_one_piece_of_memory) {
  const DeviceArray<int> array(std::vector<int>(4));
  std::vector<int> host(1024);
  CHECK(cudaMemcpy(array.data(), host.data(), 4096, cudaMemcpyHostToDevice) != cudaSuccess);
  check_misuse("run over its end");
  CHECK(cudaMemcpy2DAsync(array.data(), 64, host.data(), 16, 16, 4, cudaMemcpyHostToDevice) != cudaSuccess);
  check_misuse("run over its end");
  CHECK(cudaMemcpy2DAsync(array.data(), 8, host.data(), 16, 16, 1, cudaMemcpyHostToDevice) != cudaSuccess);
  check_misuse("the pitches are 8 and 16");
  CHECK(cudaMemsetAsync(host.data(), 0, 4) != cudaSuccess);
  check_misuse("cannot set");
}

TEST(the_kind_of_a_copy_is_checked) {
  const DeviceArray<int> array({1}), other({2});
  int host = 0;
  CHECK_EQ(cudaMemcpy(&host, array.data(), 4, cudaMemcpyHostToDevice), cudaErrorInvalidMemcpyDirection);
  check_misuse("but the kind says device memory");
  CHECK_EQ(cudaMemcpy(other.data(), array.data(), 4, cudaMemcpyDeviceToHost), cudaErrorInvalidMemcpyDirection);
  check_misuse("but the kind says host memory");
  ZENFLOW_CUDA_CHECK(cudaMemcpy(&host, array.data(), 4, cudaMemcpyDefault));
  CHECK_EQ(host, 1);
}

TEST(pageable_memory_is_read_by_the_call_and_awaited_by_it) {
  const DeviceArray<int> array({0});
  const Held held;
  int host = 7;
  ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(array.data(), &host, 4, cudaMemcpyHostToDevice, held.stream));
  host = 8;
  int result = 0;
  ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(&result, array.data(), 4, cudaMemcpyDeviceToHost, held.stream));
  CHECK_EQ(result, 7);
}

TEST(page_locked_memory_is_read_by_the_stream) {
  const DeviceArray<int> array({0});
  Pinned from(1), to(1);
  const Held held;
  *from.data() = 7;
  ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(array.data(), from.data(), 4, cudaMemcpyHostToDevice, held.stream));
  ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(to.data(), array.data(), 4, cudaMemcpyDeviceToHost, held.stream));
  if (!kChecksThreads) CHECK_EQ(*to.data(), 0);  // nobody has waited: nothing has run
  ZENFLOW_CUDA_CHECK(cudaStreamSynchronize(held.stream));
  CHECK_EQ(*to.data(), 7);
}

TEST(page_locks_are_taken_once_and_kept_while_in_use) {
  const DeviceArray<int> array({0});
  Pinned host(4);
  CHECK_EQ(cudaHostRegister(host.data() + 1, 4, 0), cudaErrorHostMemoryAlreadyRegistered);
  CHECK_EQ(cudaGetLastError(), cudaErrorHostMemoryAlreadyRegistered);
  {
    const Held held;
    ZENFLOW_CUDA_CHECK(cudaMemcpyAsync(array.data(), host.data(), 4, cudaMemcpyHostToDevice, held.stream));
    CHECK(cudaHostUnregister(host.data()) != cudaSuccess);
    check_misuse("queued work still uses");
    ZENFLOW_CUDA_CHECK(cudaStreamSynchronize(held.stream));
  }
  int other;
  CHECK(cudaHostUnregister(&other) != cudaSuccess);
  check_misuse("nothing of this kind begins at");
}

TEST(mapped_memory_alone_has_a_device_address) {
  Pinned mapped(1), unmapped(1, cudaHostRegisterDefault);
  int ordinary;
  void* address = nullptr;
  ZENFLOW_CUDA_CHECK(cudaHostGetDevicePointer(&address, mapped.data(), 0));
  launch(fill, Grid(1, 1), test_stream(), static_cast<int*>(address), 5);
  test_stream().synchronize();
  CHECK_EQ(*mapped.data(), 5);
  for (void* pointer : {static_cast<void*>(unmapped.data()), static_cast<void*>(&ordinary)}) {
    CHECK(cudaHostGetDevicePointer(&address, pointer, 0) != cudaSuccess);
    check_misuse("not mapped page-locked memory");
  }
}

TEST(kernels_get_no_pointers_that_they_may_not_use) {
  int host = 0;
  ZENFLOW_CUDA_CHECK(cudaSetDevice(1));
  const DeviceArray<int> elsewhere({0});
  ZENFLOW_CUDA_CHECK(cudaSetDevice(0));
  CHECK_THROWS(std::runtime_error, launch(fill, Grid(1, 1), test_stream(), &host, 1));
  check_misuse("an argument of (anonymous namespace)::fill(int*, int) on device 0 is");
  CHECK_THROWS(std::runtime_error, launch(fill, Grid(1, 1), test_stream(), elsewhere.data(), 1));
  check_misuse("of memory of device 1");
}

TEST(single_accesses_are_checked) {
  if (!kChecksAccess) return;
  const DeviceArray<int> array({1, 2});
  Pinned mapped(1), unmapped(1, cudaHostRegisterDefault);
  int host = 0;
  const auto check = [&](Pair pair, unsigned threads, const char* text) {
    launch(copy, Grid(1, threads), test_stream(), pair);
    check_misuse(text);
  };
  check({array.data(), mapped.data()}, 1, "");
  check({array.data(), &host}, 1, "of (anonymous namespace)::copy((anonymous namespace)::Pair) touches 4 bytes at");
  check({&host, array.data()}, 1, "pageable host memory");
  check({array.data(), unmapped.data()}, 1, "unmapped page-locked host memory");
  check({mapped.data(), array.data()}, 2, "touches 4 bytes at");  // the second thread writes past the end

  (void)*static_cast<volatile int*>(mapped.data());
  CHECK_EQ(emulation::kept_text(), "");
  (void)*static_cast<volatile int*>(array.data());
  check_misuse("host code touches 4 bytes at");
}

TEST(ordinary_memory_can_be_adopted) {
  std::vector<int> tensor(8);
  emulation::adopt(tensor.data(), 32, 0);
  launch(fill, Grid(1, 8), test_stream(), tensor.data(), 3);
  test_stream().synchronize();
  CHECK_THROWS(emulation::Misuse, emulation::adopt(DeviceArray<int>({1}).data(), 4, 0));
  emulation::adopt(tensor.data() + 4, 8, 0);  // the old tensor's memory was given to a new one
  emulation::disown(tensor.data() + 4);
  CHECK_EQ(tensor[7], 3);
  CHECK_THROWS(std::runtime_error, launch(fill, Grid(1, 8), test_stream(), tensor.data(), 3));
  check_misuse("pageable host memory");
}

TEST(page_locking_can_be_refused) {
  emulation::fail_host_register(true);
  int host;
  void* memory = nullptr;
  CHECK_EQ(cudaHostRegister(&host, 4, 0), cudaErrorMemoryAllocation);
  CHECK_EQ(cudaHostAlloc(&memory, 4, 0), cudaErrorMemoryAllocation);
  emulation::fail_host_register(false);
  CHECK_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
}
