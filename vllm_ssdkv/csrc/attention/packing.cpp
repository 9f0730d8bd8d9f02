#include "attention/packing.hpp"

#include <algorithm>
#include <cstring>

#include "attention/isa.hpp"
#include "attention/openmp_team.hpp"
#include "attention/token_order.hpp"
#include "attention/transfer.hpp"

namespace ssdkv::attention {
namespace {

// Bytes of K and V per task: enough to pay for handing it out.
constexpr std::int64_t kTaskBytes = 1 << 17;
// Below this many bytes in all, waking another thread costs more than it brings.
constexpr std::int64_t kMinThreadBytes = 1 << 18;

std::size_t count(std::int64_t bytes) { return static_cast<std::size_t>(bytes); }

// One head of one layer at a time, of which everything is made while its K and V are in the cache.
class Packer {
 public:
  explicit Packer(const Packing& packing)
      : p_(packing),
        kernels_(*active_kernels().sparse),
        groups_(p_.layout.block_tokens / p_.layout.page_tokens),
        record_(2 * p_.layout.head_size * item_bytes(p_.layout.dtype)),
        payload_(p_.layout.page_tokens * record_),
        channel_bytes_(p_.layout.head_size * p_.layout.block_tokens * item_bytes(p_.layout.dtype)),
        key_width_(row_width(p_.layout.head_size)) {}

  std::int64_t head_bytes() const { return groups_ * payload_; }

  // Where a head's channels do not lie in one piece they are made here; and its tokens ordered.
  std::int64_t scratch_bytes() const {
    if (p_.record == PageRecord::kCodes) {
      return std::max(order_bytes(), encode_scratch(p_.layout) + p_.codes.bytes);
    }
    return std::max(order_bytes(), channel_bytes_);
  }

  void pack(std::int64_t layer, std::int64_t block, std::int64_t head, std::byte* scratch) const {
    const PageLayout& layout = p_.layout;
    const auto* from = reinterpret_cast<const std::byte*>(p_.source[layer * p_.blocks + block]) +
                       head * groups_ * layout.page_stride;
    auto* const tail = reinterpret_cast<std::byte*>(p_.tail[block]);
    const std::int64_t place = (layer * layout.kv_heads + head) * groups_;
    auto* const target =
        p_.pages == nullptr ? nullptr
                            : reinterpret_cast<std::byte*>(p_.pages[block]) + place * p_.page_bytes;
    PageLayout made = layout;
    if (is_ordered(layer, block)) {
      copy_ordered(layer, block, head, from, target, scratch);
      made.page_stride = p_.page_bytes;
      from = target;
    } else if (target != nullptr) {
      copy_run({payload_, layout.page_stride, p_.page_bytes, true}, from, target, groups_);
    }
    if (tail == nullptr) return;
    summarize(made, p_.first_layer + layer, head, from, tail, scratch);
    if (p_.row || head + 1 < layout.kv_heads) return;
    clear(tail, channels_of(layer), layout.kv_heads * channel_bytes_, p_.channel_pages * payload_);
    if (layer + 1 < p_.layers) return;
    clear(tail, 0, summary_bytes(), p_.summary_pages * payload_);
  }

 private:
  // What selectors must know of a head's pages from `from` on. `layer` is its number in the slot.
  void summarize(const PageLayout& layout, std::int64_t layer, std::int64_t head,
                 const std::byte* from, std::byte* tail, std::byte* scratch) const {
    const std::int64_t number = layer * layout.kv_heads + head;
    if (p_.record == PageRecord::kCodes) {
      std::byte* const made_codes = scratch + encode_scratch(layout);
      kernels_.encode(layout, p_.codes, from, scratch, made_codes);
      put(tail, 0, number * p_.codes.bytes, made_codes, p_.codes.bytes);
    } else if (p_.channel_pages == 0) {
      for (std::int64_t g = 0; g < groups_; ++g) {
        kernels_.page_record(layout, p_.record, from + g * layout.page_stride,
                             record(tail, number * groups_ + layer * sums_per_layer() + g));
      }
      if (p_.value_sums) {
        const std::int64_t first = (layer + 1) * layout.kv_heads * groups_;
        write_sum(layout, from, record(tail, first + number));
      }
    } else {
      write_sum(layout, from, record(tail, number));
      if (p_.channels >= 0) pack_channels(layout, channels_of(layer), head, from, tail, scratch);
    }
  }

  std::int64_t order_bytes() const {
    if (p_.ordered == nullptr) return 0;
    const std::int64_t tokens = p_.layout.block_tokens;
    const std::int64_t width = std::max(key_width_, p_.feature_width);
    return 4 * tokens * (1 + key_width_) + order_scratch_bytes(tokens, width);
  }
  std::int64_t records_per_head() const { return p_.channel_pages == 0 ? groups_ : 1; }
  std::int64_t sums_per_layer() const { return p_.value_sums ? p_.layout.kv_heads : 0; }
  std::int64_t records() const {
    return p_.layers * (p_.layout.kv_heads * records_per_head() + sums_per_layer());
  }
  std::int64_t summary_bytes() const {
    if (p_.record == PageRecord::kCodes) return p_.layers * p_.layout.kv_heads * p_.codes.bytes;
    return records() * record_;
  }
  std::int64_t channels_of(std::int64_t layer) const {
    return p_.channels + layer * p_.channel_step;
  }

