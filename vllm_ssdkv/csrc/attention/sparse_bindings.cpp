// Python face of page selection. Arguments are checked here, as in bindings.cpp.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/arguments.hpp"
#include "attention/packing.hpp"
#include "attention/sparse.hpp"
#include "attention/token_order.hpp"
#include "base/arrays.hpp"
#include "base/unlocked.hpp"

namespace ssdkv::attention {
namespace {

constexpr std::int64_t kMaxChannels = kMaxHeadSize;

void check_heads(std::int64_t kv_heads, std::int64_t q_heads, std::int64_t threads) {
  require(kv_heads > 0 && q_heads > 0 && q_heads % kv_heads == 0,
          "q_heads must be a positive multiple of kv_heads");
  check_threads(threads);
}

const std::uint64_t* check_targets(const std::optional<Vector<std::uint64_t>>& list,
                                   std::int64_t blocks) {
  if (!list) return nullptr;
  check_size(*list, blocks, "lists of addresses differ in length");
  return list->data();
}

void py_summarize(Vector<std::uint64_t> source, const BlockShape& shape,
                  std::optional<Vector<std::uint64_t>> bounds,
                  std::optional<Vector<std::uint64_t>> spread,
                  std::optional<Vector<std::uint64_t>> channels,
                  std::optional<Vector<std::uint64_t>> value_sum, std::int64_t threads) {
  check_threads(threads);
  if (spread || channels || value_sum) shape.check_wide();
  const std::int64_t blocks = extent(source.shape(0));
  const Summaries s{shape,
                    source.data(),
                    check_targets(bounds, blocks),
                    check_targets(spread, blocks),
                    check_targets(channels, blocks),
                    check_targets(value_sum, blocks),
                    nullptr,
                    {}};
  const Unlocked unlocked;
  summarize_blocks(s, blocks, threads);
}

void py_encode(Vector<std::uint64_t> source, const BlockShape& shape, Vector<std::uint64_t> codes,
               std::int64_t bits, std::int64_t threads) {
  check_threads(threads);
  check_bits(bits);
  shape.check_wide();
  const std::int64_t blocks = extent(source.shape(0));
  Summaries s{};
  s.layout = shape;
  s.source = source.data();
  s.codes = check_targets(codes, blocks);
  s.code_shape = code_shape(shape, bits);
  const Unlocked unlocked;
  summarize_blocks(s, blocks, threads);
}

// What slots hold beside K and V, of so many layers.
struct SlotTails {
  BlockShape shape;
  std::int64_t layers, page_bytes, summary_pages, channel_pages;
  bool spread, value_sums;
  CodeShape codes;

  SlotTails(const BlockShape& of, std::int64_t layers_of, std::int64_t bytes_of_page,
            std::int64_t pages_of_summaries, std::int64_t pages_of_channels, bool spread_records,
            bool with_value_sums, std::int64_t code_bits)
      : shape(of),
        layers(layers_of),
        page_bytes(bytes_of_page),
        summary_pages(pages_of_summaries),
        channel_pages(pages_of_channels),
        spread(spread_records),
        value_sums(with_value_sums),
        codes(code_shape(shape, code_bits)) {
    require(layers > 0, "a slot has at least one layer");
    if (channel_pages != 0 || spread || code_bits != 0) shape.check_wide();
    require(page_bytes >= shape.payload(), "page_bytes is smaller than K and V of one page");
    require(channel_pages >= 0, "channel_pages must not be negative");
    require(channel_pages == 0 || !spread, "summaries are channels or spread, not both");
    require(spread || !value_sums, "sums of V are behind spread, or before channels");
    require(channel_pages == 0 ||
                2 * channel_pages * shape.page_tokens >= shape.kv_heads * shape.block_tokens,
            "channel_pages are too few for K");
    const std::int64_t records =
        shape.kv_heads * ((channel_pages == 0 ? shape.groups() : 1) + (value_sums ? 1 : 0));
    if (code_bits != 0) {
      check_bits(code_bits);
      require(channel_pages == 0 && !spread, "summaries are codes, channels or spread, only one");
      require(summary_pages * shape.payload() >= layers * shape.kv_heads * codes.bytes,
              "summary_pages are too few for the codes");
      return;
    }
    require(summary_pages * shape.page_tokens >= layers * records,
            "summary_pages are too few for the records");
  }
};

// How tokens are ordered: see Packing.
struct Order {
  Vector<std::uint8_t> ordered;
  Vector<std::int32_t> kept;
  Vector<std::uint64_t> features;
  std::int64_t feature_width;

