// Moving K and V between layouts. Every call blocks until done and needs no GIL.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/problem.hpp"

namespace ssdkv::attention {

struct Scatter {
  PageLayout layout;
  Vectors key;  // of the layout's dtype, unless that has 8 bits
  Vectors value;
  const std::int64_t* slots;  // [tokens]: block * block_tokens + offset; negative: no place, skip
  std::byte* cache;
  std::int64_t block_stride;
  float key_scale;  // what K is divided by on its way to 8 bits
  float value_scale;
};

void scatter_tokens(const Kernels& kernels, const Scatter& scatter, std::int64_t threads);

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
