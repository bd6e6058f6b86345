// SPDX-License-Identifier: Apache-2.0
// Stands in for the .cu files where nvcc was absent or switched off: the same symbols, which throw and say
// what to do.
#include <stdexcept>
#include <string>

#include "cuda/column_norms.h"
#include "cuda/cuda_info.h"
#include "cuda/device.h"
#include "cuda/edits.h"
#include "cuda/scatter.h"
#include "cuda/selective_adam.h"
#include "cuda/slot_map.h"
#include "cuda/stream.h"
#include "cuda/top_k.h"

namespace zenflow {
namespace {

[[noreturn]] void refuse(const char* what) {
  throw std::runtime_error(std::string(what) +
                           " needs CUDA, but zenflow was built without it: " ZENFLOW_CUDA_REASON
                           ". Rebuild with CUDACXX naming a working nvcc, or keep the parameters on the CPU.");
}

}  // namespace

void Stream::synchronize() const {
  refuse("Stream::synchronize");
}

int64_t column_norms_scratch(const std::vector<NormTask>&) {
  refuse("column_norms");
}

void column_norms(const std::vector<NormTask>&, float*, Stream) {
  refuse("column_norms");
}

void squared_norms(const std::vector<NormTask>&, double*, Stream) {
  refuse("squared_norms");
}

void side_norms(const std::vector<SideTask>&, Stream) {
  refuse("side_norms");
}

void clip_coefficient(const double*, int64_t, double, double*, float*, Stream) {
  refuse("clip_coefficient");
}

void top_k(const std::vector<TopKTask>&, Stream) {
  refuse("top_k");
}

void build_place(const int32_t*, int64_t, const int32_t*, int64_t, int32_t*, Stream) {
  refuse("build_place");
}

void selective_adam(const SelectivePass&, Stream) {
  refuse("selective_adam");
}

void unpack(const SelectivePass&, void*, Stream) {
  refuse("unpack");
}

void adam(const std::vector<AdamTask>&, const float*, Stream) {
  refuse("adam");
}

void scatter(const ScatterPass&, Stream) {
  refuse("scatter");
}

void gather_columns(const void*, int64_t, int64_t, int64_t, const int32_t*, int64_t, void*, Stream) {
  refuse("gather_columns");
}

void scatter_columns(void*, int64_t, int64_t, int64_t, const int32_t*, int64_t, const void*, Stream) {
  refuse("scatter_columns");
}

void column_checksums(const void*, DType, int64_t, int64_t, const int32_t*, int64_t, uint64_t*, Stream) {
  refuse("column_checksums");
}

void adopt_edits(const EditSearch&, Stream) {
  refuse("adopt_edits");
}

std::unique_ptr<Device> make_cuda_device(int, std::unique_ptr<DeviceMemory>, const Context&, const TransferSizes&) {
  refuse("a parameter on a GPU");
}

CudaInfo cuda_info() {
  return {false, ZENFLOW_CUDA_REASON, "", 0};
}

}  // namespace zenflow