  Order(const Vector<std::uint8_t>& layers, const Vector<std::int32_t>& kept_pages,
        const std::optional<Vector<std::uint64_t>>& rows, std::int64_t width)
      : ordered(layers), kept(kept_pages), feature_width(width) {
    if (!rows) return;
    features = *rows;
    require(width > 0 && width % kRowStep == 0, "feature_width must be a multiple of 16");
    require(features.shape(0) == ordered.shape(0) * kept.shape(0),
            "features must be [layers * slots]");
  }

  void set(Packing& p) const {
    require(p.pages != nullptr, "tokens are ordered on their way to slots");
    require(extent(ordered.shape(0)) == p.layers, "ordered must be [layers]");
    require(extent(kept.shape(0)) == p.blocks, "kept must be [slots]");
    require(p.layout.block_tokens <= INT32_MAX, "the block has too many tokens");
    for (std::int64_t i = 0; i < p.blocks; ++i) {
      require(kept.data()[i] >= 0 && kept.data()[i] <= p.layout.block_tokens / p.layout.page_tokens,
              "kept must be pages of a block");
    }
    p.ordered = ordered.data();
    p.kept = kept.data();
    p.features = features.is_valid() ? features.data() : nullptr;
    p.feature_width = feature_width;
  }
};

// What every way of packing needs.
Packing packing_of(const Vector<std::uint64_t>& source, const Vector<std::uint64_t>& tail,
                   const SlotTails& tails) {
  Packing p{};
  p.layout = tails.shape;
  p.blocks = extent(tail.shape(0));
  p.source = source.data();
  p.tail = tail.data();
  p.page_bytes = tails.page_bytes;
  p.summary_pages = tails.summary_pages;
  p.channel_pages = tails.channel_pages;
  p.record = tails.codes.bits != 0 ? PageRecord::kCodes
             : tails.spread        ? PageRecord::kSpread
                                   : PageRecord::kBounds;
  p.codes = tails.codes;
  p.value_sums = tails.value_sums;
  return p;
}

void py_make_tails(const Vector<std::uint64_t>& source, const Vector<std::uint64_t>& tail,
                   const SlotTails& tails, std::int64_t threads) {
  check_threads(threads);
  Packing p = packing_of(source, tail, tails);
  require(extent(source.shape(0)) == tails.layers * p.blocks, "source must be [layers * slots]");
  if (p.blocks == 0) return;
  p.layers = tails.layers;
  p.tail_stride = p.page_bytes;
  p.channels = p.summary_pages * p.page_bytes;
  p.channel_step = p.channel_pages * p.page_bytes;
  const Unlocked unlocked;
  pack_summarized(p, threads);
}

void py_pack_summarized(const Vector<std::uint64_t>& source, const Vector<std::uint64_t>& pages,
                        const Vector<std::uint64_t>& rows, const SlotTails& tails,
                        std::int64_t first_layer, std::int64_t channels, std::int64_t threads,
                        const Order* order) {
  check_threads(threads);
  Packing p = packing_of(source, rows, tails);
  require(extent(pages.shape(0)) == p.blocks, "pages and rows differ in slots");
  if (p.blocks == 0) return;
  p.layers = extent(source.shape(0)) / p.blocks;
  p.first_layer = first_layer;
  require(p.layers > 0 && p.layers * p.blocks == extent(source.shape(0)) && first_layer >= 0 &&
              first_layer + p.layers <= tails.layers,
          "source must be [layers * slots], of layers of a slot");
  p.pages = pages.data();
  p.row = true;
  p.tail_stride = tails.shape.payload();
  p.channels = channels;
  p.channel_step = tails.shape.kv_heads * tails.shape.groups() * tails.shape.payload() / 2;
  if (order != nullptr) {
    tails.shape.check_wide();
    order->set(p);
  }
  const Unlocked unlocked;
  pack_summarized(p, threads);
}

void score_records(PageRecord kind, std::int64_t code_bits, ConstCube query, double scale,
                   const Contexts& contexts, Vector<std::uint64_t> records,
                   Array<float, nb::ndim<1>> logits, std::int64_t threads) {
  PageScoring s{};
  if (kind != PageRecord::kBounds) contexts.shape.check_wide();
  s.kind = kind;
  s.layout = contexts.shape;
  s.codes = code_shape(contexts.shape, code_bits);
  s.query_heads = extent(query.shape(1));
  check_heads(s.layout.kv_heads, s.query_heads, threads);
  require(extent(query.shape(0)) == contexts.rows && extent(query.shape(2)) == s.layout.head_size,
          "query must be [rows, q_heads, head_size]");
  contexts.check_addresses(records);
  check_size(logits, columns_of(contexts.first_page) * s.query_heads,
             "logits must be [q_heads * pages]");
  s.query = query.data();
  s.scale = static_cast<float>(scale);
  s.row_begin = contexts.row_begin.data();
  s.records = records.data();
  s.first_column = contexts.first_page.data();
  s.logits = logits.data();
  const Unlocked unlocked;
  score_pages(s, contexts.rows, threads);
}

template <PageRecord Kind>
void py_page_logits(ConstCube query, double scale, const Contexts& contexts,
                    Vector<std::uint64_t> records, Array<float, nb::ndim<1>> logits,
                    std::int64_t threads) {
  score_records(Kind, 0, query, scale, contexts, records, logits, threads);
}

void py_code_logits(ConstCube query, double scale, const Contexts& contexts,
                    Vector<std::uint64_t> records, std::int64_t bits,
                    Array<float, nb::ndim<1>> logits, std::int64_t threads) {
  check_bits(bits);
  score_records(PageRecord::kCodes, bits, query, scale, contexts, records, logits, threads);
}

void py_choose_channels(ConstCube query, double scale, std::int64_t kv_heads,
                        Array<std::int32_t, nb::ndim<3>> channels, Cube reduced) {
  const std::int64_t rows = extent(query.shape(0));
  const std::int64_t q_heads = extent(query.shape(1));
  const std::int64_t head_size = extent(query.shape(2));
  const std::int64_t count = extent(channels.shape(2));
  check_heads(kv_heads, q_heads, 1);
  require(count > 0 && count <= head_size, "channels must be between 1 and head_size");
  require(extent(channels.shape(0)) == rows && extent(channels.shape(1)) == kv_heads,
          "channels must be [rows, kv_heads, count]");
  require(extent(reduced.shape(0)) == rows && extent(reduced.shape(1)) == q_heads &&
              extent(reduced.shape(2)) == count,
          "reduced must be [rows, q_heads, count]");
  const ChannelChoice choice{
      kv_heads,     q_heads,         head_size,     count, static_cast<float>(scale),
      query.data(), channels.data(), reduced.data()};
  const Unlocked unlocked;
  choose_channels(choice, rows);
}

void py_channel_logits(Array<const std::int32_t, nb::ndim<3>> channels, ConstCube reduced,
                       const Contexts& contexts, Vector<std::uint64_t> base,
                       Vector<std::int32_t> window_begin, Vector<std::int32_t> window_end,
                       Vector<std::uint64_t> window, Array<float, nb::ndim<1>> logits,
                       bool chosen_only, std::int64_t threads) {
  ChannelScoring s{};
  contexts.shape.check_wide();
  const std::int64_t rows = contexts.rows;
  const std::int64_t head_size = contexts.shape.head_size;
  s.layout = contexts.shape;
  s.query_heads = extent(reduced.shape(1));
  s.count = extent(channels.shape(2));
  check_heads(s.layout.kv_heads, s.query_heads, threads);
  require(extent(channels.shape(0)) == rows && extent(channels.shape(1)) == s.layout.kv_heads &&
              extent(reduced.shape(0)) == rows && extent(reduced.shape(2)) == s.count &&
              s.count > 0 && s.count <= kMaxChannels,
          "channels [rows, kv_heads, count] and reduced [rows, q_heads, count] differ");
  for (std::size_t i = 0; i < channels.size(); ++i) {
    require(channels.data()[i] >= 0 && channels.data()[i] < head_size,
            "a channel lies outside the head");
  }
  contexts.check_addresses(base);
  check_blocks(window_begin, window_end, rows, extent(window.shape(0)));
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t blocks = window_end.data()[r] - window_begin.data()[r];
    require(contexts.window_tokens.data()[r] <= blocks * s.layout.block_tokens,
            "a window has more tokens than its blocks hold");
  }
  check_size(logits, columns_of(contexts.first_token) * s.query_heads,
             "logits must be [q_heads * tokens]");
  std::vector<std::int32_t> place(channels.data(), channels.data() + channels.size());
  if (chosen_only) {
    for (std::size_t i = 0; i < place.size(); ++i) {
      place[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) % s.count);
    }
  }
  s.held = chosen_only ? s.count : head_size;
  s.place = place.data();
  s.channels = channels.data();
  s.query = reduced.data();
  s.row_begin = contexts.row_begin.data();
  s.row_end = contexts.row_end.data();
  s.base = base.data();
  s.window_begin = window_begin.data();
  s.window = window.data();
  s.window_tokens = contexts.window_tokens.data();
  s.first_column = contexts.first_token.data();
  s.logits = logits.data();
  const Unlocked unlocked;
  score_channels(s, rows, threads);
}

