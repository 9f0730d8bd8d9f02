// Blocks packed into slots and rows that have no spare byte, from several threads.
#include "attention/packing.hpp"

#include <bit>
#include <cmath>
#include <cstring>
#include <memory>

#include "attention/isa.hpp"
#include "suite.hpp"

namespace ssdkv::test {
namespace {

using attention::DType;

using Bytes = std::unique_ptr<std::byte[]>;

size_t at(int64_t i) { return static_cast<size_t>(i); }

Bytes bytes_of(int64_t count) { return Bytes(new std::byte[at(count)]); }

uint64_t address(const Bytes& bytes) { return reinterpret_cast<uint64_t>(bytes.get()); }

// Blocks of random numbers, and a place for the pages and the tail, or the row, of each slot.
struct Packed {
  attention::Packing packing{};
  int64_t item = 0, payload = 0, groups = 0, record = 0;
  std::vector<Bytes> blocks, slots, tails;
  std::vector<uint64_t> source, pages, tail;

  explicit Packed(Random& random, int64_t most_blocks);
  int64_t tail_bytes() const { return packing.channels + packing.layers * packing.channel_step; }
  float number(const std::byte* from) const;
  // K, or V, of one token.
  const std::byte* entry(int64_t layer, int64_t block, int64_t head, int64_t token,
                         bool value) const;
  // Byte number `offset` of the payloads of a tail from byte `first` on.
  const std::byte* byte(int64_t block, int64_t first, int64_t offset) const;
  void check_pages(int64_t layer, int64_t block, int64_t head) const;
  void check_bounds(int64_t layer, int64_t block, int64_t head) const;
  void check_spread(int64_t layer, int64_t block, int64_t head) const;
  void check_channels(int64_t layer, int64_t block, int64_t head) const;
  void check_all() const;
};

Packed::Packed(Random& random, int64_t most_blocks) {
  const DType dtype = random(2) == 0 ? DType::kFloat32 : DType::kBFloat16;
  item = dtype == DType::kFloat32 ? 4 : 2;
  constexpr int64_t kSizes[] = {8, 24, 64, 128};
  const int64_t size = kSizes[random(4)];
  const int64_t page_tokens = 1 + static_cast<int64_t>(random(20));
  groups = 1 + static_cast<int64_t>(random(4));
  const int64_t heads = 1 + static_cast<int64_t>(random(3));
  record = 2 * size * item;
  payload = page_tokens * record;
  packing.layout = {groups * page_tokens, page_tokens, payload, heads, size, dtype};
  packing.layers = 1 + static_cast<int64_t>(random(3));
  packing.blocks = 1 + static_cast<int64_t>(random(at(most_blocks)));
  packing.page_bytes = payload + static_cast<int64_t>(random(2)) * 96;
  const uint64_t kind = random(3);  // bounds, channels, spread
  packing.record = kind == 2 ? attention::PageRecord::kSpread : attention::PageRecord::kBounds;
  packing.channel_pages = kind == 1 ? (heads * groups + 1) / 2 : 0;
  const int64_t records = packing.layers * heads * (kind == 1 ? 1 : groups);
  packing.summary_pages = (records + page_tokens - 1) / page_tokens;
  packing.row = random(2) == 0;
  packing.tail_stride = packing.row ? payload : packing.page_bytes;
  packing.channels = packing.row ? records * record : packing.summary_pages * packing.page_bytes;
  packing.channel_step = packing.channel_pages * packing.page_bytes;
  if (packing.row && kind == 1) packing.channel_step = heads * groups * payload / 2;
  for (int64_t i = 0; i < packing.layers * packing.blocks; ++i) {
    Bytes& block = blocks.emplace_back(bytes_of(heads * groups * payload));
    for (int64_t j = 0; j < heads * groups * payload; j += item) {
      const auto bits = std::bit_cast<uint32_t>((static_cast<float>(random(33)) - 16.0F) / 8.0F);
      const auto half = static_cast<uint16_t>(bits >> 16);
      if (item == 4) std::memcpy(block.get() + j, &bits, 4);
      if (item == 2) std::memcpy(block.get() + j, &half, 2);
    }
    source.push_back(address(block));
  }
  const int64_t kv = packing.layers * heads * groups * packing.page_bytes;
  for (int64_t i = 0; i < packing.blocks; ++i) {
    pages.push_back(address(slots.emplace_back(bytes_of(kv))));
    tail.push_back(address(tails.emplace_back(bytes_of(tail_bytes()))));
  }
  packing.source = source.data();
  packing.pages = pages.data();
  packing.tail = tail.data();
}

float Packed::number(const std::byte* from) const {
  uint32_t bits = 0;
  std::memcpy(&bits, from, at(item));
  return std::bit_cast<float>(item == 4 ? bits : bits << 16);
}

const std::byte* Packed::entry(int64_t layer, int64_t block, int64_t head, int64_t token,
                               bool value) const {
  const attention::PageLayout& l = packing.layout;
  const int64_t row = (value ? l.page_tokens : 0) + token % l.page_tokens;
  return blocks[at(layer * packing.blocks + block)].get() +
         (head * groups + token / l.page_tokens) * payload + row * l.head_size * item;
}

const std::byte* Packed::byte(int64_t block, int64_t first, int64_t offset) const {
  return tails[at(block)].get() + first + offset / payload * packing.tail_stride + offset % payload;
}

void Packed::check_pages(int64_t layer, int64_t block, int64_t head) const {
  const int64_t first = (layer * packing.layout.kv_heads + head) * groups;
  for (int64_t g = 0; g < groups; ++g) {
    const std::byte* page = slots[at(block)].get() + (first + g) * packing.page_bytes;
    const std::byte* from = entry(layer, block, head, g * packing.layout.page_tokens, false);
    check(std::memcmp(page, from, at(payload)) == 0, "a page is packed");
    for (int64_t i = payload; i < packing.page_bytes; ++i) {
      check(page[i] == std::byte{0}, "padding is zero");
    }
  }
}

void Packed::check_bounds(int64_t layer, int64_t block, int64_t head) const {
  const attention::PageLayout& l = packing.layout;
  for (int64_t t = 0; t < l.block_tokens; ++t) {
    const int64_t list = (layer * l.kv_heads + head) * groups + t / l.page_tokens;
    const std::byte* bounds = byte(block, 0, list * record);
    for (int64_t d = 0; d < l.head_size; ++d) {
      const float key = number(entry(layer, block, head, t, false) + d * item);
      check(number(bounds + d * item) <= key && key <= number(bounds + (l.head_size + d) * item),
            "a key is within its page's bounds");
    }
  }
}

void Packed::check_spread(int64_t layer, int64_t block, int64_t head) const {
  const attention::PageLayout& l = packing.layout;
  const double step = item == 4 ? 1e-5 : 0x1p-8;
  for (int64_t g = 0; g < groups; ++g) {
    const std::byte* spread = byte(block, 0, ((layer * l.kv_heads + head) * groups + g) * record);
    for (int64_t d = 0; d < l.head_size; ++d) {
      double sum = 0, squares = 0;
      for (int64_t t = g * l.page_tokens; t < (g + 1) * l.page_tokens; ++t) {
        const double key{number(entry(layer, block, head, t, false) + d * item)};
        sum += key;
        squares += key * key;
      }
      const double mean = sum / static_cast<double>(l.page_tokens);
      const double variance = squares / static_cast<double>(l.page_tokens) - mean * mean;
      const double got{number(spread + d * item)};
      const double apart{number(spread + (l.head_size + d) * item)};
      check(std::abs(got - mean) <= step * std::abs(mean) + 1e-5, "the mean of a page");
      check(std::abs(apart - variance) <= step * variance + 1e-5, "the variance of a page");
    }
  }
}

void Packed::check_channels(int64_t layer, int64_t block, int64_t head) const {
  const attention::PageLayout& l = packing.layout;
  const int64_t first = packing.channels + layer * packing.channel_step;
  const int64_t number_of = layer * l.kv_heads + head;
  for (int64_t d = 0; d < l.head_size; ++d) {
    float sum = 0, want = 0;
    std::memcpy(&sum, byte(block, 0, number_of * record + d * 4), 4);
    for (int64_t t = 0; t < l.block_tokens; ++t) {
      want += number(entry(layer, block, head, t, true) + d * item);
      const std::byte* key = entry(layer, block, head, t, false) + d * item;
      const std::byte* got =
          byte(block, first, ((head * l.head_size + d) * l.block_tokens + t) * item);
      check(std::memcmp(got, key, at(item)) == 0, "a channel");
    }
    check(sum == want, "a sum of V");
  }
}

void Packed::check_all() const {
  for (int64_t layer = 0; layer < packing.layers; ++layer) {
    for (int64_t block = 0; block < packing.blocks; ++block) {
      for (int64_t head = 0; head < packing.layout.kv_heads; ++head) {
        check_pages(layer, block, head);
        if (packing.record == attention::PageRecord::kSpread) {
          check_spread(layer, block, head);
        } else if (packing.channel_pages == 0) {
          check_bounds(layer, block, head);
        } else {
          check_channels(layer, block, head);
        }
      }
    }
  }
}

void pack(Random& random, int64_t most_blocks, int64_t threads) {
  Packed packed(random, most_blocks);
  attention::pack_summarized(packed.packing, threads);
  packed.check_all();
  // Once more the tails alone.
  for (Bytes& bytes : packed.tails) {
    std::memset(bytes.get(), 0x5A, at(packed.tail_bytes()));
  }
  packed.packing.pages = nullptr;
  attention::pack_summarized(packed.packing, threads);
  packed.check_all();
}

void every_instruction_set() {
  for (const std::string& isa : attention::available_isas()) {
    attention::select_isa(isa);
    Random random(7);
    for (int round = 0; round < 40; ++round) pack(random, 3, 1);
  }
  attention::select_isa(attention::available_isas().front());
}

void many_callers() {
  in_threads(4, [](unsigned thread) {
    Random random(thread);
    for (int round = 0; round < 4; ++round) pack(random, 20, 1 + thread);
  });
}

}  // namespace

Tests packing_tests() {
  return {{"packing on every instruction set", every_instruction_set},
          {"packing: many callers", many_callers}};
}

}  // namespace ssdkv::test
