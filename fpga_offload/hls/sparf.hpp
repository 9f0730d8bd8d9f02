// Kernel `sparf`: SparQ's attention (Ribar et al. 2024) over pages, as InstInfer has it (Pan et al.
// 2024). Arguments as in description.py.
//
// 1. The channels with the largest sums of |q| over the query heads.
// 2. Approximate logits of all tokens from them: the context's by channel pages, the window's by K.
// 3. The context's tokens with the largest sums of logits, or its pages of the largest mass.
// 4. alpha: mass of what was chosen, and of the window.
// 5. With ATTEND: pages that hold a chosen token are read, the filter drops the rest of them, and
//    what was not attended to counts as the mean V.
//
// What sums up logits and scores goes in a fixed order, number by number: tokens are chosen as by
// the product's own kernels, ties included.
#pragma once

#include "argtopk.hpp"
#include "engine.hpp"
#include "ssdkv_fpga_hls.h"

namespace ssdkv {
namespace fpga {

constexpr int kTileBeats = kBlockTokens / kScoreLanes;

template <int D, int G>
struct SparfState {
  JobState<D, G> job;
  keys_t keys;
  std::uint16_t channels[D];  // chosen, ascending
  float reduced[D][G];        // queries of those channels, scaled
  float lse[G];
  float alpha[G];
  float mean[D];
};

// Numbers of one job.
struct SparfSizes {
  std::uint32_t context;  // tokens
  std::uint32_t window;   // tokens
};

// Sums of |q| in the order of the query heads; the choice goes by their keys.
template <int D, int G>
Choice choose_channels(const float (&query)[G][D], std::uint32_t together, std::uint32_t keep,
                       keys_t& keys) {
  float sums[D];
  for (int d = 0; d < D; ++d) sums[d] = 0.0f;
  for (int g = 0; g < G; ++g) {
    std::uint32_t place = 0;
    std::uint32_t neighbours = 0;
    for (int d = 0; d < D; ++d) {
#pragma HLS PIPELINE
      sums[place] += hls::fabs(query[g][d]);
      if (++neighbours == together) {
        neighbours = 0;
        ++place;
      }
    }
  }
  const std::uint32_t places = D / together;
  for (std::uint32_t i = 0; i < places; ++i) {
#pragma HLS PIPELINE II = 1
    keys[i] = key_of(sums[i]);
  }
  return choose_largest(keys, places, keep / together);
}

// Step 1, and the queries of step 2.
template <int D, int G>
void reduce_queries(std::uint32_t together, std::uint32_t keep, float scale,
                    SparfState<D, G>& state) {
  const float(&query)[G][D] = state.job.query;
  Choice choice = choose_channels<D, G>(query, together, keep, state.keys);
  std::uint32_t taken = 0;
  for (std::uint32_t place = 0; place < D / together; ++place) {
    if (!choice.takes(state.keys[place])) continue;
    for (std::uint32_t i = 0; i < together; ++i) {
#pragma HLS PIPELINE II = 1
      state.channels[taken++] = static_cast<std::uint16_t>(place * together + i);
    }
  }
  for (int g = 0; g < G; ++g) {
    float whole = 0.0f;
    float part = 0.0f;
    for (int d = 0; d < D; ++d) {
#pragma HLS PIPELINE
      whole += hls::fabs(query[g][d]);
    }
    for (std::uint32_t i = 0; i < keep; ++i) {
#pragma HLS PIPELINE
      part += hls::fabs(query[g][state.channels[i]]);
    }
    // All channels, or only zeros: nothing to correct for.
    const bool corrected = keep < D && part != 0.0f;
    const float factor = corrected ? scale * hls::sqrt(whole / part) : scale;
    for (std::uint32_t i = 0; i < keep; ++i) {
#pragma HLS PIPELINE II = 1
      state.reduced[i][g] = query[g][state.channels[i]] * factor;
    }
  }
}

// Reads a tile of the context, up to 128 tokens: for each chosen channel its beats.
template <int D, int G>
void read_channels(const channel_beat_t* memory, const std::uint64_t* channels,
                   std::uint32_t block_tokens, std::uint32_t first, int beats, std::uint32_t keep,
                   const SparfState<D, G>& state, hls::stream<channel_beat_t>& keys) {
  std::uint64_t at[kTileBeats];
  std::uint32_t block = first / block_tokens;
  std::uint32_t token = first % block_tokens;
  for (int i = 0; i < beats; ++i) {
    at[i] = (channels[block] + 2 * token) / SSDKV_FPGA_CHANNEL_BEAT_BYTES;
    token += kScoreLanes;
    if (token == block_tokens) {
      token = 0;
      ++block;
    }
  }
  const std::uint64_t step = block_tokens / kScoreLanes;
  for (std::uint32_t c = 0; c < keep; ++c) {
    for (int i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II = 1
      keys.write(memory[at[i] + state.channels[c] * step]);
    }
  }
}

// Logits of a tile. Tokens have one sum each, in the order of the channels; the tile's 8 beats fill
// the time that an adder takes.
template <int D, int G, typename T>
void multiply_channels(hls::stream<channel_beat_t>& keys, int beats, std::uint32_t keep,
                       const SparfState<D, G>& state, hls::stream<heads_t<G>>& logits) {
  float sums[kTileBeats][G][kScoreLanes];
#pragma HLS ARRAY_PARTITION variable = sums dim = 2 complete
#pragma HLS ARRAY_PARTITION variable = sums dim = 3 complete
  for (std::uint32_t c = 0; c < keep; ++c) {
    for (int i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II = 1
#pragma HLS DEPENDENCE variable = sums inter distance = 8 true
      const channel_beat_t key = keys.read();
      for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
        for (int lane = 0; lane < kScoreLanes; ++lane) {
#pragma HLS UNROLL
          const float before = c == 0 ? 0.0f : sums[i][g][lane];
          sums[i][g][lane] = hls::fma(state.reduced[c][g], T::widen(key[lane]), before);
        }
      }
    }
  }
  for (int t = 0; t < beats * kScoreLanes; ++t) {
#pragma HLS PIPELINE II = 1
    heads_t<G> token;
    for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
      token[g] = sums[t / kScoreLanes][g][t % kScoreLanes];
    }
    logits.write(token);
  }
}