void py_weigh(Vector<float> logits, Vector<std::int64_t> first_page,
              std::optional<ConstMatrix> window_lse, Array<float, nb::ndim<1>> weights,
              Matrix window_mass, Matrix lse, std::int64_t q_heads, std::int64_t page_tokens,
              std::int64_t threads) {
  const std::int64_t rows = rows_of(first_page);
  const std::int64_t kv_heads = extent(window_mass.shape(1));
  check_heads(kv_heads, q_heads, threads);
  require(page_tokens > 0, "page_tokens must be positive");
  require(extent(window_mass.shape(0)) == rows, "window_mass must be [rows, kv_heads]");
  require(extent(lse.shape(0)) == rows && extent(lse.shape(1)) == q_heads,
          "lse must be [rows, q_heads]");
  check_size(logits, columns_of(first_page) * q_heads, "logits must be [q_heads * pages]");
  check_size(weights, columns_of(first_page) * kv_heads, "weights must be [kv_heads * pages]");
  if (window_lse) {
    require(extent(window_lse->shape(0)) == rows && extent(window_lse->shape(1)) == q_heads,
            "window_lse must be [rows, q_heads]");
  }
  const Weighting w{kv_heads,
                    q_heads,
                    first_page.data(),
                    logits.data(),
                    static_cast<float>(page_tokens),
                    window_lse ? window_lse->data() : nullptr,
                    weights.data(),
                    window_mass.data(),
                    lse.data()};
  const Unlocked unlocked;
  weigh_columns(w, rows, threads);
}

