#define SSDKV_ISA portable
#include "attention/kernel/codes.hpp"

namespace ssdkv::attention {

void code_rotation(std::int64_t size, float* matrix) {
  float column[kMaxHeadSize];
  for (std::int64_t i = 0; i < size; ++i) {
    for (std::int64_t d = 0; d < size; ++d) column[d] = d == i ? 1.0f : 0.0f;
    portable::rotate(column, size);
    for (std::int64_t d = 0; d < size; ++d) matrix[d * size + i] = column[d];
  }
}

void code_levels(std::int64_t bits, float* levels) {
  portable::for_bits(bits, [&](auto of) {
    constexpr int kBits = decltype(of)::value;
    for (int i = 0; i < 1 << kBits; ++i) levels[i] = portable::level_of<kBits>(i);
  });
}

}  // namespace ssdkv::attention