  // Where the stretch of bytes that begins at byte `first` has its byte number `offset`.
  std::byte* byte(std::byte* tail, std::int64_t first, std::int64_t offset) const {
    return tail + first + offset / payload_ * p_.tail_stride + offset % payload_;
  }
  std::byte* record(std::byte* tail, std::int64_t number) const {
    return byte(tail, 0, number * record_);
  }

  // Calls piece(address, offset, bytes) for each piece of [begin, end) of such a stretch.
  template <typename Piece>
  void for_pieces(std::byte* tail, std::int64_t first, std::int64_t begin, std::int64_t end,
                  const Piece& piece) const {
    while (begin < end) {
      const std::int64_t bytes = std::min(end - begin, payload_ - begin % payload_);
      piece(byte(tail, first, begin), begin, bytes);
      begin += bytes;
    }
  }

  // Puts `bytes` at `begin` of the stretch that begins at byte `first`.
  void put(std::byte* tail, std::int64_t first, std::int64_t begin, const std::byte* from,
           std::int64_t bytes) const {
    for_pieces(tail, first, begin, begin + bytes,
               [&](std::byte* piece, std::int64_t offset, std::int64_t size) {
                 std::memcpy(piece, from + (offset - begin), count(size));
               });
  }

  void clear(std::byte* tail, std::int64_t first, std::int64_t begin, std::int64_t end) const {
    for_pieces(tail, first, begin, end, [](std::byte* to, std::int64_t, std::int64_t bytes) {
      std::memset(to, 0, count(bytes));
    });
  }

  // Where only one page could move nothing would.
  bool is_ordered(std::int64_t layer, std::int64_t block) const {
    return p_.ordered != nullptr && p_.ordered[layer] != 0 && p_.kept[block] + 1 < groups_;
  }

  // Copies a head's pages, its tokens by likeness.
  void copy_ordered(std::int64_t layer, std::int64_t block, std::int64_t head,
                    const std::byte* from, std::byte* to, std::byte* scratch) const {
    const PageLayout& layout = p_.layout;
    const std::int64_t tokens = layout.block_tokens;
    auto* const order = reinterpret_cast<std::int32_t*>(scratch);
    auto* const keys = reinterpret_cast<float*>(scratch + 4 * tokens);
    TokenRows rows{tokens, layout.page_tokens, key_width_, keys};
    const std::uint64_t features =
        p_.features == nullptr ? 0 : p_.features[layer * p_.blocks + block];
    if (features == 0) {
      kernels_.key_rows(layout, from, key_width_, keys);
    } else {
      rows.width = p_.feature_width;
      rows.rows = reinterpret_cast<const float*>(features) + head * tokens * p_.feature_width;
    }
    std::byte* const work = scratch + 4 * tokens * (1 + key_width_);
    order_tokens(kernels_, rows, p_.kept[block], work, order);
    const std::int64_t token = record_ / 2;  // of K, and of V
    for (std::int64_t g = 0; g < groups_; ++g, to += p_.page_bytes) {
      for (std::int64_t t = 0; t < layout.page_tokens; ++t) {
        const std::int64_t source = *(order + g * layout.page_tokens + t);
        const std::byte* key = from + source / layout.page_tokens * layout.page_stride +
                               source % layout.page_tokens * token;
        std::memcpy(to + t * token, key, count(token));
        std::memcpy(to + payload_ / 2 + t * token, key + payload_ / 2, count(token));
      }
      std::memset(to + payload_, 0, count(p_.page_bytes - payload_));
    }
  }

  // The sum of V of a head's pages from `from` on, and zeros.
  void write_sum(const PageLayout& layout, const std::byte* from, std::byte* to) const {
    const std::int64_t floats = p_.layout.head_size * 4;
    kernels_.value_sum(layout, from, to);
    std::memset(to + floats, 0, count(record_ - floats));
  }

  void pack_channels(const PageLayout& layout, std::int64_t first, std::int64_t head,
                     const std::byte* from, std::byte* tail, std::byte* scratch) const {
    const std::int64_t begin = head * channel_bytes_;
    const bool whole = p_.tail_stride == payload_ || begin % payload_ + channel_bytes_ <= payload_;
    std::byte* const to = whole ? byte(tail, first, begin) : scratch;
    kernels_.channels(layout, from, to);
    if (!whole) put(tail, first, begin, scratch, channel_bytes_);
  }

  const Packing& p_;
  const SparseKernels& kernels_;
  const std::int64_t groups_;
  const std::int64_t record_;
  const std::int64_t payload_;
  const std::int64_t channel_bytes_;  // of one head
  const std::int64_t key_width_;
};

}  // namespace

void pack_summarized(const Packing& p, std::int64_t threads) {
  const Packer packer(p);
  const std::int64_t heads = p.layout.kv_heads;
  const std::int64_t items = p.layers * p.blocks * heads;
  const std::int64_t step = std::max<std::int64_t>(1, kTaskBytes / packer.head_bytes());
  const std::int64_t team = items * packer.head_bytes() < kMinThreadBytes ? 1 : threads;
  for_tasks((items + step - 1) / step, team, count(packer.scratch_bytes()),
            [&](std::int64_t task, std::byte* scratch) {
              const std::int64_t end = std::min(items, (task + 1) * step);
              for (std::int64_t i = task * step; i < end; ++i) {
                packer.pack(i / heads / p.blocks, i / heads % p.blocks, i % heads, scratch);
              }
            });
}

}  // namespace ssdkv::attention
