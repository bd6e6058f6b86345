// SPDX-License-Identifier: Apache-2.0
// Staging: the way of packed gradients to the host. They are packed into chunks of device memory on the caller's
// stream; a stream of its own copies each chunk to the host, and the chunk is used again when that is done.
//
// A call that packs more than the ring of chunks holds asks for memory of its own, so that the caller's stream does not
// wait for the link; where there is none, it waits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/device.h"
#include "cuda/event.h"

namespace zenflow {

class Staging {
 public:
  // One GPU's; `memory` outlives it. A chunk is larger where a single piece needs more.
  Staging(DeviceMemory& memory, int64_t chunk_bytes, size_t chunks);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // All chunks' memory, so that a later round needs no more.
  void reserve();
  // A round of pieces that are packed on `compute`, at most `bytes` in all. Without end(), after an exception, the next
  // round drops what had not left.
  void begin(cudaStream_t compute, int64_t bytes);
  // Device memory for a piece that will go to `host`. It leaves once the caller has queued what fills it and calls
  // take() or end().
  void* take(void* host, int64_t bytes);
  void end();

  // Every piece is copied here.
  cudaStream_t stream() const { return down_; }

 private:
  struct Chunk {
    void* data = nullptr;
    int64_t bytes = 0;
    bool leaving = false;  // `left` was recorded
    Event left;
  };
  struct Piece {
    void* host;
    const void* staged;
    int64_t bytes;
  };

  void open_chunk(int64_t bytes);
  void send();
  void drop_round();
  void drop_spare();

  DeviceMemory& memory_;
  const int64_t chunk_bytes_;
  cudaStream_t down_ = nullptr;
  cudaStream_t compute_ = nullptr;
  std::vector<std::unique_ptr<Chunk>> ring_;
  size_t next_ = 0;
  void* spare_ = nullptr;  // the round's own memory
  int64_t spare_left_ = 0, spare_used_ = 0;

  Chunk* chunk_ = nullptr;  // the open chunk; nullptr: a part of the spare memory
  char* open_ = nullptr;
  int64_t open_bytes_ = 0, used_ = 0;
  bool in_round_ = false;
  std::vector<Piece> pieces_;
  Event packed_;
};

}  // namespace zenflow
