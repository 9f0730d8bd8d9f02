#include "attention/transfer.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "attention/openmp_team.hpp"

namespace ssdkv::attention {
namespace {

constexpr std::int64_t kMinTaskBytes = 1 << 19;

// Runs body(begin, end) over 0..items in pieces of about kMinTaskBytes.
template <typename Body>
void for_ranges(std::int64_t items, std::int64_t bytes_each, std::int64_t threads,
                const Body& body) {
  const std::int64_t step =
      std::max<std::int64_t>(1, kMinTaskBytes / std::max<std::int64_t>(1, bytes_each));
  for_tasks((items + step - 1) / step, threads, 0, [&](std::int64_t task, std::byte*) {
    body(task * step, std::min(items, (task + 1) * step));
  });
}

// How numbers of 8 bits are made of fp32 ones: these are multiplied so that both have one bias.
struct Float8 {
  float largest;
  float rebias;
  std::uint32_t kept;  // bits that count; without the others the product is exact below the normal
  int shift;
};
constexpr Float8 kE4M3{448.0F, 0x1p-120F, 0xffffffff, 20};
constexpr Float8 kE5M2{57344.0F, 0x1p-112F, 0xfff00000, 21};

// Rounds as float_to_fp8e4m3_scalar and float_to_fp8e5m2_scalar of vLLM's CPU backend do.
std::byte narrow(float x, const Float8& type) {
  const float v = std::max(-type.largest, std::min(type.largest, x));  // in this order NaN is large
  const auto kept = std::bit_cast<float>(std::bit_cast<std::uint32_t>(v) & type.kept);
  const auto bits = std::bit_cast<std::uint32_t>(kept * type.rebias);
  const std::uint32_t made = (bits >> 24 & 0x80) | (bits >> type.shift & 0x7f);
  return static_cast<std::byte>(v == 0.0F ? 0 : made);
}

// The vectors of tokens, one token at a time, as they are stored.
class Stored {
 public:
  Stored(const Kernels& kernels, const Vectors& from, DType dtype, float scale)
      : kernels_(kernels),
        from_(from),
        type_(dtype == DType::kFloat8E4M3 ? kE4M3 : kE5M2),
        inverse_(1.0F / scale) {
    if (item_bytes(dtype) > 1) return;
    wide_.resize(static_cast<std::size_t>(from.heads * from.head_size));
    narrow_.resize(wide_.size());
  }

  const std::byte* token(std::int64_t t) {
    if (wide_.empty()) return from_.data + t * from_.stride;
    kernels_.widen(from_, t, wide_.data());
    for (std::size_t i = 0; i < wide_.size(); ++i) narrow_[i] = narrow(wide_[i] * inverse_, type_);
    return narrow_.data();
  }

 private:
  const Kernels& kernels_;
  const Vectors& from_;
  const Float8& type_;
  float inverse_;
  std::vector<float> wide_;
  std::vector<std::byte> narrow_;
};

}  // namespace

void scatter_tokens(const Kernels& kernels, const Scatter& s, std::int64_t threads) {
  const PageLayout& layout = s.layout;
  const std::int64_t entry = layout.head_size * item_bytes(layout.dtype);
  const std::int64_t groups = layout.block_tokens / layout.page_tokens;
  for_ranges(s.key.tokens, 2 * layout.kv_heads * entry, threads,
             [&](std::int64_t begin, std::int64_t end) {
               Stored keys(kernels, s.key, layout.dtype, s.key_scale);
               Stored values(kernels, s.value, layout.dtype, s.value_scale);
               for (std::int64_t t = begin; t < end; ++t) {
                 const std::int64_t slot = s.slots[t];
                 if (slot < 0) continue;
                 const std::int64_t offset = slot % layout.block_tokens;
                 std::byte* page = s.cache + slot / layout.block_tokens * s.block_stride +
                                   offset / layout.page_tokens * layout.page_stride +
                                   offset % layout.page_tokens * entry;
                 const std::byte* key = keys.token(t);
                 const std::byte* value = values.token(t);
                 for (std::int64_t h = 0; h < layout.kv_heads; ++h) {
                   std::memcpy(page, key + h * entry, static_cast<std::size_t>(entry));
                   std::memcpy(page + layout.page_tokens * entry, value + h * entry,
                               static_cast<std::size_t>(entry));
                   page += groups * layout.page_stride;
                 }
               }
             });
}

void copy_run(const PageRun& run, const std::byte* from, std::byte* to, std::int64_t pages) {
  const auto payload = static_cast<std::size_t>(run.payload);
  const auto padding = static_cast<std::size_t>(run.destination_stride - run.payload);
  if (run.source_stride == run.payload && padding == 0) {
    std::memcpy(to, from, payload * static_cast<std::size_t>(pages));
    return;
  }
  for (std::int64_t page = 0; page < pages; ++page) {
    std::memcpy(to, from, payload);
    if (run.clear_padding) std::memset(to + payload, 0, padding);
    from += run.source_stride;
    to += run.destination_stride;
  }
}

void copy_pages(const PageCopy& c, std::int64_t items, std::int64_t threads) {
  for_ranges(items, c.pages * c.run.payload, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      copy_run(c.run, reinterpret_cast<const std::byte*>(c.source[i]),
               reinterpret_cast<std::byte*>(c.destination[i]), c.pages);
    }
  });
}

}  // namespace ssdkv::attention
