// Page selection and sparse attention over buffers without a spare byte, from several threads.
#include "attention/sparse.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>

#include "attention/attend.hpp"
#include "attention/isa.hpp"
#include "suite.hpp"

namespace ssdkv::test {
namespace {

using attention::DType;

// Memory that ends with its last byte.
using Bytes = std::unique_ptr<std::byte[]>;

uint64_t address(const Bytes& bytes) { return reinterpret_cast<uint64_t>(bytes.get()); }

Bytes bytes_of(int64_t count) { return Bytes(new std::byte[static_cast<size_t>(count)]); }

size_t at(int64_t i) { return static_cast<size_t>(i); }

// Random rows in fp32 or bfloat16, with summaries of their blocks.
struct Rows {
  attention::PageLayout layout{};
  int64_t query_heads = 0;
  int64_t rows = 0;
  int64_t item = 0;
  std::vector<Bytes> blocks, bounds, spreads, channels, sums;
  std::vector<uint64_t> base, bounds_base, spread_base, channel_base, sum_base;
  std::vector<int32_t> begin, end, window_begin, window_end, window_tokens;
  std::vector<uint64_t> window;
  std::vector<Bytes> window_blocks;
  std::vector<int64_t> first_page{0}, first_token{0};
  std::vector<float> query;

