#include "attention/sparse.hpp"

#include <algorithm>

#include "attention/isa.hpp"
#include "attention/openmp_team.hpp"

namespace ssdkv::attention {
namespace {

// Bytes read per task: enough to pay for handing it out.
constexpr std::int64_t kTaskBytes = 1 << 17;
// Below this many bytes in all, waking another thread costs more than it brings.
constexpr std::int64_t kMinThreadBytes = 1 << 18;

struct Piece {
  std::int64_t row;
  std::int64_t head;
  std::int64_t begin;
  std::int64_t end;
};

// Cuts the items of every row and KV head into pieces of about kTaskBytes. The pieces' results do
// not depend on where they are cut. A row without items has one empty piece per head.
template <typename Items>
std::vector<Piece> cut(std::int64_t rows, std::int64_t heads, std::int64_t item_size,
                       const Items& items) {
  const std::int64_t step = std::max<std::int64_t>(1, kTaskBytes / item_size);
  std::vector<Piece> pieces;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t count = items(row);
    for (std::int64_t head = 0; head < heads; ++head) {
      std::int64_t begin = 0;
      do {
        pieces.push_back({row, head, begin, std::min(begin + step, count)});
        begin += step;
      } while (begin < count);
    }
  }
  return pieces;
}

std::int64_t team(std::int64_t bytes, std::int64_t threads) {
  return bytes < kMinThreadBytes ? 1 : threads;
}

// Runs body(row, head) for every row and KV head; `columns` floats are read in all.
template <typename Body>
void for_heads(std::int64_t rows, std::int64_t heads, std::int64_t columns, std::int64_t threads,
               const Body& body) {
  for_tasks(rows * heads, team(columns * 4, threads), 0,
            [&](std::int64_t task, std::byte*) { body(task / heads, task % heads); });
}

}  // namespace

void summarize_blocks(const Summaries& s, std::int64_t blocks, std::int64_t threads) {
  const SparseKernels& kernels = *active_kernels().sparse;
  const PageLayout& layout = s.layout;
  const std::int64_t groups = layout.block_tokens / layout.page_tokens;
  const std::int64_t token = layout.head_size * item_bytes(layout.dtype);
  const std::int64_t bytes = 2 * layout.kv_heads * layout.block_tokens * token;
  const auto one = [&](std::int64_t block, std::int64_t head, std::byte* scratch) {
    const auto place = [&](const std::uint64_t* list, std::int64_t size) {
      return reinterpret_cast<std::byte*>(list[block]) + head * size;
    };
    const std::byte* pages = place(s.source, groups * layout.page_stride);
    const auto records = [&](const std::uint64_t* list, PageRecord kind) {
      if (list == nullptr) return;
      std::byte* const to = place(list, groups * 2 * token);
      for (std::int64_t g = 0; g < groups; ++g) {
        kernels.page_record(layout, kind, pages + g * layout.page_stride, to + g * 2 * token);
      }
    };
    records(s.bounds, PageRecord::kBounds);
    records(s.spread, PageRecord::kSpread);
    if (s.codes != nullptr) {
      kernels.encode(layout, s.code_shape, pages, scratch, place(s.codes, s.code_shape.bytes));
    }
    if (s.channels != nullptr) {
      kernels.channels(layout, pages, place(s.channels, layout.block_tokens * token));
    }
    if (s.value_sum != nullptr) {
      kernels.value_sum(layout, pages, place(s.value_sum, layout.head_size * 4));
    }
  };
  const std::int64_t step = std::max<std::int64_t>(1, kTaskBytes / bytes);
  const std::int64_t work = s.codes == nullptr ? 0 : encode_scratch(layout);
  for_tasks((blocks + step - 1) / step, team(blocks * bytes, threads),
            static_cast<std::size_t>(work), [&](std::int64_t task, std::byte* scratch) {
              const std::int64_t end = std::min(blocks, (task + 1) * step);
              for (std::int64_t block = task * step; block < end; ++block) {
                for (std::int64_t head = 0; head < layout.kv_heads; ++head) {
                  one(block, head, scratch);
                }
              }
            });
}

