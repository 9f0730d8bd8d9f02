#include "attention/next_best.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>

namespace ssdkv::attention {
namespace {

constexpr float kKept = 0.9F;          // of a count, by each token
constexpr std::size_t kPerChosen = 2;  // pages that are counted, for each that is chosen

}  // namespace

CountedPages count_choice(std::span<const std::int32_t> pages, std::span<const float> counts,
                          std::span<const std::int32_t> chosen) {
  CountedPages all;
  all.pages.reserve(pages.size() + chosen.size());
  all.counts.reserve(pages.size() + chosen.size());
  for (std::size_t i = 0, j = 0; i < pages.size() || j < chosen.size();) {
    const bool known = j == chosen.size() || (i < pages.size() && pages[i] <= chosen[j]);
    const bool again = j < chosen.size() && (!known || pages[i] == chosen[j]);
    all.pages.push_back(known ? pages[i] : chosen[j]);
    all.counts.push_back((known ? kKept * counts[i] : 0.0F) + (again ? 1.0F : 0.0F));
    i += known;
    j += again;
  }
  const std::size_t most = kPerChosen * chosen.size();
  if (all.pages.size() <= most) return all;
  // Counts are positive, so their bits order them; the highest has the smallest key.
  const auto key = [&](std::size_t i) {
    return std::uint64_t{~std::bit_cast<std::uint32_t>(all.counts[i])} << 32 | i;
  };
  thread_local std::vector<std::uint64_t> keys;
  keys.resize(all.pages.size());
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = key(i);
  const auto bound = keys.begin() + static_cast<std::ptrdiff_t>(most);
  std::nth_element(keys.begin(), bound, keys.end());
  std::size_t kept = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (key(i) >= *bound) continue;
    all.pages[kept] = all.pages[i];
    all.counts[kept++] = all.counts[i];
  }
  all.pages.resize(kept);
  all.counts.resize(kept);
  return all;
}

std::vector<std::int32_t> best_by_ranks(std::span<const std::int32_t> pages,
                                        std::span<const float> score,
                                        std::span<const std::int32_t> counted,
                                        std::span<const float> counts, std::int64_t most) {
  struct Page {
    float score;
    float count = 0;
    std::uint32_t number;  // in the list
    std::uint32_t ranks = 0;
  };
  std::vector<Page> order(pages.size());
  std::size_t known = 0;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const bool broken = std::isnan(score[i]);
    order[i].score = broken ? std::numeric_limits<float>::infinity() : score[i];
    order[i].number = static_cast<std::uint32_t>(i);
    while (known < counted.size() && counted[known] < pages[i]) ++known;
    if (known < counted.size() && counted[known] == pages[i]) order[i].count = counts[known];
  }
  std::sort(order.begin(), order.end(), [](const Page& a, const Page& b) {
    return std::tuple(-a.score, a.number) < std::tuple(-b.score, b.number);
  });
  for (std::size_t i = 0; i < order.size(); ++i) order[i].ranks = static_cast<std::uint32_t>(i);
  std::stable_sort(order.begin(), order.end(),
                   [](const Page& a, const Page& b) { return a.count > b.count; });
  for (std::size_t i = 0; i < order.size(); ++i) order[i].ranks += static_cast<std::uint32_t>(i);
  const auto taken =
      std::min(order.size(), static_cast<std::size_t>(std::max<std::int64_t>(0, most)));
  const auto last = order.begin() + static_cast<std::ptrdiff_t>(taken);
  std::partial_sort(order.begin(), last, order.end(), [](const Page& a, const Page& b) {
    return std::tuple(a.ranks, a.number) < std::tuple(b.ranks, b.number);
  });
  std::vector<std::int32_t> best(taken);
  for (std::size_t i = 0; i < taken; ++i) best[i] = pages[order[i].number];
  return best;
}

}  // namespace ssdkv::attention
