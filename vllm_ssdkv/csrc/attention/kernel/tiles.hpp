// Key tiles: up to kKeys keys of one KV head, gathered from pages wherever they lie.
#pragma once

#include "attention/kernel/vector.hpp"

namespace ssdkv::attention::SSDKV_ISA {
namespace {

constexpr int kKeys = 64;  // keys per softmax update
constexpr std::int64_t kLineBytes = 64;
constexpr std::int32_t kNever = 0x7fffffff;

// Stands in for rows a tile does not have: their logits are finite, and masked.
alignas(64) constexpr std::byte kZeroRow[kMaxHeadSize * sizeof(float)] = {};

// Positions are relative to the first query of the row: query i sees the keys whose position is at
// most i, and more than i less the sliding window.
struct KeyTile {
  const std::byte* row[2 * kKeys];  // keys, then values
  alignas(64) std::int32_t position[kKeys];
  int count;
  std::int32_t first;  // smallest position
  std::int32_t last;   // largest position
};

// Walks the keys of a task between the oldest that its first query sees and the newest that its
// last one does, in the order of the block list. Keys after that are never touched: they may not
// have been written.
class TileReader {
 public:
  TileReader(const Problem& problem, const Task& task)
      : problem_(problem),
        block_(task.block_begin),
        end_(task.block_end),
        origin_(problem.rows.first_position[task.row]),
        oldest_(task.query_begin - problem.sliding_window + 1),
        limit_(task.query_begin + task.query_count - 1) {
    const PageLayout& layout = problem.layout;
    entry_ = layout.head_size * item_bytes(layout.dtype);
    if (!problem.rows.list_per_head) {
      head_offset_ = task.head * (layout.block_tokens / layout.page_tokens) * layout.page_stride;
    }
    enter_block();
  }

  // False when no key is left.
  bool next(KeyTile& tile) {
    tile.count = 0;
    tile.first = kNever;
    tile.last = -kNever;
    while (block_ < end_ && tile.count < kKeys) {
      add_run(tile);
      if (token_ == visible_) {
        ++block_;
        enter_block();
      }
    }
    if (tile.count == 0) return false;
    for (int k = tile.count; k < kKeys; ++k) {
      tile.row[k] = kZeroRow;
      tile.row[kKeys + k] = kZeroRow;
      tile.position[k] = kNever;
    }
    return true;
  }

 private:
  // Moves to the next block with a visible key, from block_ on.
  void enter_block() {
    const PageLayout& layout = problem_.layout;
    for (; block_ < end_; ++block_) {
      const std::int64_t start = problem_.pages.position[block_] - origin_;
      if (start > limit_ || start + layout.block_tokens <= oldest_) continue;
      const std::int64_t seen = limit_ - start + 1;
      visible_ = seen < layout.block_tokens ? seen : layout.block_tokens;
      // Everything far behind is alike: visible.
      start_ = start < -(kNever / 2) ? -(kNever / 2) : start;
      token_ = start < oldest_ ? oldest_ - start : 0;
      return;
    }
  }

  // Adds keys up to the end of the page, of what is visible, or of the tile.
  void add_run(KeyTile& tile) {
    const PageLayout& layout = problem_.layout;
    const std::int64_t page = token_ / layout.page_tokens;
    const std::int64_t at = token_ - page * layout.page_tokens;
    std::int64_t run = layout.page_tokens - at;
    if (run > visible_ - token_) run = visible_ - token_;
    if (run > kKeys - tile.count) run = kKeys - tile.count;
    const std::byte* key = reinterpret_cast<const std::byte*>(problem_.pages.address[block_]) +
                           head_offset_ + page * layout.page_stride + at * entry_;
    const std::byte* value = key + layout.page_tokens * entry_;
    const auto position = static_cast<std::int32_t>(start_ + token_);
    if (problem_.pages.token_mask != nullptr) {
      const std::uint8_t* mask = problem_.pages.token_mask + block_ * layout.block_tokens + token_;
      for (std::int32_t i = 0; i < run; ++i) {
        if (mask[i] != 0) add_key(tile, key + i * entry_, value + i * entry_, position + i);
      }
    } else {
      for (std::int32_t i = 0; i < run; ++i) {
        tile.row[tile.count + i] = key + i * entry_;
        tile.row[kKeys + tile.count + i] = value + i * entry_;
        tile.position[tile.count + i] = position + i;
      }
      const auto count = static_cast<std::int32_t>(run);
      tile.count += count;
      widen_range(tile, position, position + count - 1);
    }
    token_ += run;
  }

  static void add_key(KeyTile& tile, const std::byte* key, const std::byte* value,
                      std::int32_t position) {
    tile.row[tile.count] = key;
    tile.row[kKeys + tile.count] = value;
    tile.position[tile.count++] = position;
    widen_range(tile, position, position);
  }

  static void widen_range(KeyTile& tile, std::int32_t first, std::int32_t last) {
    if (first < tile.first) tile.first = first;
    if (last > tile.last) tile.last = last;
  }

  const Problem& problem_;
  std::int32_t block_;
  std::int32_t end_;
  std::int64_t origin_;
  std::int64_t oldest_;  // relative position, as limit_
  std::int64_t limit_;
  std::int64_t entry_ = 0;
  std::int64_t head_offset_ = 0;
  std::int64_t start_ = 0;    // relative position of the block's first token
  std::int64_t token_ = 0;    // next token within the block
  std::int64_t visible_ = 0;  // tokens of the block that the last query sees
};

// Brings the rows of a tile into the second-level cache, a few lines at a time, while the tile
// before it is computed on. Pages end too soon for the hardware to see a pattern, and one page's
// end says nothing about where the next one lies.
class Prefetch {
 public:
  Prefetch() = default;
  Prefetch(const KeyTile& tile, std::int64_t row_bytes)
      : row_(tile.row), end_(tile.row + 2 * kKeys), row_bytes_(row_bytes) {}

  void ask(std::int64_t lines) {
    for (; lines > 0 && row_ != end_; --lines) {
      __builtin_prefetch(*row_ + at_, 0, 2);
      at_ += kLineBytes;
      if (at_ < row_bytes_) continue;
      at_ = 0;
      ++row_;
    }
  }

 private:
  const std::byte* const* row_ = nullptr;
  const std::byte* const* end_ = nullptr;
  std::int64_t row_bytes_ = 0;
  std::int64_t at_ = 0;
};

// K of a tile as fp32 [head_size][kKeys].
template <typename T>
void transpose_keys(const KeyTile& tile, std::int64_t head_size, float* to) {
  for (int k = 0; k < kKeys; k += kLanes) {
    for (std::int64_t d = 0; d < head_size; d += kLanes) {
      Vec square[kLanes];
      const std::int64_t left = head_size - d;
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const std::byte* from = tile.row[k + i] + d * static_cast<std::int64_t>(sizeof(T));
        square[i] = load_some<T>(from, left);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (i < left) write(to + (d + i) * kKeys + k, square[i]);
      }
    }
  }
}

// V of a tile as fp32 [count][width]; width is the head size rounded up to whole vectors.
template <typename T>
void widen_values(const KeyTile& tile, std::int64_t head_size, std::int64_t width, float* to) {
  for (int k = 0; k < tile.count; ++k) {
    for (std::int64_t d = 0; d < head_size; d += kLanes) {
      const std::byte* from = tile.row[kKeys + k] + d * static_cast<std::int64_t>(sizeof(T));
      write(to + k * width + d, load_some<T>(from, head_size - d));
    }
  }
}

}  // namespace
}  // namespace ssdkv::attention::SSDKV_ISA
