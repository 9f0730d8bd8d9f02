// Attention kernels against plain sums, over buffers without a spare byte, from several threads.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "attention/attend.hpp"
#include "attention/isa.hpp"
#include "attention/transfer.hpp"
#include "suite.hpp"

namespace ssdkv::test {
namespace {

using attention::DType;

// Multiples of 1/8 within [-2, 2]: exact in all three types.
float some_number(Random& random) { return (static_cast<float>(random(33)) - 16.0F) / 8.0F; }

size_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

void put(std::byte* to, DType dtype, float value) {
  if (dtype == DType::kFloat32) {
    std::memcpy(to, &value, 4);
    return;
  }
  const auto bits = std::bit_cast<uint32_t>(value);
  auto half = static_cast<uint16_t>(bits >> 16);  // bfloat16
  if (dtype == DType::kFloat16) {
    const uint32_t exponent = (bits >> 23 & 0xff) - 127 + 15;
    half = static_cast<uint16_t>((bits >> 16 & 0x8000) |
                                 (value == 0.0F ? 0 : exponent << 10 | (bits >> 13 & 0x3ff)));
  }
  std::memcpy(to, &half, 2);
}

float get(const std::byte* from, DType dtype) {
  if (dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, from, 4);
    return value;
  }
  uint16_t half = 0;
  std::memcpy(&half, from, 2);
  if (dtype == DType::kBFloat16) return std::bit_cast<float>(uint32_t{half} << 16);
  const float magnitude = half >> 10 & 0x1f ? std::ldexp(static_cast<float>((half & 0x3ff) | 0x400),
                                                         static_cast<int>(half >> 10 & 0x1f) - 25)
                                            : std::ldexp(static_cast<float>(half & 0x3ff), -24);
  return half & 0x8000 ? -magnitude : magnitude;
}

// A random problem. Every block lies in memory of its own that ends with its last value.
struct Case {
  attention::Problem problem{};
  std::vector<float> maximum, denominator, accumulator;
  std::vector<int32_t> query_begin, query_count, block_begin, block_end;
  std::vector<int64_t> first_position, position;
  std::vector<uint64_t> base;
  std::vector<std::unique_ptr<std::byte[]>> blocks;
  std::unique_ptr<std::byte[]> query;
  size_t tokens = 0;

  Case(Random& random, int64_t head_size, DType kv, DType q, size_t rows, size_t most_blocks);

