// SPDX-License-Identifier: Apache-2.0
#include "isa.h"

#include <cstdlib>
#include <stdexcept>

namespace zenflow {

namespace {

// __builtin_cpu_supports looks at cpuid and, through XCR0, at what the operating system saves.
std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> kernels{&scalar_kernels()};
#ifdef ZENFLOW_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2) kernels.push_back(&avx2_kernels());
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    kernels.push_back(&avx512_kernels());
  }
#endif
  return kernels;
}

const Kernels* find_kernels(const std::string& isa) {
  for (const Kernels* k : available_kernels()) {
    if (k->name == isa) return k;
  }
  return nullptr;
}

std::string offered() {
  std::string names;
  for (const Kernels* k : available_kernels()) names += std::string(names.empty() ? "" : ", ") + k->name;
  return names;
}

const Kernels& choose_kernels() {
  const char* wanted = std::getenv("ZENFLOW_ISA");
  if (wanted == nullptr || *wanted == '\0') return *available_kernels().back();
  if (const Kernels* kernels = find_kernels(wanted)) return *kernels;
  throw std::invalid_argument("ZENFLOW_ISA is '" + std::string(wanted) + "', but this machine offers: " + offered() +
                              ". Set it to one of these, or unset it to use the last.");
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* k : available_kernels()) names.push_back(k->name);
  return names;
}

const Kernels& kernels_named(const std::string& isa) {
  if (const Kernels* kernels = find_kernels(isa)) return *kernels;
  throw std::invalid_argument("zenflow: no instruction set '" + isa + "'; this machine offers: " + offered());
}

const Kernels& active_kernels() {
  static const Kernels& kernels = choose_kernels();
  return kernels;
}

}  // namespace zenflow
