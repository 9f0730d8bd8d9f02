// One task of attention, and what follows it. Included once by each kernels_*.cpp, which define
// SSDKV_ISA (namespace), SSDKV_ISA_NAME and SSDKV_KERNELS (the table to define).
//
// Online softmax over key tiles (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022) in
// fp32 throughout.
#pragma once

#include <cmath>

#include "attention/kernel/logits.hpp"
#include "attention/kernel/order.hpp"
#include "attention/kernel/panels.hpp"
#include "attention/kernel/weights.hpp"

namespace ssdkv::attention::SSDKV_ISA {

// Of codes.hpp, which is compiled on its own.
void encode_head(const PageLayout& layout, const CodeShape& shape, const std::byte* pages,
                 std::byte* scratch, std::byte* record);
void code_logits(const PageScoring& s, std::int64_t row, std::int64_t head,
                 std::int64_t block_begin, std::int64_t block_end, std::byte* scratch);

namespace {

// Up to this many query rows K and V are read in place; above it, conversion is shared.
constexpr std::int64_t kDirectRows = 8;
// Rows of scratch past the last one: the last panel may be that much larger than what is left.
constexpr std::int64_t kSpareRows = 6;

std::int64_t whole_vectors(std::int64_t head_size) {
  return (head_size + kLanes - 1) / kLanes * kLanes;
}

// Bytes of a part of scratch; every part starts on a cache line.
std::size_t part_bytes(std::int64_t items) {
  return (static_cast<std::size_t>(items) * sizeof(float) + kLineBytes - 1) / kLineBytes *
         kLineBytes;
}

std::size_t scratch_bytes(std::int64_t task_rows, std::int64_t head_size) {
  const std::int64_t rows = task_rows + kSpareRows;
  const std::int64_t width = whole_vectors(head_size);
  return 2 * part_bytes(rows * width) + 3 * part_bytes(rows) + 2 * part_bytes(width * kKeys) +
         part_bytes(kSpareRows * kKeys);
}

// The rows of a task: its queries times the query heads of its KV head, queries outermost.
struct TaskRows {
  const Problem& problem;
  const Task& task;
  std::int64_t group;
  std::int64_t count;
  std::int64_t head_size;

  TaskRows(const Problem& p, const Task& t)
      : problem(p),
        task(t),
        group(p.state.query_heads / p.layout.kv_heads),
        count(t.query_count * group),
        head_size(p.layout.head_size) {}

  std::int64_t token(std::int64_t row) const {
    return problem.rows.query_begin[task.row] + task.query_begin + row / group;
  }
  std::int64_t head(std::int64_t row) const { return task.head * group + row % group; }
  // Index in [tokens][query_heads].
  std::int64_t place(std::int64_t row) const {
    return token(row) * problem.state.query_heads + head(row);
  }
};

// A running task: its rows, and where they are kept in scratch meanwhile.
struct Work : TaskRows {
  std::int64_t width;      // head size in whole vectors
  std::int64_t row_bytes;  // of one key, as stored
  bool direct;
  float* queries;      // panels [head_size][R], or rows [width] if direct
  float* accumulator;  // [rows][width]
  float* maximum;      // [rows]
  float* denominator;
  std::int32_t* limit;  // position up to which a row sees keys
  std::int32_t sliding_window;
  bool plain;     // logits are products
  float* keys;    // [head_size][kKeys]
  float* values;  // [kKeys][width]
  float* logits;  // [kSpareRows][kKeys]

  Work(const Problem& p, const Task& t, std::byte* scratch)
      : TaskRows(p, t),
        width(whole_vectors(head_size)),
        row_bytes(head_size * item_bytes(p.layout.dtype)),
        direct(count <= kDirectRows && width == head_size),
        sliding_window(p.sliding_window < kNever ? static_cast<std::int32_t>(p.sliding_window)
                                                 : kNever),
        plain(p.state.shape.plain()) {
    const auto take = [&scratch](std::int64_t items) {
      std::byte* part = scratch;
      scratch += part_bytes(items);
      return reinterpret_cast<float*>(part);
    };
    const std::int64_t rows = count + kSpareRows;
    queries = take(rows * width);
    accumulator = take(rows * width);
    maximum = take(rows);
    denominator = take(rows);
    limit = reinterpret_cast<std::int32_t*>(take(rows));
    keys = take(width * kKeys);
    values = take(kKeys * width);
    logits = take(kSpareRows * kKeys);
  }

