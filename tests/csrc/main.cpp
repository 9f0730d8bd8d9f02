// Runs all tests, or those whose name contains the argument. Sanitizers end it with their own
// status, a failed check with 1, a hang with SIGALRM.
#include <unistd.h>

#include <stdexcept>

#include "suite.hpp"

namespace ssdkv::test {
namespace {

constexpr unsigned kPatienceSeconds = 300;  // per test, sanitized, on a busy machine

struct Skipped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

int run(const std::string& wanted) {
  unsigned done = 0;
  for (const auto& group :
       {memory_tests(), arrival_verifier_tests(), stripe_tests(), cipher_tests(), cache_tests(),
        page_cache_tests(), index_tests(), engine_tests(), team_tests(), attention_tests(),
        sparse_tests(), decode_tests(), packing_tests(), miss_service_tests()}) {
    for (const Test& test : group) {
      if (test.name.find(wanted) == std::string::npos) continue;
      std::printf("%s", test.name.c_str());
      std::fflush(stdout);
      alarm(kPatienceSeconds);
      try {
        test.run();
        std::printf(": ok\n");
        ++done;
      } catch (const Skipped& why) {
        std::printf(": skipped, %s\n", why.what());
      }
    }
  }
  check(done > 0, "some test ran");
  std::printf("%u tests passed\n", done);
  return 0;
}

}  // namespace

void skip(const std::string& why) { throw Skipped(why); }

}  // namespace ssdkv::test

int main(int argc, char** argv) { return ssdkv::test::run(argc > 1 ? argv[1] : ""); }
