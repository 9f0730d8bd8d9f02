// From logits to what pages are chosen by: softmax weights, scores of pages, mass covered.
#pragma once

#include <cmath>

#include "attention/kernel/summaries.hpp"

namespace ssdkv::attention::SSDKV_ISA {
namespace {

// Some of `count` floats; the lanes after them are `fill`.
inline Vec read_some(const float* from, std::int64_t count, float fill) {
  if (count >= kLanes) return read(from);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? from[i] : fill;
  return read(lanes);
}

inline void write_some(float* to, Vec v, std::int64_t count) {
  store_some<float>(reinterpret_cast<std::byte*>(to), v, count);
}

// Log-sum-exp of `count` floats, NaN among them left out: they show where they are used.
inline float log_sum_exp(const float* x, std::int64_t count) {
  Vec top = splat(-kInfinity);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    top = max(read_some(x + i, count - i, -kInfinity), top);
  }
  const float shift = horizontal_max(top);
  if (shift == -kInfinity) return shift;
  // In pieces: a sum of a hundred thousand floats would lose digits.
  constexpr std::int64_t kPiece = 64 * kLanes;
  double total = 0;
  for (std::int64_t begin = 0; begin < count; begin += kPiece) {
    Vec sum = {};
    for (std::int64_t i = begin; i < count && i < begin + kPiece; i += kLanes) {
      const Vec v = read_some(x + i, count - i, -kInfinity);
      sum += v == v ? exp_nonpositive(v - shift) : Vec{};
    }
    total += static_cast<double>(horizontal_sum(sum));
  }
  return shift + static_cast<float>(::log(total));
}

inline float log_add(float a, float b) {
  const float top = a > b ? a : b;
  if (top == -kInfinity) return top;
  return top + ::logf(::expf(a - top) + ::expf(b - top));
}

void weigh(const Weighting& w, std::int64_t row, std::int64_t head) {
  const std::int64_t group = w.query_heads / w.kv_heads;
  const std::int64_t first = w.first_column[row];
  const std::int64_t columns = w.first_column[row + 1] - first;
  const float* logits = w.logits + first * w.query_heads + head * group * columns;
  float* weights = w.weights + first * w.kv_heads + head * columns;
  const float share = 1.0f / static_cast<float>(group);
  const float tokens = ::logf(w.column_tokens);
  float window = 0;
  for (std::int64_t g = 0; g < group; ++g, logits += columns) {
    float all = log_sum_exp(logits, columns) + tokens;
    if (w.window_lse != nullptr) {
      const float seen = w.window_lse[row * w.query_heads + head * group + g];
      all = log_add(all, seen);
      window += seen == -kInfinity ? 0.0f : share * ::expf(seen - all);
    }
    w.lse[row * w.query_heads + head * group + g] = all;
    const Vec shift = splat(all - tokens);
    for (std::int64_t i = 0; i < columns; i += kLanes) {
      const std::int64_t left = columns - i;
      const Vec weight = exp_nonpositive(read_some(logits + i, left, 0.0f) - shift) * share;
      write_some(weights + i, g == 0 ? weight : read_some(weights + i, left, 0.0f) + weight, left);
    }
  }
  w.window_mass[row * w.kv_heads + head] = window;
}

// The query heads of one KV head, and the logits of their tokens.
struct TokenPlace {
  std::int64_t group;
  std::int64_t tokens;
  const float* logits;  // [group][tokens]
  std::int64_t query_head;