void py_score_tokens(Vector<float> logits, Vector<std::int64_t> first_token,
                     Vector<std::int64_t> first_column, Array<float, nb::ndim<1>> score,
                     Array<float, nb::ndim<1>> mass, Matrix lse, Matrix window_mass,
                     std::int64_t page_tokens, std::int64_t threads) {
  const std::int64_t rows = rows_of(first_token);
  const std::int64_t kv_heads = extent(window_mass.shape(1));
  const std::int64_t q_heads = extent(lse.shape(1));
  check_heads(kv_heads, q_heads, threads);
  require(page_tokens > 0, "page_tokens must be positive");
  require(rows_of(first_column) == rows && extent(lse.shape(0)) == rows &&
              extent(window_mass.shape(0)) == rows,
          "first_column, lse and window_mass must have the rows of first_token");
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t columns = first_column.data()[r + 1] - first_column.data()[r];
    require(columns * page_tokens <= first_token.data()[r + 1] - first_token.data()[r],
            "a row's context has more tokens than the row");
  }
  check_size(logits, columns_of(first_token) * q_heads, "logits must be [q_heads * tokens]");
  check_size(score, columns_of(first_column) * kv_heads, "score must be [kv_heads * columns]");
  check_size(mass, columns_of(first_column) * kv_heads, "mass must be [kv_heads * columns]");
  const TokenScoring s{kv_heads,           q_heads,       page_tokens,
                       first_token.data(), logits.data(), first_column.data(),
                       score.data(),       mass.data(),   lse.data(),
                       window_mass.data()};
  const Unlocked unlocked;
  score_tokens(s, rows, threads);
}

std::tuple<ArrayOut<std::int32_t>, ArrayOut<std::int32_t>, ArrayOut<float>> py_choose(
    Vector<float> score, Vector<float> mass, ConstMatrix window_mass,
    Vector<std::int64_t> first_column, Vector<std::int32_t> least, Vector<std::int32_t> most,
    std::int64_t sinks, double p, std::int64_t threads) {
  const std::int64_t rows = rows_of(first_column);
  const std::int64_t kv_heads = extent(window_mass.shape(1));
  check_heads(kv_heads, kv_heads, threads);
  require(extent(window_mass.shape(0)) == rows, "window_mass must be [rows, kv_heads]");
  check_size(score, columns_of(first_column) * kv_heads, "score must be [kv_heads * columns]");
  check_size(mass, columns_of(first_column) * kv_heads, "mass must be [kv_heads * columns]");
  check_size(least, rows, "least must be [rows]");
  check_size(most, rows, "most must be [rows]");
  require(sinks >= 0 && !std::isnan(p), "sinks or p out of range");
  const ColumnChoice choice{kv_heads,     sinks,       p,
                            least.data(), most.data(), first_column.data(),
                            score.data(), mass.data(), window_mass.data()};
  ChosenColumns chosen;
  {
    const Unlocked unlocked;
    chosen = choose_columns(choice, rows, threads);
  }
  return {to_numpy(std::move(chosen.columns)), to_numpy(std::move(chosen.begin)),
          to_numpy(std::move(chosen.mass))};
}

