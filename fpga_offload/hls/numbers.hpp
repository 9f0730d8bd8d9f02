// Beats of memory, and the numbers in them. As all of this folder: C++14, for the vendor's
// compiler.
#pragma once

#include <cstdint>

#include "hls_math.h"
#include "hls_stream.h"
#include "hls_vector.h"
#include "ssdkv_fpga.h"

namespace ssdkv {
namespace fpga {

constexpr int kPageTokens = SSDKV_FPGA_PAGE_TOKENS;
constexpr int kBlockTokens = SSDKV_FPGA_BLOCK_TOKENS;
constexpr int kBlockPages = kBlockTokens / kPageTokens;
constexpr int kMaxPages = SSDKV_FPGA_MAX_JOB_ENTRIES;
constexpr int kMaxTokens = SSDKV_FPGA_MAX_SPARF_TOKENS;
constexpr int kMaxGroup = SSDKV_FPGA_MAX_GROUP;

constexpr int kLanes = SSDKV_FPGA_BEAT_BYTES / 2;               // elements of a beat of a page
constexpr int kScoreLanes = SSDKV_FPGA_SCORE_TOKENS;            // tokens of a beat of channels
constexpr int kFloats = SSDKV_FPGA_BEAT_BYTES / sizeof(float);  // of a beat
constexpr int kWords = SSDKV_FPGA_BEAT_BYTES / sizeof(std::uint64_t);

// A sum is taken up again after so many cycles, which is more than an adder takes. So many partial
// sums are kept, and added up in the end.
constexpr int kInterleave = 8;

using beat_t = hls::vector<std::uint16_t, kLanes>;
using channel_beat_t = hls::vector<std::uint16_t, kScoreLanes>;
using float_beat_t = hls::vector<float, kFloats>;
using entry_t = ssdkv_fpga_entry;
using job_t = ssdkv_fpga_job;
using sparf_job_t = ssdkv_fpga_sparf_job;
using choice_t = ssdkv_fpga_choice;
using status_t = ssdkv_fpga_status;

// One number per query head.
template <int G>
using heads_t = hls::vector<float, G>;

union FloatBits {
  float value;
  std::uint32_t bits;
};

inline float float_of(std::uint32_t bits) {
#pragma HLS INLINE
  FloatBits both;
  both.bits = bits;
  return both.value;
}

inline std::uint32_t bits_of(float value) {
#pragma HLS INLINE
  FloatBits both;
  both.value = value;
  return both.bits;
}

constexpr std::uint32_t kMinusInfinityBits = 0xff800000u;

inline float minus_infinity() {
#pragma HLS INLINE
  return float_of(kMinusInfinityBits);
}

struct Float16 {
  static constexpr std::uint32_t kFlags = 0;

  // Operators of FPGAs take subnormal numbers for 0, so no conversion by one: those of fp16 become
  // normal numbers of fp32 here.
  static float widen(std::uint16_t half) {
#pragma HLS INLINE
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const std::uint32_t magnitude = half & 0x7fffu;
    const std::uint32_t infinite = magnitude >= 0x7c00u ? 112u << 23 : 0u;
    const std::uint32_t normal = (magnitude << 13) + (112u << 23) + infinite;
    const std::uint32_t whole = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)));
    const std::uint32_t small = magnitude == 0u ? 0u : whole - (24u << 23);
    return float_of(sign | (magnitude < 0x400u ? small : normal));
  }
};

struct BFloat16 {
  static constexpr std::uint32_t kFlags = SSDKV_FPGA_FLAG_BFLOAT16;

  static float widen(std::uint16_t half) {
#pragma HLS INLINE
    return float_of(static_cast<std::uint32_t>(half) << 16);
  }
};

// The sum of N values, as a tree of adders.
template <int N>
struct Tree {
  static float sum(const float* values) {
#pragma HLS INLINE
    return Tree<N / 2>::sum(values) + Tree<N - N / 2>::sum(values + N / 2);
  }
};
template <>
struct Tree<1> {
  static float sum(const float* values) {
#pragma HLS INLINE
    return values[0];
  }
};

// A beat whose elements moved up by `places`, those of the end to the front.
inline beat_t rotate(const beat_t& beat, int places) {
#pragma HLS INLINE
  std::uint16_t twice[2 * kLanes];
#pragma HLS ARRAY_PARTITION variable = twice complete
  for (int i = 0; i < kLanes; ++i) {
#pragma HLS UNROLL
    twice[i] = beat[i];
    twice[i + kLanes] = beat[i];
  }
  const int from = (kLanes - places) & (kLanes - 1);
  beat_t moved;
  for (int i = 0; i < kLanes; ++i) {
#pragma HLS UNROLL
    moved[i] = twice[i + from];
  }
  return moved;
}

// A page on chip: where it lies, and which of its tokens are attended to.
struct page_t {
  std::uint64_t address;
  std::uint16_t live;
};

inline std::uint16_t first_tokens(std::uint32_t tokens) {
#pragma HLS INLINE
  return static_cast<std::uint16_t>((1u << tokens) - 1u);
}

inline bool is_live(const page_t& page, int token) {
#pragma HLS INLINE
  return ((page.live >> token) & 1) != 0;
}

}  // namespace fpga
}  // namespace ssdkv