  RowState state(std::int64_t row) const {
    return {maximum + row, denominator + row, limit + row, sliding_window};
  }

  // Rows in the panel that starts at `row`. Panels of 4 and 6 (or 1, 2 and 4) cover any number with
  // at most one to spare.
  int panel_rows(std::int64_t row) const {
    const std::int64_t left = count - row;
    if (direct) return left >= 3 ? 4 : static_cast<int>(left);
    return left <= 4 || left == 7 || left == 8 ? 4 : 6;
  }
};

// Writes the scaled query of a row to `to`, `step` floats from element to element.
template <typename T>
void read_query(const Work& w, std::int64_t row, float* to, std::int64_t step) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const Problem& p = w.problem;
  const std::byte* from =
      p.query.data + w.token(row) * p.query.stride + w.head(row) * w.head_size * kItem;
  for (std::int64_t d = 0; d < w.head_size; d += kLanes) {
    const std::int64_t left = w.head_size - d;
    float lanes[kLanes];
    write(lanes, load_some<T>(from + d * kItem, left) * p.scale);
    for (int i = 0; i < kLanes && i < left; ++i) to[(d + i) * step] = lanes[i];
  }
}

template <typename T>
void read_queries(const Work& w) {
  std::memset(w.queries, 0, part_bytes((w.count + kSpareRows) * w.width));
  for (std::int64_t row = 0; row < w.count;) {
    const int panel = w.panel_rows(row);
    float* to = w.queries + row * w.width;
    for (int r = 0; r < panel && row + r < w.count; ++r) {
      // Panels are interleaved, for broadcasts; direct rows are not.
      if (w.direct) {
        read_query<T>(w, row + r, to + r * w.width, 1);
      } else {
        read_query<T>(w, row + r, to + r, panel);
      }
    }
    row += panel;
  }
}

// Brings queries and state into scratch. Spare rows see nothing and start empty, as partial states
// do.
void begin(const Work& w) {
  const Problem& p = w.problem;
  for_dtype(p.query.dtype, [&](auto item) { read_queries<decltype(item)>(w); });
  std::memset(w.accumulator, 0, part_bytes((w.count + kSpareRows) * w.width));
  for (std::int64_t row = 0; row < w.count + kSpareRows; ++row) {
    w.limit[row] =
        row < w.count ? w.task.query_begin + static_cast<std::int32_t>(row / w.group) : -kNever;
    w.maximum[row] = -kInfinity;
    w.denominator[row] = 0.0f;
    if (row >= w.count || w.task.partial != nullptr) continue;
    const std::int64_t at = w.place(row);
    w.maximum[row] = p.state.maximum[at];
    w.denominator[row] = p.state.denominator[at];
    std::memcpy(w.accumulator + row * w.width, p.state.accumulator + at * w.head_size,
                static_cast<std::size_t>(w.head_size) * sizeof(float));
  }
}

void end(const Work& w) {
  const Problem& p = w.problem;
  for (std::int64_t row = 0; row < w.count; ++row) {
    float* maximum = w.task.partial + row;
    float* denominator = w.task.partial + w.count + row;
    float* accumulator = w.task.partial + 2 * w.count + row * w.head_size;
    if (w.task.partial == nullptr) {
      const std::int64_t at = w.place(row);
      maximum = p.state.maximum + at;
      denominator = p.state.denominator + at;
      accumulator = p.state.accumulator + at * w.head_size;
    }
    *maximum = w.maximum[row];
    *denominator = w.denominator[row];
    std::memcpy(accumulator, w.accumulator + row * w.width,
                static_cast<std::size_t>(w.head_size) * sizeof(float));
  }
}

// What follows from the products of a panel with a tile, up to the weights.
template <int R>
void weigh_panel(const Work& w, const KeyTile& tile, std::int64_t row, float* correction) {
  if (!w.plain) {
    const LogitShape& shape = w.problem.state.shape;
    float slope[R] = {};
    if (shape.slopes != nullptr) {
      for (int r = 0; r < R; ++r) slope[r] = shape.slopes[w.head(row + r)];
    }
    shape_logits<R>(tile, shape.soft_cap, shape.slopes == nullptr ? nullptr : slope, w.limit + row,
                    w.logits);
  }
  softmax<R>(tile, w.state(row), w.logits, correction);
}

template <int R, typename T>
void direct_panel(const Work& w, const KeyTile& tile, Prefetch& ahead, std::int64_t row) {
  float correction[R];
  logits_direct<R, T>(w.queries + row * w.width, w.width, tile, ahead, w.logits);
  weigh_panel<R>(w, tile, row, correction);
  const DirectRows values{tile.row + kKeys, &ahead, (w.row_bytes + kLineBytes - 1) / kLineBytes};
  add_values<R, T>(w.logits, correction, tile.count, values, w.accumulator + row * w.width, w.width,
                   w.width / kLanes);
}

template <int R>
void shared_panel(const Work& w, const KeyTile& tile, Prefetch& ahead, std::int64_t lines,
                  std::int64_t row) {
  float correction[R];
  logits_of<R>(w.queries + row * w.width, w.keys, w.head_size, ahead, lines, w.logits);
  weigh_panel<R>(w, tile, row, correction);
  const WidenedRows values{reinterpret_cast<const std::byte*>(w.values), w.width * 4};
  add_values<R, float>(w.logits, correction, tile.count, values, w.accumulator + row * w.width,
                       w.width, w.width / kLanes);
}

// Calls visit(tile, ahead) for every key tile; `ahead` asks for the tile after it.
template <typename Visit>
void for_tiles(const Work& w, const Visit& visit) {
  TileReader reader(w.problem, w.task);
  KeyTile tiles[2];
  bool more = reader.next(tiles[0]);
  for (int turn = 0; more; turn ^= 1) {
    more = reader.next(tiles[turn ^ 1]);
    Prefetch ahead;
    if (more) ahead = Prefetch(tiles[turn ^ 1], w.row_bytes);
    visit(tiles[turn], ahead);
  }
}

template <typename T>
void attend_direct(const Work& w) {
  for_tiles(w, [&](const KeyTile& tile, Prefetch& ahead) {
    for (std::int64_t row = 0; row < w.count;) {
      const int panel = w.panel_rows(row);
      if (panel == 1) direct_panel<1, T>(w, tile, ahead, row);
      if (panel == 2) direct_panel<2, T>(w, tile, ahead, row);
      if (panel == 4) direct_panel<4, T>(w, tile, ahead, row);
      row += panel;
    }
  });
}

template <typename T>
void attend_shared(const Work& w) {
  // Few query rows leave few steps to ask for the next tile in.
  const std::int64_t lines =
      2 * kKeys * 6 / kLineBytes * static_cast<std::int64_t>(sizeof(T)) / w.count + 1;
  for_tiles(w, [&](const KeyTile& tile, Prefetch& ahead) {
    transpose_keys<T>(tile, w.head_size, w.keys);
    widen_values<T>(tile, w.head_size, w.width, w.values);
    for (std::int64_t row = 0; row < w.count;) {
      const int panel = w.panel_rows(row);
      const std::int64_t last = row + panel < w.count ? row + panel - 1 : w.count - 1;
      if (tile.first <= w.limit[last] && tile.last > w.limit[row] - w.sliding_window) {
        if (panel == 4) shared_panel<4>(w, tile, ahead, lines, row);
        if (panel == 6) shared_panel<6>(w, tile, ahead, lines, row);
      }
      row += panel;
    }
  });
}

template <typename T>
void attend_blocks(const Work& w) {
  if (w.direct) {
    attend_direct<T>(w);
  } else {
    attend_shared<T>(w);
  }
}

void attend(const Problem& problem, const Task& task, std::byte* scratch) {
  const Work w(problem, task, scratch);
  begin(w);
  for_stored(problem.layout.dtype, [&](auto item) { attend_blocks<decltype(item)>(w); });
  end(w);
}

void fold(const Problem& p, const Task& task, const float* partials, std::int64_t count) {
  const TaskRows rows(p, task);
  for (std::int64_t i = 0; i < count; ++i, partials += rows.count * (rows.head_size + 2)) {
    for (std::int64_t row = 0; row < rows.count; ++row) {
      const std::int64_t at = rows.place(row);
      const float denominator = partials[rows.count + row];
      if (denominator == 0.0f) continue;  // saw no key
      const float before = p.state.maximum[at];
      const float now = partials[row] > before ? partials[row] : before;
      const float keep = exp_one(before - now);
      const float add = exp_one(partials[row] - now);
      p.state.maximum[at] = now;
      p.state.denominator[at] = p.state.denominator[at] * keep + denominator * add;
      float* to = p.state.accumulator + at * rows.head_size;
      const float* from = partials + 2 * rows.count + row * rows.head_size;
      for (std::int64_t d = 0; d < rows.head_size; ++d) to[d] = to[d] * keep + from[d] * add;
    }
  }
}

template <typename T>
void finish_tokens(const Output& o, std::int64_t token_begin, std::int64_t token_end) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t token = token_begin; token < token_end; ++token) {
    for (std::int64_t head = 0; head < o.state.query_heads; ++head) {
      const std::int64_t at = token * o.state.query_heads + head;
      const float denominator = o.state.denominator[at];
      const float scale = o.state.value_scale;
      const bool seen = denominator != 0.0f;
      const auto* from =
          reinterpret_cast<const std::byte*>(o.state.accumulator + at * o.state.head_size);
      std::byte* to = o.out.data + token * o.out.stride + head * o.state.head_size * kItem;
      for (std::int64_t d = 0; d < o.state.head_size; d += kLanes) {
        const std::int64_t left = o.state.head_size - d;
        const Vec sum = load_some<float>(from + d * static_cast<std::int64_t>(sizeof(float)), left);
        store_some<T>(to + d * kItem, seen ? sum / denominator * scale : Vec{}, left);
      }
      if (o.lse != nullptr)
        o.lse[at] = seen ? o.state.maximum[at] + ::logf(denominator) : -kInfinity;
    }
  }
}

