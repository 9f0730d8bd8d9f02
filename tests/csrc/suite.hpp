// Base of every native test: checks that end the program, random numbers, threads that are
// waited for.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <source_location>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace ssdkv::test {

// Ends the program: nothing that comes after a failure is worth knowing.
inline void check(bool holds, const char* what,
                  const std::source_location where = std::source_location::current()) {
  if (holds) return;
  std::fprintf(stderr, "%s:%u: not true: %s\n", where.file_name(), where.line(), what);
  std::fflush(nullptr);
  std::_Exit(1);
}

template <class Exception, class Body>
void check_throws(const Body& body, const char* what,
                  const std::source_location where = std::source_location::current()) {
  bool thrown = false;
  try {
    body();
  } catch (const Exception&) {
    thrown = true;
  }
  check(thrown, what, where);
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  // Uniform in [0, below).
  uint64_t operator()(uint64_t below) { return engine_() % below; }

 private:
  std::mt19937_64 engine_;
};

// Runs body(0), ..., body(count - 1), each in a thread of its own, and waits for all.
inline void in_threads(unsigned count, const std::function<void(unsigned)>& body) {
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
  for (std::thread& thread : threads) thread.join();
}

// A test may skip itself where the machine cannot do what it needs; it then says so.
struct Test {
  std::string name;
  std::function<void()> run;
};

using Tests = std::vector<Test>;

[[noreturn]] void skip(const std::string& why);

Tests memory_tests();
Tests cipher_tests();
Tests arrival_verifier_tests();
Tests stripe_tests();
Tests cache_tests();
Tests page_cache_tests();
Tests index_tests();
Tests engine_tests();
Tests team_tests();
Tests attention_tests();
Tests sparse_tests();
Tests decode_tests();
Tests packing_tests();
Tests miss_service_tests();

}  // namespace ssdkv::test
