// torch tensors as operands of calls: read by their attributes, which takes neither DLPack nor a
// frame of Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "attention/arguments.hpp"

namespace ssdkv::attention {

// A layer's blocks in HBM, [count][...], `stride` bytes apart.
struct CacheBlocks {
  std::uint64_t address;
  std::int64_t count;
  std::int64_t stride;
};

// A tensor [T, heads, head_size] on the CPU whose heads have no holes. Throws, naming it, if it is
// another one.
Vectors vectors_of(const std::string& name, nb::handle tensor, std::int64_t heads,
                   std::int64_t head_size);

// A tensor [count, ...] on the CPU that has room for such blocks, without holes in a block.
CacheBlocks blocks_of(nb::handle tensor, const BlockShape& shape);

}  // namespace ssdkv::attention
