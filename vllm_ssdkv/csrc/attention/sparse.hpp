// The calls behind the Python functions of page selection: they cut a call into tasks and run them
// on a team of threads. Arguments are checked by the bindings, not here. Every call blocks until
// done, may be made from any thread, and needs no GIL. The same call gives the same bits whatever
// the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/problem.hpp"
#include "attention/scoring.hpp"

namespace ssdkv::attention {

void summarize_blocks(const Summaries& summaries, std::int64_t blocks, std::int64_t threads);

void score_pages(const PageScoring& scoring, std::int64_t rows, std::int64_t threads);

void score_channels(const ChannelScoring& scoring, std::int64_t rows, std::int64_t threads);

void weigh_columns(const Weighting& weighting, std::int64_t rows, std::int64_t threads);

void score_tokens(const TokenScoring& scoring, std::int64_t rows, std::int64_t threads);

void cover_pages(const Coverage& coverage, std::int64_t rows, std::int64_t threads);

// The channels of each KV head that SparQ's first step takes: the largest sums of |q| over its
// query heads, equal ones by number; and the queries of those channels.
struct ChannelChoice {
  std::int64_t kv_heads;
  std::int64_t query_heads;
  std::int64_t head_size;
  std::int64_t count;
  float scale;             // of full logits
  const float* query;      // [rows][query_heads][head_size]
  std::int32_t* channels;  // [rows][kv_heads][count], ascending
  float* reduced;          // [rows][query_heads][count]: query times scale_g
};

void choose_channels(const ChannelChoice& choice, std::int64_t rows);

// Columns that each list (row and KV head) takes: the first `sinks`, then those of the highest
// score, equal ones by number, NaN before all others, until `p` of the mass is covered, but at
// least `least[row]` and at most `most[row]` in all.
struct ColumnChoice {
  std::int64_t kv_heads;
  std::int64_t sinks;
  double p;                   // 1 or more: until `most`
  const std::int32_t* least;  // [rows]
  const std::int32_t* most;   // [rows]
  const std::int64_t* first_column;
  const float* score;        // per KV head, as in scoring.hpp
  const float* mass;         // per KV head
  const float* window_mass;  // [rows][kv_heads]
};

struct ChosenColumns {
  std::vector<std::int32_t> columns;  // ascending within each list
  std::vector<std::int32_t> begin;    // [rows * kv_heads + 1]
  std::vector<float> mass;  // [rows][kv_heads]: of them and the window; 1 if all are taken
};

ChosenColumns choose_columns(const ColumnChoice& choice, std::int64_t rows, std::int64_t threads);

}  // namespace ssdkv::attention
