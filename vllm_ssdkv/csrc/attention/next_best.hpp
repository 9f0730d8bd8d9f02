// How often pages were chosen lately, and which pages to read ahead by that and by scores. Lists of
// pages are ascending, none twice. Time grows with the pages of the lists.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ssdkv::attention {

struct CountedPages {
  std::vector<std::int32_t> pages;
  std::vector<float> counts;
};

// A list's counts after one more token: 0.9 of each, and 1 more for what was chosen. The highest
// are kept, equal ones by number, twice as many as were chosen.
CountedPages count_choice(std::span<const std::int32_t> pages, std::span<const float> counts,
                          std::span<const std::int32_t> chosen);

// `most` of a list's pages: those with the lowest sum of two ranks, by score and by count, the best
// first. Equal counts rank by score, equal scores and equal sums by number; NaN scores come first.
std::vector<std::int32_t> best_by_ranks(std::span<const std::int32_t> pages,
                                        std::span<const float> score,
                                        std::span<const std::int32_t> counted,
                                        std::span<const float> counts, std::int64_t most);

}  // namespace ssdkv::attention
