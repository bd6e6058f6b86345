// SPDX-License-Identifier: Apache-2.0
// ZENFLOW_INLINE: a function that is always inlined, for the host and, under nvcc, for the device as well.
// ZENFLOW_MEMBER: the same for a host's member function.
#pragma once

#ifdef __CUDACC__
#define ZENFLOW_INLINE static __host__ __device__ __forceinline__
#else
#define ZENFLOW_INLINE static inline __attribute__((always_inline))
#define ZENFLOW_MEMBER inline __attribute__((always_inline))
#endif
