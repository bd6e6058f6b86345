// SPDX-License-Identifier: Apache-2.0
//
// FloatingPointMode: while it lives, this thread computes in IEEE's default mode: round to nearest,
// denormals kept (no FTZ, no DAZ), no traps. Afterwards the caller's mode is back, sticky flags
// included. Results must not depend on torch.set_flush_denormal() or on a mode inherited from the
// creating thread. The compiler may move arithmetic across the switch within one function, so guard
// a call to code that it cannot see into, not a loop beside it.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace zenflow {

class FloatingPointMode {
 public:
  FloatingPointMode() noexcept : saved_(read()) { write(kDefault); }
  ~FloatingPointMode() { write(saved_); }
  FloatingPointMode(const FloatingPointMode&) = delete;
  FloatingPointMode& operator=(const FloatingPointMode&) = delete;

 private:
#if defined(__x86_64__) || defined(__i386__)
  using Word = unsigned;
  static constexpr Word kDefault = 0x1F80;  // MXCSR: every exception masked, nothing else
  static Word read() noexcept { return _mm_getcsr(); }
  static void write(Word word) noexcept { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kDefault = 0;  // FPCR
  static Word read() noexcept {
    Word word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) noexcept { __asm__ volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = int;
  static constexpr Word kDefault = 0;
  static Word read() noexcept { return 0; }
  static void write(Word) noexcept {}
#endif

  Word saved_;
};

}  // namespace zenflow
