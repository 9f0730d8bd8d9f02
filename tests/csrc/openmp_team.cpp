// The team that computes attention: every task runs exactly once, on whatever team the host has.
#include "attention/openmp_team.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "suite.hpp"

// The host's OpenMP runtime as far as it is called. A real one would do, but sanitizers do not see
// how its threads wait for one another.
extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  ssdkv::test::in_threads(threads, [&](unsigned) { body(data); });
}

namespace ssdkv::test {
namespace {

struct Call {
  std::vector<int> seen;  // by task; no atomic: a task must run once, before the call returns
  std::size_t scratch_bytes;
};

void run(Call& call, int64_t threads) {
  attention::run_tasks(
      static_cast<int64_t>(call.seen.size()), threads, call.scratch_bytes,
      [](void* opaque, int64_t task, std::byte* scratch) {
        auto& c = *static_cast<Call*>(opaque);
        ++c.seen[static_cast<size_t>(task)];
        if (c.scratch_bytes == 0) return;
        check(reinterpret_cast<uintptr_t>(scratch) % 64 == 0, "scratch is aligned");
        std::memset(scratch, static_cast<int>(task), c.scratch_bytes);
      },
      &call);
}

void calls(unsigned seed, unsigned rounds) {
  Random random(seed);
  for (unsigned round = 0; round < rounds; ++round) {
    Call call{std::vector<int>(random(40)), random(3) * 1000};
    run(call, 1 + static_cast<int64_t>(random(6)));
    for (const int count : call.seen) check(count == 1, "every task runs once");
  }
}

void many_callers() {
  check(attention::team_available(), "the team above is found");
  calls(0, 500);
  in_threads(4, [](unsigned thread) { calls(thread + 1, 200); });
}

void child() {
#if defined(__SANITIZE_THREAD__)
  skip("TSan does not follow threads over a fork");
#else
  calls(0, 10);
  const pid_t pid = fork();
  check(pid >= 0, "a child");
  if (pid == 0) {
    alarm(60);
    check(!attention::team_available(), "a child has no team");
    calls(1, 100);
    _exit(0);
  }
  int status = 0;
  check(waitpid(pid, &status, 0) == pid && status == 0, "a child works alone");
  calls(2, 10);
#endif
}

}  // namespace

Tests team_tests() { return {{"team: many callers", many_callers}, {"team: a child", child}}; }

}  // namespace ssdkv::test
