// Moving K and V between layouts without arithmetic. Every call blocks until done and needs no GIL.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/problem.hpp"

namespace ssdkv::attention {

struct Scatter {
  PageLayout layout;
  const std::byte* key;  // [tokens][kv_heads][head_size], tokens `key_stride` bytes apart
  const std::byte* value;
  std::int64_t key_stride;
  std::int64_t value_stride;
  const std::int64_t* slots;  // [tokens]: block * block_tokens + offset; negative: no place, skip
  std::byte* cache;
  std::int64_t block_stride;
};

void scatter_tokens(const Scatter& scatter, std::int64_t tokens, std::int64_t threads);

struct PageCopy {
  const std::uint64_t* source;       // [items] addresses of the first page
  const std::uint64_t* destination;  // [items]
  std::int64_t pages;                // per item
  std::int64_t payload;              // bytes used per page
  std::int64_t source_stride;        // bytes from page to page
  std::int64_t destination_stride;
  bool clear_padding;  // zero what lies between payloads in the destination
};

void copy_pages(const PageCopy& copy, std::int64_t items, std::int64_t threads);

}  // namespace ssdkv::attention
