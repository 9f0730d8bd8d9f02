// Many small pieces of work over a few short-lived threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

#include "base/worker_thread.hpp"

namespace ssdkv {

// Run body(first, last) over [0, n) in shares of `share` items, on this thread and up to
// `threads - 1` more. `body` must not throw.
template <class Body>
void parallel(size_t n, size_t share, unsigned threads, const Body& body) {
  std::atomic<size_t> next{0};
  const auto drain = [&]() noexcept {
    for (;;) {
      const size_t first = next.fetch_add(share, std::memory_order_relaxed);
      if (first >= n) return;
      body(first, std::min(n, first + share));
    }
  };
  const size_t shares = n / share + (n % share != 0 ? 1 : 0);
  const size_t wanted = std::min<size_t>(threads, shares);
  std::vector<std::thread> extra;
  if (wanted > 1) {
    extra.reserve(wanted - 1);
    const BlockSignals quiet;
    try {
      while (extra.size() + 1 < wanted) {
        extra.emplace_back([&drain] {
          use_all_cpus();
          drain();
        });
      }
      // NOLINTNEXTLINE(bugprone-empty-catch): those that exist, and this one, do the work.
    } catch (const std::system_error&) {  // out of threads
    }
  }
  drain();
  for (auto& thread : extra) thread.join();
}

// Number of threads for `total_bytes`: `asked`, or a choice for 0; one below `least_bytes`,
// because starting threads would cost more than it saves.
unsigned choose_threads(size_t total_bytes, size_t least_bytes, unsigned asked);

}  // namespace ssdkv
