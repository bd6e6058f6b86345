// SPDX-License-Identifier: Apache-2.0
#include "cuda/stream.h"

#include "cuda/check.h"

namespace zenflow {

void Stream::synchronize() const {
  ZENFLOW_CUDA_CHECK(cudaStreamSynchronize(handle_));
}

}  // namespace zenflow
