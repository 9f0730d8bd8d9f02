// Look-up of a selection's pages: from a selector's answer to entries of the page cache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ssdkv {

// The contexts of some rows: row r has the blocks first[r], first[r] + 1, ... of these.
struct ContextBlocks {
  std::span<const int32_t> first;
  std::span<const int64_t> slots;    // of each block
  std::span<const uint64_t> frames;  // address of its slot's frame, or 0
};

struct PageShape {
  int64_t heads;
  int64_t groups;  // pages of a block and KV head
  int64_t page_tokens;
  int64_t first_page;  // of the layer, within a slot
};

struct LocatedPages {  // all by page
  std::vector<int64_t> slots;
  std::vector<int64_t> pages;  // within the slot
  std::vector<uint64_t> frames;
  std::vector<int64_t> position;  // of the first token, in the request
  std::vector<int32_t> blocks;
};

// Head h of row r has the pages begin[i] .. begin[i + 1], i = r * heads + h, numbered block *
// groups + group from the start of the row's context. Throws std::out_of_range for blocks that do
// not exist.
LocatedPages locate(const ContextBlocks& context, const PageShape& shape,
                    std::span<const int32_t> pages, std::span<const int32_t> begin);

}  // namespace ssdkv
