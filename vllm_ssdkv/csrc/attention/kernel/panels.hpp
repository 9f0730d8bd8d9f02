// The inner loops: a panel is a few query rows whose logits against one key tile fit in registers.
//
// Both ways of getting logits and of adding values exist twice. `*_direct` reads K and V where they
// lie, converting in registers: for a handful of query rows, where memory is the limit and each
// byte is used once. The others read a tile that was converted (and, for K, transposed) beforehand:
// for many query rows, which share that work.
#pragma once

#include "attention/kernel/tiles.hpp"

namespace ssdkv::attention::SSDKV_ISA {
namespace {

// Vectors of one row that a panel of `rows` keeps in registers, with room for loads and a
// broadcast.
constexpr int columns_for(int rows) {
  const int room = kRegisters == 32 ? 24 : 12;
  const int columns = room / rows;
  return columns > 8 ? 8 : columns < 1 ? 1 : columns > 4 && rows > 2 ? 4 : columns;
}

// logits[R][kKeys] = queries (panel layout [head_size][R]) times keys [head_size][kKeys]. Asks for
// `lines` of `ahead` at every step of the head size.
template <int R>
void logits_of(const float* queries, const float* keys, std::int64_t head_size, Prefetch& ahead,
               std::int64_t lines, float* logits) {
  constexpr int kColumns =
      columns_for(R) > kKeys / kLanes ? kKeys / kLanes : columns_for(R) / 2 * 2;
  static_assert(kKeys % (kColumns * kLanes) == 0);
  for (int k = 0; k < kKeys; k += kColumns * kLanes) {
    Vec sum[R][kColumns] = {};
    const float* query = queries;
    const float* key = keys + k;
    for (std::int64_t d = 0; d < head_size; ++d, query += R, key += kKeys) {
      ahead.ask(lines);
      Vec column[kColumns];
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) column[c] = read(key + c * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vec q = splat(query[r]);
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) sum[r][c] += q * column[c];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) write(logits + r * kKeys + k + c * kLanes, sum[r][c]);
    }
  }
}

// As logits_of, from row-major queries [R][width] and the tile's own keys. head_size is a multiple
// of kLanes.
template <int R, typename T>
void logits_direct(const float* queries, std::int64_t width, const KeyTile& tile, Prefetch& ahead,
                   float* logits) {
  constexpr int kStep = kLanes / R;  // keys at once: one sum per lane of the result
  constexpr auto kLines =
      static_cast<std::int64_t>((kStep * kLanes * sizeof(T) + kLineBytes - 1) / kLineBytes);
  for (int k = 0; k < tile.count; k += kStep) {
    Vec sum[kLanes] = {};
    const std::byte* from[kStep];
#pragma GCC unroll 16
    for (int i = 0; i < kStep; ++i) from[i] = tile.row[k + i];
    for (std::int64_t d = 0; d < width; d += kLanes) {
      ahead.ask(kLines);
      Vec query[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) query[r] = read(queries + r * width + d);
#pragma GCC unroll 16
      for (int i = 0; i < kStep; ++i) {
        const Vec key = load<T>(from[i] + d * static_cast<std::int64_t>(sizeof(T)));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r * kStep + i] += query[r] * key;
      }
    }
    float sums[kLanes];
    write(sums, sums_of(sum));
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      std::memcpy(logits + r * kKeys + k, sums + r * kStep, kStep * sizeof(float));
  }
}

// tanh within a few ulp; near 0 by the polynomial of Cephes' tanhf (Moshier, 1992).
inline Vec tanh_of(Vec x) {
  const Vec magnitude = x < Vec{} ? -x : x;
  const Vec decay = exp_nonpositive(-2.0f * magnitude);
  const Vec far = (1.0f - decay) / (1.0f + decay);
  const Vec square = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  return magnitude < splat(0.625f) ? p * square * x + x : (x < Vec{} ? -far : far);
}

// Turns products of R rows with a tile into logits that are not plain. `slope` has one for each
// row, or is null; `newest` are the rows' own positions.
template <int R>
void shape_logits(const KeyTile& tile, float soft_cap, const float* slope,
                  const std::int32_t* newest, float* logits) {
  for (int i = 0; i < kKeys; i += kLanes) {
    IntVec position;
    std::memcpy(&position, tile.position + i, sizeof(position));
    const Vec place = __builtin_convertvector(position, Vec);
    for (int r = 0; r < R; ++r) {
      float* const at = logits + r * kKeys + i;
      Vec logit = read(at);
      if (soft_cap != 0.0f) logit = soft_cap * tanh_of(logit / soft_cap);
      if (slope != nullptr) logit += slope[r] * (place - static_cast<float>(newest[r]));
      write(at, logit);
    }
  }
}