void py_cover(Vector<float> logits, Vector<std::int64_t> first_token, ConstMatrix lse,
              Vector<std::int32_t> window_tokens, Vector<std::int32_t> pages,
              Vector<std::int32_t> begin, std::optional<Mask> token_mask, Matrix alpha,
              std::int64_t page_tokens, std::int64_t column_tokens,
              std::optional<ConstMatrix> window_lse, std::int64_t threads) {
  const std::int64_t rows = rows_of(first_token);
  const std::int64_t q_heads = extent(lse.shape(1));
  require(rows == 0 || (extent(begin.shape(0)) - 1) % rows == 0,
          "begin must be [rows * kv_heads + 1]");
  const std::int64_t kv_heads = rows == 0 ? 1 : (extent(begin.shape(0)) - 1) / rows;
  check_heads(kv_heads, q_heads, threads);
  require(page_tokens > 0 && column_tokens > 0, "page_tokens and column_tokens must be positive");
  require(extent(lse.shape(0)) == rows && extent(alpha.shape(0)) == rows &&
              extent(alpha.shape(1)) == q_heads,
          "lse and alpha must be [rows, q_heads]");
  require(!window_lse ||
              (extent(window_lse->shape(0)) == rows && extent(window_lse->shape(1)) == q_heads),
          "window_lse must be [rows, q_heads]");
  check_size(window_tokens, rows, "window_tokens must be [rows]");
  check_size(logits, columns_of(first_token) * q_heads, "logits must be [q_heads * tokens]");
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t context =
        first_token.data()[r + 1] - first_token.data()[r] - window_tokens.data()[r];
    require(window_tokens.data()[r] >= 0 && context >= 0, "a window is larger than its row");
    for (std::int64_t i = r * kv_heads; i < (r + 1) * kv_heads; ++i) {
      const std::int64_t first = begin.data()[i];
      const std::int64_t last = begin.data()[i + 1];
      require(first >= 0 && first <= last && last <= extent(pages.shape(0)),
              "a list reaches beyond the pages");
      for (std::int64_t at = first; at < last; ++at) {
        const std::int64_t page = pages.data()[at];
        require(page >= 0 && (page + 1) * page_tokens <= context,
                "a page lies outside its row's context");
      }
    }
  }
  Coverage c{};
  c.kv_heads = kv_heads;
  c.query_heads = q_heads;
  c.page_tokens = page_tokens;
  c.first_token = first_token.data();
  c.window_tokens = window_tokens.data();
  c.logits = logits.data();
  c.lse = lse.data();
  c.pages = pages.data();
  c.begin = begin.data();
  if (token_mask) {
    require(token_mask->shape(0) == pages.shape(0) && extent(token_mask->shape(1)) == page_tokens,
            "token_mask must be [pages, page_tokens]");
    c.token_mask = token_mask->data();
  }
  c.alpha = alpha.data();
  c.column_tokens = static_cast<float>(column_tokens);
  if (window_lse) c.window_lse = window_lse->data();
  const Unlocked unlocked;
  cover_pages(c, rows, threads);
}

// Lists of pages without those that are in others, all of them ascending.
std::pair<ArrayOut<std::int32_t>, ArrayOut<std::int32_t>> py_without(
    const Vector<std::int32_t>& pages, const Vector<std::int32_t>& begin,
    const Vector<std::int32_t>& known, const Vector<std::int32_t>& known_begin) {
  require(begin.shape(0) > 0 && begin.shape(0) == known_begin.shape(0),
          "the lists differ in number");
  const auto check = [](const Vector<std::int32_t>& edges, std::size_t count) {
    require(edges.data()[0] == 0 && extent(count) == edges.data()[edges.shape(0) - 1],
            "the lists' edges do not fit their pages");
    for (std::size_t i = 1; i < edges.shape(0); ++i) {
      require(edges.data()[i] >= edges.data()[i - 1], "a list has a negative length");
    }
  };
  check(begin, pages.shape(0));
  check(known_begin, known.shape(0));
  std::vector<std::int32_t> left;
  std::vector<std::int32_t> edges{0};
  edges.reserve(begin.shape(0));
  for (std::size_t i = 0; i + 1 < begin.shape(0); ++i) {
    std::set_difference(pages.data() + begin.data()[i], pages.data() + begin.data()[i + 1],
                        known.data() + known_begin.data()[i],
                        known.data() + known_begin.data()[i + 1], std::back_inserter(left));
    edges.push_back(static_cast<std::int32_t>(left.size()));
  }
  return {to_numpy(std::move(left)), to_numpy(std::move(edges))};
}

