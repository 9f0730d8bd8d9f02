// xxh3-64 (seed 0) of pages while they stream: one stripe of the hash is one beat of memory.
//
// Written from the published description of XXH3 for inputs of more than 240 bytes. A page is K and
// V; all K is read before any V, so the state of each page waits on chip in between.
#pragma once

#include "numbers.hpp"

namespace ssdkv {
namespace fpga {

constexpr int kDigestUnits = 2;  // a page each: the end of a hash block takes longer than a beat
constexpr int kBlockStripes = 16;
constexpr int kSecretWords = 24;

constexpr std::uint64_t kPrime32_1 = 0x9E3779B1u;
constexpr std::uint64_t kPrime32_2 = 0x85EBCA77u;
constexpr std::uint64_t kPrime32_3 = 0xC2B2AE3Du;
constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87u;
constexpr std::uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr std::uint64_t kPrime64_3 = 0x165667B19E3779F9u;
constexpr std::uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63u;
constexpr std::uint64_t kPrime64_5 = 0x27D4EB2F165667C5u;
constexpr std::uint64_t kAvalanche = 0x165667919E3779F9u;

// The default secret, as little-endian words.
constexpr std::uint64_t kSecret[kSecretWords] = {
    0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u,
    0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u,
    0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,
    0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u,
    0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
    0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu};

// Eight bytes of the secret from any byte on.
inline std::uint64_t secret_at(int byte) {
#pragma HLS INLINE
  const int word = byte / 8;
  const int bits = byte % 8 * 8;
  if (bits == 0) return kSecret[word];
  return (kSecret[word] >> bits) | (kSecret[word + 1] << (64 - bits));
}

struct digest_t {
  std::uint64_t lanes[kWords];
};

inline digest_t new_digest() {
#pragma HLS INLINE
  return {{kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5,
           kPrime32_1}};
}

// Takes up stripe `stripe` of `stripes`.
inline void add_stripe(digest_t& state, const beat_t& beat, int stripe, int stripes) {
#pragma HLS INLINE
  const int place = stripe % kBlockStripes;
  const bool last = stripe + 1 == stripes;
  for (int i = 0; i < kWords; ++i) {
#pragma HLS UNROLL
    const std::uint64_t word = static_cast<std::uint64_t>(beat[4 * i]) |
                               static_cast<std::uint64_t>(beat[4 * i + 1]) << 16 |
                               static_cast<std::uint64_t>(beat[4 * i + 2]) << 32 |
                               static_cast<std::uint64_t>(beat[4 * i + 3]) << 48;
    const std::uint64_t keyed = word ^ (last ? secret_at(121 + 8 * i) : kSecret[place + i]);
    state.lanes[i ^ 1] += word;
    state.lanes[i] += (keyed & 0xffffffffu) * (keyed >> 32);
  }
  if (last || place + 1 != kBlockStripes) return;
  for (int i = 0; i < kWords; ++i) {
#pragma HLS UNROLL
    std::uint64_t lane = state.lanes[i];
    lane ^= lane >> 47;
    lane ^= kSecret[kBlockStripes + i];
    state.lanes[i] = lane * kPrime32_1;
  }
}

// The two halves of the product of two numbers, in one: by four multiplications of 32 bits.
inline std::uint64_t folded_product(std::uint64_t a, std::uint64_t b) {
#pragma HLS INLINE
  const std::uint64_t low = (a & 0xffffffffu) * (b & 0xffffffffu);
  const std::uint64_t left = (a >> 32) * (b & 0xffffffffu);
  const std::uint64_t right = (a & 0xffffffffu) * (b >> 32);
  const std::uint64_t high = (a >> 32) * (b >> 32);
  const std::uint64_t cross = (low >> 32) + (left & 0xffffffffu) + right;
  const std::uint64_t upper = (left >> 32) + (cross >> 32) + high;
  const std::uint64_t lower = (cross << 32) | (low & 0xffffffffu);
  return upper ^ lower;
}

inline std::uint64_t finish_digest(const digest_t& state, std::uint64_t bytes) {
#pragma HLS INLINE
  std::uint64_t sum = bytes * kPrime64_1;
  for (int i = 0; i < kWords / 2; ++i) {
#pragma HLS UNROLL
    sum += folded_product(state.lanes[2 * i] ^ secret_at(11 + 16 * i),
                          state.lanes[2 * i + 1] ^ secret_at(19 + 16 * i));
  }
  sum ^= sum >> 37;
  sum *= kAvalanche;
  return sum ^ (sum >> 32);
}

// Of a unit's pages.
using digests_t = digest_t[kMaxPages / kDigestUnits];

// Takes up half of each of `pages` pages: K as the first, V as the second.
template <int D>
void digest_halves(hls::stream<beat_t>& beats, int from, int pages, bool second,
                   digests_t& states) {
  constexpr int kHalf = kPageTokens * D / kLanes;
  for (int page = 0; page < pages; ++page) {
    digest_t state = second ? states[from + page] : new_digest();
#pragma HLS ARRAY_PARTITION variable = state.lanes complete
    for (int i = 0; i < kHalf; ++i) {
#pragma HLS PIPELINE
      add_stripe(state, beats.read(), (second ? kHalf : 0) + i, 2 * kHalf);
    }
    states[from + page] = state;
  }
}

}  // namespace fpga
}  // namespace ssdkv