  explicit Rows(Random& random, int64_t most_blocks);
  Bytes block(Random& random) const;
  float key(const std::byte* block, int64_t head, int64_t token, int64_t d) const;
};

float number(Random& random) { return (static_cast<float>(random(33)) - 16.0F) / 8.0F; }

Rows::Rows(Random& random, int64_t most_blocks) {
  const DType dtype = random(2) == 0 ? DType::kFloat32 : DType::kBFloat16;
  item = dtype == DType::kFloat32 ? 4 : 2;
  constexpr int64_t kSizes[] = {8, 24, 64, 128};
  const int64_t size = kSizes[random(4)];
  const int64_t page_tokens = 1 + static_cast<int64_t>(random(20));
  const int64_t block_tokens = page_tokens * (1 + static_cast<int64_t>(random(3)));
  const int64_t kv_heads = 1 + static_cast<int64_t>(random(2));
  const int64_t stride = 2 * page_tokens * size * item;
  layout = {block_tokens, page_tokens, stride, kv_heads, size, dtype};
  query_heads = kv_heads * (1 + static_cast<int64_t>(random(7)));
  rows = 1 + static_cast<int64_t>(random(3));
  const int64_t groups = block_tokens / page_tokens;
  for (int64_t row = 0; row < rows; ++row) {
    const auto count = static_cast<int64_t>(random(at(most_blocks) + 1));
    begin.push_back(static_cast<int32_t>(base.size()));
    for (int64_t i = 0; i < count; ++i) {
      base.push_back(address(blocks.emplace_back(block(random))));
      bounds_base.push_back(
          address(bounds.emplace_back(bytes_of(kv_heads * groups * 2 * size * item))));
      spread_base.push_back(
          address(spreads.emplace_back(bytes_of(kv_heads * groups * 2 * size * item))));
      channel_base.push_back(
          address(channels.emplace_back(bytes_of(kv_heads * size * block_tokens * item))));
      sum_base.push_back(address(sums.emplace_back(bytes_of(kv_heads * size * 4))));
    }
    end.push_back(static_cast<int32_t>(base.size()));
    const int64_t tokens = 1 + static_cast<int64_t>(random(at(2 * block_tokens)));
    window_begin.push_back(static_cast<int32_t>(window.size()));
    for (int64_t i = 0; i < (tokens + block_tokens - 1) / block_tokens; ++i) {
      window.push_back(address(window_blocks.emplace_back(block(random))));
    }
    window_end.push_back(static_cast<int32_t>(window.size()));
    window_tokens.push_back(static_cast<int32_t>(tokens));
    first_page.push_back(first_page.back() + count * groups);
    first_token.push_back(first_token.back() + count * block_tokens + tokens);
  }
  query.resize(at(rows * query_heads * size));
  for (float& x : query) x = number(random);
}

Bytes Rows::block(Random& random) const {
  const int64_t size =
      layout.kv_heads * (layout.block_tokens / layout.page_tokens) * layout.page_stride;
  Bytes made = bytes_of(size);
  for (int64_t i = 0; i < size; i += item) {
    const auto bits = std::bit_cast<uint32_t>(number(random));
    const auto half = static_cast<uint16_t>(bits >> 16);
    if (item == 4) std::memcpy(made.get() + i, &bits, 4);
    if (item == 2) std::memcpy(made.get() + i, &half, 2);
  }
  return made;
}

float Rows::key(const std::byte* block, int64_t head, int64_t token, int64_t d) const {
  const int64_t groups = layout.block_tokens / layout.page_tokens;
  const std::byte* from = block +
                          (head * groups + token / layout.page_tokens) * layout.page_stride +
                          (token % layout.page_tokens * layout.head_size + d) * item;
  uint32_t bits = 0;
  std::memcpy(&bits, from, static_cast<size_t>(item));
  return std::bit_cast<float>(item == 4 ? bits : bits << 16);
}

// Every step from blocks to attention: all pages by bounds must be dense attention, and no logit
// may exceed its bound.
void select_and_attend(Random& random, int64_t most_blocks, int64_t threads) {
  Rows r(random, most_blocks);
  const attention::PageLayout& l = r.layout;
  const int64_t group = r.query_heads / l.kv_heads;
  const int64_t pages_of_block = l.block_tokens / l.page_tokens;
  attention::summarize_blocks({l,
                               r.base.data(),
                               r.bounds_base.data(),
                               r.spread_base.data(),
                               r.channel_base.data(),
                               r.sum_base.data(),
                               nullptr,
                               {}},
                              static_cast<int64_t>(r.base.size()), threads);

  std::vector<float> bounds(at(r.first_page.back() * r.query_heads));
  std::vector<float> spread(bounds.size());
  attention::PageScoring scoring{l,
                                 attention::PageRecord::kBounds,
                                 r.query_heads,
                                 r.query.data(),
                                 0.125F,
                                 r.begin.data(),
                                 r.bounds_base.data(),
                                 r.first_page.data(),
                                 bounds.data(),
                                 {}};
  attention::score_pages(scoring, r.rows, threads);
  scoring.kind = attention::PageRecord::kSpread;
  scoring.records = r.spread_base.data();
  scoring.logits = spread.data();
  attention::score_pages(scoring, r.rows, threads);

  // All channels: the logits are exact, up to the order of their sums.
  const int64_t count = l.head_size;
  std::vector<int32_t> chosen(at(r.rows * l.kv_heads * count));
  std::vector<float> reduced(at(r.rows * r.query_heads * count));
  attention::choose_channels({l.kv_heads, r.query_heads, l.head_size, count, 0.125F, r.query.data(),
                              chosen.data(), reduced.data()},
                             r.rows);
  std::vector<float> logits(at(r.first_token.back() * r.query_heads));
  attention::score_channels(
      {l, r.query_heads, count, chosen.data(), reduced.data(), r.begin.data(), r.end.data(),
       r.channel_base.data(), l.head_size, chosen.data(), r.window_begin.data(), r.window.data(),
       r.window_tokens.data(), r.first_token.data(), logits.data()},
      r.rows, threads);
  for (int64_t row = 0; row < r.rows; ++row) {
    const int64_t tokens = r.first_token[at(row + 1)] - r.first_token[at(row)];
    const int64_t pages = r.first_page[at(row + 1)] - r.first_page[at(row)];
    for (int64_t head = 0; head < r.query_heads; ++head) {
      const float* q = r.query.data() + (row * r.query_heads + head) * l.head_size;
      double magnitude = 0;
      for (int64_t d = 0; d < l.head_size; ++d) magnitude += std::abs(double{q[d]});
      double of_page = 0;
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t context = pages * l.page_tokens;
        const int64_t place = t < context ? t : t - context;
        const auto& from = t < context ? r.base : r.window;
        const auto first = t < context ? r.begin[at(row)] : r.window_begin[at(row)];
        const auto* block =
            reinterpret_cast<const std::byte*>(from[at(first + place / l.block_tokens)]);
        double want = 0;
        for (int64_t d = 0; d < l.head_size; ++d) {
          want +=
              0.125 * double{q[d]} * double{r.key(block, head / group, place % l.block_tokens, d)};
        }
        const float got = logits[at(r.first_token[at(row)] * r.query_heads + head * tokens + t)];
        check(std::abs(double{got} - want) < 1e-3, "a channel logit");
        if (t >= context) continue;
        const float bound =
            bounds[at(r.first_page[at(row)] * r.query_heads + head * pages + t / l.page_tokens)];
        check(double{bound} >= want - 1e-3, "a bound");
        of_page = (t % l.page_tokens == 0 ? 0 : of_page) + want;
        if ((t + 1) % l.page_tokens != 0) continue;
        const float logit =
            spread[at(r.first_page[at(row)] * r.query_heads + head * pages + t / l.page_tokens)];
        // The variance adds to the mean logit; records in 16 bit are rounded.
        const double rounding = 1e-3 + (r.item == 4 ? 0 : 0.125 * magnitude / 128);
        check(double{logit} >= of_page / static_cast<double>(l.page_tokens) - rounding,
              "a logit from mean and variance");
      }
    }
  }

