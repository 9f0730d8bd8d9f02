#include "io/slot/memory.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "base/parallel.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ssdkv {
namespace {

constexpr uint64_t kParallelBytes = 4U << 20;  // below this, one thread
constexpr uint64_t kShareBytes = 1U << 20;     // work that one thread takes at a time

const void* at(uint64_t address) { return reinterpret_cast<const void*>(address); }

uint64_t hash(uint64_t address, size_t nbytes) {
  return static_cast<uint64_t>(XXH3_64bits(at(address), nbytes));
}

constexpr size_t kLine = 64;                   // bytes of a line of the cache
constexpr uint64_t kStreamBytes = 16 * kLine;  // less is not worth it

#ifdef MADV_POPULATE_WRITE
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // Linux 5.14; headers may be older than the kernel
#endif

}  // namespace

int populate(uint64_t address, size_t nbytes) noexcept {
  while (madvise(reinterpret_cast<void*>(address), nbytes, kPopulateWrite) != 0) {
    if (errno != EINTR && errno != EAGAIN) return errno;
  }
  return 0;
}

uint64_t checksum(const std::byte* data, size_t nbytes) noexcept {
  return static_cast<uint64_t>(XXH3_64bits(data, nbytes));
}

#if defined(__SSE2__)
void copy_past_cache(uint64_t dst, uint64_t src, size_t nbytes) noexcept {
  if (nbytes == 0) return;  // memcpy wants addresses even then
  auto* to = reinterpret_cast<std::byte*>(dst);
  const auto* from = reinterpret_cast<const std::byte*>(src);
  if (nbytes < kStreamBytes) {
    std::memcpy(to, from, nbytes);
    return;
  }
  const size_t head = (kLine - dst % kLine) % kLine;
  const size_t body = (nbytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  for (size_t i = head; i < head + body; i += kLine) {
    __m128i line[kLine / sizeof(__m128i)];
    std::memcpy(line, from + i, kLine);
    auto* const target = reinterpret_cast<__m128i*>(to + i);
    for (size_t part = 0; part < std::size(line); ++part)
      _mm_stream_si128(target + part, line[part]);
  }
  std::memcpy(to + head + body, from + head + body, nbytes - head - body);
}

void fence_copies() noexcept { _mm_sfence(); }
#else
void copy_past_cache(uint64_t dst, uint64_t src, size_t nbytes) noexcept {
  if (nbytes != 0) std::memcpy(reinterpret_cast<void*>(dst), at(src), nbytes);
}

void fence_copies() noexcept {}
#endif

void checksum(const uint64_t* addresses, size_t n, size_t nbytes, unsigned threads, uint64_t* out) {
  const size_t share = std::max<size_t>(1, kShareBytes / std::max<size_t>(nbytes, 1));
  parallel(n, share, choose_threads(n * nbytes, kParallelBytes, threads),
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
  const unsigned workers = choose_threads(total, kParallelBytes, threads);
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
