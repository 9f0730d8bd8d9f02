#include "attention/codes.hpp"

namespace ssdkv::attention {

CodeShape code_shape(const PageLayout& layout, std::int64_t bits) {
  if (bits == 0) return {};
  const std::int64_t tiles = (layout.block_tokens + kCodeTile - 1) / kCodeTile;
  const std::int64_t lines = (layout.head_size * bits + 31) / 32 * 4;
  const std::int64_t weights = tiles * kCodeTile * lines;
  const std::int64_t mean = weights + tiles * kCodeTile * 2;
  const std::int64_t step = mean + (layout.head_size + 3) / 4 * 4;
  return {bits, tiles, lines, weights, mean, step, step + 4};
}

std::int64_t encode_scratch(const PageLayout& layout) {
  // Keys of a tile, and the mean.
  return kCodeTile * 4 * layout.head_size + 4 * (kMaxHeadSize + kCodeTile);
}

std::int64_t scoring_scratch(const PageLayout& layout, const CodeShape& shape, std::int64_t group) {
  const std::int64_t queries = (kCodeTile + group) * 4 * layout.head_size;
  const std::int64_t logits = 4 * shape.tiles * kCodeTile * 4;
  const std::int64_t tables = 2 * shape.lines * kCodeTile + 64;
  return queries + logits + group * tables;
}

}  // namespace ssdkv::attention
