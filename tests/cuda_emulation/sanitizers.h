// SPDX-License-Identifier: Apache-2.0
// What the thread and address sanitizers must be told. The emulator is compiled without thread instrumentation and
// keeps its own locks out of sight (Invisible), so that the only orderings TSan knows are those that CUDA gives, each
// stated by a pair of release(object) and acquire(object).
#pragma once

#include <cstddef>

#ifdef EMULATION_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif
#ifdef EMULATION_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulation {

// Whether this thread is out of TSan's sight.
inline thread_local bool hidden = false;

inline void set_hidden(bool now) {
#ifdef EMULATION_TSAN
  if (now && !hidden) {
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);  // reads, too
  } else if (!now && hidden) {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  }
#endif
  hidden = now;
}

// While one lives, this thread's locks order nothing and its accesses, malloc and free included, race with nothing.
// Not across a switch of fibers.
class Invisible {
 public:
  Invisible() { set_hidden(true); }
  ~Invisible() { set_hidden(before_); }
  Invisible(const Invisible&) = delete;
  Invisible& operator=(const Invisible&) = delete;

 private:
  const bool before_ = hidden;
};

// The opposite, for what the emulated program does.
class Visible {
 public:
  Visible() { set_hidden(false); }
  ~Visible() { set_hidden(before_); }
  Visible(const Visible&) = delete;
  Visible& operator=(const Visible&) = delete;

 private:
  const bool before_ = hidden;
};

inline void release([[maybe_unused]] const void* object) {
#ifdef EMULATION_TSAN
  const Visible visible;
  __tsan_release(const_cast<void*>(object));
#endif
}
inline void acquire([[maybe_unused]] const void* object) {
#ifdef EMULATION_TSAN
  const Visible visible;
  __tsan_acquire(const_cast<void*>(object));
#endif
}

#ifdef EMULATION_ASAN
inline void forbid(const void* begin, size_t bytes) {
  __asan_poison_memory_region(begin, bytes);
}
inline void permit(const void* begin, size_t bytes) {
  __asan_unpoison_memory_region(begin, bytes);
}
#else
inline void forbid(const void*, size_t) {}
inline void permit(const void*, size_t) {}
#endif

}  // namespace emulation