// The same for 8 pages of the window, from K as it lies on chip. Four columns take turns, so a new
// one starts every other cycle.
template <int D, int G, typename T>
void multiply_window(const transposed_t<D>& transposed, std::uint32_t keep,
                     const SparfState<D, G>& state, hls::stream<heads_t<G>>& logits) {
  constexpr int kColumns = Sizes<D>::kColumns;
  float sums[kColumns][G][kLanes];
#pragma HLS ARRAY_PARTITION variable = sums dim = 2 complete
#pragma HLS ARRAY_PARTITION variable = sums dim = 3 complete
  for (std::uint32_t c = 0; c < keep; ++c) {
    for (int column = 0; column < kColumns; ++column) {
#pragma HLS PIPELINE II = 2
      const beat_t key = channel_row<D>(transposed, state.channels[c], column);
      for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
        for (int lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
          const float before = c == 0 ? 0.0f : sums[column][g][lane];
          sums[column][g][lane] = hls::fma(state.reduced[c][g], T::widen(key[lane]), before);
        }
      }
    }
  }
  for (int t = 0; t < kBlockTokens; ++t) {
#pragma HLS PIPELINE II = 1
    heads_t<G> token;
    for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
      token[g] = sums[t / kLanes][g][t % kLanes];
    }
    logits.write(token);
  }
}