  std::vector<double> expected() const;  // [tokens][query_heads][head_size], then the lse
  const std::byte* entry(size_t block, int64_t head, int64_t token, bool value) const;
};

Case::Case(Random& random, int64_t head_size, DType kv, DType q, size_t rows, size_t most_blocks) {
  const int64_t kv_heads = 1 + static_cast<int64_t>(random(3));
  const int64_t page_tokens = random(2) == 0 ? 16 : 8;
  const int64_t block_tokens = page_tokens * (1 + static_cast<int64_t>(random(3)));
  const auto item = static_cast<int64_t>(bytes_of(kv));
  const int64_t payload = 2 * page_tokens * head_size * item;
  const int64_t stride = payload + static_cast<int64_t>(random(2)) * 64;
  problem.layout = {block_tokens, page_tokens, stride, kv_heads, head_size, kv};
  problem.state.query_heads = kv_heads * (1 + static_cast<int64_t>(random(5)));
  problem.query.dtype = q;
  problem.scale = 0.125F;
  if (random(2) == 0) problem.sliding_window = 1 + static_cast<int64_t>(random(90));
  const int64_t pages = kv_heads * block_tokens / page_tokens;
  for (size_t row = 0; row < rows; ++row) {
    const size_t queries = random(3) == 0 ? 1 + random(70) : 1;
    const size_t count = random(most_blocks + 1);
    query_begin.push_back(static_cast<int32_t>(tokens));
    query_count.push_back(static_cast<int32_t>(queries));
    tokens += queries;
    block_begin.push_back(static_cast<int32_t>(base.size()));
    for (size_t i = 0; i < count; ++i) {
      const auto nbytes = static_cast<size_t>((pages - 1) * stride + payload);
      auto& block = blocks.emplace_back(new std::byte[nbytes]);
      for (int64_t page = 0; page < pages; ++page) {
        for (int64_t at = 0; at < payload; at += item) {
          put(block.get() + page * stride + at, kv, some_number(random));
        }
      }
      base.push_back(reinterpret_cast<uint64_t>(block.get()));
      position.push_back(static_cast<int64_t>(i) * block_tokens);
    }
    block_end.push_back(static_cast<int32_t>(base.size()));
    first_position.push_back(static_cast<int64_t>(random(count * size_t(block_tokens) + 2)));
  }
  const auto heads = static_cast<size_t>(problem.state.query_heads);
  const auto size = static_cast<size_t>(head_size);
  problem.query.stride = static_cast<int64_t>((heads * size + 8) * bytes_of(q));
  const size_t query_bytes = tokens * static_cast<size_t>(problem.query.stride) - 8 * bytes_of(q);
  query.reset(new std::byte[query_bytes]);
  for (size_t at = 0; at < query_bytes; at += bytes_of(q)) {
    put(query.get() + at, q, some_number(random));
  }
  maximum.assign(tokens * heads, -std::numeric_limits<float>::infinity());
  denominator.assign(tokens * heads, 0.0F);
  accumulator.assign(tokens * heads * size, 0.0F);
  problem.query = {
      query.get(), q, problem.query.stride, static_cast<int64_t>(tokens), problem.state.query_heads,
      head_size};
  problem.state = {
      static_cast<int64_t>(tokens), problem.state.query_heads, head_size, maximum.data(),
      denominator.data(),           accumulator.data()};
  problem.rows = {static_cast<int64_t>(rows),
                  query_begin.data(),
                  query_count.data(),
                  first_position.data(),
                  block_begin.data(),
                  block_end.data(),
                  false};
  problem.pages = {static_cast<int64_t>(base.size()), base.data(), position.data(), nullptr};
}

const std::byte* Case::entry(size_t block, int64_t head, int64_t token, bool value) const {
  const attention::PageLayout& l = problem.layout;
  const int64_t page = head * (l.block_tokens / l.page_tokens) + token / l.page_tokens;
  const int64_t row = token % l.page_tokens + (value ? l.page_tokens : 0);
  return blocks[block].get() + page * l.page_stride +
         row * l.head_size * static_cast<int64_t>(bytes_of(l.dtype));
}

std::vector<double> Case::expected() const {
  const attention::PageLayout& l = problem.layout;
  const auto size = static_cast<size_t>(l.head_size);
  const auto heads = static_cast<size_t>(problem.state.query_heads);
  const auto item = static_cast<int64_t>(bytes_of(l.dtype));
  const int64_t group = problem.state.query_heads / l.kv_heads;
  std::vector<double> out(tokens * heads * (size + 1));
  for (size_t row = 0; row < query_count.size(); ++row) {
    for (int32_t i = 0; i < query_count[row]; ++i) {
      const auto token = static_cast<size_t>(query_begin[row] + i);
      for (size_t head = 0; head < heads; ++head) {
        const int64_t kv_head = static_cast<int64_t>(head) / group;
        const std::byte* q = query.get() + token * static_cast<size_t>(problem.query.stride) +
                             head * size * bytes_of(problem.query.dtype);
        std::vector<double> sum(size);
        double total = 0;
        for (auto b = static_cast<size_t>(block_begin[row]);
             b < static_cast<size_t>(block_end[row]); ++b) {
          for (int64_t t = 0; t < l.block_tokens; ++t) {
            const int64_t behind = first_position[row] + i - position[b] - t;
            if (behind < 0 || behind >= problem.sliding_window) continue;
            const std::byte* key = entry(b, kv_head, t, false);
            const std::byte* value = entry(b, kv_head, t, true);
            double logit = 0;
            for (size_t d = 0; d < size; ++d) {
              const auto at = static_cast<int64_t>(d) * item;
              logit += double{get(key + at, l.dtype)} *
                       get(q + d * bytes_of(problem.query.dtype), problem.query.dtype);
            }
            const double weight = std::exp(logit * problem.scale);
            total += weight;
            for (size_t d = 0; d < size; ++d) {
              sum[d] += weight * get(value + static_cast<int64_t>(d) * item, l.dtype);
            }
          }
        }
        const size_t at = token * heads + head;
        for (size_t d = 0; d < size; ++d) out[at * size + d] = total == 0 ? 0 : sum[d] / total;
        out[tokens * heads * size + at] = std::log(total);  // -inf where nothing is seen
      }
    }
  }
  return out;
}

void compare(Case& c, const attention::Kernels& kernels, int64_t threads) {
  const auto heads = static_cast<size_t>(c.problem.state.query_heads);
  const auto size = static_cast<size_t>(c.problem.layout.head_size);
  const auto expected = c.expected();
  attention::attend(kernels, c.problem, threads);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    std::vector<float> lse(c.tokens * heads);
    const size_t nbytes = c.tokens * heads * size * bytes_of(dtype);
    const std::unique_ptr<std::byte[]> out(new std::byte[nbytes]);
    const attention::Output output{
        c.problem.state,
        {out.get(), dtype, static_cast<int64_t>(heads * size * bytes_of(dtype)),
         static_cast<int64_t>(c.tokens), c.problem.state.query_heads, c.problem.layout.head_size},
        lse.data()};
    attention::finish(kernels, output, threads);
    const double tolerance = dtype == DType::kFloat32   ? 2e-4
                             : dtype == DType::kFloat16 ? 2e-3
                                                        : 1.2e-2;
    for (size_t i = 0; i < c.tokens * heads * size; ++i) {
      const double got = get(out.get() + i * bytes_of(dtype), dtype);
      check(std::abs(got - expected[i]) <= tolerance, "the output");
    }
    for (size_t i = 0; i < lse.size(); ++i) {
      const double wanted = expected[c.tokens * heads * size + i];
      check(std::isinf(wanted) ? std::isinf(lse[i]) : std::abs(lse[i] - wanted) < 1e-3, "the lse");
    }
  }
}

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

