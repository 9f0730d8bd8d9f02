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
    if (s.channels != nullptr) write_channels(block, place(s.channels, b));
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