template <int G>
void keep_logits(hls::stream<heads_t<G>>& incoming, std::uint32_t first, int tokens,
                 heads_t<G> (&logits)[kMaxTokens]) {
  for (int t = 0; t < tokens; ++t) {
#pragma HLS PIPELINE II = 1
    logits[first + static_cast<std::uint32_t>(t)] = incoming.read();
  }
}

template <int D, int G, typename T>
void score_tile(const channel_beat_t* memory, const std::uint64_t* channels,
                std::uint32_t block_tokens, std::uint32_t first, int beats, std::uint32_t keep,
                SparfState<D, G>& state) {
#pragma HLS DATAFLOW
  hls::stream<channel_beat_t> keys("channels");
  hls::stream<heads_t<G>> logits("approximate logits");
#pragma HLS STREAM variable = keys depth = 64
#pragma HLS STREAM variable = logits depth = 128
  read_channels<D, G>(memory, channels, block_tokens, first, beats, keep, state, keys);
  multiply_channels<D, G, T>(keys, beats, keep, state, logits);
  keep_logits<G>(logits, first, beats * kScoreLanes, state.job.logits);
}

// Keeps the logits of valid tokens of up to 8 pages of the window; says how many.
template <int D, int G>
void keep_window(hls::stream<heads_t<G>>& incoming, int pages, std::uint32_t to,
                 JobState<D, G>& job, std::uint32_t& kept) {
  std::uint32_t count = 0;
  for (int t = 0; t < kBlockTokens; ++t) {
#pragma HLS PIPELINE II = 1
    const heads_t<G> logits = incoming.read();
    const int page = t / kPageTokens;
    if (page < pages && is_live(job.pages[page], t % kPageTokens)) {
      job.logits[to + count++] = logits;
    }
  }
  kept = count;
}

// Up to 8 pages of the window, which stand first in job.pages.
template <int D, int G, typename T>
void score_window_tile(const beat_t* memory, int count, std::uint32_t keep, std::uint32_t to,
                       SparfState<D, G>& state, std::uint32_t& kept) {
#pragma HLS DATAFLOW
  hls::stream<beat_t> beats("window");
  hls::stream<beat_t> even("none");
  hls::stream<beat_t> odd("none");
  hls::stream<heads_t<G>> logits("window logits");
  transposed_t<D> transposed;
#pragma HLS ARRAY_PARTITION variable = transposed dim = 2 complete
#pragma HLS STREAM variable = beats depth = 64
#pragma HLS STREAM variable = logits depth = 128
  read_halves<D>(memory, state.job.pages, 0, count, 0, false, beats, even, odd);
  transpose<D>(beats, count, transposed);
  multiply_window<D, G, T>(transposed, keep, state, logits);
  keep_window<D, G>(logits, count, to, state.job, kept);
}

// Logits of the window's tokens, from `to` on. Returns how many there are.
template <int D, int G, typename T>
std::uint32_t score_window(const beat_t* memory, const entry_t* entries, const sparf_job_t& job,
                           std::uint32_t keep, std::uint32_t to, SparfState<D, G>& state) {
  std::uint32_t tokens = 0;
  for (std::uint32_t first = 0; first < job.window_entries; first += kBlockPages) {
    const std::uint32_t left = job.window_entries - first;
    const int count = left < kBlockPages ? static_cast<int>(left) : kBlockPages;
    for (int i = 0; i < count; ++i) {
#pragma HLS PIPELINE II = 1
      const entry_t entry = entries[job.first_window + first + static_cast<std::uint32_t>(i)];
      state.job.pages[i].address = entry.address;
      state.job.pages[i].live = first_tokens(entry.tokens);
    }
    std::uint32_t kept = 0;
    score_window_tile<D, G, T>(memory, count, keep, to + tokens, state, kept);
    tokens += kept;
  }
  return tokens;
}

// Adds a weight to one of the partial sums. NaN is left out: it shows where it is used.
inline void add_weight(float logit, float reference, int place, float (&parts)[kInterleave]) {
#pragma HLS INLINE
  if (logit == logit) parts[place % kInterleave] += hls::exp(logit - reference);
}

