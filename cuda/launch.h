// SPDX-License-Identifier: Apache-2.0
// launch(kernel, grid, stream, arguments...): a checked kernel launch without <<<>>>, which host compilers
// cannot parse. Arguments are converted to the kernel's parameter types here; a wrong number of them is a
// compile error. Shared memory is static only.
#pragma once

#include <tuple>
#include <type_traits>

#include "cuda/check.h"
#include "cuda/stream.h"

namespace zenflow {

// The shape of a launch. Remembers the line that made it, so that a failed launch is reported there.
struct Grid {
  Grid(dim3 blocks, dim3 threads, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : blocks(blocks), threads(threads), file(file), line(line) {}

  dim3 blocks, threads;
  const char* file;
  int line;
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Grid& grid, Stream stream, Arguments... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "wrong number of kernel arguments");
  std::tuple<std::remove_const_t<Parameters>...> values{arguments...};
  const auto error = std::apply(
      [&](auto&... value) {
        void* addresses[] = {&value..., nullptr};
        return cudaLaunchKernel(kernel, grid.blocks, grid.threads, addresses, 0, stream.handle());
      },
      values);
  check_cuda(error, "kernel launch", grid.file, grid.line);
}

}  // namespace zenflow