namespace {

// Scores codes, in pieces of whole blocks.
void score_codes(const PageScoring& s, std::int64_t rows, std::int64_t threads) {
  const SparseKernels& kernels = *active_kernels().sparse;
  const PageLayout& layout = s.layout;
  const std::int64_t groups = layout.block_tokens / layout.page_tokens;
  const std::vector<Piece> pieces = cut(
      rows, layout.kv_heads, s.codes.bytes,
      [&](std::int64_t row) { return (s.first_column[row + 1] - s.first_column[row]) / groups; });
  const std::int64_t bytes = s.first_column[rows] / groups * layout.kv_heads * s.codes.bytes;
  for_tasks(
      static_cast<std::int64_t>(pieces.size()), team(bytes, threads),
      static_cast<std::size_t>(scoring_scratch(layout, s.codes, s.query_heads / layout.kv_heads)),
      [&](std::int64_t task, std::byte* scratch) {
        const Piece& p = pieces[static_cast<std::size_t>(task)];
        if (p.begin == p.end) return;
        kernels.code_logits(s, p.row, p.head, p.begin, p.end, scratch);
      });
}

}  // namespace

void score_pages(const PageScoring& s, std::int64_t rows, std::int64_t threads) {
  if (s.kind == PageRecord::kCodes) return score_codes(s, rows, threads);
  const SparseKernels& kernels = *active_kernels().sparse;
  const PageLayout& layout = s.layout;
  const std::int64_t page = 2 * layout.head_size * item_bytes(layout.dtype);
  const std::vector<Piece> pieces = cut(rows, layout.kv_heads, page, [&](std::int64_t row) {
    return s.first_column[row + 1] - s.first_column[row];
  });
  const std::int64_t group = s.query_heads / layout.kv_heads;
  const std::int64_t scratch = 4 * group * (layout.head_size + 15);
  for_tasks(static_cast<std::int64_t>(pieces.size()),
            team(s.first_column[rows] * layout.kv_heads * page, threads),
            static_cast<std::size_t>(scratch), [&](std::int64_t task, std::byte* bytes) {
              const Piece& p = pieces[static_cast<std::size_t>(task)];
              if (p.begin == p.end) return;
              kernels.page_logits(s, p.row, p.head, p.begin, p.end, bytes);
            });
}

void score_channels(const ChannelScoring& s, std::int64_t rows, std::int64_t threads) {
  const SparseKernels& kernels = *active_kernels().sparse;
  const PageLayout& layout = s.layout;
  const std::int64_t item = item_bytes(layout.dtype);
  const std::int64_t block = s.count * layout.block_tokens * item;
  const std::vector<Piece> pieces =
      cut(rows, layout.kv_heads, std::max<std::int64_t>(1, block),
          [&](std::int64_t row) { return s.row_end[row] - s.row_begin[row]; });
  for_tasks(static_cast<std::int64_t>(pieces.size()),
            team(s.first_column[rows] * layout.kv_heads * s.count * item, threads),
            static_cast<std::size_t>(4 * s.count * 64), [&](std::int64_t task, std::byte* bytes) {
              const Piece& p = pieces[static_cast<std::size_t>(task)];
              if (p.begin == 0) kernels.window_logits(s, p.row, p.head, bytes);
              if (p.begin < p.end) kernels.channel_logits(s, p.row, p.head, p.begin, p.end);
            });
}

void weigh_columns(const Weighting& w, std::int64_t rows, std::int64_t threads) {
  const SparseKernels& kernels = *active_kernels().sparse;
  for_heads(rows, w.kv_heads, w.first_column[rows] * w.query_heads, threads,
            [&](std::int64_t row, std::int64_t head) { kernels.weigh(w, row, head); });
}

void score_tokens(const TokenScoring& s, std::int64_t rows, std::int64_t threads) {
  const SparseKernels& kernels = *active_kernels().sparse;
  for_heads(rows, s.kv_heads, s.first_token[rows] * s.query_heads, threads,
            [&](std::int64_t row, std::int64_t head) { kernels.score_tokens(s, row, head); });
}

void cover_pages(const Coverage& c, std::int64_t rows, std::int64_t threads) {
  const SparseKernels& kernels = *active_kernels().sparse;
  const std::int64_t group = c.query_heads / c.kv_heads;
  for_heads(rows, c.kv_heads, c.begin[rows * c.kv_heads] * c.page_tokens * group, threads,
            [&](std::int64_t row, std::int64_t head) { kernels.cover(c, row, head); });
}

}  // namespace ssdkv::attention