// Log-sum-exp of all tokens, by query head.
template <int D, int G>
void sum_logits(std::uint32_t tokens, SparfState<D, G>& state) {
  float tops[kInterleave][G];
  float sums[G];
#pragma HLS ARRAY_PARTITION variable = tops complete
  for (int i = 0; i < kInterleave; ++i) {
    for (int g = 0; g < G; ++g) tops[i][g] = minus_infinity();
  }
  for (std::uint32_t t = 0; t < tokens; ++t) {
#pragma HLS PIPELINE II = 1
    const heads_t<G> logits = state.job.logits[t];
    for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
      if (logits[g] > tops[t % kInterleave][g]) tops[t % kInterleave][g] = logits[g];
    }
  }
  for (int g = 0; g < G; ++g) {
    for (int i = 1; i < kInterleave; ++i) {
      if (tops[i][g] > tops[0][g]) tops[0][g] = tops[i][g];
    }
    sums[g] = 0.0f;
  }
  for (std::uint32_t first = 0; first < tokens; first += kBlockTokens) {
    const std::uint32_t end = first + kBlockTokens < tokens ? first + kBlockTokens : tokens;
    float parts[G][kInterleave] = {};
#pragma HLS ARRAY_PARTITION variable = parts complete
    for (std::uint32_t t = first; t < end; ++t) {
#pragma HLS PIPELINE II = 1
      const heads_t<G> logits = state.job.logits[t];
      for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
        add_weight(logits[g], tops[0][g], static_cast<int>(t % kInterleave), parts[g]);
      }
    }
    for (int g = 0; g < G; ++g) sums[g] += Tree<kInterleave>::sum(parts[g]);
  }
  for (int g = 0; g < G; ++g) state.lse[g] = tops[0][g] + hls::log(sums[g]);
}

// Mean over the query heads of a token's softmax weights.
template <int G>
float mass_of(const heads_t<G>& logits, const float (&lse)[G]) {
#pragma HLS INLINE
  float sum = 0.0f;
  for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
    sum += hls::exp(logits[g] - lse[g]);
  }
  return sum / G;
}

// Keys by which tokens are chosen: sums of logits.
template <int D, int G>
void key_tokens(std::uint32_t context, std::uint32_t sinks, SparfState<D, G>& state) {
  for (std::uint32_t t = 0; t < context; ++t) {
#pragma HLS PIPELINE II = 1
    const heads_t<G> logits = state.job.logits[t];
    float sum = 0.0f;
    for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
      sum += logits[g];
    }
    state.keys[t] = t < sinks ? kFirstOfAll : key_of(sum);
  }
}

// Keys by which pages are chosen: masses.
template <int D, int G>
void key_pages(std::uint32_t context, std::uint32_t page_tokens, std::uint32_t sinks,
               SparfState<D, G>& state) {
  for (std::uint32_t page = 0; page < context / page_tokens; ++page) {
    float parts[kInterleave] = {};
#pragma HLS ARRAY_PARTITION variable = parts complete
    for (std::uint32_t t = 0; t < page_tokens; ++t) {
#pragma HLS PIPELINE II = 1
      parts[t % kInterleave] += mass_of<G>(state.job.logits[page * page_tokens + t], state.lse);
    }
    state.keys[page] = page < sinks ? kFirstOfAll : key_of(Tree<kInterleave>::sum(parts));
  }
}

