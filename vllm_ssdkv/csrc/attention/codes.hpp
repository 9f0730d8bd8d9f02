// K of a head in 1, 2 or 4 bits a channel: where each part lies in a record. Plain description, for
// the reason given in problem.hpp; docs/format.md says what the numbers mean.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/problem.hpp"

namespace ssdkv::attention {

// Tokens whose codes lie side by side: byte i of the codes of all 16, then byte i + 1, ...
inline constexpr std::int64_t kCodeTile = 16;

// A head's record of one block: codes [tiles][lines][kCodeTile], weights bfloat16
// [tiles][kCodeTile], rotated mean int8 [head_size], its step float32.
struct CodeShape {
  std::int64_t bits;
  std::int64_t tiles;
  std::int64_t lines;    // bytes of a token's codes, a multiple of 4
  std::int64_t weights;  // offsets in bytes
  std::int64_t mean;
  std::int64_t step;
  std::int64_t bytes;  // of the record
};

// Where `bits` is 0 the record has no bytes.
CodeShape code_shape(const PageLayout& layout, std::int64_t bits);

// The matrix that keys and queries are rotated by, [size][size], and the levels of so many bits,
// [2 ** bits], for kernels of other devices.
void code_rotation(std::int64_t size, float* matrix);
void code_levels(std::int64_t bits, float* levels);

// Bytes of scratch that encoding takes, and scoring of so many query heads of a KV head.
std::int64_t encode_scratch(const PageLayout& layout);
std::int64_t scoring_scratch(const PageLayout& layout, const CodeShape& shape, std::int64_t group);

}  // namespace ssdkv::attention
