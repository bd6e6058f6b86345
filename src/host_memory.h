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

// Lets a device address host memory. Outlives the arrays that it has locked.
class PageLocker {
 public:
  virtual ~PageLocker() = default;
  // The device's address of the memory, whole pages, or nullptr where the system refuses.
  virtual void* lock(void* data, int64_t bytes) = 0;
  virtual void unlock(void* data) noexcept = 0;
};

class HostArray {
 public:
  HostArray() = default;
  // Zero bytes allocate nothing. With a locker the array has its pages for itself, and page_lock() may be called.
  // Throws HostMemoryError, or std::invalid_argument if bytes < 0.
  explicit HostArray(int64_t bytes, PageLocker* locker = nullptr);
  ~HostArray();
  HostArray(HostArray&& other) noexcept;
  HostArray& operator=(HostArray&& other) noexcept;

  void* data() const { return data_; }  // nullptr if empty
  int64_t bytes() const { return bytes_; }

  // Page-locks the array until its end, if there is a locker and it can. Touches every page: first_touch comes before.
  void page_lock();
  void* device_address() const { return device_address_; }  // nullptr: not page-locked

  // Writes a zero into each page from the thread that will use it: the one that gets the same range from
  // pool.parallel_for(bytes / element_bytes, grain, ...). Call before anything is stored.
  void first_touch(ThreadPool& pool, int64_t element_bytes, int64_t grain);

  // Sum over all arrays that live in this process.
  static int64_t host_bytes_held();

 private:
  int64_t mapped_bytes() const;  // 0: from the allocator

  void* data_ = nullptr;
  int64_t bytes_ = 0;
  PageLocker* locker_ = nullptr;
  void* device_address_ = nullptr;
};

}  // namespace zenflow
