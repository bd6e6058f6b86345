// SPDX-License-Identifier: Apache-2.0
// Stream: a CUDA stream that somebody else owns, as a value. It cannot be made from a literal 0 or nullptr,
// so that the default stream is never picked by accident; torch's default stream, whose handle is 0 at run
// time, comes in through from_handle. Needs no CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // CUDA's own name: cudaStream_t is a pointer to it

namespace zenflow {

class Stream {
 public:
  explicit Stream(CUstream_st* handle) : handle_(handle) {}
  explicit Stream(int) = delete;
  explicit Stream(std::nullptr_t) = delete;

  // The integer that torch gives as `torch.cuda.current_stream().cuda_stream`.
  static Stream from_handle(uintptr_t handle) { return Stream(reinterpret_cast<CUstream_st*>(handle)); }

  CUstream_st* handle() const { return handle_; }

  // Waits until all work queued so far is done. Throws what CUDA reports of that work.
  void synchronize() const;

 private:
  CUstream_st* handle_;
};

}  // namespace zenflow
