// SPDX-License-Identifier: Apache-2.0
#include "stream_ceiling.h"

#include <cstring>

#include "host_job.h"

#ifdef ZENFLOW_X86
#include <immintrin.h>
#endif

namespace zenflow {
namespace {

constexpr int64_t kLine = 64;
constexpr int kMostStreams = 24;

// A cache line in registers. Vectors of 16 bytes, which every x86-64 has, keep up with memory.
#ifdef ZENFLOW_X86
using Piece = __m128i;
inline Piece load(const char* from) {
  return _mm_loadu_si128(reinterpret_cast<const Piece*>(from));
}
inline Piece mix(Piece a, Piece b) {
  return _mm_xor_si128(a, b);
}
inline Piece filled(int value) {
  return _mm_set1_epi32(value);
}
template <bool PastCaches>
void store(char* to, Piece piece) {
  Piece* const at = reinterpret_cast<Piece*>(to);
  PastCaches ? _mm_stream_si128(at, piece) : _mm_store_si128(at, piece);
}
inline void finish_stores() {
  _mm_sfence();
}
#else
using Piece = uint64_t;
inline Piece load(const char* from) {
  Piece piece;
  std::memcpy(&piece, from, sizeof piece);
  return piece;
}
inline Piece mix(Piece a, Piece b) {
  return a ^ b;
}
inline Piece filled(int value) {
  return static_cast<Piece>(value);
}
template <bool>
void store(char* to, Piece piece) {
  std::memcpy(to, &piece, sizeof piece);
}
inline void finish_stores() {}
#endif
constexpr int64_t kPiece = sizeof(Piece);

// Where one run of each stream lies, and how many bytes it has.
struct Runs {
  char* data[kMostStreams];
  int64_t bytes[kMostStreams];
  int count = 0;

  Runs(const std::vector<ByteStream>& streams, int64_t first, int64_t run) {
    for (const ByteStream& s : streams) {
      data[count] = static_cast<char*>(s.data) + first * s.item_bytes;
      bytes[count++] = run * s.item_bytes;
    }
  }
  char* at(int stream, int64_t index) const { return data[stream] + index * bytes[stream]; }
};

// body(offset) for the pieces of a run, a whole line at a time.
template <class Body>
inline void for_pieces(int64_t bytes, Body&& body) {
  for (int64_t line = 0; line < bytes; line += kLine) {
    for (int64_t i = 0; i < kLine; i += kPiece) body(line + i);
  }
}

// `zero` is 0, which the compiler does not know: it keeps every load and every store.
template <bool UpdatedPastCaches, bool WrittenPastCaches>
void run_range(const Streams& streams, int64_t run, int64_t begin, int64_t end, int zero) {
  const Runs updated(streams.updated, begin, run), read(streams.read, begin, run), written(streams.written, begin, run);
  const Piece nothing = filled(zero);
  Piece all = nothing;  // of everything that was read, so that reading alone counts too
  for (int64_t i = 0; i < (end - begin) / run; ++i) {
    for (int s = 0; s < read.count; ++s) {
      const char* const from = read.at(s, i);
      for_pieces(read.bytes[s], [&](int64_t at) { all = mix(all, load(from + at)); });
    }
    for (int s = 0; s < updated.count; ++s) {
      char* const place = updated.at(s, i);
      for_pieces(updated.bytes[s],
                 [&](int64_t at) { store<UpdatedPastCaches>(place + at, mix(load(place + at), nothing)); });
    }
    for (int s = 0; s < written.count; ++s) {
      char* const to = written.at(s, i);
      for_pieces(written.bytes[s], [&](int64_t at) { store<WrittenPastCaches>(to + at, all); });
    }
  }
  __asm__ volatile("" : : "m"(all));
  finish_stores();
}

}  // namespace

int64_t Streams::bytes() const {
  int64_t item = 0;
  for (const ByteStream& s : updated) item += 2 * s.item_bytes;
  for (const ByteStream& s : read) item += s.item_bytes;
  for (const ByteStream& s : written) item += s.item_bytes;
  return elements * item;
}

void run_streams(const Streams& streams, const Pattern& pattern, ThreadPool& pool) {
  static volatile int unknown = 0;
  const int zero = unknown;
  const auto loop = pattern.bypass == Bypass::kNothing   ? run_range<false, false>
                    : pattern.bypass == Bypass::kWritten ? run_range<false, true>
                                                         : run_range<true, true>;
  pool.parallel_for(streams.elements, kHostGrain,
                    [&](int64_t begin, int64_t end) { loop(streams, pattern.run, begin, end, zero); });
}

}  // namespace zenflow
