#include "io/memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>

#include "io/worker_thread.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ssdkv {
namespace {

constexpr uint64_t kParallelBytes = 4U << 20;  // below this, one thread
constexpr uint64_t kShareBytes = 1U << 20;     // work that one thread takes at a time
constexpr unsigned kDefaultThreads = 4;        // a core copies 5 to 10 GB/s; four fill most sockets
constexpr unsigned kMaxThreads = 64;

const void* at(uint64_t address) { return reinterpret_cast<const void*>(address); }

uint64_t hash(uint64_t address, size_t nbytes) {
  return static_cast<uint64_t>(XXH3_64bits(at(address), nbytes));
}

unsigned choose_threads(uint64_t total_bytes, unsigned asked) {
  if (total_bytes < kParallelBytes) return 1;
  if (asked != 0) return std::min(asked, kMaxThreads);
  // Not hardware_concurrency(): it reports 1 inside a thread that is pinned to one core.
  const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
  return std::clamp(static_cast<unsigned>(std::max(cpus, 1L)), 1U, kDefaultThreads);
}

// Run body(first, last) over [0, n) in shares of `share` items.
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
    } catch (const std::system_error&) {
      // Out of threads: those that exist, and this one, do the work.
    }
  }
  drain();
  for (auto& thread : extra) thread.join();
}

}  // namespace

void checksum(const uint64_t* addresses, size_t n, size_t nbytes, unsigned threads, uint64_t* out) {
  const size_t share = std::max<size_t>(1, kShareBytes / std::max<size_t>(nbytes, 1));
  parallel(n, share, choose_threads(uint64_t{n} * nbytes, threads),
           [&](size_t first, size_t last) noexcept {
             for (size_t i = first; i < last; ++i) out[i] = hash(addresses[i], nbytes);
           });
}

std::vector<int64_t> verify(const uint64_t* addresses, const uint64_t* expected, size_t n,
                            size_t nbytes, unsigned threads) {
  std::vector<uint64_t> actual(n);
  checksum(addresses, n, nbytes, threads, actual.data());
  std::vector<int64_t> wrong;
  for (size_t i = 0; i < n; ++i) {
    if (actual[i] != expected[i]) wrong.push_back(static_cast<int64_t>(i));
  }
  return wrong;
}

void copy(const std::vector<Piece>& pieces, unsigned threads) {
  uint64_t total = 0;
  for (const Piece& piece : pieces) total += piece.nbytes;
  const unsigned workers = choose_threads(total, threads);
  const auto run = [](const std::vector<Piece>& list, size_t first, size_t last) noexcept {
    for (size_t i = first; i < last; ++i) {
      std::memcpy(reinterpret_cast<void*>(list[i].dst), at(list[i].src), list[i].nbytes);
    }
  };
  if (workers == 1) {
    run(pieces, 0, pieces.size());
    return;
  }
  // Cut long pieces so that one long copy is shared too.
  std::vector<Piece> cut;
  cut.reserve(pieces.size() + total / kShareBytes);
  for (Piece piece : pieces) {
    while (piece.nbytes > kShareBytes) {
      cut.push_back({piece.src, piece.dst, kShareBytes});
      piece = {piece.src + kShareBytes, piece.dst + kShareBytes, piece.nbytes - kShareBytes};
    }
    cut.push_back(piece);
  }
  const uint64_t mean = std::max<uint64_t>(1, total / cut.size());
  parallel(cut.size(), std::max<size_t>(1, kShareBytes / mean), workers,
           [&](size_t first, size_t last) noexcept { run(cut, first, last); });
}

}  // namespace ssdkv
