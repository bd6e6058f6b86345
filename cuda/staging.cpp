// SPDX-License-Identifier: Apache-2.0
#include "cuda/staging.h"

#include <algorithm>
#include <utility>

namespace zenflow {
namespace {

constexpr int64_t kAlignment = 256;

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

uintptr_t handle_of(cudaStream_t stream) {
  return reinterpret_cast<uintptr_t>(stream);
}

}  // namespace

Staging::Staging(DeviceMemory& memory, int64_t chunk_bytes, size_t chunks)
    : memory_(memory), chunk_bytes_(aligned(chunk_bytes)) {
  ZENFLOW_CUDA_CHECK(cudaStreamCreateWithFlags(&down_, cudaStreamNonBlocking));
  for (size_t i = 0; i < chunks; ++i) ring_.push_back(std::make_unique<Chunk>());
}

Staging::~Staging() {
  drop_spare();
  for (const auto& chunk : ring_) {
    if (chunk->data != nullptr) memory_.release(chunk->data, handle_of(down_));
  }
  (void)cudaStreamDestroy(down_);
}

void Staging::reserve() {
  for (const auto& chunk : ring_) {
    if (chunk->data != nullptr) continue;
    chunk->data = memory_.allocate(chunk_bytes_);
    chunk->bytes = chunk_bytes_;
  }
}

void Staging::begin(cudaStream_t compute, int64_t bytes) {
  if (std::exchange(in_round_, true)) drop_round();
  compute_ = compute;
  // Each piece is aligned, and a chunk's rest may be too small for the next one: ask for a little more.
  const int64_t wanted = bytes + bytes / 4 + chunk_bytes_;
  if (bytes <= chunk_bytes_ * static_cast<int64_t>(ring_.size())) return;
  spare_ = memory_.try_allocate(wanted);
  spare_left_ = spare_ != nullptr ? wanted : 0;
}

// After an exception: what was not sent stays behind, and nothing in use is packed over.
void Staging::drop_round() {
  pieces_.clear();
  open_bytes_ = used_ = 0;
  if (chunk_ != nullptr && chunk_->data != nullptr) {
    ZENFLOW_CUDA_CHECK(cudaEventRecord(chunk_->left.handle(), down_));
    chunk_->leaving = true;
  }
  drop_spare();
}

void Staging::drop_spare() {
  if (spare_ == nullptr) return;
  memory_.release(std::exchange(spare_, nullptr), handle_of(down_));
  open_bytes_ = used_ = spare_left_ = spare_used_ = 0;
}

void* Staging::take(void* host, int64_t bytes) {
  if (used_ + bytes > open_bytes_) {
    send();
    open_chunk(bytes);
  }
  char* const staged = open_ + used_;
  used_ = aligned(used_ + bytes);
  pieces_.push_back({host, staged, bytes});
  return staged;
}

void Staging::open_chunk(int64_t bytes) {
  const int64_t wanted = std::max(chunk_bytes_, aligned(bytes));
  open_bytes_ = used_ = 0;  // until there is an open chunk again
  if (wanted <= spare_left_) {
    chunk_ = nullptr;
    open_ = static_cast<char*>(spare_) + (spare_used_ += wanted) - wanted;
    spare_left_ -= wanted;
    open_bytes_ = wanted;
    return;
  }
  chunk_ = ring_[next_].get();
  next_ = (next_ + 1) % ring_.size();
  if (chunk_->bytes < wanted) {
    if (chunk_->data != nullptr) memory_.release(std::exchange(chunk_->data, nullptr), handle_of(down_));
    chunk_->bytes = 0;
    chunk_->data = memory_.allocate(wanted);
    chunk_->bytes = wanted;
  } else if (chunk_->leaving) {
    // The chunk: its copy to the host still reads what the caller's stream would pack over.
    ZENFLOW_CUDA_CHECK(cudaStreamWaitEvent(compute_, chunk_->left.handle(), 0));
  }
  chunk_->leaving = false;
  open_ = static_cast<char*>(chunk_->data);
  open_bytes_ = wanted;
}

void Staging::send() {
  if (pieces_.empty()) return;
  ZENFLOW_CUDA_CHECK(cudaEventRecord(packed_.handle(), compute_));
  // The chunk: the caller's stream must have packed it before it is copied.
  ZENFLOW_CUDA_CHECK(cudaStreamWaitEvent(down_, packed_.handle(), 0));
  for (const Piece& piece : pieces_) {
    ZENFLOW_CUDA_CHECK(
        cudaMemcpyAsync(piece.host, piece.staged, static_cast<size_t>(piece.bytes), cudaMemcpyDeviceToHost, down_));
  }
  pieces_.clear();
  if (chunk_ == nullptr) return;
  ZENFLOW_CUDA_CHECK(cudaEventRecord(chunk_->left.handle(), down_));
  chunk_->leaving = true;
}

void Staging::end() {
  send();
  drop_spare();  // without one, the open chunk's rest serves the next round
  in_round_ = false;
}

}  // namespace zenflow
