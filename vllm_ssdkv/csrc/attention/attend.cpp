#include "attention/attend.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "attention/openmp_team.hpp"

namespace ssdkv::attention {
namespace {

// Query rows (queries x heads of a group) per task: enough to pay for converting and transposing
// each key tile, few enough that queries and accumulators stay in the second-level cache.
constexpr std::int64_t kTileRows = 192;
// Tasks per thread that a call is cut into when it is large: evens out rows of different lengths.
constexpr std::int64_t kTasksPerThread = 4;
// A split over blocks costs a partial state; below this many keys it does not pay.
constexpr std::int64_t kMinSplitKeys = 512;
// Reading a key costs about as much as this many query rows cost in arithmetic.
constexpr std::int64_t kReadRows = 4;
// Work ((query rows + kReadRows) x keys x head size) below which waking another thread costs more
// than it brings.
constexpr std::int64_t kMinThreadWork = 1 << 19;

// A query tile of one row and KV head, before it is split over blocks.
struct Tile {
  Task task;
  std::int64_t rows;
  std::int64_t keys;  // that its queries see

  std::int64_t work() const { return (rows + kReadRows) * keys; }
  std::int64_t blocks() const { return task.block_end - task.block_begin; }
  std::size_t partial_floats(std::int64_t head_size) const {
    return static_cast<std::size_t>(rows * (head_size + 2));
  }
};

struct Fold {
  Task task;
  const float* partials;
  std::int64_t count;
};

struct Plan {
  std::vector<Task> tasks;
  std::vector<Fold> folds;
  std::unique_ptr<float[]> partials;
  std::int64_t most_rows = 0;
  std::int64_t threads = 1;
};

// Keys in a list's blocks that queries at the positions `first` to `last` see, were none masked.
std::int64_t visible_keys(const Problem& p, std::int64_t list, std::int64_t first,
                          std::int64_t last) {
  const std::int64_t oldest = first - p.sliding_window + 1;
  const std::int64_t size = p.layout.block_tokens;
  std::int64_t keys = 0;
  for (std::int64_t b = p.rows.begin[list]; b < p.rows.end[list]; ++b) {
    const std::int64_t begin = p.pages.position[b];
    keys += std::max<std::int64_t>(0, std::clamp<std::int64_t>(last + 1 - begin, 0, size) -
                                          std::clamp<std::int64_t>(oldest - begin, 0, size));
  }
  return keys;
}

std::vector<Tile> cut_queries(const Problem& p) {
  const std::int64_t group = p.state.query_heads / p.layout.kv_heads;
  const std::int64_t step = std::max<std::int64_t>(1, kTileRows / group);
  std::vector<Tile> tiles;
  for (std::int64_t row = 0; row < p.rows.count; ++row) {
    // Late queries see the most keys: they go first, so that the last tasks to end are short ones.
    const std::int64_t count = p.rows.query_count[row];
    for (std::int64_t begin = (count - 1) / step * step; count > 0 && begin >= 0; begin -= step) {
      const std::int64_t queries = std::min(step, count - begin);
      const std::int64_t first = p.rows.first_position[row] + begin;
      std::int64_t keys = 0;
      for (std::int64_t head = 0; head < p.layout.kv_heads; ++head) {
        const std::int64_t list = p.rows.list_per_head ? row * p.layout.kv_heads + head : row;
        if (head == 0 || p.rows.list_per_head)
          keys = visible_keys(p, list, first, first + queries - 1);
        if (keys == 0) continue;
        const Task task{static_cast<std::int32_t>(row),
                        static_cast<std::int32_t>(head),
                        static_cast<std::int32_t>(begin),
                        static_cast<std::int32_t>(queries),
                        p.rows.begin[list],
                        p.rows.end[list],
                        nullptr};
        tiles.push_back({task, queries * group, keys});
      }
    }
  }
  return tiles;
}

// Parts that each tile is split into over its blocks, until there is work for every thread.
std::vector<std::int64_t> splits_for_threads(const std::vector<Tile>& tiles, std::int64_t work,
                                             std::int64_t threads) {
  std::vector<std::int64_t> splits(tiles.size(), 1);
  if (threads == 1) return splits;
  const std::int64_t share = std::max<std::int64_t>(1, work / (threads * kTasksPerThread));
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const Tile& tile = tiles[i];
    const std::int64_t wanted = (tile.work() + share - 1) / share;
    splits[i] =
        std::max<std::int64_t>(1, std::min({wanted, tile.blocks(), tile.keys / kMinSplitKeys}));
  }
  return splits;
}

// Cuts a call into tasks. Partial states are folded in block order. Lists of whole rows are cut by
// shapes and by the number of threads: the same call gives the same bits every time. Lists per head
// are cut after every kSplitPages pages, and every part is a partial state, so that calls with
// whole parts of a list give together the bits of one call with all of it.
Plan make_plan(const Problem& p, std::int64_t threads) {
  const std::vector<Tile> tiles = cut_queries(p);
  Plan plan;
  std::int64_t work = 0;
  for (const Tile& tile : tiles) {
    work += tile.work();
    plan.most_rows = std::max(plan.most_rows, tile.rows);
  }
  plan.threads = std::clamp<std::int64_t>(work * p.layout.head_size / kMinThreadWork, 1, threads);

  // The first part of a row's list updates the state itself.
  const std::int64_t in_place = p.rows.list_per_head ? 0 : 1;
  std::vector<std::int64_t> splits;
  if (p.rows.list_per_head) {
    for (const Tile& tile : tiles) {
      splits.push_back((tile.blocks() + kSplitPages - 1) / kSplitPages);
    }
  } else {
    splits = splits_for_threads(tiles, work, plan.threads);
  }
  std::size_t floats = 0;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    floats += static_cast<std::size_t>(splits[i] - in_place) *
              tiles[i].partial_floats(p.layout.head_size);
  }

