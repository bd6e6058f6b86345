// SPDX-License-Identifier: Apache-2.0
// The ceiling that benchmarks hold a kernel against: a loop as in STREAM over the same arrays, with the same threads,
// that moves the same bytes and computes next to nothing. Benchmarks alone use it.
#pragma once

#include <cstdint>
#include <vector>

#include "thread_pool.h"

namespace zenflow {

struct ByteStream {
  void* data;
  int64_t item_bytes;  // of one element: 2 or 4
};

// Element i of every stream goes together. `updated` streams are read and written back unchanged, so that a loop may
// run over live state; every byte of `written` ones is replaced. These two are aligned to 64 bytes.
struct Streams {
  std::vector<ByteStream> updated, read, written;
  int64_t elements;

  int64_t bytes() const;  // read and written, each once for every time
};

// Which stores bypass the caches. A store that does not reads its line first, unless it was read anyway.
enum class Bypass { kNothing, kWritten, kEverything };

// How a loop goes over the streams. Which way is the fastest depends on their number and on where they lie.
struct Pattern {
  Bypass bypass;
  int64_t run;  // elements taken from one stream after the other: a multiple of 32 that divides kHostGrain
};

// One pass over the streams. Elements beyond the last whole run are left out.
void run_streams(const Streams& streams, const Pattern& pattern, ThreadPool& pool);

}  // namespace zenflow
