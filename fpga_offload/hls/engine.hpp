// Attention of one job as HILOS has it (Jang et al., ASPLOS 2026): blocks of 128 tokens, K
// transposed on chip, a softmax of two passes, G query heads for each read of K and V.
//
// The first pass reads K, keeps all logits on chip, and finds maximum and sum: by block first, then
// of all. The second reads V and adds it up with the weights. The result is not divided by the sum,
// so that partials merge. Weights are powers of 2 with a whole number as reference: what is scaled
// by it later is exact.
#pragma once

#include "digest.hpp"
#include "numbers.hpp"

namespace ssdkv {
namespace fpga {

// Long sums of fp32 lose digits: a block has sums of its own, and so have so many blocks.
constexpr int kFoldBlocks = 32;

inline bool is_fold(int first) {
#pragma HLS INLINE
  return first / kBlockPages % kFoldBlocks == kFoldBlocks - 1;
}

// Sizes that follow from head size D. The buffer of K^T has a bank for each lane.
template <int D>
struct Sizes {
  static constexpr int kBeats = D / kLanes;                    // of a token
  static constexpr int kHalf = kPageTokens * kBeats;           // beats of K, or V, of a page
  static constexpr int kDepth = kBlockTokens * kBeats;         // of each bank
  static constexpr int kColumns = kBlockTokens / kLanes;       // rows of lanes of a block's tokens
  static constexpr int kChannelSets = kInterleave / kColumns;  // partial sums of a logit
  static constexpr int kTokenSets = kInterleave / kBeats;      // partial sums of an output
};

// K of a block, transposed.
template <int D>
using transposed_t = std::uint16_t[Sizes<D>::kDepth][kLanes];

// Entries of a job on chip.
using pages_t = page_t[kMaxPages];

// What the passes of a job share.
template <int D, int G>
struct JobState {
  float query[G][D];
  pages_t pages;
  heads_t<G> logits[kMaxTokens];
  float recent[Sizes<D>::kBeats][G][kLanes];  // sums of V of up to kFoldBlocks blocks
  float totals[Sizes<D>::kBeats][G][kLanes];  // of those before
  digests_t digests[kDigestUnits];
  float maximum[G];  // whole, in base 2
  float recent_sum[G];
  float total_sum[G];
};

// Reads half of some pages, K or V; a second copy goes to the digests.
template <int D>
void read_halves(const beat_t* memory, const pages_t& pages, int from, int count,
                 std::uint32_t offset, bool checksum, hls::stream<beat_t>& beats,
                 hls::stream<beat_t>& even, hls::stream<beat_t>& odd) {
  for (int page = 0; page < count; ++page) {
    const std::uint64_t first = (pages[from + page].address + offset) / SSDKV_FPGA_BEAT_BYTES;
    for (int i = 0; i < Sizes<D>::kHalf; ++i) {
#pragma HLS PIPELINE II = 1
      const beat_t beat = memory[first + static_cast<std::uint64_t>(i)];
      beats.write(beat);
      if (checksum && page % kDigestUnits == 0) even.write(beat);
      if (checksum && page % kDigestUnits != 0) odd.write(beat);
    }
  }
}

// Element (token, channel) lies in bank (token + channel) mod 32: a beat of one token's channels
// and a row of one channel's tokens both take each bank once.
template <int D>
void transpose(hls::stream<beat_t>& beats, int pages, transposed_t<D>& transposed) {
  constexpr int kBeats = Sizes<D>::kBeats;
  for (int i = 0; i < Sizes<D>::kDepth; ++i) {
#pragma HLS PIPELINE II = 1
    beat_t beat = {};
    if (i < pages * Sizes<D>::kHalf) beat = beats.read();
    const beat_t turned = rotate(beat, i / kBeats % kLanes);
    for (int bank = 0; bank < kLanes; ++bank) {
#pragma HLS UNROLL
      transposed[i][bank] = turned[bank];
    }
  }
}

// One channel of the tokens 32 column .. 32 column + 31.
template <int D>
beat_t channel_row(const transposed_t<D>& transposed, int channel, int column) {
#pragma HLS INLINE
  beat_t banks;
  for (int bank = 0; bank < kLanes; ++bank) {
#pragma HLS UNROLL
    const int token = column * kLanes + ((bank - channel) & (kLanes - 1));
    banks[bank] = transposed[token * Sizes<D>::kBeats + channel / kLanes][bank];
  }
  return rotate(banks, (kLanes - channel) & (kLanes - 1));
}

// Logits of a block: channel by channel for 32 tokens and all query heads in a cycle. A sum is
// taken up again after kInterleave cycles, for which neighbouring channels have sums of their own.
template <int D, int G, typename T>
void multiply_keys(const transposed_t<D>& transposed, const float (&query)[G][D],
                   hls::stream<heads_t<G>>& logits) {
  constexpr int kColumns = Sizes<D>::kColumns;
  constexpr int kSets = Sizes<D>::kChannelSets;
  float sums[kSets][kColumns][G][kLanes];
#pragma HLS ARRAY_PARTITION variable = sums dim = 3 complete
#pragma HLS ARRAY_PARTITION variable = sums dim = 4 complete
  for (int channel = 0; channel < D; ++channel) {
    for (int column = 0; column < kColumns; ++column) {
#pragma HLS PIPELINE II = 1
#pragma HLS DEPENDENCE variable = sums inter distance = 8 true
      const beat_t keys = channel_row<D>(transposed, channel, column);
      for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
        for (int lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
          const float product = query[g][channel] * T::widen(keys[lane]);
          const float before = channel < kSets ? 0.0f : sums[channel % kSets][column][g][lane];
          sums[channel % kSets][column][g][lane] = before + product;
        }
      }
    }
  }
  for (int token = 0; token < kBlockTokens; ++token) {
#pragma HLS PIPELINE II = 1
    heads_t<G> whole;
    for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
      float parts[kSets];
      for (int set = 0; set < kSets; ++set) {
#pragma HLS UNROLL
        parts[set] = sums[set][token / kLanes][g][token % kLanes];
      }
      whole[g] = Tree<kSets>::sum(parts);
    }
    logits.write(whole);
  }
}

