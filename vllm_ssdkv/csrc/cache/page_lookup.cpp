#include "cache/page_lookup.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace ssdkv {

LocatedPages locate(const ContextBlocks& context, const PageShape& shape,
                    std::span<const int32_t> pages, std::span<const int32_t> begin) {
  const size_t rows = context.first.size(), heads = static_cast<size_t>(shape.heads);
  if (shape.heads < 1 || shape.groups < 1) throw std::invalid_argument("no heads or no groups");
  if (begin.size() != rows * heads + 1 || context.slots.size() != context.frames.size()) {
    throw std::invalid_argument("a list of pages for each row and head");
  }
  if (begin.front() != 0 || static_cast<size_t>(begin.back()) != pages.size()) {
    throw std::invalid_argument("lists are not those of the pages");
  }
  if (!std::is_sorted(begin.begin(), begin.end())) {
    throw std::invalid_argument("lists are not ascending");
  }
  LocatedPages found;
  found.slots.resize(pages.size());
  found.pages.resize(pages.size());
  found.frames.resize(pages.size());
  found.position.resize(pages.size());
  found.blocks.resize(pages.size());
  for (size_t list = 0; list < rows * heads; ++list) {
    const int64_t first = context.first[list / heads];
    const int64_t inside = shape.first_page + static_cast<int64_t>(list % heads) * shape.groups;
    for (auto i = static_cast<size_t>(begin[list]); i < static_cast<size_t>(begin[list + 1]); ++i) {
      const int64_t block = first + pages[i] / shape.groups;
      if (pages[i] < 0 || block < 0 || static_cast<size_t>(block) >= context.slots.size()) {
        throw std::out_of_range("page " + std::to_string(pages[i]) + " of a context");
      }
      const auto at = static_cast<size_t>(block);
      found.slots[i] = context.slots[at];
      found.pages[i] = inside + pages[i] % shape.groups;
      found.frames[i] = context.frames[at];
      found.position[i] = pages[i] * shape.page_tokens;
      found.blocks[i] = static_cast<int32_t>(block);
    }
  }
  return found;
}

}  // namespace ssdkv