void every_instruction_set() {
  for (const std::string& isa : attention::available_isas()) {
    attention::select_isa(isa);
    Random random(7);
    for (const int64_t head_size : {8, 24, 64, 128, 256}) {
      for (const DType kv : kTypes) {
        for (const DType q : kTypes) {
          Case c(random, head_size, kv, q, 1 + random(3), 4);
          compare(c, attention::active_kernels(), 1);
        }
      }
    }
  }
  attention::select_isa(attention::available_isas().front());
}

// Calls at the same time, large enough to be split over blocks, while somebody looks at what
// may run here.
void many_callers() {
  in_threads(5, [](unsigned thread) {
    if (thread == 4) {
      for (int i = 0; i < 1000; ++i) attention::select_isa(attention::available_isas().front());
      return;
    }
    Random random(thread);
    for (int round = 0; round < 3; ++round) {
      Case c(random, 64, kTypes[random(3)], DType::kFloat32, 2, 100);
      compare(c, attention::active_kernels(), 1 + thread);
    }
  });
}

void transfers() {
  in_threads(3, [](unsigned thread) {
    // Blocks whose pages lie apart are packed, unpacked elsewhere, and are the same.
    constexpr int64_t kItems = 60, kPages = 6, kPayload = 5000, kStride = 8192;
    Random random(thread);
    std::vector<std::byte> from(kItems * kPages * kPayload), packed(kItems * kPages * kStride),
        to(from.size());
    for (std::byte& byte : from) byte = static_cast<std::byte>(random(256));
    std::vector<uint64_t> source, middle, target;
    for (int64_t i = 0; i < kItems; ++i) {
      source.push_back(reinterpret_cast<uint64_t>(from.data() + i * kPages * kPayload));
      middle.push_back(reinterpret_cast<uint64_t>(packed.data() + i * kPages * kStride));
      target.push_back(reinterpret_cast<uint64_t>(to.data() + i * kPages * kPayload));
    }
    attention::copy_pages(
        {source.data(), middle.data(), kPages, {kPayload, kPayload, kStride, true}}, kItems, 3);
    attention::copy_pages(
        {middle.data(), target.data(), kPages, {kPayload, kStride, kPayload, false}}, kItems, 3);
    check(from == to, "packed and unpacked");
    check(packed[kPayload] == std::byte{0} && packed.back() == std::byte{0}, "padding is zero");

    // Tokens scattered into blocks lie where entry() would look for them.
    constexpr int64_t kHeads = 2, kSize = 32, kTokens = 70;
    const attention::PageLayout layout{32,     16,    2 * 16 * kSize * 4 + 64,
                                       kHeads, kSize, DType::kFloat32};
    const int64_t block_bytes = kHeads * 2 * layout.page_stride;
    std::vector<std::byte> cache(static_cast<size_t>(4 * block_bytes - 64));
    std::vector<float> key(kTokens * kHeads * kSize), value(key.size());
    std::vector<int64_t> slots;
    for (size_t i = 0; i < key.size(); ++i) {
      key[i] = static_cast<float>(i);
      value[i] = -key[i];
    }
    for (int64_t t = 0; t < kTokens; ++t) slots.push_back(t % 9 == 0 ? -1 : t * 41 % 128);
    const auto vectors = [&](std::vector<float>& of) {
      return attention::Vectors{reinterpret_cast<std::byte*>(of.data()),
                                DType::kFloat32,
                                kHeads * kSize * 4,
                                kTokens,
                                kHeads,
                                kSize};
    };
    attention::Scatter scatter{layout,       vectors(key), vectors(value), slots.data(),
                               cache.data(), block_bytes,  1.0F,           1.0F};
    attention::scatter_tokens(attention::active_kernels(), scatter, 3);
    for (int64_t t = 0; t < kTokens; ++t) {
      const int64_t slot = slots[static_cast<size_t>(t)];
      if (slot < 0) continue;
      for (int64_t head = 0; head < kHeads; ++head) {
        const std::byte* page = cache.data() + slot / 32 * block_bytes +
                                (head * 2 + slot % 32 / 16) * layout.page_stride +
                                slot % 16 * kSize * 4;
        const auto at = static_cast<float>((t * kHeads + head) * kSize);
        check(get(page, DType::kFloat32) == at, "the key is there");
        check(get(page + 16 * kSize * 4, DType::kFloat32) == -at, "the value is there");
      }
    }
    // The same in 8 bits, by several threads: what is too large becomes the largest number.
    scatter.layout = {32, 16, 2 * 16 * kSize, kHeads, kSize, DType::kFloat8E4M3};
    scatter.block_stride = kHeads * 2 * scatter.layout.page_stride;
    attention::scatter_tokens(attention::active_kernels(), scatter, 3);
    const int64_t last = slots[kTokens - 1];
    check(cache[static_cast<size_t>(last / 32 * scatter.block_stride +
                                    last % 32 / 16 * scatter.layout.page_stride +
                                    last % 16 * kSize)] == std::byte{0x7e},
          "the largest number is there");
  });
}

}  // namespace

Tests attention_tests() {
  return {{"attention: every instruction set", every_instruction_set},
          {"attention: many callers", many_callers},
          {"attention: transfers", transfers}};
}

}  // namespace ssdkv::test