  std::vector<float> weights(at(r.first_page.back() * l.kv_heads)), mass(weights.size());
  std::vector<float> window_mass(at(r.rows * l.kv_heads)), lse(at(r.rows * r.query_heads));
  attention::weigh_columns(
      {l.kv_heads, r.query_heads, r.first_page.data(), bounds.data(),
       static_cast<float>(l.page_tokens), nullptr, weights.data(), window_mass.data(), lse.data()},
      r.rows, threads);
  attention::score_tokens(
      {l.kv_heads, r.query_heads, l.page_tokens, r.first_token.data(), logits.data(),
       r.first_page.data(), weights.data(), mass.data(), lse.data(), window_mass.data()},
      r.rows, threads);
  std::vector<int32_t> least(at(r.rows)), most(at(r.rows));
  for (int64_t row = 0; row < r.rows; ++row) {
    const int64_t pages = r.first_page[at(row + 1)] - r.first_page[at(row)];
    most[at(row)] = static_cast<int32_t>(random(at(pages) + 1));
    least[at(row)] = static_cast<int32_t>(random(at(pages) + 1));
  }
  const double p = random(2) == 0 ? 1.0 : 0.5;
  const attention::ChosenColumns columns =
      attention::choose_columns({l.kv_heads, 1, p, least.data(), most.data(), r.first_page.data(),
                                 weights.data(), mass.data(), window_mass.data()},
                                r.rows, threads);
  std::vector<uint8_t> mask(columns.columns.size() * at(l.page_tokens));
  for (uint8_t& token : mask) token = static_cast<uint8_t>(random(2));
  std::vector<float> alpha(lse.size());
  attention::cover_pages({l.kv_heads, r.query_heads, l.page_tokens, r.first_token.data(),
                          r.window_tokens.data(), logits.data(), lse.data(), columns.columns.data(),
                          columns.begin.data(), mask.data(), alpha.data()},
                         r.rows, threads);
  for (const float share : alpha) check(share >= 0 && share <= 1, "alpha");

  std::vector<uint64_t> pages;
  std::vector<int64_t> position;
  for (int64_t list = 0; list < r.rows * l.kv_heads; ++list) {
    const int64_t row = list / l.kv_heads;
    for (int32_t i = columns.begin[at(list)]; i < columns.begin[at(list + 1)]; ++i) {
      const int32_t page = columns.columns[at(i)];
      check(i == columns.begin[at(list)] || page > columns.columns[at(i - 1)], "pages ascend");
      check(page < r.first_page[at(row + 1)] - r.first_page[at(row)], "pages exist");
      const int64_t place = list % l.kv_heads * pages_of_block + page % pages_of_block;
      pages.push_back(r.base[at(r.begin[at(row)] + page / pages_of_block)] +
                      static_cast<uint64_t>(place * l.page_stride));
      position.push_back(page * l.page_tokens);
    }
  }
  std::vector<float> maximum(lse.size(), -INFINITY), denominator(lse.size());
  std::vector<float> accumulator(r.query.size());
  std::vector<int32_t> tokens(at(r.rows)), ones(at(r.rows), 1);
  std::vector<int64_t> newest(at(r.rows), 1 << 20);
  for (int64_t row = 0; row < r.rows; ++row) tokens[at(row)] = static_cast<int32_t>(row);
  attention::Problem problem{};
  problem.layout = l;
  problem.layout.block_tokens = l.page_tokens;
  problem.state = {r.rows,         r.query_heads,      l.head_size,
                   maximum.data(), denominator.data(), accumulator.data()};
  problem.rows = {r.rows,        tokens.data(),        ones.data(),
                  newest.data(), columns.begin.data(), columns.begin.data() + 1,
                  true};
  problem.pages = {static_cast<int64_t>(pages.size()), pages.data(), position.data(), mask.data()};
  problem.query = {reinterpret_cast<std::byte*>(r.query.data()),
                   DType::kFloat32,
                   r.query_heads * l.head_size * 4,
                   r.rows,
                   r.query_heads,
                   l.head_size};
  problem.scale = 0.125F;
  attention::attend(attention::active_kernels(), problem, threads);
  // The chosen tokens' share of the softmax, once from logits and once from attention.
  for (int64_t row = 0; row < r.rows; ++row) {
    const int64_t all = r.first_token[at(row + 1)] - r.first_token[at(row)];
    for (int64_t head = 0; head < r.query_heads; ++head) {
      const size_t i = at(row * r.query_heads + head);
      const float* x = logits.data() + r.first_token[at(row)] * r.query_heads + head * all;
      double window = 0;
      for (int64_t t = all - r.window_tokens[at(row)]; t < all; ++t) {
        window += std::exp(double{x[t]} - double{lse[i]});
      }
      const double attended =
          denominator[i] == 0
              ? 0
              : double{denominator[i]} * std::exp(double{maximum[i]} - double{lse[i]});
      check(std::abs(attended + window - double{alpha[i]}) < 1e-3, "what was attended to");
    }
  }
}

void every_instruction_set() {
  for (const std::string& isa : attention::available_isas()) {
    attention::select_isa(isa);
    Random random(11);
    for (int round = 0; round < 40; ++round) select_and_attend(random, 6, 1);
  }
  attention::select_isa(attention::available_isas().front());
}

void many_callers() {
  in_threads(4, [](unsigned thread) {
    Random random(thread);
    for (int round = 0; round < 4; ++round) select_and_attend(random, 60, 1 + thread);
  });
}

}  // namespace

Tests sparse_tests() {
  return {{"sparse attention on every instruction set", every_instruction_set},
          {"sparse attention: many callers", many_callers}};
}

}  // namespace ssdkv::test
