// SPDX-License-Identifier: Apache-2.0
#include "host_memory.h"

#include <sys/mman.h>

#include <unistd.h>
#include <algorithm>
#include <vector>

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "check.h"

using zenflow::HostArray;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

bool all_zero(const HostArray& array) {
  const char* bytes = static_cast<const char*>(array.data());
  for (int64_t i = 0; i < array.bytes(); ++i) {
    if (bytes[i] != 0) return false;
  }
  return true;
}

}  // namespace

TEST(arrays_are_aligned_zeroed_and_counted) {
  const int64_t before = HostArray::host_bytes_held();
  for (const int64_t bytes : {int64_t{1}, int64_t{63}, int64_t{65}, 2 * kMiB - 1, 2 * kMiB, 5 * kMiB + 3}) {
    const HostArray array(bytes);
    CHECK_EQ(array.bytes(), bytes);
    const int64_t alignment = bytes >= 2 * kMiB ? sysconf(_SC_PAGESIZE) : 64;
    CHECK_EQ(reinterpret_cast<uintptr_t>(array.data()) % alignment, 0u);
    CHECK(all_zero(array));
    std::memset(array.data(), 1, bytes);
    CHECK_EQ(HostArray::host_bytes_held(), before + bytes);
  }
  CHECK_EQ(HostArray::host_bytes_held(), before);
}

TEST(empty_arrays_hold_nothing) {
  const int64_t before = HostArray::host_bytes_held();
  HostArray array(0), other;
  CHECK(array.data() == nullptr && other.data() == nullptr);
  CHECK_EQ(array.bytes(), 0);
  zenflow::ThreadPool pool(2);
  array.first_touch(pool, 4, 16);
  CHECK_EQ(HostArray::host_bytes_held(), before);
}

TEST(moving_passes_the_memory_on) {
  const int64_t before = HostArray::host_bytes_held();
  {
    HostArray a(100), b(3 * kMiB);
    void* const data = b.data();
    a = std::move(b);
    CHECK(a.data() == data && b.data() == nullptr && b.bytes() == 0);
    CHECK_EQ(HostArray::host_bytes_held(), before + 3 * kMiB);
    HostArray c(std::move(a));
    CHECK(c.data() == data && a.data() == nullptr);
    HostArray& same = c;
    c = std::move(same);
    CHECK(c.data() == data);
  }
  CHECK_EQ(HostArray::host_bytes_held(), before);
}

TEST(a_refused_allocation_names_its_size) {
  const int64_t before = HostArray::host_bytes_held();
  const int64_t bytes = int64_t{1} << 60;
  std::string message;
  try {
    HostArray array(bytes);
  } catch (const std::bad_alloc& error) {
    message = error.what();
  }
  CHECK(message.find(std::to_string(bytes)) != std::string::npos);
  CHECK_EQ(HostArray::host_bytes_held(), before);
  CHECK_THROWS(std::invalid_argument, HostArray(-1));
}

TEST(first_touch_makes_every_page_resident_and_leaves_zeros) {
  zenflow::ThreadPool pool(3);
  for (const int64_t bytes : {int64_t{1}, int64_t{4096}, int64_t{10001}, 2 * kMiB + 6, 5 * kMiB}) {
    HostArray array(bytes);
    array.first_touch(pool, 4, 16);
    if (bytes >= 2 * kMiB) {
      std::vector<unsigned char> resident((bytes + 4095) / 4096);
      CHECK_EQ(mincore(array.data(), bytes, resident.data()), 0);
      CHECK_EQ(std::count(resident.begin(), resident.end(), 1), static_cast<int64_t>(resident.size()));
    }
    CHECK(all_zero(array));
  }
  HostArray array(8);
  CHECK_THROWS(std::invalid_argument, array.first_touch(pool, 0, 16));
}