// Step 4, and the masks: goes over all tokens once more, and drops what was not chosen. Chosen
// pages of the context are left in job.pages with their tokens.
template <int D, int G>
choice_t filter_tokens(Choice choice, const SparfSizes& sizes, std::uint32_t column_tokens,
                       std::uint32_t first_entry, SparfState<D, G>& state, std::uint32_t* masks) {
  choice_t said = {};
  float parts[G][kInterleave] = {};
  float window[kInterleave] = {};
#pragma HLS ARRAY_PARTITION variable = parts complete
#pragma HLS ARRAY_PARTITION variable = window complete
  std::uint32_t mask = 0;
  std::uint32_t column = 0;
  std::uint32_t in_column = 0;
  bool taken = false;
  for (std::uint32_t t = 0; t < sizes.context + sizes.window; ++t) {
#pragma HLS PIPELINE II = 1
    const heads_t<G> logits = state.job.logits[t];
    const bool context = t < sizes.context;
    if (context && in_column == 0) taken = choice.takes(state.keys[column++]);
    in_column = in_column + 1 == column_tokens ? 0 : in_column + 1;
    for (int g = 0; g < G; ++g) {
#pragma HLS UNROLL
      if (!context || taken) parts[g][t % kInterleave] += hls::exp(logits[g] - state.lse[g]);
    }
    if (!context) window[t % kInterleave] += mass_of<G>(logits, state.lse);
    if (context && taken) mask |= 1u << (t % kPageTokens);
    if (context && taken) ++said.tokens;
    if (context && t % kPageTokens == kPageTokens - 1) {
      masks[first_entry + t / kPageTokens] = mask;
      state.job.pages[said.pages].address = first_entry + t / kPageTokens;
      state.job.pages[said.pages].live = static_cast<std::uint16_t>(mask);
      if (mask != 0u) ++said.pages;
      mask = 0;
    }
  }
  for (int g = 0; g < G; ++g) {
    const float sum = Tree<kInterleave>::sum(parts[g]);
    state.alpha[g] = sum > 1.0f ? 1.0f : sum;
    said.alpha[g] = state.alpha[g];
    said.lse[g] = state.lse[g];
  }
  said.window_mass = Tree<kInterleave>::sum(window);
  return said;
}

// The list for step 5: places in the list of entries become addresses, and the window follows.
inline int list_chosen(const entry_t* entries, const sparf_job_t& job, std::uint32_t chosen,
                       bool window, pages_t& pages) {
  for (std::uint32_t i = 0; i < chosen; ++i) {
#pragma HLS PIPELINE II = 1
    pages[i].address = entries[pages[i].address].address;
  }
  if (!window) return static_cast<int>(chosen);
  for (std::uint32_t i = 0; i < job.window_entries; ++i) {
#pragma HLS PIPELINE II = 1
    const entry_t entry = entries[job.first_window + i];
    pages[chosen + i].address = entry.address;
    pages[chosen + i].live = first_tokens(entry.tokens);
  }
  return static_cast<int>(chosen + job.window_entries);
}

template <int D>
void read_mean(const float_beat_t* means, std::uint32_t place, float (&mean)[D]) {
  for (int i = 0; i < D / kFloats; ++i) {
#pragma HLS PIPELINE II = 1
    const float_beat_t beat =
        means[static_cast<std::uint64_t>(place) * (D / kFloats) + static_cast<std::uint64_t>(i)];
    for (int lane = 0; lane < kFloats; ++lane) {
#pragma HLS UNROLL
      mean[i * kFloats + lane] = beat[lane];
    }
  }
}

