#include "attention/openmp_team.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <memory>
#include <new>
#include <vector>

namespace ssdkv::attention {
namespace {

// Grows, never shrinks: a thread's scratch is at most about 1 MiB (one query tile and one key
// tile).
class Scratch {
 public:
  std::byte* reserve(std::size_t bytes) {
    if (bytes > size_) {
      data_.reset(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{kAlign})));
      size_ = bytes;
    }
    return data_.get();
  }

 private:
  static constexpr std::size_t kAlign = 64;
  struct Release {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{kAlign}); }
  };
  std::unique_ptr<std::byte, Release> data_;
  std::size_t size_ = 0;
};

// What GCC compiles `omp parallel` to: runs `body(data)` on each thread of a team of at most
// `threads`, the caller's thread among them. LLVM's and Intel's runtimes offer it as well.
using ParallelRegion = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

std::atomic<ParallelRegion> host_region{nullptr};

// Looked up at run time, not linked: wheels of torch bring the runtime under different names, and a
// second copy of it would have a team of its own.
ParallelRegion parallel_region() {
  static const bool looked = [] {
    host_region.store(reinterpret_cast<ParallelRegion>(dlsym(RTLD_DEFAULT, "GOMP_parallel")));
    // The runtime does not notice that a child has none of its threads, and would wait for them.
    pthread_atfork(nullptr, nullptr, [] { host_region.store(nullptr); });
    return true;
  }();
  static_cast<void>(looked);
  return host_region.load(std::memory_order_relaxed);
}

struct Region {
  TeamWork work;
  void* context;
  std::int64_t tasks;
  std::vector<Scratch>& scratch;  // reserved, one for each thread of the team
  std::atomic<std::size_t> joined{0};
  std::atomic<std::int64_t> next{0};

  static void body(void* data) {
    auto& region = *static_cast<Region*>(data);
    std::byte* const scratch = region.scratch[region.joined.fetch_add(1)].reserve(0);
    for (;;) {
      const std::int64_t task = region.next.fetch_add(1, std::memory_order_relaxed);
      if (task >= region.tasks) return;
      region.work(region.context, task, scratch);
    }
  }
};

// Scratch of the teams that the current thread starts.
std::vector<Scratch>& team_scratch(std::size_t threads, std::size_t bytes) {
  thread_local std::vector<Scratch> team;
  if (team.size() < threads) team.resize(threads);
  for (std::size_t i = 0; i < threads; ++i) team[i].reserve(bytes);
  return team;
}

}  // namespace

bool team_available() { return parallel_region() != nullptr; }

void run_tasks(std::int64_t tasks, std::int64_t threads, std::size_t scratch_bytes, TeamWork work,
               void* context) {
  const ParallelRegion parallel = parallel_region();
  // Few tasks do not make the team smaller: that would end threads which torch starts again.
  const bool alone = parallel == nullptr || threads <= 1 || tasks <= 1;
  auto& scratch = team_scratch(alone ? 1 : static_cast<std::size_t>(threads), scratch_bytes);
  Region region{work, context, tasks, scratch};
  if (alone) {
    Region::body(&region);
  } else {
    parallel(&Region::body, &region, static_cast<unsigned>(threads), 0);
  }
}

}  // namespace ssdkv::attention
