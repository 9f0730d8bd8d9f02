// Digest of memory that a GPU can compute as well, word by word in any order.
//
// With w(i) the i-th word of 8 bytes (little-endian, the last one filled up with zeros), counted
// from 1, the digest is the sum of mix(w(i) ^ i * kStep) modulo 2^64. `mix` is a bijection, so a
// change of one word always changes the sum; and words are bound to their places.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ssdkv {

constexpr uint64_t kDigestStep = 0x9e3779b97f4a7c15;
constexpr uint64_t kDigestFirst = 0xbf58476d1ce4e5b9;
constexpr uint64_t kDigestSecond = 0x94d049bb133111eb;

constexpr uint64_t digest_word(uint64_t word, uint64_t number) noexcept {
  uint64_t mixed = (word ^ (number * kDigestStep)) * kDigestFirst;
  mixed ^= mixed >> 32;
  mixed *= kDigestSecond;
  return mixed ^ (mixed >> 29);
}

// Digests of nbytes[i] bytes at each of n addresses. `threads` is an upper limit; 0 means "choose".
std::vector<uint64_t> digest(const uint64_t* addresses, const uint64_t* nbytes, size_t n,
                             unsigned threads);

// The 8 bytes at each of n addresses, which need not be aligned.
std::vector<uint64_t> read_words(const uint64_t* addresses, size_t n);

}  // namespace ssdkv
