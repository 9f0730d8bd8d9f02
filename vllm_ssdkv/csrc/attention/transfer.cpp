#include "attention/transfer.hpp"

#include <algorithm>
#include <cstring>

#include "attention/openmp_team.hpp"

namespace ssdkv::attention {
namespace {

constexpr std::int64_t kMinTaskBytes = 1 << 19;

std::int64_t item_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Runs body(begin, end) over 0..items in pieces of about kMinTaskBytes.
template <typename Body>
void for_ranges(std::int64_t items, std::int64_t bytes_each, std::int64_t threads,
                const Body& body) {
  const std::int64_t step =
      std::max<std::int64_t>(1, kMinTaskBytes / std::max<std::int64_t>(1, bytes_each));
  for_tasks((items + step - 1) / step, threads, 0, [&](std::int64_t task, std::byte*) {
    body(task * step, std::min(items, (task + 1) * step));
  });
}

}  // namespace

void scatter_tokens(const Scatter& s, std::int64_t tokens, std::int64_t threads) {
  const PageLayout& layout = s.layout;
  const std::int64_t entry = layout.head_size * item_bytes(layout.dtype);
  const std::int64_t groups = layout.block_tokens / layout.page_tokens;
  for_ranges(tokens, 2 * layout.kv_heads * entry, threads,
             [&](std::int64_t begin, std::int64_t end) {
               for (std::int64_t t = begin; t < end; ++t) {
                 const std::int64_t slot = s.slots[t];
                 if (slot < 0) continue;
                 const std::int64_t offset = slot % layout.block_tokens;
                 std::byte* page = s.cache + slot / layout.block_tokens * s.block_stride +
                                   offset / layout.page_tokens * layout.page_stride +
                                   offset % layout.page_tokens * entry;
                 const std::byte* key = s.key + t * s.key_stride;
                 const std::byte* value = s.value + t * s.value_stride;
                 for (std::int64_t h = 0; h < layout.kv_heads; ++h) {
                   std::memcpy(page, key + h * entry, static_cast<std::size_t>(entry));
                   std::memcpy(page + layout.page_tokens * entry, value + h * entry,
                               static_cast<std::size_t>(entry));
                   page += groups * layout.page_stride;
                 }
               }
             });
}

void copy_run(const PageRun& run, const std::byte* from, std::byte* to, std::int64_t pages) {
  const auto payload = static_cast<std::size_t>(run.payload);
  const auto padding = static_cast<std::size_t>(run.destination_stride - run.payload);
  if (run.source_stride == run.payload && padding == 0) {
    std::memcpy(to, from, payload * static_cast<std::size_t>(pages));
    return;
  }
  for (std::int64_t page = 0; page < pages; ++page) {
    std::memcpy(to, from, payload);
    if (run.clear_padding) std::memset(to + payload, 0, padding);
    from += run.source_stride;
    to += run.destination_stride;
  }
}

void copy_pages(const PageCopy& c, std::int64_t items, std::int64_t threads) {
  for_ranges(items, c.pages * c.run.payload, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      copy_run(c.run, reinterpret_cast<const std::byte*>(c.source[i]),
               reinterpret_cast<std::byte*>(c.destination[i]), c.pages);
    }
  });
}

}  // namespace ssdkv::attention