// Running softmax of R rows: turns logits into weights and says by what the accumulators must be
// scaled.
struct RowState {
  float* maximum;
  float* denominator;
  const std::int32_t* limit;  // position up to which the row sees keys
  std::int32_t window;        // and how many: none at limit - window or before
};

inline float exp_one(float x) { return exp_nonpositive(splat(x))[0]; }

// Weights of a row that no key of a tile is visible to: -inf - -inf would not be a number.
inline void sees_nothing(float* weights, float* correction) {
  *correction = 1.0f;
  std::memset(weights, 0, kKeys * sizeof(float));
}

template <int R>
void softmax(const KeyTile& tile, const RowState& state, float* logits, float* correction) {
  constexpr int kVectors = kKeys / kLanes;
  for (int r = 0; r < R; ++r) {
    float* row = logits + r * kKeys;
    const std::int32_t newest = state.limit[r];
    if (tile.first > newest) {
      sees_nothing(row, correction + r);
      continue;
    }
    const std::int32_t behind = newest - state.window;
    const bool slides = tile.first <= behind;
    if (slides || tile.last > newest || tile.count < kKeys) {
      const IntVec limit = newest - IntVec{};
      const IntVec floor = behind - IntVec{};
      for (int i = 0; i < kVectors; ++i) {
        IntVec position;
        std::memcpy(&position, tile.position + i * kLanes, sizeof(position));
        const Vec logit = position > limit ? splat(-kInfinity) : read(row + i * kLanes);
        write(row + i * kLanes, position > floor ? logit : splat(-kInfinity));
      }
    }
    Vec top = read(row);
    for (int i = 1; i < kVectors; ++i) top = max(top, read(row + i * kLanes));
    const float before = state.maximum[r];
    const float here = horizontal_max(top);
    if (slides && here == -kInfinity) {
      sees_nothing(row, correction + r);
      continue;
    }
    const float now = here > before ? here : before;
    const Vec shift = splat(now);
    Vec total = {};
    for (int i = 0; i < kVectors; ++i) {
      const Vec weight = exp_nonpositive(read(row + i * kLanes) - shift);
      write(row + i * kLanes, weight);
      total += weight;
    }
    correction[r] = now == before ? 1.0f : exp_one(before - now);
    state.maximum[r] = now;
    state.denominator[r] = state.denominator[r] * correction[r] + horizontal_sum(total);
  }
}

// accumulator[R][width] = accumulator * correction + weights[R][kKeys] times C vectors of each
// value row. row(k) is the address of value k; summing a tile on its own before adding it keeps
// rounding errors small.
template <int R, int C, typename T, typename RowOf>
void add_columns(const float* weights, const float* correction, int count, RowOf row,
                 float* accumulator, std::int64_t width) {
  Vec sum[R][C] = {};
  for (int k = 0; k < count; ++k) {
    const std::byte* from = row(k);
    Vec value[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) value[c] = load<T>(from + c * kLanes * static_cast<int>(sizeof(T)));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(weights[r * kKeys + k]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] += weight * value[c];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const Vec scale = splat(correction[r]);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      float* to = accumulator + r * width + c * kLanes;
      write(to, read(to) * scale + sum[r][c]);
    }
  }
}

// Calls add_columns for `vectors` vectors per row, as many at a time as registers hold.
template <int R, typename T, int C = columns_for(R), typename RowOf>
void add_values(const float* weights, const float* correction, int count, RowOf row,
                float* accumulator, std::int64_t width, std::int64_t vectors) {
  while (vectors >= C) {
    add_columns<R, C, T>(weights, correction, count, row, accumulator, width);
    accumulator += C * kLanes;
    vectors -= C;
    row = row.shifted(C * kLanes * static_cast<std::int64_t>(sizeof(T)));
  }
  if constexpr (C > 1) {
    if (vectors > 0)
      add_values<R, T, C / 2>(weights, correction, count, row, accumulator, width, vectors);
  }
}

// Value rows where they lie. The first walk over them asks for `lines` of `ahead` per row.
struct DirectRows {
  const std::byte* const* rows;
  Prefetch* ahead;
  std::int64_t lines;
  std::int64_t offset = 0;

  const std::byte* operator()(int k) const {
    ahead->ask(lines);
    return rows[k] + offset;
  }
  DirectRows shifted(std::int64_t bytes) const { return {rows, ahead, 0, offset + bytes}; }
};

// Value rows of a converted tile.
struct WidenedRows {
  const std::byte* base;
  std::int64_t stride;

  const std::byte* operator()(int k) const { return base + k * stride; }
  WidenedRows shifted(std::int64_t bytes) const { return {base + bytes, stride}; }
};

}  // namespace
}  // namespace ssdkv::attention::SSDKV_ISA
