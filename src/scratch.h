// SPDX-License-Identifier: Apache-2.0
// Working memory of one thread, kept between uses so that a steady step allocates nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace zenflow {

// `bytes` of uninitialised memory, aligned for vectors; handed back to the thread's store at the end of the scope.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : buffer_(take()) {
    const size_t needed = static_cast<size_t>(bytes) + kAlignment;
    if (buffer_.size() < needed) buffer_.resize(needed);
    const auto address = reinterpret_cast<uintptr_t>(buffer_.data());
    data_ = buffer_.data() + (kAlignment - address % kAlignment) % kAlignment;
  }
  ~Scratch() { store().idle.push_back(std::move(buffer_)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() { return data_; }
  float* floats() { return reinterpret_cast<float*>(data_); }

 private:
  static constexpr size_t kAlignment = 64;
  using Buffer = std::vector<char>;

  struct Store {
    std::vector<Buffer> idle;
    size_t made = 0;
  };

  static Store& store() {
    static thread_local Store buffers;
    return buffers;
  }
  static Buffer take() {
    Store& s = store();
    if (s.idle.empty()) {
      s.idle.reserve(++s.made);  // so that handing back never allocates
      return {};
    }
    Buffer buffer = std::move(s.idle.back());
    s.idle.pop_back();
    return buffer;
  }

  Buffer buffer_;
  char* data_;
};

}  // namespace zenflow
