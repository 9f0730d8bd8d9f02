#include "decode/page_table.hpp"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

namespace ssdkv::decode {
namespace {

std::int64_t groups_of(const StepPlan& plan) {
  return plan.slot.block_tokens / plan.slot.page_tokens;
}

std::int64_t layer_pages(const StepPlan& plan) { return plan.slot.kv_heads * groups_of(plan); }

// Visits each page of a row's lists: its index, its number in the row's context, its block, and its
// number within a layer's part of a slot.
template <typename Visit>
void each_page(const StepPlan& plan, std::int64_t row, const std::int32_t* begin,
               const std::int32_t* pages, const Visit& visit) {
  const std::int64_t groups = groups_of(plan), first = plan.choosing->row_begin[row];
  for (std::int64_t head = 0; head < plan.slot.kv_heads; ++head) {
    for (std::int64_t i = begin[head]; i < begin[head + 1]; ++i) {
      const std::int64_t page = pages[i];
      visit(i, page, first + page / groups, head * groups + page % groups);
    }
  }
}

// Writes addresses and positions, and lists the pages without a frame. Returns how many distinct
// ones there are in frames.
std::int64_t locate(StepPlan& plan, std::int64_t layer) {
  const ChoosingRows& rows = *plan.choosing;
  WorkSpace& work = plan.work;
  const ChosenPages& chosen = work.chosen;
  const std::int64_t slot_pages = layer_pages(plan);
  work.address.resize(static_cast<std::size_t>(chosen.count));
  work.position.resize(static_cast<std::size_t>(chosen.count));
  work.outside.clear();
  work.slots.clear();
  work.numbers.clear();
  const bool shared = rows.slot != nullptr;
  if (shared) work.seen.assign(static_cast<std::size_t>((rows.slots * slot_pages + 63) / 64), 0);
  std::int64_t again = 0;
  const std::int64_t offset = plan.layer_offset(layer);
  const auto place = [&](std::int64_t i, std::int64_t page, std::int64_t block,
                         std::int64_t number) {
    const auto at = static_cast<std::size_t>(i);
    work.position[at] = page * plan.slot.page_tokens;
    if (rows.frame[block] == 0) {
      work.outside.push_back(static_cast<std::int32_t>(i));
      work.slots.push_back(rows.stored[block]);
      work.numbers.push_back(layer * slot_pages + number);
      return;
    }
    work.address[at] =
        rows.frame[block] + static_cast<std::uint64_t>(offset + number * plan.slot.page_stride);
    if (!shared) return;
    const std::int64_t bit = rows.slot[block] * slot_pages + number;
    std::uint64_t& word = work.seen[static_cast<std::size_t>(bit / 64)];
    const std::uint64_t mask = std::uint64_t{1} << (bit % 64);
    again += (word & mask) != 0;
    word |= mask;
  };
  for (std::int64_t row = 0; row < rows.count; ++row) {
    each_page(plan, row, chosen.begin + row * plan.slot.kv_heads, chosen.pages, place);
  }
  return chosen.count - static_cast<std::int64_t>(work.outside.size()) - again;
}

// Whether no more than `room` distinct pages lie outside frames.
bool fits(const StepPlan& plan, std::size_t room) {
  const WorkSpace& work = plan.work;
  if (work.outside.size() <= room) return true;
  std::vector<std::int64_t> keys(work.outside.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = plan.choosing->cache->key(work.slots[i], work.numbers[i]);
  }
  std::sort(keys.begin(), keys.end());
  return static_cast<std::size_t>(std::unique(keys.begin(), keys.end()) - keys.begin()) <= room;
}

// Whether each page that was guessed lies in a frame or in the cache.
bool all_here(const StepPlan& plan, const GuessedPages& guess) {
  const ChoosingRows& rows = *plan.choosing;
  std::vector<std::int64_t> slots, numbers;
  for (std::int64_t i = 0; i < guess.count; ++i) {
    each_page(plan, guess.row[i], guess.lists.begin + i * plan.slot.kv_heads, guess.lists.pages,
              [&](std::int64_t, std::int64_t, std::int64_t block, std::int64_t number) {
                if (rows.frame[block] != 0) return;
                slots.push_back(rows.stored[block]);
                numbers.push_back(guess.layer * layer_pages(plan) + number);
              });
  }
  const std::vector<std::uint8_t> held = rows.cache->holds(slots, numbers);
  return std::find(held.begin(), held.end(), 0) == held.end();
}

}  // namespace

bool look_up(StepPlan& plan, std::int64_t layer, std::size_t room, const GuessedPages* guess) {
  WorkSpace& work = plan.work;
  give_back(plan);
  const std::int64_t framed = locate(plan, layer);
  if (work.chosen.count > 0 && (!work.outside.empty() || guess != nullptr)) {
    if (!fits(plan, room)) return false;
    PageCache& cache = *plan.choosing->cache;
    work.no_frame.assign(work.outside.size(), 0);
    work.asked = cache.acquire(work.slots, work.numbers, work.no_frame);
    AskedPages& asked = *work.asked;
    asked.framed = static_cast<std::size_t>(framed);
    if (asked.held < asked.keys.size() || asked.coming > 0 || asked.guessed > 0) return false;
    if (guess != nullptr && !all_here(plan, *guess)) return false;
    const FoundPages found =
        cache.find(work.numbers, work.no_frame, asked.which, asked.keys, asked.places);
    for (std::size_t i = 0; i < work.outside.size(); ++i) {
      work.address[static_cast<std::size_t>(work.outside[i])] = found.address[i];
    }
    plan.totals.held += static_cast<std::int64_t>(asked.held);
  }
  plan.totals.framed += framed;
  return true;
}

void give_back(StepPlan& plan) {
  if (!plan.work.asked) return;
  const AskedPages asked = *std::exchange(plan.work.asked, std::nullopt);
  const auto unread = std::span(asked.places).subspan(asked.held);
  const std::vector<std::uint8_t> good(unread.size(), 0);
  const std::vector<std::uint16_t> devices(unread.size(), 0);
  PageCache& cache = *plan.choosing->cache;
  cache.complete(std::span(asked.keys).subspan(asked.held), unread, good, devices);
  cache.release(asked.places);
}

}  // namespace ssdkv::decode