  template <typename Call>
  TokenPlace(const Call& call, std::int64_t row, std::int64_t head)
      : group(call.query_heads / call.kv_heads),
        tokens(call.first_token[row + 1] - call.first_token[row]),
        logits(call.logits + call.first_token[row] * call.query_heads + head * group * tokens),
        query_head(row * call.query_heads + head * group) {}
};

// Score and mass of up to kLanes tokens from `token` on: the sum of the logits of all query heads,
// and the mean of their softmax weights.
struct TokenScore {
  Vec score;
  Vec mass;
};

inline TokenScore score_of(const TokenPlace& place, const float* lse, std::int64_t token,
                           std::int64_t count) {
  TokenScore sum = {};
  for (std::int64_t g = 0; g < place.group; ++g) {
    const Vec x = read_some(place.logits + g * place.tokens + token, count, -kInfinity);
    sum.score += x;
    sum.mass += exp_nonpositive(x - lse[g]);
  }
  sum.mass /= splat(static_cast<float>(place.group));
  return sum;
}

void score_tokens(const TokenScoring& s, std::int64_t row, std::int64_t head) {
  const TokenPlace place(s, row, head);
  float* lse = s.lse + place.query_head;
  for (std::int64_t g = 0; g < place.group; ++g) {
    lse[g] = log_sum_exp(place.logits + g * place.tokens, place.tokens);
  }
  const std::int64_t first = s.first_column[row];
  const std::int64_t columns = s.first_column[row + 1] - first;
  float* score = s.score + first * s.kv_heads + head * columns;
  float* mass = s.mass + first * s.kv_heads + head * columns;
  const std::int64_t context = columns * s.page_tokens;
  if (s.page_tokens == 1) {
    for (std::int64_t t = 0; t < context; t += kLanes) {
      const TokenScore tokens = score_of(place, lse, t, context - t);
      write_some(score + t, tokens.score, context - t);
      write_some(mass + t, tokens.mass, context - t);
    }
  } else {
    for (std::int64_t page = 0; page < columns; ++page) {
      Vec sum = {};
      for (std::int64_t t = 0; t < s.page_tokens; t += kLanes) {
        sum += score_of(place, lse, page * s.page_tokens + t, s.page_tokens - t).mass;
      }
      score[page] = mass[page] = horizontal_sum(sum);
    }
  }
  double window = 0;
  for (std::int64_t t = context; t < place.tokens; t += kLanes) {
    window += static_cast<double>(horizontal_sum(score_of(place, lse, t, place.tokens - t).mass));
  }
  s.window_mass[row * s.kv_heads + head] = static_cast<float>(window);
}

// Softmax weights of `count` tokens from x on, the masked ones left out, added to `sum` one after
// the other: the result depends on the tokens, not on how pages cut them.
inline double add_weights(const float* x, std::int64_t count, float lse, const std::uint8_t* mask,
                          double sum) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    float weight[kLanes];
    write(weight, exp_nonpositive(read_some(x + i, count - i, 0.0f) - lse));
    for (std::int64_t t = i; t < i + kLanes && t < count; ++t) {
      if (mask == nullptr || mask[t] != 0) sum += static_cast<double>(weight[t - i]);
    }
  }
  return sum;
}

void cover(const Coverage& c, std::int64_t row, std::int64_t head) {
  const TokenPlace place(c, row, head);
  const std::int64_t list = row * c.kv_heads + head;
  for (std::int64_t g = 0; g < place.group; ++g) {
    const float* x = place.logits + g * place.tokens;
    const float all = c.lse[place.query_head + g];
    const float lse = all - ::logf(c.column_tokens);
    double sum = 0;
    for (std::int64_t i = c.begin[list]; i < c.begin[list + 1]; ++i) {
      const std::uint8_t* mask =
          c.token_mask == nullptr ? nullptr : c.token_mask + i * c.page_tokens;
      sum = add_weights(x + c.pages[i] * c.page_tokens, c.page_tokens, lse, mask, sum);
    }
    const std::int64_t window = c.window_tokens == nullptr ? 0 : c.window_tokens[row];
    sum = add_weights(x + place.tokens - window, window, lse, nullptr, sum);
    if (c.window_lse != nullptr) {
      sum += static_cast<double>(::expf(c.window_lse[place.query_head + g] - all));
    }
    c.alpha[place.query_head + g] = sum > 1 ? 1.0f : static_cast<float>(sum);
  }
}

}  // namespace
}  // namespace ssdkv::attention::SSDKV_ISA
