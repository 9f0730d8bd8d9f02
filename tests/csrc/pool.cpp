// The attention pool: every task runs exactly once, whoever calls and however many.
#include "attention/pool.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "suite.hpp"

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

void calls(unsigned thread, unsigned rounds) {
  Random random(thread);
  for (unsigned round = 0; round < rounds; ++round) {
    Call call{std::vector<int>(random(40)), random(3) * 1000};
    run(call, 1 + static_cast<int64_t>(random(6)));
    for (const int count : call.seen) check(count == 1, "every task runs once");
  }
}

void many_callers() {
  calls(0, 2000);
  in_threads(6, [](unsigned thread) { calls(thread + 1, 800); });
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
    calls(1, 100);
    _exit(0);
  }
  int status = 0;
  check(waitpid(pid, &status, 0) == pid && status == 0, "a child has a pool of its own");
  calls(2, 10);
#endif
}

}  // namespace

Tests pool_tests() { return {{"pool: many callers", many_callers}, {"pool: a child", child}}; }

}  // namespace ssdkv::test