void finish(const Output& o, std::int64_t token_begin, std::int64_t token_end) {
  for_dtype(o.out.dtype,
            [&](auto item) { finish_tokens<decltype(item)>(o, token_begin, token_end); });
}

template <typename T>
void widen_token(const Vectors& v, std::int64_t token, float* to) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const std::byte* const from = v.data + token * v.stride;
  const std::int64_t count = v.heads * v.head_size;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    store_some<float>(reinterpret_cast<std::byte*>(to + i),
                      load_some<T>(from + i * kItem, count - i), count - i);
  }
}

void widen(const Vectors& v, std::int64_t token, float* to) {
  for_dtype(v.dtype, [&](auto item) { widen_token<decltype(item)>(v, token, to); });
}

constexpr SparseKernels kSparseKernels{
    page_record, head_channels,  head_value_sum, key_rows, project,      encode_head, code_logits,
    page_logits, channel_logits, window_logits,  weigh,    score_tokens, cover};

}  // namespace
}  // namespace ssdkv::attention::SSDKV_ISA

namespace ssdkv::attention {

const Kernels SSDKV_KERNELS{
    SSDKV_ISA_NAME,    SSDKV_ISA::scratch_bytes, SSDKV_ISA::attend,         SSDKV_ISA::fold,
    SSDKV_ISA::finish, SSDKV_ISA::widen,         &SSDKV_ISA::kSparseKernels};

}  // namespace ssdkv::attention
