// SPDX-License-Identifier: Apache-2.0
#include "symbol.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <vector>

namespace emulation {
namespace {

// Kernels are mostly local symbols, which dladdr does not know: this reads .symtab.
std::string mangled_name(const char* module, uint64_t offset) {
  std::ifstream stream(module, std::ios::binary);
  const std::vector<char> file((std::istreambuf_iterator<char>(stream)), {});
  if (file.size() < sizeof(ElfW(Ehdr))) return "";
  const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(file.data());
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(file.data() + header->e_shoff);
  for (int s = 0; s < header->e_shnum; ++s) {
    if (sections[s].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(file.data() + sections[s].sh_offset);
    const char* names = file.data() + sections[sections[s].sh_link].sh_offset;
    for (uint64_t i = 0; i < sections[s].sh_size / sizeof(ElfW(Sym)); ++i) {
      const auto& symbol = symbols[i];
      const bool holds = offset >= symbol.st_value && offset - symbol.st_value < symbol.st_size;
      if (holds && ELF64_ST_TYPE(symbol.st_info) == STT_FUNC) return names + symbol.st_name;
    }
  }
  return "";
}

}  // namespace

std::string symbol_name(const void* code) {
  Dl_info info;
  link_map* map = nullptr;
  if (dladdr1(code, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) != 0 && map != nullptr) {
    const char* module = map->l_name[0] != '\0' ? map->l_name : "/proc/self/exe";
    const std::string name = mangled_name(module, reinterpret_cast<uint64_t>(code) - map->l_addr);
    int status = 0;
    char* plain = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
    if (plain != nullptr) {
      std::string result = plain;
      std::free(plain);
      return result;
    }
    if (!name.empty()) return name;
  }
  std::ostringstream address;
  address << "code at " << code;
  return address.str();
}

}  // namespace emulation