  plan.partials = std::make_unique_for_overwrite<float[]>(floats);
  float* partial = plan.partials.get();
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const Tile& tile = tiles[i];
    if (splits[i] > in_place) plan.folds.push_back({tile.task, partial, splits[i] - in_place});
    const auto border = [&](std::int64_t s) {
      const std::int64_t at = p.rows.list_per_head ? std::min(s * kSplitPages, tile.blocks())
                                                   : tile.blocks() * s / splits[i];
      return tile.task.block_begin + static_cast<std::int32_t>(at);
    };
    for (std::int64_t s = 0; s < splits[i]; ++s) {
      Task task = tile.task;
      task.block_begin = border(s);
      task.block_end = border(s + 1);
      if (s >= in_place) {
        task.partial = partial;
        partial += tile.partial_floats(p.layout.head_size);
      }
      plan.tasks.push_back(task);
    }
  }
  return plan;
}

}  // namespace

void attend(const Kernels& kernels, const Problem& problem, std::int64_t threads) {
  const Plan plan = make_plan(problem, threads);
  // All or one: OpenMP ends and starts threads when a team's size changes.
  const std::int64_t team = plan.threads > 1 ? threads : 1;
  for_tasks(static_cast<std::int64_t>(plan.tasks.size()), team,
            kernels.scratch_bytes(plan.most_rows, problem.layout.head_size),
            [&](std::int64_t i, std::byte* scratch) {
              kernels.attend(problem, plan.tasks[static_cast<std::size_t>(i)], scratch);
            });
  for_tasks(static_cast<std::int64_t>(plan.folds.size()), team, 0, [&](std::int64_t i, std::byte*) {
    const Fold& fold = plan.folds[static_cast<std::size_t>(i)];
    kernels.fold(problem, fold.task, fold.partials, fold.count);
  });
}

void finish(const Kernels& kernels, const Output& output, std::int64_t threads) {
  const std::int64_t tokens = output.state.tokens;
  if (output.state.query_heads * output.state.head_size == 0) return;
  const std::int64_t step = std::max<std::int64_t>(
      1, kMinThreadWork / 4 / (output.state.query_heads * output.state.head_size));
  for_tasks((tokens + step - 1) / step, threads, 0, [&](std::int64_t i, std::byte*) {
    kernels.finish(output, i * step, std::min(tokens, (i + 1) * step));
  });
}

void log_sum_exp(const State& state, std::int64_t token, float* to) {
  for (std::int64_t h = 0; h < state.query_heads; ++h) {
    const std::int64_t at = token * state.query_heads + h;
    // Rounded once: no choice of pages depends on whose logarithm it is.
    const double log = std::log(static_cast<double>(state.denominator[at]));
    to[h] = state.maximum[at] + static_cast<float>(log);
  }
}

void merge(const State& state, const State& part) {
  const std::int64_t count = state.tokens * state.query_heads;
  const std::int64_t head_size = state.head_size;
  for (std::int64_t at = 0; at < count; ++at) {
    if (part.denominator[at] == 0.0f) continue;  // saw no key
    const float before = state.maximum[at];
    const float now = std::max(before, part.maximum[at]);
    const float keep = std::exp(before - now);
    const float add = std::exp(part.maximum[at] - now);
    state.maximum[at] = now;
    state.denominator[at] = state.denominator[at] * keep + part.denominator[at] * add;
    float* const to = state.accumulator + at * head_size;
    const float* const from = part.accumulator + at * head_size;
    for (std::int64_t d = 0; d < head_size; ++d) to[d] = to[d] * keep + from[d] * add;
  }
}

}  // namespace ssdkv::attention
