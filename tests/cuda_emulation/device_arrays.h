// SPDX-License-Identifier: Apache-2.0
// Arrays in device memory for the kernels' tests: filled from the host, at any alignment, and read back together with
// the guard bytes around them.
#pragma once

#include <cstring>
#include <vector>

#include "../cpp/check.h"
#include "../cpp/random.h"
#include "cuda/check.h"
#include "cuda/stream.h"
#include "dtype.h"

namespace zenflow_test {

using zenflow::DType;

inline zenflow::Stream test_stream() {
  static cudaStream_t handle = [] {
    cudaStream_t stream = nullptr;
    ZENFLOW_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
  }();
  return zenflow::Stream(handle);
}

// `offset` elements lie before the array, so that its address is not that of an allocation.
template <class T>
class DeviceArray {
 public:
  DeviceArray(const std::vector<T>& values, int64_t offset = 0)
      : count_(values.size()), before_(static_cast<size_t>(offset) * sizeof(T)), bytes_(before_ + size() + kGuard) {
    std::vector<unsigned char> memory(bytes_, kPattern);
    if (count_ > 0) std::memcpy(memory.data() + before_, values.data(), size());
    ZENFLOW_CUDA_CHECK(cudaMalloc(&memory_, bytes_));
    ZENFLOW_CUDA_CHECK(cudaMemcpy(memory_, memory.data(), bytes_, cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(memory_); }

  T* data() const { return reinterpret_cast<T*>(memory_ + before_); }

  // What the stream's work has made of it. Nothing may have been written around it.
  std::vector<T> read() const {
    test_stream().synchronize();
    std::vector<unsigned char> memory(bytes_);
    ZENFLOW_CUDA_CHECK(cudaMemcpy(memory.data(), memory_, bytes_, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < bytes_; ++i) CHECK((i >= before_ && i < before_ + size()) || memory[i] == kPattern);
    std::vector<T> values(count_);
    if (count_ > 0) std::memcpy(values.data(), memory.data() + before_, size());
    return values;
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr unsigned char kPattern = 0xa5;
  size_t size() const { return count_ * sizeof(T); }

  size_t count_, before_, bytes_;
  unsigned char* memory_ = nullptr;
};

// Elements of a dtype, by their bits.
struct Elements {
  DType dtype;
  std::vector<uint32_t> bits;

  int64_t count() const { return static_cast<int64_t>(bits.size()); }
  float at(int64_t i) const {
    return zenflow::with_dtype(dtype, [&]<DType D>() {
      return zenflow::widen<D>(static_cast<typename zenflow::BitsOf<D>::type>(bits[static_cast<size_t>(i)]));
    });
  }
  void set(int64_t i, float value) {
    bits[static_cast<size_t>(i)] =
        zenflow::with_dtype(dtype, [&]<DType D>() { return uint32_t{zenflow::round_to<D>(value)}; });
  }
};

// The first element whose bits differ (any NaN equals any NaN), or -1.
inline int64_t first_difference(const Elements& a, const Elements& b) {
  CHECK(a.dtype == b.dtype && a.count() == b.count());
  for (int64_t i = 0; i < a.count(); ++i) {
    if (!same_bits(a.dtype, a.bits[static_cast<size_t>(i)], b.bits[static_cast<size_t>(i)])) return i;
  }
  return -1;
}

// Ordinary values of different sizes, or, if wild, all that an element can be.
inline Elements random_elements(Random& random, DType dtype, int64_t count, bool wild) {
  Elements elements{dtype, std::vector<uint32_t>(static_cast<size_t>(count))};
  for (int64_t i = 0; i < count; ++i) {
    elements.set(i, wild ? random.any_float() : std::ldexp(random.uniform(), static_cast<int>(random.between(-6, 1))));
  }
  return elements;
}

class DeviceElements {
 public:
  DeviceElements(const Elements& elements, int64_t offset = 0)
      : dtype_(elements.dtype), memory_(packed(elements), offset * zenflow::item_size(elements.dtype)) {}

  void* data() const { return memory_.data(); }
  float* floats() const { return static_cast<float*>(data()); }
  Elements read() const {
    const std::vector<unsigned char> memory = memory_.read();
    Elements elements{dtype_, std::vector<uint32_t>(memory.size() / static_cast<size_t>(zenflow::item_size(dtype_)))};
    for (int64_t i = 0; i < elements.count(); ++i) {
      elements.bits[static_cast<size_t>(i)] = bits_at(dtype_, memory.data(), i);
    }
    return elements;
  }

 private:
  static std::vector<unsigned char> packed(const Elements& elements) {
    const auto item = static_cast<size_t>(zenflow::item_size(elements.dtype));
    std::vector<unsigned char> memory(elements.bits.size() * item);
    for (size_t i = 0; i < elements.bits.size(); ++i) std::memcpy(&memory[i * item], &elements.bits[i], item);
    return memory;
  }

  DType dtype_;
  DeviceArray<unsigned char> memory_;
};

// Sizes around the borders of blocks, tiles and warps.
struct Shape {
  int64_t rows, columns;
  int64_t count() const { return rows * columns; }
};
inline Shape random_shape(Random& random) {
  const int64_t rows =
      random.one_of<int64_t>({1, random.between(2, 9), 63, 64, 65, 127, 128, 129, random.between(130, 600)});
  const int64_t columns = random.one_of<int64_t>(
      {1, random.between(2, 31), 32, 33, 8 * random.between(1, 30), 255, 256, 257, random.between(258, 400)});
  return rows * columns > 60000 ? Shape{rows, random.between(1, 40)} : Shape{rows, columns};
}

inline DType random_dtype(Random& random) {
  return random.one_of({DType::kFloat32, DType::kBFloat16, DType::kFloat16});
}

}  // namespace zenflow_test
