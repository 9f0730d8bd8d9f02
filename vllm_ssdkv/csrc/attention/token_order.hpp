// Order of a block's tokens in which alike ones share a page.
#pragma once

#include <cstdint>

#include "attention/scoring.hpp"

namespace ssdkv::attention {

// Rows are padded to a multiple of so many numbers, for vectors of any instruction set.
inline constexpr std::int64_t kRowStep = 16;

inline std::int64_t row_width(std::int64_t size) {
  return (size + kRowStep - 1) / kRowStep * kRowStep;
}

// One row of numbers per token of a block, by which tokens are alike.
struct TokenRows {
  std::int64_t tokens;  // whole pages
  std::int64_t page_tokens;
  std::int64_t width;  // of a row, a multiple of kRowStep
  const float* rows;   // [tokens][width]
};

// Bytes of scratch that order_tokens needs.
std::int64_t order_scratch_bytes(std::int64_t tokens, std::int64_t width);

// Writes which token comes at each place: order, int32 [tokens]. The first `kept` pages keep their
// tokens. The others are halved again and again across the direction in which their rows vary most,
// down to pages; in a page tokens keep the order of their positions. Rows that are not finite leave
// their part in the order of positions. The same rows give the same order.
void order_tokens(const SparseKernels& kernels, const TokenRows& rows, std::int64_t kept,
                  std::byte* scratch, std::int32_t* order);

}  // namespace ssdkv::attention
