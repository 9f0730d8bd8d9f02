#include "attention/mean_value.hpp"

#include <algorithm>
#include <cmath>

namespace ssdkv::attention {

void add_value(const ValueSums& sums, std::int64_t place, std::int64_t layer, std::int64_t position,
               const float* value, float* mean) {
  const std::int64_t at = place * sums.layers + layer, width = sums.kv_heads * sums.head_size;
  float* const blocks = sums.blocks + at * width;
  float* const rest = sums.rest + at * width;
  const std::int64_t tokens = position + 1;
  const bool full = tokens % sums.block_tokens == 0;
  for (std::int64_t i = 0; i < width; ++i) {
    rest[i] += value[i];
    const float total = blocks[i] + rest[i];
    mean[i] = total / static_cast<float>(tokens);
    if (full) {
      blocks[i] = total;
      rest[i] = 0;
    }
  }
  sums.tokens[at] = tokens;
}

namespace {

// Mass of what was attended to and the sink together, of which `alpha` is that of what was attended
// to among all tokens.
float beside_sink(float alpha, float denominator, float maximum, float sink) {
  const float share = std::exp(sink - maximum);
  const float attended = std::max(denominator - share, 0.0F);
  const float everything = attended > 0 ? attended / alpha : 0.0F;
  return denominator / (everything + share);
}

}  // namespace

void compensate(const State& state, std::int64_t token, std::int64_t kv_heads, const float* alpha,
                const float* mean, const float* sinks) {
  const std::int64_t group = state.query_heads / kv_heads;
  for (std::int64_t head = 0; head < state.query_heads; ++head) {
    const std::int64_t at = token * state.query_heads + head;
    float kept = alpha[head];
    if (sinks != nullptr) {
      kept = beside_sink(kept, state.denominator[at], state.maximum[at], sinks[head]);
    }
    const float rest = (1.0F - kept) * state.denominator[at];
    const float* const from = mean + head / group * state.head_size;
    float* const to = state.accumulator + at * state.head_size;
    for (std::int64_t d = 0; d < state.head_size; ++d) to[d] = kept * to[d] + rest * from[d];
  }
}

}  // namespace ssdkv::attention
