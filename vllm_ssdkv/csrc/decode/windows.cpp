#include "decode/windows.hpp"

#include <stdexcept>

namespace ssdkv::decode {

Windows windows_of(std::span<const std::int64_t> query_start, std::span<const std::int64_t> length,
                   const BlockTable& table, std::span<const std::int64_t> hbm_start,
                   std::int64_t block_tokens) {
  const std::size_t rows = length.size();
  if (query_start.size() != rows + 1 || hbm_start.size() != rows || block_tokens < 1) {
    throw std::invalid_argument("rows differ in number, or a block has no tokens");
  }
  Windows made;
  for (std::size_t r = 0; r < rows; ++r) {
    const std::int64_t count = query_start[r + 1] - query_start[r];
    const std::int64_t end = (length[r] + block_tokens - 1) / block_tokens;
    if (count < 0 || length[r] < count || hbm_start[r] < 0 || hbm_start[r] > end) {
      throw std::invalid_argument("a row has fewer tokens than queries, or no window");
    }
    if (static_cast<std::int64_t>(r) >= table.rows || end > table.blocks) {
      throw std::out_of_range("a window reaches beyond the table of blocks");
    }
    made.query_begin.push_back(static_cast<std::int32_t>(query_start[r]));
    made.query_count.push_back(static_cast<std::int32_t>(count));
    made.first_position.push_back(length[r] - count);
    made.begin.push_back(static_cast<std::int32_t>(made.block.size()));
    for (std::int64_t i = hbm_start[r]; i < end; ++i) {
      made.block.push_back(
          table.data[static_cast<std::int64_t>(r) * table.stride + i * table.step]);
      made.position.push_back(i * block_tokens);
    }
    made.end.push_back(static_cast<std::int32_t>(made.block.size()));
  }
  return made;
}

}  // namespace ssdkv::decode
