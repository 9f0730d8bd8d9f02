#include "decode/page_table.hpp"

#include <algorithm>
#include <cstddef>

namespace ssdkv::decode {

std::int64_t look_up(StepPlan& plan, std::int64_t layer, const ChosenPages& chosen) {
  const ChoosingRows& rows = *plan.choosing;
  const attention::PageLayout& slot = plan.slot;
  const std::int64_t groups = slot.block_tokens / slot.page_tokens;
  const std::int64_t slot_pages = slot.kv_heads * groups;
  WorkSpace& work = plan.work;
  work.address.resize(static_cast<std::size_t>(chosen.count));
  work.position.resize(static_cast<std::size_t>(chosen.count));
  const bool shared = rows.slot != nullptr;
  if (shared) work.seen.assign(static_cast<std::size_t>((rows.slots * slot_pages + 63) / 64), 0);
  std::int64_t again = 0;
  const std::int64_t offset = plan.layer_offset(layer);
  for (std::int64_t list = 0; list < rows.count * slot.kv_heads; ++list) {
    const std::int64_t first = rows.row_begin[list / slot.kv_heads];
    const std::int64_t head_page = list % slot.kv_heads * groups;
    for (std::int64_t i = chosen.begin[list]; i < chosen.begin[list + 1]; ++i) {
      const std::int64_t page = chosen.pages[i];
      const std::int64_t block = first + page / groups, number = head_page + page % groups;
      const auto at = static_cast<std::size_t>(i);
      work.address[at] =
          rows.frame[block] + static_cast<std::uint64_t>(offset + number * slot.page_stride);
      work.position[at] = page * slot.page_tokens;
      if (!shared) continue;
      const std::int64_t bit = rows.slot[block] * slot_pages + number;
      std::uint64_t& word = work.seen[static_cast<std::size_t>(bit / 64)];
      const std::uint64_t mask = std::uint64_t{1} << (bit % 64);
      again += (word & mask) != 0;
      word |= mask;
    }
  }
  return chosen.count - again;
}

}  // namespace ssdkv::decode
