#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "attention/openmp_team.hpp"
#include "attention/sparse.hpp"

namespace ssdkv::attention {
namespace {

// Below this many columns in all, waking another thread costs more than it brings.
constexpr std::int64_t kMinThreadColumns = 1 << 13;

// Orders columns as a choice takes them: a smaller key comes first. NaN counts as infinity, so that
// broken data is attended to and shows.
std::uint64_t key_of(float score, std::int64_t column) {
  if (std::isnan(score)) score = std::numeric_limits<float>::infinity();
  const auto bits = std::bit_cast<std::uint32_t>(score + 0.0F);  // -0 as 0
  const std::uint32_t ascending = (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
  return std::uint64_t{~ascending} << 32 | static_cast<std::uint32_t>(column);
}

// Takes columns of one list into `to`, which has room for `most`; returns how many, and their mass.
std::int64_t choose_list(const ColumnChoice& c, std::int64_t row, std::int64_t head,
                         std::int32_t* to, float& covered) {
  const std::int64_t columns = c.first_column[row + 1] - c.first_column[row];
  const std::int64_t most = std::clamp<std::int64_t>(c.most[row], 0, columns);
  const std::int64_t least = std::clamp<std::int64_t>(c.least[row], 0, most);
  const std::int64_t at = c.first_column[row] * c.kv_heads + head * columns;
  const float* score = c.score + at;
  const float* mass = c.mass + at;
  double sum = static_cast<double>(c.window_mass[row * c.kv_heads + head]);
  const auto enough = [&](std::int64_t taken) { return taken >= least && c.p < 1 && sum >= c.p; };
  std::int64_t taken = 0;
  for (; taken < std::min(c.sinks, most); ++taken) {
    to[taken] = static_cast<std::int32_t>(taken);
    sum += static_cast<double>(mass[taken]);
  }
  if (taken < most && most == columns && c.p >= 1) {
    for (; taken < most; ++taken) to[taken] = static_cast<std::int32_t>(taken);
  } else if (taken < most && !enough(taken)) {
    thread_local std::vector<std::uint64_t> keys;
    keys.resize(static_cast<std::size_t>(columns - taken));
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::int64_t column = taken + static_cast<std::int64_t>(i);
      keys[i] = key_of(score[column], column);
    }
    auto last = keys.begin() + (most - taken - 1);
    std::nth_element(keys.begin(), last, keys.end());
    if (c.p < 1 && least < most) {
      std::sort(keys.begin(), last);
      last = keys.begin();
      for (std::int64_t n = taken + 1;; ++n, ++last) {
        sum += static_cast<double>(mass[static_cast<std::uint32_t>(*last)]);
        if (n == most || enough(n)) break;
      }
      const std::uint64_t bound = *last;
      for (std::int64_t column = taken; column < columns; ++column) {
        if (key_of(score[column], column) > bound) continue;
        to[taken++] = static_cast<std::int32_t>(column);
      }
    } else {
      const std::uint64_t bound = *last;
      for (std::int64_t column = taken; column < columns; ++column) {
        if (key_of(score[column], column) > bound) continue;
        to[taken++] = static_cast<std::int32_t>(column);
        sum += static_cast<double>(mass[column]);
      }
    }
  }
  covered = taken == columns ? 1.0F : static_cast<float>(std::min(sum, 1.0));
  return taken;
}

}  // namespace

ChosenColumns choose_columns(const ColumnChoice& choice, std::int64_t rows, std::int64_t threads) {
  const auto lists = static_cast<std::size_t>(rows * choice.kv_heads);
  std::vector<std::int64_t> room(lists + 1);
  for (std::size_t i = 0; i < lists; ++i) {
    const std::int64_t row = static_cast<std::int64_t>(i) / choice.kv_heads;
    const std::int64_t columns = choice.first_column[row + 1] - choice.first_column[row];
    room[i + 1] = room[i] + std::clamp<std::int64_t>(choice.most[row], 0, columns);
  }
  ChosenColumns chosen;
  chosen.columns.resize(static_cast<std::size_t>(room.back()));
  chosen.begin.resize(lists + 1);
  chosen.mass.resize(lists);
  const std::int64_t columns = choice.first_column[rows] * choice.kv_heads;
  for_tasks(static_cast<std::int64_t>(lists), columns < kMinThreadColumns ? 1 : threads, 0,
            [&](std::int64_t i, std::byte*) {
              const auto list = static_cast<std::size_t>(i);
              chosen.begin[list + 1] = static_cast<std::int32_t>(
                  choose_list(choice, i / choice.kv_heads, i % choice.kv_heads,
                              chosen.columns.data() + room[list], chosen.mass[list]));
            });
  for (std::size_t i = 0; i < lists; ++i) {
    const std::int32_t to = chosen.begin[i];
    const std::int32_t count = chosen.begin[i + 1];
    std::int32_t* all = chosen.columns.data();
    std::copy(all + room[i], all + room[i] + count, all + to);
    chosen.begin[i + 1] = to + count;
  }
  chosen.columns.resize(static_cast<std::size_t>(chosen.begin.back()));
  return chosen;
}

void choose_channels(const ChannelChoice& c, std::int64_t rows) {
  const std::int64_t group = c.query_heads / c.kv_heads;
  std::vector<float> sum(static_cast<std::size_t>(c.head_size));
  std::vector<std::int32_t> order(sum.size());
  for (std::int64_t list = 0; list < rows * c.kv_heads; ++list) {
    const float* query = c.query + list * group * c.head_size;
    std::fill(sum.begin(), sum.end(), 0.0F);
    for (std::int64_t g = 0; g < group; ++g) {
      for (std::int64_t d = 0; d < c.head_size; ++d) {
        sum[static_cast<std::size_t>(d)] += std::fabs(query[g * c.head_size + d]);
      }
    }
    std::iota(order.begin(), order.end(), 0);
    const auto last = order.begin() + c.count;
    std::partial_sort(order.begin(), last, order.end(), [&](std::int32_t a, std::int32_t b) {
      const std::uint64_t first = key_of(sum[static_cast<std::size_t>(a)], a);
      return first < key_of(sum[static_cast<std::size_t>(b)], b);
    });
    std::sort(order.begin(), last);
    std::int32_t* channels = c.channels + list * c.count;
    std::copy(order.begin(), last, channels);
    for (std::int64_t g = 0; g < group; ++g) {
      const float* head = query + g * c.head_size;
      float* to = c.reduced + (list * group + g) * c.count;
      float whole = 0;
      for (std::int64_t d = 0; d < c.head_size; ++d) whole += std::fabs(head[d]);
      float part = 0;
      for (std::int64_t i = 0; i < c.count; ++i) {
        to[i] = head[channels[i]];
        part += std::fabs(to[i]);
      }
      // All channels, or only zeros: nothing to correct for. The plain scale keeps the first exact.
      const bool corrected = c.count < c.head_size && part != 0;
      const float scale = corrected ? c.scale * std::sqrt(whole / part) : c.scale;
      for (std::int64_t i = 0; i < c.count; ++i) to[i] *= scale;
    }
  }
}

}  // namespace ssdkv::attention