// 2^(logit - reference), rounded once before the power.
inline float weight_of(float logit, float scale, float reference) {
#pragma HLS INLINE
  return hls::exp2(hls::fma(logit, scale, -reference));
}

// First pass of the softmax over a block: its maximum, the sum of its weights, and both with those
// of the blocks before it. Tokens that are not attended to count as minus infinity.
template <int D, int G>
void add_block(hls::stream<heads_t<G>>& incoming, int first, int count, float scale,
               JobState<D, G>& job) {
  float block[kBlockTokens][G];
  float tops[kInterleave][G];
  float parts[G][kInterleave];
#pragma HLS ARRAY_PARTITION variable = block dim = 2 complete
#pragma HLS ARRAY_PARTITION variable = tops complete
#pragma HLS ARRAY_PARTITION variable = parts complete
  for (int i = 0; i < kInterleave; ++i) {
#pragma HLS UNROLL
    for (int g = 0; g < G; ++g) {
      tops[i][g] = minus_infinity();
      parts[g][i] = 0.0f;
    }
  }
  for (int t = 0; t < kBlockTokens; ++t) {
#pragma HLS PIPELINE II = 1
    const heads_t<G> logits = incoming.read();
    const bool here = t < count * kPageTokens;
    if (here) job.logits[first * kPageTokens + t] = logits;
    const bool live = here && is_live(job.pages[first + t / kPageTokens], t % kPageTokens);
    for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
      block[t][g] = logits[g];
      const float scaled = logits[g] * scale;
      if (live && scaled > tops[t % kInterleave][g]) tops[t % kInterleave][g] = scaled;
    }
  }
  float reference[G];
  for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
    float top = tops[0][g];
    for (int i = 1; i < kInterleave; ++i) top = tops[i][g] > top ? tops[i][g] : top;
    reference[g] = hls::ceil(top);
  }
  for (int t = 0; t < count * kPageTokens; ++t) {
#pragma HLS PIPELINE II = 1
    const bool live = is_live(job.pages[first + t / kPageTokens], t % kPageTokens);
    for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
      if (live) parts[g][t % kInterleave] += weight_of(block[t][g], scale, reference[g]);
    }
  }
  for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
    const float before = job.maximum[g];
    const float top = reference[g] > before ? reference[g] : before;
    if (top == minus_infinity()) continue;
    const float scaled = job.recent_sum[g] * hls::exp2(before - top) +
                         Tree<kInterleave>::sum(parts[g]) * hls::exp2(reference[g] - top);
    const float older = job.total_sum[g] * hls::exp2(before - top);
    job.recent_sum[g] = is_fold(first) ? 0.0f : scaled;
    job.total_sum[g] = is_fold(first) ? older + scaled : older;
    job.maximum[g] = top;
  }
}

