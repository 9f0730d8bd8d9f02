// Layers of a step's plan over buffers without a spare byte, from several threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "attention/isa.hpp"
#include "attention/sparse.hpp"
#include "decode/layer_run.hpp"
#include "decode/page_table.hpp"
#include "suite.hpp"

namespace ssdkv::test {
namespace {

using attention::DType;

constexpr int64_t kLayers = 2, kHeader = 64, kPadding = 32;

size_t at(int64_t i) { return static_cast<size_t>(i); }

float number(Random& random) { return (static_cast<float>(random(33)) - 16.0F) / 8.0F; }

std::vector<float> numbers(Random& random, int64_t count) {
  std::vector<float> made(at(count));
  for (float& x : made) x = number(random);
  return made;
}

// Some of the rows that choose.
struct Group {
  std::vector<int32_t> row, begin, end, window, most;
  std::vector<int64_t> first_page{0}, first_token{0};
  decode::ScoredPages scored{};

  decode::ChoosingGroup bound(const decode::ScoredPages& of_all) {
    scored = of_all;
    scored.least = scored.most = most.data();
    return {static_cast<int64_t>(row.size()),
            row.data(),
            begin.data(),
            end.data(),
            window.data(),
            first_page.data(),
            first_token.data(),
            &scored,
            nullptr};
  }
};

// Rows of a token each in fp32, whose contexts lie in slots that rows share.
struct Step {
  int64_t rows, kv_heads, query_heads, size, page_tokens, groups, slots, blocks_each;
  decode::StepPlan plan{};
  bool by_channels, by_token, estimates;
  std::vector<std::vector<float>> slot, record;
  std::vector<float> cache, query, out, sum_blocks, sum_rest;
  std::vector<int32_t> token, ones, begin, end, slot_of, most;
  std::vector<int64_t> position, newest, row_number, sum_tokens, first_page{0};
  std::vector<uint64_t> place, frame, records;
  std::vector<int64_t> block_position;
  decode::PlacedBlocks window{}, whole{}, none{};
  attention::ValueSums sums{};
  decode::ChoosingRows choosing{};
  decode::ScoredPages scored{};
  Group alike[2];

  bool gives_up = false;  // at the first layer that stops

  explicit Step(Random& random);
  int64_t run(bool chooses, int64_t threads);
  void bring(const decode::LayerOperands& operands, attention::AttentionClock& clock);