// Checks the numbers of a call.
inline Finding check_sparf_arguments(std::uint32_t head_size, std::uint32_t dtype,
                                     std::uint32_t job_count, std::uint32_t block_tokens,
                                     std::uint32_t page_tokens, std::uint32_t keep_channels,
                                     std::uint32_t channel_group, std::uint32_t v_offset,
                                     std::uint32_t flags) {
  const bool by_page = (flags & SSDKV_FPGA_FLAG_BY_PAGE) != 0;
  const bool attend = (flags & SSDKV_FPGA_FLAG_ATTEND) != 0;
  const bool window = (flags & SSDKV_FPGA_FLAG_WINDOW) != 0;
  const bool mean = (flags & SSDKV_FPGA_FLAG_MEAN_VALUE) != 0;
  std::uint32_t wrong = 0;
  if ((flags & SSDKV_FPGA_FLAG_BFLOAT16) != dtype) return {SSDKV_FPGA_STATUS_SHAPE, 0};
  if (job_count > SSDKV_FPGA_MAX_JOBS) {
    wrong = SSDKV_FPGA_SPARF_ARGUMENT_JOB_COUNT;
  } else if (block_tokens == 0 || block_tokens % kScoreLanes != 0) {
    wrong = SSDKV_FPGA_SPARF_ARGUMENT_BLOCK_TOKENS;
  } else if (by_page && (page_tokens == 0 || page_tokens % kPageTokens != 0 ||
                         block_tokens % page_tokens != 0)) {
    wrong = SSDKV_FPGA_SPARF_ARGUMENT_PAGE_TOKENS;
  } else if (channel_group == 0 || head_size % channel_group != 0) {
    wrong = SSDKV_FPGA_SPARF_ARGUMENT_CHANNEL_GROUP;
  } else if (keep_channels == 0 || keep_channels > head_size ||
             keep_channels % channel_group != 0) {
    wrong = SSDKV_FPGA_SPARF_ARGUMENT_KEEP_CHANNELS;
  } else if (!is_v_offset(v_offset, static_cast<int>(head_size))) {
    wrong = SSDKV_FPGA_SPARF_ARGUMENT_V_OFFSET;
  } else if ((window && !attend) || (mean && !window)) {
    wrong = SSDKV_FPGA_SPARF_ARGUMENT_FLAGS;
  }
  return {wrong == 0 ? std::uint32_t{SSDKV_FPGA_STATUS_OK} : SSDKV_FPGA_STATUS_ARGUMENT, wrong};
}

inline bool is_within(std::uint32_t first, std::uint64_t count, std::uint32_t size) {
#pragma HLS INLINE
  return count <= size && first <= size - count;
}

// Checks one job and what it refers to. `bases` are where pages and channel pages lie.
inline Finding check_sparf_job(const std::uint64_t* bases, const entry_t* entries,
                               const std::uint64_t* channels, const sparf_job_t& job,
                               std::uint32_t place, std::uint32_t entry_count,
                               std::uint32_t channel_count, std::uint32_t block_tokens,
                               bool attend) {
  const std::uint64_t pages =
      static_cast<std::uint64_t>(job.channel_blocks) * block_tokens / kPageTokens;
  if (!is_within(job.first_entry, pages, entry_count) ||
      !is_within(job.first_window, job.window_entries, entry_count) ||
      !is_within(job.first_channels, job.channel_blocks, channel_count)) {
    return {SSDKV_FPGA_STATUS_JOB_ENTRIES, place};
  }
  if (pages + job.window_entries > kMaxPages) return {SSDKV_FPGA_STATUS_JOB_LENGTH, place};
  for (std::uint32_t i = 0; i < job.channel_blocks; ++i) {
#pragma HLS PIPELINE II = 1
    const std::uint32_t at = job.first_channels + i;
    const Finding found = check_address(bases[1] + channels[at], SSDKV_FPGA_CHANNEL_BEAT_BYTES,
                                        SSDKV_FPGA_STATUS_CHANNEL_ADDRESS, at);
    if (found.code != SSDKV_FPGA_STATUS_OK) return found;
  }
  for (std::uint32_t i = 0; i < job.window_entries; ++i) {
#pragma HLS PIPELINE II = 1
    const Finding found =
        check_entry(bases[0], entries[job.first_window + i], job.first_window + i);
    if (found.code != SSDKV_FPGA_STATUS_OK) return found;
  }
  for (std::uint32_t i = 0; attend && i < pages; ++i) {
#pragma HLS PIPELINE II = 1
    const entry_t entry = entries[job.first_entry + i];
    if (entry.tokens != kPageTokens) return {SSDKV_FPGA_STATUS_ENTRY_TOKENS, job.first_entry + i};
    const Finding found = check_entry(bases[0], entry, job.first_entry + i);
    if (found.code != SSDKV_FPGA_STATUS_OK) return found;
  }
  return {SSDKV_FPGA_STATUS_OK, 0};
}