template <int D, int G, typename T>
void score_block(const beat_t* memory, int first, int count, float scale, bool checksum,
                 JobState<D, G>& job) {
#pragma HLS DATAFLOW
  hls::stream<beat_t> beats("k");
  hls::stream<beat_t> even("even k");
  hls::stream<beat_t> odd("odd k");
  hls::stream<heads_t<G>> logits("logits");
  transposed_t<D> transposed;
#pragma HLS ARRAY_PARTITION variable = transposed dim = 2 complete
#pragma HLS STREAM variable = beats depth = 64
#pragma HLS STREAM variable = even depth = 256
#pragma HLS STREAM variable = odd depth = 256
#pragma HLS STREAM variable = logits depth = 128
  const int summed = checksum ? count : 0;
  read_halves<D>(memory, job.pages, first, count, 0, checksum, beats, even, odd);
  digest_halves<D>(even, first / kDigestUnits, (summed + 1) / 2, false, job.digests[0]);
  digest_halves<D>(odd, first / kDigestUnits, summed / 2, false, job.digests[1]);
  transpose<D>(beats, count, transposed);
  multiply_keys<D, G, T>(transposed, job.query, logits);
  add_block<D, G>(logits, first, count, scale, job);
}

// Second pass of the softmax: weights of a block's tokens.
template <int D, int G>
void weigh_block(int first, int count, float scale, const JobState<D, G>& job,
                 hls::stream<heads_t<G>>& weights) {
  for (int t = 0; t < count * kPageTokens; ++t) {
#pragma HLS PIPELINE II = 1
    const heads_t<G> logits = job.logits[first * kPageTokens + t];
    const bool live = is_live(job.pages[first + t / kPageTokens], t % kPageTokens);
    heads_t<G> weight;
    for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
      weight[g] = live ? weight_of(logits[g], scale, job.maximum[g]) : 0.0f;
    }
    weights.write(weight);
  }
}

// Adds up V of a block: 32 channels of one token and all query heads in a cycle. A sum is taken up
// again after kInterleave cycles, for which neighbouring tokens have sums of their own.
template <int D, int G, typename T>
void add_values(hls::stream<beat_t>& beats, hls::stream<heads_t<G>>& weights, int first, int count,
                JobState<D, G>& job) {
  constexpr int kBeats = Sizes<D>::kBeats;
  constexpr int kSets = Sizes<D>::kTokenSets;
  float sums[kSets][kBeats][G][kLanes];
#pragma HLS ARRAY_PARTITION variable = sums dim = 3 complete
#pragma HLS ARRAY_PARTITION variable = sums dim = 4 complete
  for (int t = 0; t < count * kPageTokens; ++t) {
    const heads_t<G> weight = weights.read();
    const bool live = is_live(job.pages[first + t / kPageTokens], t % kPageTokens);
    for (int i = 0; i < kBeats; ++i) {
#pragma HLS PIPELINE II = 1
#pragma HLS DEPENDENCE variable = sums inter distance = 8 true
      const beat_t values = beats.read();
      for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
        for (int lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
          const float product = live ? weight[g] * T::widen(values[lane]) : 0.0f;
          const float before = t < kSets ? 0.0f : sums[t % kSets][i][g][lane];
          sums[t % kSets][i][g][lane] = before + product;
        }
      }
    }
  }
  const bool fold = is_fold(first);
  for (int i = 0; i < kBeats; ++i) {
#pragma HLS PIPELINE II = 1
    for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
      for (int lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
        float parts[kSets];
        for (int set = 0; set < kSets; ++set) parts[set] = sums[set][i][g][lane];
        const float sum = job.recent[i][g][lane] + Tree<kSets>::sum(parts);
        job.recent[i][g][lane] = fold ? 0.0f : sum;
        if (fold) job.totals[i][g][lane] += sum;
      }
    }
  }
}

template <int D, int G, typename T>
void value_block(const beat_t* memory, int first, int count, std::uint32_t v_offset, float scale,
                 bool checksum, JobState<D, G>& job) {
#pragma HLS DATAFLOW
  hls::stream<beat_t> beats("v");
  hls::stream<beat_t> even("even v");
  hls::stream<beat_t> odd("odd v");
  hls::stream<heads_t<G>> weights("weights");
#pragma HLS STREAM variable = beats depth = 512
#pragma HLS STREAM variable = even depth = 256
#pragma HLS STREAM variable = odd depth = 256
#pragma HLS STREAM variable = weights depth = 128
  const int summed = checksum ? count : 0;
  read_halves<D>(memory, job.pages, first, count, v_offset, checksum, beats, even, odd);
  digest_halves<D>(even, first / kDigestUnits, (summed + 1) / 2, true, job.digests[0]);
  digest_halves<D>(odd, first / kDigestUnits, summed / 2, true, job.digests[1]);
  weigh_block<D, G>(first, count, scale, job, weights);
  add_values<D, G, T>(beats, weights, first, count, job);
}

template <int D, int G, typename T>
void read_queries(const beat_t* queries, std::uint32_t place, JobState<D, G>& job) {
  const std::uint64_t first = static_cast<std::uint64_t>(place) * G * Sizes<D>::kBeats;
  for (int i = 0; i < G * Sizes<D>::kBeats; ++i) {
#pragma HLS PIPELINE II = 1
    const beat_t beat = queries[first + static_cast<std::uint64_t>(i)];
    for (int lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
      const int channel = i % Sizes<D>::kBeats * kLanes + lane;
      job.query[i / Sizes<D>::kBeats][channel] = T::widen(beat[lane]);
    }
  }
}

