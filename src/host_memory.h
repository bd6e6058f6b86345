// SPDX-License-Identifier: Apache-2.0
//
// HostArray: a move-only, zero-filled piece of host memory, aligned to 64 bytes; from 2 MiB on it
// is mapped on its own, page-aligned, and asks for huge pages. A mapped page gets its place (NUMA
// node) and costs memory only when it is first written.
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

#include "thread_pool.h"

namespace zenflow {

// Says how many bytes were asked for and how many are held.
class HostMemoryError : public std::bad_alloc {
 public:
  explicit HostMemoryError(const std::string& message) : message_(message) {}
  const char* what() const noexcept override { return message_.what(); }

 private:
  std::runtime_error message_;  // for its copy, which cannot throw
};

class HostArray {
 public:
  HostArray() = default;
  // Zero bytes allocate nothing. Throws HostMemoryError, or std::invalid_argument if bytes < 0.
  explicit HostArray(int64_t bytes);
  ~HostArray();
  HostArray(HostArray&& other) noexcept;
  HostArray& operator=(HostArray&& other) noexcept;

  void* data() const { return data_; }  // nullptr if empty
  int64_t bytes() const { return bytes_; }

  // Writes a zero into each page from the thread that will use it: the one that gets the same range from
  // pool.parallel_for(bytes / element_bytes, grain, ...). Call before anything is stored.
  void first_touch(ThreadPool& pool, int64_t element_bytes, int64_t grain);

  // Sum over all arrays that live in this process.
  static int64_t host_bytes_held();

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace zenflow
