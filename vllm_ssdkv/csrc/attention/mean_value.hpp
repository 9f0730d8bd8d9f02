// Mean V of requests that are decoded, for what nobody attends to: SparQ's last step (Ribar et al.
// 2024). All of it is fp32.
#pragma once

#include <cstdint>

#include "attention/problem.hpp"

namespace ssdkv::attention {

// Sums of V of the tokens of requests, each of which has a place.
struct ValueSums {
  std::int64_t layers;
  std::int64_t kv_heads;
  std::int64_t head_size;
  std::int64_t block_tokens;
  float* blocks;         // [places][layers][kv_heads][head_size]: over complete blocks
  float* rest;           // likewise: over the tokens behind them
  std::int64_t* tokens;  // [places][layers]: in both
};

// Adds V of the token at a position, [kv_heads][head_size], to the sums of all before it, and
// writes the mean over all of them.
void add_value(const ValueSums& sums, std::int64_t place, std::int64_t layer, std::int64_t position,
               const float* value, float* mean);

// What a token's query heads have attended to becomes alpha * out + (1 - alpha) * mean, by its
// `alpha`, [query_heads], and `mean`, [kv_heads][head_size]. With `sinks`, the logits of its heads'
// attention sinks, alpha leaves these out: a sink has no value that could be missing.
void compensate(const State& state, std::int64_t token, std::int64_t kv_heads, const float* alpha,
                const float* mean, const float* sinks);

}  // namespace ssdkv::attention
