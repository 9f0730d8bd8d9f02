// Logits that are bounds or approximations: from page bounds (Quest, Tang et al. 2024), from mean
// and variance of pages, and from some channels (SparQ, Ribar et al. 2024).
#pragma once

#include "attention/kernel/blocks.hpp"
#include "attention/scoring.hpp"

namespace ssdkv::attention::SSDKV_ISA {
namespace {

constexpr int kWindowTile = 64;

// One element as fp32.
template <typename T>
float load_one(const std::byte* from) {
  if constexpr (sizeof(T) == 4) {
    float x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  } else {
    return load_some<T>(from, 1)[0];
  }
}
template <>
inline float load_one<BFloat16>(const std::byte* from) {
  std::uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// sums[R][kLanes / R]: for every channel the larger of query * min and query * max, or query * mean
// and half of query^2 * variance.
template <PageRecord Kind, int R, typename T>
void record_logits(const float* queries, std::int64_t width, std::int64_t head_size,
                   const std::byte* const* page, const std::byte* const* ahead, float* sums) {
  constexpr int kStep = kLanes / R;
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  Vec sum[kLanes] = {};
  for (std::int64_t d = 0; d < head_size; d += kLanes) {
    const std::int64_t left = head_size - d;
    Vec query[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) query[r] = read(queries + r * width + d);
#pragma GCC unroll 16
    for (int i = 0; i < kStep; ++i) {
      __builtin_prefetch(ahead[i] + d * kItem, 0, 2);
      __builtin_prefetch(ahead[i] + (head_size + d) * kItem, 0, 2);
      const Vec first = load_some<T>(page[i] + d * kItem, left);
      const Vec second = load_some<T>(page[i] + (head_size + d) * kItem, left);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if constexpr (Kind == PageRecord::kBounds) {
          sum[r * kStep + i] += query[r] * (query[r] > Vec{} ? second : first);
        } else {
          // The logits' second cumulant: the log of the mean of exp where they are normal.
          sum[r * kStep + i] += query[r] * (first + 0.5f * query[r] * second);
        }
      }
    }
  }
  write(sums, sums_of(sum));
}

template <PageRecord Kind, typename T>
void record_pages(const PageScoring& s, std::int64_t row, std::int64_t head, std::int64_t begin,
                  std::int64_t end, std::byte* scratch) {
  const PageLayout& layout = s.layout;
  const std::int64_t groups = layout.block_tokens / layout.page_tokens;
  const std::int64_t group = s.query_heads / layout.kv_heads;
  const std::int64_t size = layout.head_size;
  const std::int64_t width = (size + kLanes - 1) / kLanes * kLanes;
  const std::int64_t page_bytes = 2 * size * static_cast<std::int64_t>(sizeof(T));
  auto* queries = reinterpret_cast<float*>(scratch);
  const float* query = s.query + (row * s.query_heads + head * group) * size;
  for (std::int64_t g = 0; g < group; ++g) {
    for (std::int64_t d = 0; d < width; ++d) {
      queries[g * width + d] = d < size ? query[g * size + d] * s.scale : 0.0f;
    }
  }
  const std::int64_t columns = s.first_column[row + 1] - s.first_column[row];
  float* logits = s.logits + s.first_column[row] * s.query_heads + head * group * columns;
  const auto address = [&](std::int64_t page) {
    const std::int64_t block = page / groups;
    return reinterpret_cast<const std::byte*>(s.records[s.row_begin[row] + block]) +
           (head * groups + page - block * groups) * page_bytes;
  };
  for_panels(group, [&]<int R>(std::int64_t g) {
    constexpr int kStep = kLanes / R;
    const std::byte* pages[2 * kStep];
    for (int i = 0; i < kStep; ++i) pages[i] = address(begin + i < end ? begin + i : end - 1);
    for (std::int64_t page = begin; page < end; page += kStep) {
      for (int i = 0; i < kStep; ++i) {
        const std::int64_t next = page + kStep + i;
        pages[kStep + i] = address(next < end ? next : end - 1);
      }
      float sums[kLanes];
      record_logits<Kind, R, T>(queries + g * width, width, size, pages, pages + kStep, sums);
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < kStep && page + i < end; ++i) {
          logits[(g + r) * columns + page + i] = sums[r * kStep + i];
        }
      }
      for (int i = 0; i < kStep; ++i) pages[i] = pages[kStep + i];
    }
  });
}

void page_logits(const PageScoring& s, std::int64_t row, std::int64_t head, std::int64_t begin,
                 std::int64_t end, std::byte* scratch) {
  if (s.kind == PageRecord::kBounds) {
    return for_stored(s.layout.dtype, [&](auto item) {
      record_pages<PageRecord::kBounds, decltype(item)>(s, row, head, begin, end, scratch);
    });
  }
  for_dtype(s.layout.dtype, [&](auto item) {
    record_pages<PageRecord::kSpread, decltype(item)>(s, row, head, begin, end, scratch);
  });
}

