#include "attention/transfer.hpp"

#include <algorithm>
#include <cstring>

#include "attention/team.hpp"

namespace ssdkv::attention {
namespace {

constexpr std::int64_t kMinTaskBytes = 1 << 19;

std::int64_t item_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Runs body(begin, end) over 0..items in pieces of about kMinTaskBytes.
template <typename Body>
void for_ranges(std::int64_t items, std::int64_t bytes_each, std::int64_t threads,
                const Body& body) {
  struct Context {
    const Body& body;
    std::int64_t items;
    std::int64_t step;
  } context{body, items,
            std::max<std::int64_t>(1, kMinTaskBytes / std::max<std::int64_t>(1, bytes_each))};
  run_tasks((items + context.step - 1) / context.step, threads, 0,
            [](void* opaque, std::int64_t i, std::byte*) {
              const auto& c = *static_cast<Context*>(opaque);
              c.body(i * c.step, std::min(c.items, (i + 1) * c.step));
            },
            &context);
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

void copy_pages(const PageCopy& c, std::int64_t items, std::int64_t threads) {
  const auto payload = static_cast<std::size_t>(c.payload);
  const auto padding = static_cast<std::size_t>(c.destination_stride - c.payload);
  const bool dense = c.source_stride == c.payload && c.destination_stride == c.payload;
  for_ranges(items, c.pages * c.payload, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const auto* from = reinterpret_cast<const std::byte*>(c.source[i]);
      auto* to = reinterpret_cast<std::byte*>(c.destination[i]);
      if (dense) {
        std::memcpy(to, from, payload * static_cast<std::size_t>(c.pages));
        continue;
      }
      for (std::int64_t page = 0; page < c.pages; ++page) {
        std::memcpy(to, from, payload);
        if (c.clear_padding) std::memset(to + payload, 0, padding);
        from += c.source_stride;
        to += c.destination_stride;
      }
    }
  });
}

}  // namespace ssdkv::attention