// Both passes over the job's `count` pages; leaves maximum and sums.
template <int D, int G, typename T>
void attend_pages(const beat_t* memory, int count, std::uint32_t v_offset, float scale,
                  bool checksum, JobState<D, G>& job) {
  for (int i = 0; i < Sizes<D>::kBeats; ++i) {
#pragma HLS PIPELINE II = 1
    for (int g = 0; g < G; ++g) {
      for (int lane = 0; lane < kLanes; ++lane) {
        job.recent[i][g][lane] = 0.0f;
        job.totals[i][g][lane] = 0.0f;
      }
    }
  }
  for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
    job.maximum[g] = minus_infinity();
    job.recent_sum[g] = 0.0f;
    job.total_sum[g] = 0.0f;
  }
  for (int first = 0; first < count; first += kBlockPages) {
    const int here = count - first < kBlockPages ? count - first : kBlockPages;
    score_block<D, G, T>(memory, first, here, scale, checksum, job);
  }
  for (int first = 0; first < count; first += kBlockPages) {
    const int here = count - first < kBlockPages ? count - first : kBlockPages;
    value_block<D, G, T>(memory, first, here, v_offset, scale, checksum, job);
  }
}

template <int D, int G>
float sum_of(const JobState<D, G>& job, int g) {
#pragma HLS INLINE
  return job.total_sum[g] + job.recent_sum[g];
}

// Writes the partial of a job: acc is own_share times the sums, and rest_share times l times a
// mean.
template <int D, int G>
void write_partial(const JobState<D, G>& job, const float (&own_share)[kMaxGroup],
                   const float (&mean)[D], std::uint32_t place, float_beat_t* out) {
  constexpr int kOutBeats = G * D / kFloats;
  const std::uint64_t first = static_cast<std::uint64_t>(place) * (kOutBeats + 1);
  for (int i = 0; i < kOutBeats; ++i) {
#pragma HLS PIPELINE II = 1
    const int g = i * kFloats / D;
    float_beat_t beat;
    for (int lane = 0; lane < kFloats; ++lane) {
#pragma HLS UNROLL
      const int channel = i * kFloats % D + lane;
      const int beat_of = channel / kLanes;
      const float sum =
          job.totals[beat_of][g][channel % kLanes] + job.recent[beat_of][g][channel % kLanes];
      const float rest = (1.0f - own_share[g]) * sum_of(job, g) * mean[channel];
      beat[lane] = own_share[g] * sum + rest;
    }
    out[first + static_cast<std::uint64_t>(i)] = beat;
  }
  float_beat_t tail;
  for (int g = 0; g < kMaxGroup; ++g) {
#pragma HLS UNROLL
    tail[g] = g < G ? job.maximum[g < G ? g : 0] : 0.0f;
    tail[kMaxGroup + g] = g < G ? sum_of(job, g < G ? g : 0) : 0.0f;
  }
  out[first + kOutBeats] = tail;
}

inline void write_status(std::uint32_t code, std::uint32_t index, std::uint32_t jobs,
                         std::uint64_t beats, status_t* status) {
#pragma HLS INLINE
  status_t record = {};
  record.code = code;
  record.index = index;
  record.version = SSDKV_FPGA_VERSION;
  record.jobs = jobs;
  record.beats = beats;
  *status = record;
}

// What is wrong with an argument, a job or an entry.
struct Finding {
  std::uint32_t code;
  std::uint32_t index;
};

inline Finding check_address(std::uint64_t address, std::uint32_t alignment, std::uint32_t code,
                             std::uint32_t index) {
#pragma HLS INLINE
  const bool right = address != 0 && address % alignment == 0;
  return {right ? std::uint32_t{SSDKV_FPGA_STATUS_OK} : code, index};
}

inline bool is_v_offset(std::uint32_t v_offset, int head_size) {
#pragma HLS INLINE
  const std::uint32_t half = 2 * kPageTokens * static_cast<std::uint32_t>(head_size);
  return v_offset >= half && v_offset % SSDKV_FPGA_BEAT_BYTES == 0;
}

inline Finding check_entry(std::uint64_t base, const entry_t& entry, std::uint32_t index) {
#pragma HLS INLINE
  if (entry.tokens < 1 || entry.tokens > kPageTokens) {
    return {SSDKV_FPGA_STATUS_ENTRY_TOKENS, index};
  }
  return check_address(base + entry.address, SSDKV_FPGA_BEAT_BYTES, SSDKV_FPGA_STATUS_ENTRY_ADDRESS,
                       index);
}

}  // namespace fpga
}  // namespace ssdkv
