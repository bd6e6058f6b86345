// SPDX-License-Identifier: Apache-2.0
// launch(kernel, grid, block, stream, arguments...): a checked kernel launch without <<<>>>, which host compilers cannot parse.
// Arguments are converted to the kernel's parameter types here, so a mismatch is a compile error. Shared memory is static only.
#pragma once

#include <tuple>
#include <type_traits>

#include "cuda/check.h"
#include "cuda/stream.h"

namespace zenflow {

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, Stream stream, Arguments... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "wrong number of kernel arguments");
  std::tuple<std::remove_const_t<Parameters>...> values{arguments...};
  std::apply(
      [&](auto&... value) {
        void* addresses[] = {&value..., nullptr};
        ZENFLOW_CUDA_CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, addresses, 0, stream.handle()));
      },
      values);
}

}  // namespace zenflow
