// Rows of tokens, and the direction in which some of them vary most.
#pragma once

#include "attention/kernel/summaries.hpp"
#include "attention/kernel/vector.hpp"
#include "attention/scoring.hpp"

namespace ssdkv::attention::SSDKV_ISA {
namespace {

// So many turns of power iteration: two find most of the direction, more find hardly anything.
constexpr int kPowerTurns = 3;

template <typename T>
void write_rows(const PageLayout& layout, const std::byte* pages, std::int64_t width, float* rows) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t t = 0; t < layout.block_tokens; ++t, rows += width) {
    const std::byte* key = pages + t / layout.page_tokens * layout.page_stride +
                           t % layout.page_tokens * layout.head_size * kItem;
    for (std::int64_t d = 0; d < width; d += kLanes) {
      const std::int64_t left = layout.head_size - d;
      write(rows + d, left > 0 ? load_some<T>(key + d * kItem, left) : Vec{});
    }
  }
}

void key_rows(const PageLayout& layout, const std::byte* pages, std::int64_t width, float* rows) {
  for_dtype(layout.dtype,
            [&](auto item) { write_rows<decltype(item)>(layout, pages, width, rows); });
}

inline float dot(const float* a, const float* b, std::int64_t width) {
  Vec sum = {};
  for (std::int64_t d = 0; d < width; d += kLanes) sum += read(a + d) * read(b + d);
  return horizontal_sum(sum);
}

// Scales a vector to length 1; one without a length stays without.
inline void normalize(float* v, std::int64_t width) {
  const float length = __builtin_sqrtf(dot(v, v, width));
  const float factor = length > 0.0f ? 1.0f / length : 0.0f;
  for (std::int64_t d = 0; d < width; d += kLanes) write(v + d, read(v + d) * splat(factor));
}

void project(const Projection& p) {
  const std::int64_t width = p.width;
  float* const along = p.vectors;
  float* const next = p.vectors + width;
  const float share = 1.0f / static_cast<float>(p.count);
  for (std::int64_t d = 0; d < width; d += kLanes) {
    Vec sum = {};
    for (std::int64_t i = 0; i < p.count; ++i) sum += read(p.rows + p.members[i] * width + d);
    const Vec mean = sum * splat(share);
    for (std::int64_t i = 0; i < p.count; ++i) {
      write(p.centred + i * width + d, read(p.rows + p.members[i] * width + d) - mean);
    }
    const Vec far = read(p.centred + p.count / 2 * width + d);
    write(along + d, read(p.centred + d) - far + splat(1e-3f));
  }
  normalize(along, width);
  for (int turn = 0; turn < kPowerTurns; ++turn) {
    for (std::int64_t d = 0; d < width; d += kLanes) write(next + d, Vec{});
    for (std::int64_t i = 0; i < p.count; ++i) {
      const float* row = p.centred + i * width;
      const Vec weight = splat(dot(row, along, width));
      for (std::int64_t d = 0; d < width; d += kLanes) {
        write(next + d, read(next + d) + weight * read(row + d));
      }
    }
    for (std::int64_t d = 0; d < width; d += kLanes) write(along + d, read(next + d));
    normalize(along, width);
  }
  for (std::int64_t i = 0; i < p.count; ++i) {
    p.projections[i] = dot(p.centred + i * width, along, width);
  }
}

}  // namespace
}  // namespace ssdkv::attention::SSDKV_ISA
