// Summaries of a block whose K and V leave memory: page records, channel-major K, sums of V.
#pragma once

#include "attention/kernel/blocks.hpp"
#include "attention/scoring.hpp"

namespace ssdkv::attention::SSDKV_ISA {
namespace {

// The smaller and the larger; a NaN is kept once it was seen, so that broken data shows.
inline Vec lower(Vec low, Vec v) { return (v < low) | (v != v) ? v : low; }
inline Vec upper(Vec high, Vec v) { return (v > high) | (v != v) ? v : high; }

template <typename T>
void write_bounds(const PageLayout& layout, const std::byte* page, std::byte* to) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const std::int64_t size = layout.head_size;
  for_channels(size, [&](auto abreast, std::int64_t d) {
    constexpr int kWide = decltype(abreast)::value;
    Vec low[kWide], high[kWide];
    for_rows<T, kWide>(page, 1, size, d, [&](int i, Vec v) { low[i] = high[i] = v; });
    for_rows<T, kWide>(page + size * kItem, layout.page_tokens - 1, size, d, [&](int i, Vec v) {
      low[i] = lower(low[i], v);
      high[i] = upper(high[i], v);
    });
    for (int i = 0; i < kWide; ++i) {
      const std::int64_t at = d + i * kLanes;
      store_some<T>(to + at * kItem, low[i], size - at);
      store_some<T>(to + (size + at) * kItem, high[i], size - at);
    }
  });
}

// The largest finite number of a dtype.
template <typename T>
constexpr float kLargest = 0x1.fffffep127f;
template <>
constexpr float kLargest<BFloat16> = 0x1.fep127f;
template <>
constexpr float kLargest<Float16> = 65504.0f;

// In two passes, around the page's first key: the variance of equal numbers is 0. One that is too
// large for T is the largest of T, so that what is finite stays so. NaN, both, where a channel has
// a number that is not finite, so that broken data shows.
template <typename T>
void write_spread(const PageLayout& layout, const std::byte* page, std::byte* to) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const std::int64_t size = layout.head_size;
  const Vec tokens = splat(static_cast<float>(layout.page_tokens));
  for_channels(size, [&](auto abreast, std::int64_t d) {
    constexpr int kWide = decltype(abreast)::value;
    Vec first[kWide], mean[kWide] = {}, variance[kWide] = {};
    for_rows<T, kWide>(page, 1, size, d, [&](int i, Vec v) { first[i] = v; });
    for_rows<T, kWide>(page, layout.page_tokens, size, d,
                       [&](int i, Vec v) { mean[i] += v - first[i]; });
    for (int i = 0; i < kWide; ++i) mean[i] = first[i] + mean[i] / tokens;
    for_rows<T, kWide>(page, layout.page_tokens, size, d, [&](int i, Vec v) {
      const Vec apart = v - mean[i];
      variance[i] += apart * apart;
    });
    for (int i = 0; i < kWide; ++i) {
      const std::int64_t at = d + i * kLanes;
      const Vec largest = splat(kLargest<T>);
      const Vec broken = mean[i] - mean[i];  // 0, or NaN
      const Vec square = variance[i] / tokens;
      store_some<T>(to + at * kItem, mean[i] + broken, size - at);
      store_some<T>(to + (size + at) * kItem, (square > largest ? largest : square) + broken,
                    size - at);
    }
  });
}

// K as it is, bit by bit, channel-major. The numbers of 4 / sizeof(T) keys share a lane, one behind
// the other: transposed as if lanes were single numbers, registers hold what one channel has of
// kLanes times as many keys.
template <typename T>
void write_channels(const PageLayout& layout, const std::byte* pages, std::byte* to) {
  constexpr int kItem = sizeof(T);
  constexpr int kShared = 4 / kItem;
  const std::int64_t tokens = layout.block_tokens;
  const auto pack = [](const std::byte* const* keys, std::int64_t d) {
    if constexpr (kItem == 4) {
      return load<float>(keys[0] + d * kItem);
    } else {
      return reinterpret_cast<Vec>(widen(keys[0] + d * kItem) | widen(keys[1] + d * kItem) << 16);
    }
  };
  for (std::int64_t t = 0; t < tokens; t += kShared * kLanes) {
    const Keys<kShared * kLanes> keys(layout, pages, t);
    const std::int64_t bytes = (tokens - t) * kItem;
    for (std::int64_t d = 0; d < layout.head_size; d += kLanes) {
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = pack(keys.at + i * kShared, d);
      transpose(square);
      std::byte* target = to + (d * tokens + t) * kItem;
      for (int i = 0; i < kLanes && d + i < layout.head_size; ++i, target += tokens * kItem) {
        constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Vec));
        if (bytes >= kBytes) {
          std::memcpy(target, &square[i], sizeof(Vec));
        } else {
          std::memcpy(target, &square[i], static_cast<std::size_t>(bytes));
        }
      }
    }
  }
}

template <typename T>
void write_value_sum(const PageLayout& layout, const std::byte* pages, std::byte* to) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const std::byte* values = pages + layout.page_tokens * layout.head_size * kItem;
  for_channels(layout.head_size, [&](auto abreast, std::int64_t d) {
    constexpr int kWide = decltype(abreast)::value;
    Vec sum[kWide] = {};
    for_tokens<T, kWide>(layout, values, d, [&](int i, Vec v) { sum[i] += v; });
    for (int i = 0; i < kWide; ++i) {
      const std::int64_t at = d + i * kLanes;
      store_some<float>(to + at * 4, sum[i], layout.head_size - at);
    }
  });
}

void page_record(const PageLayout& layout, PageRecord kind, const std::byte* page, std::byte* to) {
  if (kind == PageRecord::kBounds) {
    return for_stored(layout.dtype,
                      [&](auto item) { write_bounds<decltype(item)>(layout, page, to); });
  }
  for_dtype(layout.dtype, [&](auto item) { write_spread<decltype(item)>(layout, page, to); });
}

void head_channels(const PageLayout& layout, const std::byte* pages, std::byte* to) {
  for_dtype(layout.dtype, [&](auto item) { write_channels<decltype(item)>(layout, pages, to); });
}

void head_value_sum(const PageLayout& layout, const std::byte* pages, std::byte* to) {
  for_dtype(layout.dtype, [&](auto item) { write_value_sum<decltype(item)>(layout, pages, to); });
}

}  // namespace
}  // namespace ssdkv::attention::SSDKV_ISA
