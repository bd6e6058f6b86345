// SPDX-License-Identifier: Apache-2.0
#include "host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace zenflow {
namespace {

constexpr int64_t kAlignment = 64;              // a cache line, and an AVX-512 vector
constexpr int64_t kMapFrom = int64_t{2} << 20;  // one huge page
constexpr int64_t kPage = 4096;                 // the smallest page: mapped memory is zero, a touch places it

std::atomic<int64_t> held{0};

int64_t rounded_up(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

void* map(int64_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  madvise(data, bytes, MADV_HUGEPAGE);  // a wish: small pages work too
  return data;
}

void* allocate(int64_t bytes) {
  void* data = std::aligned_alloc(kAlignment, rounded_up(bytes));
  if (data != nullptr) std::memset(data, 0, bytes);
  return data;
}

}  // namespace

HostArray::HostArray(int64_t bytes, PageLocker* locker) : bytes_(bytes), locker_(locker) {
  if (bytes < 0) throw std::invalid_argument("zenflow: a host array cannot have " + std::to_string(bytes) + " bytes");
  if (bytes == 0) return;
  data_ = mapped_bytes() > 0 ? map(mapped_bytes()) : allocate(bytes);
  if (data_ == nullptr) {
    throw HostMemoryError("zenflow: cannot allocate " + std::to_string(bytes) + " bytes of host memory (" +
                          std::strerror(errno) + "); " + std::to_string(held) + " bytes are held already");
  }
  held += bytes;
}

int64_t HostArray::mapped_bytes() const {
  return bytes_ >= kMapFrom || locker_ != nullptr ? (bytes_ + kPage - 1) / kPage * kPage : 0;
}

void HostArray::page_lock() {
  if (data_ != nullptr && locker_ != nullptr) device_address_ = locker_->lock(data_, mapped_bytes());
}

HostArray::~HostArray() {
  if (data_ == nullptr) return;
  held -= bytes_;
  if (device_address_ != nullptr) locker_->unlock(data_);
  if (mapped_bytes() > 0) {
    munmap(data_, mapped_bytes());
  } else {
    std::free(data_);
  }
}

HostArray::HostArray(HostArray&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      locker_(std::exchange(other.locker_, nullptr)),
      device_address_(std::exchange(other.device_address_, nullptr)) {}

HostArray& HostArray::operator=(HostArray&& other) noexcept {
  HostArray old(std::move(other));
  std::swap(data_, old.data_);
  std::swap(bytes_, old.bytes_);
  std::swap(locker_, old.locker_);
  std::swap(device_address_, old.device_address_);
  return *this;
}

void HostArray::first_touch(ThreadPool& pool, int64_t element_bytes, int64_t grain) {
  if (element_bytes < 1) {
    throw std::invalid_argument("zenflow: first_touch needs element_bytes >= 1, got " + std::to_string(element_bytes));
  }
  if (bytes_ < kMapFrom) return;  // one thread's anyway
  const int64_t elements = bytes_ / element_bytes + (bytes_ % element_bytes != 0);
  pool.parallel_for(elements, grain, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * element_bytes, last = std::min(end * element_bytes, bytes_);
    for (int64_t i = (first + kPage - 1) / kPage * kPage; i < last; i += kPage)
      static_cast<volatile char*>(data_)[i] = 0;
  });
}

int64_t HostArray::host_bytes_held() {
  return held;
}

}  // namespace zenflow
