// The largest of a list, equal ones by place: a radix select by bytes, from the top.
#pragma once

#include "numbers.hpp"

namespace ssdkv {
namespace fpga {

constexpr int kRadix = 256;
constexpr int kHistograms = 4;  // a counter is taken up again after so many cycles at least

// Orders floats as unsigned numbers. NaN counts as infinity, so that broken data is attended to and
// shows; -0 as 0.
inline std::uint32_t key_of(float value) {
#pragma HLS INLINE
  std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7f800000u;
  if (bits == 0x80000000u) bits = 0u;
  return (bits >> 31) != 0u ? ~bits : bits | 0x80000000u;
}

constexpr std::uint32_t kFirstOfAll = 0xffffffffu;  // above the key of any float

// What is taken: keys above `bound`, and the first `ties` of those that are equal to it.
struct Choice {
  std::uint32_t bound;
  std::uint32_t ties;

  // Whether the next key is taken; keys come in their order.
  bool takes(std::uint32_t key) {
#pragma HLS INLINE
    if (key != bound) return key > bound;
    if (ties == 0u) return false;
    --ties;
    return true;
  }
};

using keys_t = std::uint32_t[kMaxTokens];

// The choice of `keep` of `count` keys; all of them if there are no more.
inline Choice choose_largest(const keys_t& keys, std::uint32_t count, std::uint32_t keep) {
  if (keep >= count) return {0u, count};
  if (keep == 0u) return {kFirstOfAll, 0u};
  Choice choice = {0u, keep};
  for (int shift = 24; shift >= 0; shift -= 8) {
    std::uint32_t counts[kHistograms][kRadix];
#pragma HLS ARRAY_PARTITION variable = counts dim = 1 complete
    for (int digit = 0; digit < kRadix; ++digit) {
#pragma HLS PIPELINE II = 1
      for (int i = 0; i < kHistograms; ++i) counts[i][digit] = 0u;
    }
    for (std::uint32_t i = 0; i < count; ++i) {
#pragma HLS PIPELINE II = 1
#pragma HLS DEPENDENCE variable = counts inter distance = 4 true
      const std::uint32_t key = keys[i];
      const bool same = shift == 24 || (key ^ choice.bound) >> (shift + 8) == 0u;
      if (same) ++counts[i % kHistograms][(key >> shift) % kRadix];
    }
    bool found = false;
    for (int digit = kRadix - 1; digit >= 0; --digit) {
#pragma HLS PIPELINE II = 1
      const std::uint32_t here =
          counts[0][digit] + counts[1][digit] + counts[2][digit] + counts[3][digit];
      if (!found && here >= choice.ties) {
        found = true;
        choice.bound |= static_cast<std::uint32_t>(digit) << shift;
      } else if (!found) {
        choice.ties -= here;
      }
    }
  }
  return choice;
}

}  // namespace fpga
}  // namespace ssdkv