  // Where pages without a frame are, if there are any.
  std::unique_ptr<PageCache> tables;
  std::vector<float> places;
  std::vector<int64_t> stored;
};

Step::Step(Random& random)
    : rows(1 + static_cast<int64_t>(random(3))),
      kv_heads(1 + static_cast<int64_t>(random(2))),
      query_heads(kv_heads * (1 + static_cast<int64_t>(random(3)))),
      size(8 * (1 + static_cast<int64_t>(random(4)))),
      page_tokens(1 + static_cast<int64_t>(random(8))),
      groups(1 + static_cast<int64_t>(random(3))),
      slots(1 + static_cast<int64_t>(random(6))),
      blocks_each(1 + static_cast<int64_t>(random(at(slots)))),
      by_channels(random(2) == 1),
      by_token(by_channels && random(2) == 1),
      estimates(by_channels && random(2) == 1) {
  const int64_t payload = 2 * page_tokens * size * 4, block_tokens = page_tokens * groups;
  plan.hbm = {block_tokens, page_tokens, payload, kv_heads, size, DType::kFloat32};
  plan.slot = {block_tokens, page_tokens, payload + kPadding, kv_heads, size, DType::kFloat32};
  plan.header_bytes = kHeader;
  plan.tokens = rows;
  const int64_t layer_bytes = kv_heads * groups * plan.slot.page_stride;
  const int64_t record_bytes = kv_heads * (by_channels ? block_tokens : groups * 2) * size * 4;
  for (int64_t i = 0; i < slots; ++i) {
    // The padding of the last page is not there.
    slot.push_back(numbers(random, (kHeader + kLayers * layer_bytes - kPadding) / 4));
    record.emplace_back(at(kLayers * record_bytes / 4));
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const uint64_t from = reinterpret_cast<uint64_t>(slot.back().data()) +
                            static_cast<uint64_t>(plan.layer_offset(layer));
      const uint64_t to = reinterpret_cast<uint64_t>(record.back().data()) +
                          static_cast<uint64_t>(layer * record_bytes);
      attention::Summaries summaries{};
      summaries.layout = plan.slot;
      summaries.source = &from;
      (by_channels ? summaries.channels : summaries.bounds) = &to;
      attention::summarize_blocks(summaries, 1, 1);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    begin.push_back(static_cast<int32_t>(frame.size()));
    const auto first = static_cast<int64_t>(random(at(slots - blocks_each + 1)));
    for (int64_t i = first; i < first + blocks_each; ++i) {
      slot_of.push_back(static_cast<int32_t>(i));
      frame.push_back(reinterpret_cast<uint64_t>(slot[at(i)].data()));
      records.push_back(reinterpret_cast<uint64_t>(record[at(i)].data()));
      block_position.push_back((i - first) * block_tokens);
    }
    end.push_back(static_cast<int32_t>(frame.size()));
    first_page.push_back(first_page.back() + blocks_each * groups);
    token.push_back(static_cast<int32_t>(row));
    ones.push_back(1);
    place.push_back(static_cast<uint64_t>(row));
    newest.push_back(blocks_each * block_tokens);
    position.push_back(blocks_each * block_tokens);
    most.push_back(static_cast<int32_t>(blocks_each * (by_token ? block_tokens : groups)));
    row_number.push_back(row);
    Group& group = alike[row % 2];
    group.row.push_back(static_cast<int32_t>(row));
    group.begin.push_back(begin.back());
    group.end.push_back(end.back());
    group.window.push_back(1);
    group.first_token.push_back(group.first_token.back() + blocks_each * block_tokens + 1);
    group.most.push_back(most.back());
    group.first_page.push_back(group.first_page.back() + blocks_each * groups);
  }
  cache = numbers(random, rows * kv_heads * groups * payload / 4);
  query = numbers(random, rows * query_heads * size);
  out.resize(query.size());
  window = {{rows, token.data(), ones.data(), newest.data(), token.data(), nullptr, false},
            rows,
            place.data(),
            newest.data()};
  whole = {{rows, token.data(), ones.data(), newest.data(), begin.data(), end.data(), false},
           static_cast<int64_t>(frame.size()),
           frame.data(),
           block_position.data()};
  scored = {by_channels ? attention::PageRecord::kChannels : attention::PageRecord::kBounds,
            0,
            by_channels ? 1 + static_cast<int64_t>(random(at(size))) : 0,
            records.data(),
            record_bytes,
            1,
            most.data(),
            most.data(),
            0,
            by_token,
            estimates};
  sum_blocks.resize(at(rows * kLayers * kv_heads * size));
  sum_rest.resize(sum_blocks.size());
  sum_tokens.resize(at(rows * kLayers));
  sums = {kLayers,         kv_heads,         size, block_tokens, sum_blocks.data(),
          sum_rest.data(), sum_tokens.data()};
  choosing = {rows,
              row_number.data(),
              token.data(),
              position.data(),
              begin.data(),
              first_page.data(),
              whole.count,
              frame.data(),
              slot_of.data(),
              slots,
              {},
              nullptr,
              nullptr,
              estimates ? &sums : nullptr,
              row_number.data()};
}

// Returns how many layers stopped.
int64_t Step::run(bool chooses, int64_t threads) {
  std::vector<int32_t> window_end(token);
  for (int32_t& edge : window_end) ++edge;
  window.rows.end = window_end.data();
  none = whole;
  none.count = 0;
  plan.threads = threads;
  plan.window = &window;
  plan.streamed.assign(kLayers, chooses ? &none : &whole);
  plan.choosing = chooses ? &choosing : nullptr;
  // Rows of even and of odd numbers, which choose alike all the same.
  choosing.groups.clear();
  for (Group& group : alike) {
    if (!group.row.empty()) choosing.groups.push_back(group.bound(scored));
  }
  plan.chooses.assign(kLayers, chooses ? 1 : 0);
  plan.totals = {};
  std::fill(sum_rest.begin(), sum_rest.end(), 0.0F);
  std::fill(sum_blocks.begin(), sum_blocks.end(), 0.0F);
  int64_t stopped = 0;
  const int64_t stride = query_heads * size * 4;
  attention::AttentionClock clock;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const decode::LayerOperands operands{layer,
                                         {reinterpret_cast<std::byte*>(query.data()),
                                          DType::kFloat32, stride, rows, query_heads, size},
                                         {reinterpret_cast<std::byte*>(out.data()), DType::kFloat32,
                                          stride, rows, query_heads, size},
                                         reinterpret_cast<uint64_t>(cache.data()),
                                         kv_heads * groups * plan.hbm.page_stride,
                                         0.125F,
                                         attention::kUnbounded,
                                         nullptr,
                                         {},
                                         1.0F,
                                         places.size(),
                                         nullptr};
    if (decode::run_layer(plan, operands, clock)) continue;
    ++stopped;
    if (gives_up) return stopped;
    bring(operands, clock);
  }
  return stopped;
}

// Reads what a layer has stopped for.
void Step::bring(const decode::LayerOperands& operands, attention::AttentionClock& clock) {
  decode::WorkSpace& work = plan.work;
  check(work.asked.has_value(), "there is room");
  const AskedPages asked = *std::exchange(work.asked, std::nullopt);
  const int64_t page = plan.slot.page_stride / 4;
  for (size_t i = asked.held; i < asked.keys.size(); ++i) {
    const int64_t pages = kLayers * kv_heads * groups;
    const float* const from =
        slot[at(asked.keys[i] / pages)].data() + kHeader / 4 + asked.keys[i] % pages * page;
    std::copy(from, from + page - kPadding / 4, places.data() + asked.places[i] * page);
  }
  const std::span<const int64_t> keys(asked.keys.data() + asked.held,
                                      asked.keys.size() - asked.held);
  const std::span<const int32_t> taken(asked.places.data() + asked.held, keys.size());
  tables->complete(keys, taken, std::vector<uint8_t>(keys.size(), 1),
                   std::vector<uint16_t>(keys.size()));
  const FoundPages found =
      tables->find(work.numbers, work.no_frame, asked.which, asked.keys, asked.places);
  std::vector<uint64_t> address(work.address);
  for (size_t i = 0; i < work.outside.size(); ++i) address[at(work.outside[i])] = found.address[i];
  decode::resume(plan, operands,
                 {work.chosen.count, address.data(), work.position.data(), work.chosen.begin,
                  work.chosen.begin + 1, work.chosen.token_mask},
                 clock);
  tables->release(asked.places);
}

// Rows that choose every page attend to what rows that do not choose do.
void all_pages_are_the_context(Random& random, int64_t threads) {
  Step step(random);
  step.run(false, threads);
  const std::vector<float> wanted = step.out;
  step.run(true, threads);
  for (size_t i = 0; i < wanted.size(); ++i) {
    check(std::abs(step.out[i] - wanted[i]) < 1e-4F, "an output");
  }
  const decode::ChoiceTotals& totals = step.plan.totals;
  const int64_t pages = step.first_page.back() * step.kv_heads * kLayers;
  check(totals.lists == step.rows * step.kv_heads * kLayers, "lists");
  check(totals.selected == pages && totals.context == pages, "pages chosen");
  check(totals.missing == 0, "nothing is missing");
  check(totals.tokens == pages * step.page_tokens, "tokens chosen");
  check((totals.channel_bytes > 0) == step.by_channels, "channels that were looked at");
  for (const int64_t tokens : step.sum_tokens) {
    check(tokens == (step.estimates ? step.position.front() + 1 : 0), "values that were added");
  }
  const int64_t of_slot = step.groups * step.kv_heads * kLayers;
  check(totals.framed <= step.slots * of_slot && totals.framed >= step.blocks_each * of_slot,
        "pages of shared slots count once");
}

// Where pages lie changes no bit: some frames are gone, their pages are read, and then found.
void pages_outside_frames(Random& random, int64_t threads) {
  Step step(random);
  step.run(true, threads);
  const std::vector<float> wanted = step.out;
  const int64_t pages = kLayers * step.kv_heads * step.groups;
  const auto places = at(step.slots * pages);
  // The padding of the last place is not there.
  step.places.resize(places * at(step.plan.slot.page_stride / 4) - kPadding / 4);
  const PageLayout layout{reinterpret_cast<uint64_t>(step.places.data()),
                          static_cast<uint64_t>(step.plan.slot.page_stride), kHeader};
  step.tables =
      std::make_unique<PageCache>(layout, places, at(step.slots), at(pages), PagePolicy::kRecent);
  step.stored.assign(step.slot_of.begin(), step.slot_of.end());
  bool outside = false;
  for (size_t i = 0; i < step.frame.size(); ++i) {
    if (step.slot_of[i] % 2 != 0) continue;
    step.frame[i] = 0;
    outside = true;
  }
  step.choosing.cache = step.tables.get();
  step.choosing.stored = step.stored.data();
  // Somebody fails before he takes what a layer has stopped for: it is asked for as if new.
  step.gives_up = true;
  for (int again = 0; again < 2 && outside; ++again) {
    check(step.run(true, threads) == 1, "nothing is in memory");
    check(step.tables->taken() > 0, "the plan has places");
  }
  decode::give_back(step.plan);
  check(step.tables->taken() == 0 && step.tables->held() == 0, "an unread page is held");
  step.gives_up = false;
  for (const bool again : {false, true}) {
    const int64_t stopped = step.run(true, threads);
    check(stopped == (outside && !again ? kLayers : 0), "layers that stopped");
    check(step.out == wanted, "a bit");
    check(step.tables->taken() == 0, "a place was not given back");
  }
  const auto held = static_cast<int64_t>(step.tables->held());
  check(step.plan.totals.held == held, "pages of the cache count once");
}

void every_instruction_set() {
  for (const std::string& isa : attention::available_isas()) {
    attention::select_isa(isa);
    Random random(5);
    for (int round = 0; round < 40; ++round) {
      all_pages_are_the_context(random, 1);
      pages_outside_frames(random, 1);
    }
  }
  attention::select_isa(attention::available_isas().front());
}

void many_callers() {
  in_threads(4, [](unsigned thread) {
    Random random(thread);
    for (int round = 0; round < 20; ++round) {
      all_pages_are_the_context(random, 1 + thread);
      pages_outside_frames(random, 1 + thread);
    }
  });
}

}  // namespace

Tests decode_tests() {
  return {{"layers of a plan on every instruction set", every_instruction_set},
          {"layers of plans: many callers", many_callers}};
}

}  // namespace ssdkv::test