// logits[R][V vectors] of tokens that lie side by side in each channel: at(c) is where those of the
// c-th channel begin. The channels are summed in order, whatever R, V and the source: a token's
// logit does not depend on where it lies.
template <int R, int V, typename T, typename At>
void sum_channels(const float* query, std::int64_t count, const At& at, std::int64_t tokens,
                  float* logits, std::int64_t columns) {
  Vec sum[R][V] = {};
  for (std::int64_t c = 0; c < count; ++c) {
    const std::byte* from = at(c);
    Vec key[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const std::int64_t left = tokens - v * kLanes;
      key[v] =
          left > 0 ? load_some<T>(from + v * kLanes * static_cast<int>(sizeof(T)), left) : Vec{};
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec q = splat(query[r * count + c]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] += q * key[v];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      auto* to = reinterpret_cast<std::byte*>(logits + r * columns + v * kLanes);
      if (tokens > v * kLanes) store_some<float>(to, sum[r][v], tokens - v * kLanes);
    }
  }
}

// The head's place in the tables of a ChannelScoring.
struct HeadPlace {
  std::int64_t group;
  const std::int32_t* channels;
  const std::int32_t* place;
  const float* query;
  std::int64_t columns;
  float* logits;

  HeadPlace(const ChannelScoring& s, std::int64_t row, std::int64_t head)
      : group(s.query_heads / s.layout.kv_heads),
        channels(s.channels + (row * s.layout.kv_heads + head) * s.count),
        place(s.place + (row * s.layout.kv_heads + head) * s.count),
        query(s.query + (row * s.query_heads + head * group) * s.count),
        columns(s.first_column[row + 1] - s.first_column[row]),
        logits(s.logits + s.first_column[row] * s.query_heads + head * group * columns) {}
};

template <typename T>
void channel_blocks(const ChannelScoring& s, std::int64_t row, std::int64_t head,
                    std::int64_t begin, std::int64_t end) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const HeadPlace place(s, row, head);
  const std::int64_t tokens = s.layout.block_tokens;
  const auto keys_of = [&](std::int64_t block) {
    return reinterpret_cast<const std::byte*>(s.base[s.row_begin[row] + block]) +
           head * s.held * tokens * kItem;
  };
  for (std::int64_t block = begin; block < end; ++block) {
    const std::byte* keys = keys_of(block);
    // Channels lie apart and blocks anywhere: no pattern for the hardware to see.
    const std::int64_t next = block + 4 < end ? block + 4 : end - 1;
    const std::byte* ahead = keys_of(next);
    for (std::int64_t c = 0; c < s.count; ++c) {
      __builtin_prefetch(ahead + place.place[c] * tokens * kItem, 0, 2);
    }
    for (std::int64_t t = 0; t < tokens;) {
      const bool wide = tokens - t > 2 * kLanes;
      const auto at = [&](std::int64_t c) { return keys + (place.place[c] * tokens + t) * kItem; };
      float* to = place.logits + block * tokens + t;
      for_panels(place.group, [&]<int R>(std::int64_t g) {
        const float* query = place.query + g * s.count;
        if (wide) {
          sum_channels<R, 4, T>(query, s.count, at, tokens - t, to + g * place.columns,
                                place.columns);
        } else {
          sum_channels<R, 2, T>(query, s.count, at, tokens - t, to + g * place.columns,
                                place.columns);
        }
      });
      t += (wide ? 4 : 2) * kLanes;
    }
  }
}

template <typename T>
void window_tokens(const ChannelScoring& s, std::int64_t row, std::int64_t head,
                   std::byte* scratch) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const PageLayout& layout = s.layout;
  const HeadPlace place(s, row, head);
  const std::int64_t groups = layout.block_tokens / layout.page_tokens;
  float* to = place.logits + place.columns - s.window_tokens[row];
  auto* tile = reinterpret_cast<float*>(scratch);
  for (std::int64_t first = 0; first < s.window_tokens[row]; first += kWindowTile) {
    const std::int64_t left = s.window_tokens[row] - first;
    for (std::int64_t t = 0; t < kWindowTile && t < left; ++t) {
      const std::int64_t block = (first + t) / layout.block_tokens;
      const std::int64_t token = first + t - block * layout.block_tokens;
      const std::int64_t page = token / layout.page_tokens;
      const std::byte* key =
          reinterpret_cast<const std::byte*>(s.window[s.window_begin[row] + block]) +
          (head * groups + page) * layout.page_stride +
          (token - page * layout.page_tokens) * layout.head_size * kItem;
      for (std::int64_t c = 0; c < s.count; ++c) {
        tile[c * kWindowTile + t] = load_one<T>(key + place.channels[c] * kItem);
      }
    }
    for (std::int64_t t = 0; t < kWindowTile && t < left; t += 2 * kLanes) {
      const auto at = [&](std::int64_t c) {
        return reinterpret_cast<const std::byte*>(tile + c * kWindowTile + t);
      };
      for_panels(place.group, [&]<int R>(std::int64_t g) {
        sum_channels<R, 2, float>(place.query + g * s.count, s.count, at, left - t,
                                  to + first + t + g * place.columns, place.columns);
      });
    }
  }
}

void channel_logits(const ChannelScoring& s, std::int64_t row, std::int64_t head,
                    std::int64_t begin, std::int64_t end) {
  for_dtype(s.layout.dtype,
            [&](auto item) { channel_blocks<decltype(item)>(s, row, head, begin, end); });
}

void window_logits(const ChannelScoring& s, std::int64_t row, std::int64_t head,
                   std::byte* scratch) {
  for_dtype(s.layout.dtype,
            [&](auto item) { window_tokens<decltype(item)>(s, row, head, scratch); });
}

}  // namespace
}  // namespace ssdkv::attention::SSDKV_ISA