void py_compensate(const BoundState& state, const Vector<std::int64_t>& token,
                   const ConstMatrix& alpha, const ConstCube& mean,
                   const std::optional<Vector<float>>& sinks) {
  const auto heads = static_cast<std::size_t>(state.query_heads);
  const std::size_t kv_heads = mean.shape(1);
  require(extent(mean.shape(2)) == state.head_size, "the state and mean do not belong together");
  require(alpha.shape(0) == token.shape(0) && mean.shape(0) == token.shape(0) &&
              alpha.shape(1) == heads && kv_heads > 0 && heads % kv_heads == 0,
          "alpha and mean must have one row for each token");
  if (sinks) check_size(*sinks, state.query_heads, "sinks must be [q_heads]");
  for (std::size_t r = 0; r < token.shape(0); ++r) {
    const std::int64_t t = token.data()[r];
    require(t >= 0 && t < state.tokens, "a token lies outside the state");
    compensate(state, t, extent(kv_heads), alpha.data() + r * heads,
               mean.data() + r * kv_heads * mean.shape(2), sinks ? sinks->data() : nullptr);
  }
}

// Adds V of a token of each of some places, and answers with the means.
nb::ndarray<nb::numpy, float, nb::ndim<3>> py_add_values(const BoundValueSums& sums,
                                                         std::int64_t layer,
                                                         const Vector<std::int64_t>& places,
                                                         const Vector<std::int64_t>& positions,
                                                         const ConstCube& values) {
  require(layer >= 0 && layer < sums.layers, "there is no such layer");
  const std::size_t rows = places.shape(0);
  require(positions.shape(0) == rows && values.shape(0) == rows &&
              extent(values.shape(1)) == sums.kv_heads && extent(values.shape(2)) == sums.head_size,
          "values must be [places, kv_heads, head_size]");
  const std::size_t width = values.shape(1) * values.shape(2);
  auto made = std::make_unique<float[]>(rows * width);
  for (std::size_t r = 0; r < rows; ++r) {
    const std::int64_t place = places.data()[r];
    require(place >= 0 && place < sums.places, "there is no such place");
    add_value(sums, place, layer, positions.data()[r], values.data() + r * width,
              made.get() + r * width);
  }
  float* const means = made.release();
  const nb::capsule owner(means, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return {means, {rows, values.shape(1), values.shape(2)}, owner};
}

// The softmax mass that lists leave out, where there is an estimate (it is not NaN), and the tokens
// that a mask leaves in.
std::pair<double, std::int64_t> py_count_choice(const ConstMatrix& mass,
                                                std::optional<Mask> token_mask) {
  double missing = 0;
  for (std::size_t i = 0; i < mass.size(); ++i) {
    if (mass.data()[i] < 1.0F) missing += 1.0 - static_cast<double>(mass.data()[i]);
  }
  std::int64_t tokens = 0;
  if (token_mask) {
    for (std::size_t i = 0; i < token_mask->size(); ++i) tokens += token_mask->data()[i];
  }
  return {missing, tokens};
}

}  // namespace

