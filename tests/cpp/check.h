// SPDX-License-Identifier: Apache-2.0
//
// A test framework in one page. TEST(name) { ... } registers a test; CHECK, CHECK_EQ and
// CHECK_THROWS print the expression, its values and its place, and end the test by an exception.
// So they belong on the test's own thread; other threads report through what they compute.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace zenflow_test {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream message;
  message << text << " failed: " << a << " vs " << b;
  fail(file, line, message.str());
}

}  // namespace zenflow_test

#define TEST(name)                                                                 \
  static void test_##name();                                                       \
  static const zenflow_test::Registration registration_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition)                                                                   \
  do {                                                                                     \
    if (!(condition)) zenflow_test::fail(__FILE__, __LINE__, #condition " failed: false"); \
  } while (false)

#define CHECK_EQ(a, b) zenflow_test::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)

#define CHECK_THROWS(type, ...)                                                                        \
  do {                                                                                                 \
    bool zenflow_thrown = false;                                                                       \
    try {                                                                                              \
      __VA_ARGS__;                                                                                     \
    } catch (const type&) {                                                                            \
      zenflow_thrown = true;                                                                           \
    }                                                                                                  \
    if (!zenflow_thrown) zenflow_test::fail(__FILE__, __LINE__, #__VA_ARGS__ " did not throw " #type); \
  } while (false)