// As run_attend; `channel_base` is where `channel_pages` lies.
template <int D, int G, typename T>
void run_sparf(SparfState<D, G>& state, std::uint64_t base, std::uint64_t channel_base,
               SSDKV_FPGA_SPARF_PARAMETERS) {
  const float natural = float_of(static_cast<std::uint32_t>(scale));
  const float binary = float_of(static_cast<std::uint32_t>(scale_log2e));
  const bool by_page = (flags & SSDKV_FPGA_FLAG_BY_PAGE) != 0;
  const bool attend = (flags & SSDKV_FPGA_FLAG_ATTEND) != 0;
  const bool window = (flags & SSDKV_FPGA_FLAG_WINDOW) != 0;
  const bool mean = (flags & SSDKV_FPGA_FLAG_MEAN_VALUE) != 0;
  const std::uint64_t bases[2] = {base, channel_base};
  Finding found = check_sparf_arguments(D, T::kFlags, job_count, block_tokens, page_tokens,
                                        keep_channels, channel_group, v_offset, flags);
  for (std::uint32_t i = 0; i < job_count && found.code == SSDKV_FPGA_STATUS_OK; ++i) {
    const sparf_job_t job = jobs[i];
    found = check_sparf_job(bases, entries, channels, job, i, entry_count, channel_count,
                            block_tokens, attend);
  }
  const std::uint32_t done = found.code == SSDKV_FPGA_STATUS_OK ? job_count : 0;
  std::uint64_t beats = 0;
  for (std::uint32_t i = 0; i < done; ++i) {
    const sparf_job_t job = jobs[i];
    read_queries<D, G, T>(q, job.query, state.job);
    reduce_queries<D, G>(channel_group, keep_channels, natural, state);
    SparfSizes sizes = {job.channel_blocks * block_tokens, 0};
    for (std::uint32_t first = 0; first < sizes.context; first += kBlockTokens) {
      const std::uint32_t left = (sizes.context - first) / kScoreLanes;
      score_tile<D, G, T>(channel_pages, channels + job.first_channels, block_tokens, first,
                          left < kTileBeats ? static_cast<int>(left) : kTileBeats, keep_channels,
                          state);
    }
    sizes.window = score_window<D, G, T>(pages, entries, job, keep_channels, sizes.context, state);
    sum_logits<D, G>(sizes.context + sizes.window, state);
    if (by_page) {
      key_pages<D, G>(sizes.context, page_tokens, sinks, state);
    } else {
      key_tokens<D, G>(sizes.context, sinks, state);
    }
    const std::uint32_t column_tokens = by_page ? page_tokens : 1;
    const Choice choice = choose_largest(state.keys, sizes.context / column_tokens, job.keep);
    const choice_t said =
        filter_tokens<D, G>(choice, sizes, column_tokens, job.first_entry, state, masks);
    choices[job.out] = said;
    beats += Sizes<D>::kHalf * static_cast<std::uint64_t>(job.window_entries);
    if (!attend) continue;
    const int count = list_chosen(entries, job, said.pages, window, state.job.pages);
    float own_share[kMaxGroup];
    for (int g = 0; g < kMaxGroup; ++g) own_share[g] = mean && g < G ? state.alpha[g] : 1.0f;
    if (mean) read_mean<D>(mean_value, job.out, state.mean);
    attend_pages<D, G, T>(pages, count, v_offset, binary, false, state.job);
    write_partial<D, G>(state.job, own_share, state.mean, job.out, out);
    beats += 2 * Sizes<D>::kHalf * static_cast<std::uint64_t>(count);
  }
  write_status(found.code, found.index, done, beats, status);
}

}  // namespace fpga
}  // namespace ssdkv