void bind_sparse(nb::module_& module) {
  module.def("summarize", &py_summarize, nb::arg("source").noconvert(), nb::arg("shape"),
             nb::arg("bounds").noconvert().none(), nb::arg("spread").noconvert().none(),
             nb::arg("channels").noconvert().none(), nb::arg("value_sum").noconvert().none(),
             nb::arg("threads"),
             "Write summaries of blocks: page records, channel-major K and sums of V.");
  module.def("encode", &py_encode, nb::arg("source").noconvert(), nb::arg("shape"),
             nb::arg("codes").noconvert(), nb::arg("bits"), nb::arg("threads"),
             "Write K of blocks in 1, 2 or 4 bits, a record for each KV head.");
  nb::class_<SlotTails>(module, "SlotTails", R"(Data of slots of L layers beside K and V.

Pages are ``page_bytes`` apart. A tail has ``summary_pages``, then ``channel_pages`` of each layer.
Without channel pages summaries are bounds, or ``spread``, behind which may be the sums of V
(``value_sums``), or codes of ``code_bits``, if not 0.)")
      .def(nb::init<const BlockShape&, std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool,
                    bool, std::int64_t>(),
           nb::arg("shape"), nb::arg("layers"), nb::arg("page_bytes"), nb::arg("summary_pages"),
           nb::arg("channel_pages"), nb::arg("spread"), nb::arg("value_sums"),
           nb::arg("code_bits"));
  nb::class_<Order>(module, "Order", R"(Order of the tokens of blocks on their way to slots.

Tokens of layers that are ``ordered [L]`` go into their pages by likeness, but for the first ``kept
[n]`` pages: by K or by the ``features [L * n]`` of a block, addresses, 0 for none.)")
      .def(nb::init<const Vector<std::uint8_t>&, const Vector<std::int32_t>&,
                    const std::optional<Vector<std::uint64_t>>&, std::int64_t>(),
           nb::arg("ordered").noconvert(), nb::arg("kept").noconvert(),
           nb::arg("features").noconvert().none(), nb::arg("feature_width"));
  module.def("make_tails", &py_make_tails, nb::arg("source").noconvert(),
             nb::arg("tail").noconvert(), nb::arg("tails"), nb::arg("threads"),
             R"(Make the tails of n slots.

``source [L * n]``: addresses of each layer's part of each block; ``tail [n]``: those of the tails'
first pages.)");
  module.def("pack_summarized", &py_pack_summarized, nb::arg("source").noconvert(),
             nb::arg("pages").noconvert(), nb::arg("rows").noconvert(), nb::arg("tails"),
             nb::arg("first_layer"), nb::arg("channels"), nb::arg("threads"),
             nb::arg("order") = nb::none(),
             R"(Copy layers of n blocks to slots, and make what selectors must know of them.

``source [l * n]``: addresses of each block's part of l layers, from ``first_layer`` on. ``pages
[n]``: addresses of these layers' first pages of K and V in slots. ``rows [n]``: addresses of rows
of a table of summaries, 0 for none, whose byte ``channels`` begins channel-major K; -1: they have
none.)");
  nb::class_<Contexts>(module, "Contexts",
                       R"(Contexts and windows of rows, for every layer of a step.

Row r has the blocks ``row_begin[r]..row_end[r]`` of what a call lists, and ``window_tokens[r]``
behind them; its columns begin at ``first_page[r]`` and ``first_token[r]`` of a table.)")
      .def(nb::init<const BlockShape&, Vector<std::int32_t>, Vector<std::int32_t>,
                    Vector<std::int32_t>, Vector<std::int64_t>, Vector<std::int64_t>>(),
           nb::arg("shape"), nb::arg("row_begin").noconvert(), nb::arg("row_end").noconvert(),
           nb::arg("window_tokens").noconvert(), nb::arg("first_page").noconvert(),
           nb::arg("first_token").noconvert());
  const auto bind_page_logits = [&](const char* name, auto function, const char* text) {
    module.def(name, function, nb::arg("query").noconvert(), nb::arg("scale"), nb::arg("contexts"),
               nb::arg("records").noconvert(), nb::arg("logits").noconvert(), nb::arg("threads"),
               text);
  };
  bind_page_logits("bound_logits", &py_page_logits<PageRecord::kBounds>,
                   "Upper bounds of the scaled logits of each page.");
  bind_page_logits("spread_logits", &py_page_logits<PageRecord::kSpread>,
                   "Logits of each page from mean and variance of its keys.");
  module.def("code_logits", &py_code_logits, nb::arg("query").noconvert(), nb::arg("scale"),
             nb::arg("contexts"), nb::arg("records").noconvert(), nb::arg("bits"),
             nb::arg("logits").noconvert(), nb::arg("threads"),
             "Log of the mean over each page's tokens of exp of the logits from their codes.");
  module.def(
      "code_bytes",
      [](const BlockShape& shape, std::int64_t bits) {
        check_bits(bits);
        return code_shape(shape, bits).bytes;
      },
      nb::arg("shape"), nb::arg("bits"), "Bytes of the codes of one KV head of a block.");
  module.def(
      "rotation",
      [](std::int64_t head_size) {
        require(head_size > 0 && head_size <= kMaxHeadSize, "head_size is out of range");
        std::vector<float> matrix(static_cast<std::size_t>(head_size * head_size));
        code_rotation(head_size, matrix.data());
        return to_numpy(std::move(matrix));
      },
      nb::arg("head_size"), "The matrix by which codes rotate keys.");
  module.def(
      "code_levels",
      [](std::int64_t bits) {
        check_bits(bits);
        std::vector<float> levels(std::size_t{1} << bits);
        code_levels(bits, levels.data());
        return to_numpy(std::move(levels));
      },
      nb::arg("bits"), "The numbers that codes stand for, ascending.");
  module.def("choose_channels", &py_choose_channels, nb::arg("query").noconvert(), nb::arg("scale"),
             nb::arg("kv_heads"), nb::arg("channels").noconvert(), nb::arg("reduced").noconvert(),
             "SparQ's channels and the scaled queries of them.");
  module.def("channel_logits", &py_channel_logits, nb::arg("channels").noconvert(),
             nb::arg("reduced").noconvert(), nb::arg("contexts"), nb::arg("base").noconvert(),
             nb::arg("window_begin").noconvert(), nb::arg("window_end").noconvert(),
             nb::arg("window").noconvert(), nb::arg("logits").noconvert(), nb::arg("chosen_only"),
             nb::arg("threads"), "SparQ's approximate logits of context, then window.");
  module.def("weigh", &py_weigh, nb::arg("logits").noconvert(), nb::arg("first_page").noconvert(),
             nb::arg("window_lse").noconvert().none(), nb::arg("weights").noconvert(),
             nb::arg("window_mass").noconvert(), nb::arg("lse").noconvert(), nb::arg("q_heads"),
             nb::arg("page_tokens"), nb::arg("threads"),
             "Mean softmax weight of each page over a KV head's query heads.");
  module.def("score_tokens", &py_score_tokens, nb::arg("logits").noconvert(),
             nb::arg("first_token").noconvert(), nb::arg("first_column").noconvert(),
             nb::arg("score").noconvert(), nb::arg("mass").noconvert(), nb::arg("lse").noconvert(),
             nb::arg("window_mass").noconvert(), nb::arg("page_tokens"), nb::arg("threads"),
             "Scores and masses of context pages or tokens from logits of tokens.");
  module.def("choose", &py_choose, nb::arg("score").noconvert(), nb::arg("mass").noconvert(),
             nb::arg("window_mass").noconvert(), nb::arg("first_column").noconvert(),
             nb::arg("least").noconvert(), nb::arg("most").noconvert(), nb::arg("sinks"),
             nb::arg("p"), nb::arg("threads"), "Columns by score until p of the mass is covered.");
  module.def("cover", &py_cover, nb::arg("logits").noconvert(), nb::arg("first_token").noconvert(),
             nb::arg("lse").noconvert(), nb::arg("window_tokens").noconvert(),
             nb::arg("pages").noconvert(), nb::arg("begin").noconvert(),
             nb::arg("token_mask").noconvert().none(), nb::arg("alpha").noconvert(),
             nb::arg("page_tokens"), nb::arg("column_tokens"),
             nb::arg("window_lse").noconvert().none(), nb::arg("threads"),
             R"(Softmax mass of chosen pages and the window, per query head.

A page has ``page_tokens`` columns of ``logits``, each of which stands for ``column_tokens``.
``window_lse [rows, q_heads]``: of windows that have no columns.)");
  module.def("without", &py_without, nb::arg("pages").noconvert(), nb::arg("begin").noconvert(),
             nb::arg("known").noconvert(), nb::arg("known_begin").noconvert(),
             "Lists of pages without those of other lists, and their edges.");
  module.def("compensate", &py_compensate, nb::arg("state"), nb::arg("token").noconvert(),
             nb::arg("alpha").noconvert(), nb::arg("mean").noconvert(),
             nb::arg("sinks").noconvert().none(),
             R"(acc = alpha * acc + (1 - alpha) * l * mean for some tokens.

With ``sinks [q_heads]``, logits of attention sinks that alpha leaves out, which are not missing.)");
  nb::class_<BoundValueSums>(module, "ValueSums", R"(Sums of V of requests' tokens, by place.

``blocks`` and ``rest [places, layers, kv_heads, head_size]`` are those of complete blocks, and of
the tokens behind them; ``tokens [places, layers]`` are in both. All three are written to.)")
      .def(nb::init<const Array<float, nb::ndim<4>>&, const Array<float, nb::ndim<4>>&,
                    const Array<std::int64_t, nb::ndim<2>>&, std::int64_t>(),
           nb::arg("blocks").noconvert(), nb::arg("rest").noconvert(),
           nb::arg("tokens").noconvert(), nb::arg("block_tokens"))
      .def("add", &py_add_values, nb::arg("layer"), nb::arg("places").noconvert(),
           nb::arg("positions").noconvert(), nb::arg("values").noconvert(),
           R"(Add ``values [n, kv_heads, head_size]`` of the tokens at ``positions [n]``.

The means over all tokens of the ``places [n]``, them included.)");
  module.def("count_choice", &py_count_choice, nb::arg("mass").noconvert(),
             nb::arg("token_mask").noconvert().none(),
             "Softmax mass that lists leave out, and tokens that a mask leaves in.");
}

}  // namespace ssdkv::attention
