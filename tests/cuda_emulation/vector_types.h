// SPDX-License-Identifier: Apache-2.0
// CUDA's small vectors, with CUDA's alignment.
#pragma once

#define EMULATION_VECTORS(name, type, alignment2, alignment4)     \
  struct name##1 {                                                \
    type x;                                                       \
  };                                                              \
  struct alignas(alignment2) name##2 {                            \
    type x, y;                                                    \
  };                                                              \
  struct name##3 {                                                \
    type x, y, z;                                                 \
  };                                                              \
  struct alignas(alignment4) name##4 {                            \
    type x, y, z, w;                                              \
  };                                                              \
  inline name##2 make_##name##2(type x, type y) {                 \
    return {x, y};                                                \
  }                                                               \
  inline name##3 make_##name##3(type x, type y, type z) {         \
    return {x, y, z};                                             \
  }                                                               \
  inline name##4 make_##name##4(type x, type y, type z, type w) { \
    return {x, y, z, w};                                          \
  }

EMULATION_VECTORS(short, short, 4, 8)
EMULATION_VECTORS(ushort, unsigned short, 4, 8)
EMULATION_VECTORS(int, int, 8, 16)
EMULATION_VECTORS(uint, unsigned int, 8, 16)
EMULATION_VECTORS(longlong, long long, 16, 16)
EMULATION_VECTORS(ulonglong, unsigned long long, 16, 16)
EMULATION_VECTORS(float, float, 8, 16)
EMULATION_VECTORS(double, double, 16, 16)

#undef EMULATION_VECTORS

struct dim3 {
  unsigned int x = 1, y = 1, z = 1;
  constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
};
