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

// Pages that lie evenly apart, and where they go.
struct PageRun {
  std::int64_t payload;        // bytes used per page
  std::int64_t source_stride;  // bytes from page to page
  std::int64_t destination_stride;
  bool clear_padding;  // zero what lies between payloads in the destination
};

// On the caller's thread.
void copy_run(const PageRun& run, const std::byte* from, std::byte* to, std::int64_t pages);

struct PageCopy {
  const std::uint64_t* source;       // [items] addresses of the first page
  const std::uint64_t* destination;  // [items]
  std::int64_t pages;                // per item
  PageRun run;
};

void copy_pages(const PageCopy& copy, std::int64_t items, std::int64_t threads);

}  // namespace ssdkv::attention
