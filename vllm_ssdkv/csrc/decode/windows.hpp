// Windows of a step's rows in HBM, worked out once per step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ssdkv::decode {

struct Windows {
  std::vector<std::int32_t> query_begin, query_count;  // [rows]
  std::vector<std::int64_t> first_position;            // [rows]: of the first query
  std::vector<std::int32_t> begin, end;                // [rows]: of the window's blocks in these:
  std::vector<std::int64_t> block;                     // ids in HBM, row after row
  std::vector<std::int64_t> position;                  // of the first token of each
};

// Ids of blocks by row and index in the row's request; entry (r, i) is data[r * stride + i * step].
struct BlockTable {
  const std::int32_t* data;
  std::int64_t rows, blocks, stride, step;
};

// Row r has the queries query_start[r] .. query_start[r + 1], which are the last of its length[r]
// tokens, and a window from its block hbm_start[r] to the block of its last token. Throws
// std::invalid_argument where these do not fit each other, std::out_of_range for blocks that the
// table does not have.
Windows windows_of(std::span<const std::int64_t> query_start, std::span<const std::int64_t> length,
                   const BlockTable& table, std::span<const std::int64_t> hbm_start,
                   std::int64_t block_tokens);

}  // namespace ssdkv::decode
