// What is kept in memory of a block whose K and V leave: page bounds, channel-major K, sums of V.
#pragma once

#include "attention/kernel/vector.hpp"
#include "attention/scoring.hpp"

namespace ssdkv::attention::SSDKV_ISA {
namespace {

// The smaller and the larger; a NaN is kept once it was seen, so that broken data shows.
inline Vec lower(Vec low, Vec v) { return (v < low) | (v != v) ? v : low; }
inline Vec upper(Vec high, Vec v) { return (v > high) | (v != v) ? v : high; }

// One block being summarised.
template <typename T>
struct Block {
  static constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const PageLayout& layout;
  const std::byte* data;

  std::int64_t groups() const { return layout.block_tokens / layout.page_tokens; }
  const std::byte* page(std::int64_t head, std::int64_t group) const {
    return data + (head * groups() + group) * layout.page_stride;
  }
  const std::byte* key(std::int64_t head, std::int64_t token) const {
    const std::int64_t group = token / layout.page_tokens;
    return page(head, group) + (token - group * layout.page_tokens) * layout.head_size * kItem;
  }
};

template <typename T>
void write_bounds(const Block<T>& block, std::byte* to) {
  const std::int64_t size = block.layout.head_size;
  const std::int64_t row = size * block.kItem;
  for (std::int64_t head = 0; head < block.layout.kv_heads; ++head) {
    for (std::int64_t group = 0; group < block.groups(); ++group, to += 2 * row) {
      const std::byte* key = block.page(head, group);
      for (std::int64_t d = 0; d < size; d += kLanes) {
        const std::byte* from = key + d * block.kItem;
        Vec low = load_some<T>(from, size - d);
        Vec high = low;
        for (std::int64_t t = 1; t < block.layout.page_tokens; ++t) {
          const Vec v = load_some<T>(from + t * row, size - d);
          low = lower(low, v);
          high = upper(high, v);
        }
        store_some<T>(to + d * block.kItem, low, size - d);
        store_some<T>(to + row + d * block.kItem, high, size - d);
      }
    }
  }
}

template <typename T>
void write_channels(const Block<T>& block, std::byte* to) {
  const std::int64_t size = block.layout.head_size;
  const std::int64_t tokens = block.layout.block_tokens;
  for (std::int64_t head = 0; head < block.layout.kv_heads; ++head) {
    for (std::int64_t t = 0; t < tokens; t += kLanes) {
      for (std::int64_t d = 0; d < size; d += kLanes) {
        Vec square[kLanes] = {};
        for (int i = 0; i < kLanes && t + i < tokens; ++i) {
          square[i] = load_some<T>(block.key(head, t + i) + d * block.kItem, size - d);
        }
        transpose(square);
        for (int i = 0; i < kLanes && d + i < size; ++i) {
          const std::int64_t at = (head * size + d + i) * tokens + t;
          store_some<T>(to + at * block.kItem, square[i], tokens - t);
        }
      }
    }
  }
}

// The step between the int8 numbers of kLanes channels from `d` on: the largest magnitude is 127
// of it. NaN where a channel has a number that is not finite, so that broken data shows.
template <typename T>
Vec step_of(const Block<T>& block, std::int64_t head, std::int64_t d) {
  Vec most = {};
  for (std::int64_t t = 0; t < block.layout.block_tokens; ++t) {
    const Vec v = load_some<T>(block.key(head, t) + d * block.kItem, block.layout.head_size - d);
    most = upper(most, v < Vec{} ? -v : v);
  }
  return most < splat(kInfinity) ? most / 127.0f : splat(__builtin_nanf(""));
}

// The nearest whole number of steps, the even one of two; 0 where there is no step.
inline Vec steps(Vec v, Vec step) {
  const Vec magic = splat(0x1.8p23f);  // adding it rounds, as in exp_nonpositive
  const Vec whole = (v / step + magic) - magic;
  const Vec most = splat(127.0f);  // a step that is subnormal may be too small
  const Vec held = whole > most ? most : (whole < -most ? -most : whole);
  return step > Vec{} ? held : Vec{};
}

template <typename T>
void write_scaled(const Block<T>& block, std::byte* to, std::byte* scales) {
  const std::int64_t size = block.layout.head_size;
  const std::int64_t tokens = block.layout.block_tokens;
  for (std::int64_t head = 0; head < block.layout.kv_heads; ++head) {
    for (std::int64_t d = 0; d < size; d += kLanes) {
      const Vec step = step_of(block, head, d);
      store_some<float>(scales + head * scale_record(block.layout) + d * 4, step, size - d);
      for (std::int64_t t = 0; t < tokens; t += kLanes) {
        Vec square[kLanes] = {};
        for (int i = 0; i < kLanes && t + i < tokens; ++i) {
          const std::byte* from = block.key(head, t + i) + d * block.kItem;
          square[i] = steps(load_some<T>(from, size - d), step);
        }
        transpose(square);
        for (int i = 0; i < kLanes && d + i < size; ++i) {
          store_some<Int8>(to + (head * size + d + i) * tokens + t, square[i], tokens - t);
        }
      }
    }
  }
}

template <typename T>
void write_value_sum(const Block<T>& block, std::byte* to) {
  const std::int64_t size = block.layout.head_size;
  const std::int64_t value = block.layout.page_tokens * size * block.kItem;
  for (std::int64_t head = 0; head < block.layout.kv_heads; ++head, to += size * 4) {
    for (std::int64_t d = 0; d < size; d += kLanes) {
      Vec sum = {};
      for (std::int64_t t = 0; t < block.layout.block_tokens; ++t) {
        sum += load_some<T>(block.key(head, t) + value + d * block.kItem, size - d);
      }
      store_some<float>(to + d * 4, sum, size - d);
    }
  }
}

template <typename T>
void summarize_blocks(const Summaries& s, std::int64_t block_begin, std::int64_t block_end) {
  const auto place = [](const std::uint64_t* list, std::int64_t block) {
    return reinterpret_cast<std::byte*>(list[block]);
  };
  for (std::int64_t b = block_begin; b < block_end; ++b) {
    const Block<T> block{s.layout, place(s.source, b)};
    if (s.bounds != nullptr) write_bounds(block, place(s.bounds, b));
    if (s.scales != nullptr) {
      write_scaled(block, place(s.channels, b), place(s.scales, b));
    } else if (s.channels != nullptr) {
      write_channels(block, place(s.channels, b));
    }
    if (s.value_sum != nullptr) write_value_sum(block, place(s.value_sum, b));
  }
}

void summarize(const Summaries& s, std::int64_t block_begin, std::int64_t block_end) {
  switch (s.layout.dtype) {
    case DType::kFloat32:
      return summarize_blocks<float>(s, block_begin, block_end);
    case DType::kBFloat16:
      return summarize_blocks<BFloat16>(s, block_begin, block_end);
    case DType::kFloat16:
      return summarize_blocks<Float16>(s, block_begin, block_end);
  }
}

}  // namespace
}  // namespace ssdkv::attention::SSDKV_ISA
