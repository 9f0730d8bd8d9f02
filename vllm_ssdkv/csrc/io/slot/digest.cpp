#include "io/slot/digest.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/parallel.hpp"

namespace ssdkv {
namespace {

constexpr size_t kWord = sizeof(uint64_t);
constexpr size_t kShareBytes = 1U << 20;     // work that one thread takes at a time
constexpr size_t kParallelBytes = 4U << 20;  // below this, one thread

struct Share {
  size_t region;
  uint64_t begin;  // of the region, in bytes
  size_t nbytes;
};

uint64_t sum_of(const std::byte* data, size_t nbytes, uint64_t words_before) noexcept {
  const size_t whole = nbytes / kWord;
  uint64_t sum = 0;
  for (size_t i = 0; i < whole; ++i) {
    uint64_t word;
    std::memcpy(&word, data + i * kWord, kWord);
    sum += digest_word(word, words_before + i + 1);
  }
  if (const size_t rest = nbytes % kWord; rest != 0) {
    uint64_t word = 0;
    std::memcpy(&word, data + whole * kWord, rest);
    sum += digest_word(word, words_before + whole + 1);
  }
  return sum;
}

}  // namespace

std::vector<uint64_t> digest(const uint64_t* addresses, const uint64_t* nbytes, size_t n,
                             unsigned threads) {
  std::vector<Share> shares;
  size_t total = 0;
  for (size_t region = 0; region < n; ++region) {
    total += nbytes[region];
    for (uint64_t begin = 0; begin < nbytes[region]; begin += kShareBytes) {
      shares.push_back({region, begin, std::min<size_t>(kShareBytes, nbytes[region] - begin)});
    }
  }
  std::vector<std::atomic<uint64_t>> sums(n);
  parallel(shares.size(), 1, choose_threads(total, kParallelBytes, threads),
           [&](size_t first, size_t last) noexcept {
             for (size_t i = first; i < last; ++i) {
               const auto& [region, begin, size] = shares[i];
               const auto* data = reinterpret_cast<const std::byte*>(addresses[region] + begin);
               sums[region].fetch_add(sum_of(data, size, begin / kWord), std::memory_order_relaxed);
             }
           });
  return {sums.begin(), sums.end()};
}

std::vector<uint64_t> read_words(const uint64_t* addresses, size_t n) {
  std::vector<uint64_t> words(n);
  for (size_t i = 0; i < n; ++i) {
    std::memcpy(&words[i], reinterpret_cast<const void*>(addresses[i]), kWord);
  }
  return words;
}

}  // namespace ssdkv
