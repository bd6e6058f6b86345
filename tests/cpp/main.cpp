// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstring>
#include <exception>

#include "check.h"

// Runs all tests, or those whose names contain the argument. Exit status 1 if one failed or none ran.
int main(int argc, char** argv) {
  int passed = 0, failed = 0;
  for (const auto& test : zenflow_test::tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    try {
      test.run();
      ++passed;
      std::printf("ok      %s\n", test.name);
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED  %s\n        %s\n", test.name, error.what());
    }
    std::fflush(stdout);  // a forked child must not print it again
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed > 0 || passed == 0;
}
