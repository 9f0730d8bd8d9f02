// Walks over query heads, and over K and V of a block.
#pragma once

#include "attention/kernel/vector.hpp"

namespace ssdkv::attention::SSDKV_ISA {
namespace {

// Calls visit<R>(row) for panels of 4, 2 and 1 rows that cover `rows`.
template <typename Visit>
void for_panels(std::int64_t rows, const Visit& visit) {
  std::int64_t row = 0;
  for (; row + 4 <= rows; row += 4) visit.template operator()<4>(row);
  for (; row + 2 <= rows; row += 2) visit.template operator()<2>(row);
  for (; row < rows; ++row) visit.template operator()<1>(row);
}

// So many vectors of channels are worked on at a time: what is kept of one token waits for that of
// the token before, and meanwhile the others' turn comes.
constexpr int kAbreast = 4;

template <int W>
struct Width {
  static constexpr int value = W;
};

// Calls visit(Width<W>, d) for all channels: W vectors of them from d on. A single one may be cut
// short by the head's size.
template <typename Visit>
void for_channels(std::int64_t size, const Visit& visit) {
  std::int64_t d = 0;
  for (; d + kAbreast * kLanes <= size; d += kAbreast * kLanes) {
    visit(Width<kAbreast>{}, d);
  }
  for (; d < size; d += kLanes) visit(Width<1>{}, d);
}

// Calls add(i, v) for each vector i of W, from channel d on, of each of `rows` rows in order.
template <typename T, int W, typename Add>
void for_rows(const std::byte* row, std::int64_t rows, std::int64_t size, std::int64_t d,
              const Add& add) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const std::byte* from = row + d * kItem;
  for (std::int64_t r = 0; r < rows; ++r, from += size * kItem) {
#pragma GCC unroll 4
    for (int i = 0; i < W; ++i) {
      add(i, W > 1 ? load<T>(from + i * kLanes * kItem) : load_some<T>(from, size - d));
    }
  }
}

// The same for keys, or values, of all pages of one head of a block.
template <typename T, int W, typename Add>
void for_tokens(const PageLayout& layout, const std::byte* first, std::int64_t d, const Add& add) {
  for (std::int64_t t = 0; t < layout.block_tokens; t += layout.page_tokens) {
    for_rows<T, W>(first, layout.page_tokens, layout.head_size, d, add);
    first += layout.page_stride;
  }
}

// Places of `Count` keys of one head of a block, from `token` on; behind the last one it stands in
// for those that are missing. Any may be read kLanes channels at a time, even where a head has
// fewer: behind the last key of a page lies V.
template <int Count>
struct Keys {
  const std::byte* at[Count];

  Keys(const PageLayout& layout, const std::byte* pages, std::int64_t token) {
    const std::int64_t bytes = layout.head_size * item_bytes(layout.dtype);
    const std::byte* page = pages + token / layout.page_tokens * layout.page_stride;
    std::int64_t inside = token % layout.page_tokens;
    for (int i = 0; i < Count; ++i) {
      at[i] = page + inside * bytes;
      if (token + i + 1 >= layout.block_tokens) continue;
      if (++inside == layout.page_tokens) {
        page += layout.page_stride;
        inside = 0;
      }
    }
  }
};

}  // namespace
}  // namespace ssdkv::attention::SSDKV_ISA
