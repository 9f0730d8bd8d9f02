// Python face of a step's plan. Arguments are checked here, once per step, but for those of a
// layer; what cannot be checked is that raw addresses point at memory of the stated shape.
#include "decode/bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "attention/arguments.hpp"
#include "attention/tensors.hpp"
#include "base/arrays.hpp"
#include "base/unlocked.hpp"
#include "decode/layer_run.hpp"
#include "decode/windows.hpp"

namespace ssdkv::decode {
namespace {

using attention::BlockShape;
using attention::BoundRows;
using attention::BoundValueSums;
using attention::check_size;
using attention::Contexts;
using attention::extent;
using attention::PageRecord;
using attention::require;
using attention::Vector;
using attention::Vectors;
namespace nb = nanobind;

// The structs of step_plan.hpp with the arrays that they point into.

struct BoundBlocks : PlacedBlocks {
  BoundBlocks(std::shared_ptr<const BoundRows> rows_of, const Vector<std::uint64_t>& places,
              const Vector<std::int64_t>& positions)
      : PlacedBlocks{*rows_of, extent(places.shape(0)), places.data(), positions.data()},
        bound(std::move(rows_of)),
        place_(places),
        position_(positions) {
    check_size(positions, count, "place and position differ in length");
    require(!bound->list_per_head, "each row has one list of blocks");
    require(bound->last_page <= count, "a list reaches beyond the blocks");
    for (std::int64_t i = 0; i < count; ++i) last_place = std::max(last_place, place[i]);
  }

  std::shared_ptr<const BoundRows> bound;
  std::uint64_t last_place = 0;

 private:
  Vector<std::uint64_t> place_;
  Vector<std::int64_t> position_;
};

struct BoundScoredPages : ScoredPages {
  BoundScoredPages(PageRecord kind, std::int64_t bits, std::int64_t looked_at,
                   const Vector<std::uint64_t>& addresses, std::int64_t bytes_of_layer,
                   std::int64_t first, const Vector<std::int32_t>& fewest,
                   const Vector<std::int32_t>& limit, double mass, bool tokens, bool mean_rest)
      : ScoredPages{kind,          bits,         looked_at, addresses.data(), bytes_of_layer, first,
                    fewest.data(), limit.data(), mass,      tokens,           mean_rest},
        blocks(extent(addresses.shape(0))),
        rows(extent(limit.shape(0))),
        records_(addresses),
        least_(fewest),
        most_(limit) {
    if (kind == PageRecord::kCodes) attention::check_bits(bits);
    require((kind == PageRecord::kCodes) == (bits != 0), "only codes have bits");
    require((kind == PageRecord::kChannels) == (channels > 0), "only channels are looked at");
    require(!by_token || channels > 0, "only channels tell tokens apart");
    require(!estimates || channels > 0 || kind == PageRecord::kSpread,
            "the rest is estimated by channels and spread");
    require(layer_bytes >= 0 && sinks >= 0, "layer_bytes or sinks out of range");
    require(wanted >= 0 && wanted <= 1, "a mass is between 0 and 1");
    check_size(fewest, rows, "least and most differ in length");
  }

  std::int64_t blocks, rows;

 private:
  Vector<std::uint64_t> records_;
  Vector<std::int32_t> least_, most_;
};

struct BoundListedPages : ListedPages {
  BoundListedPages(const Vector<std::int32_t>& numbers, const Vector<std::int32_t>& edges)
      : ListedPages{numbers.data(), edges.data()},
        lists(extent(edges.shape(0)) - 1),
        pages_(numbers),
        begin_(edges) {
    require(lists >= 0 && begin[0] == 0 && begin[lists] == extent(numbers.shape(0)) &&
                std::is_sorted(begin, begin + lists + 1),
            "the lists' edges do not fit their pages");
  }

  std::int64_t lists;

 private:
  Vector<std::int32_t> pages_, begin_;
};

using Choice =
    std::variant<std::shared_ptr<const BoundScoredPages>, std::shared_ptr<const BoundListedPages>>;

struct BoundGroup : ChoosingGroup {
  BoundGroup(std::shared_ptr<const Contexts> of, const Vector<std::int32_t>& numbers, Choice choice)
      : ChoosingGroup{of->rows,
                      numbers.data(),
                      of->row_begin.data(),
                      of->row_end.data(),
                      of->window_tokens.data(),
                      of->first_page.data(),
                      of->first_token.data(),
                      nullptr,
                      nullptr},
        contexts(std::move(of)),
        choice_(std::move(choice)),
        row_(numbers) {
    check_size(numbers, count, "each row has a number");
    std::visit([&](const auto& pages) { set_choice(*pages); }, choice_);
  }

  std::shared_ptr<const Contexts> contexts;
  std::int64_t blocks = -1;  // that records are of, if any

 private:
  void set_choice(const BoundScoredPages& pages) {
    require(pages.rows == count, "most must be [rows]");
    require(pages.channels <= contexts->shape.head_size, "channels must be within head_size");
    if (pages.record != PageRecord::kBounds) contexts->shape.check_wide();
    blocks = pages.blocks;
    scored = &pages;
  }

  void set_choice(const BoundListedPages& pages) {
    const std::int64_t heads = contexts->shape.kv_heads;
    require(pages.lists == count * heads, "begin must be [rows * kv_heads + 1]");
    for (std::int64_t list = 0; list < pages.lists; ++list) {
      const std::int64_t* const first = first_page + list / heads;
      for (std::int64_t i = pages.begin[list]; i < pages.begin[list + 1]; ++i) {
        require(pages.pages[i] >= 0 && pages.pages[i] < first[1] - first[0],
                "a page lies outside its row's context");
      }
    }
    listed = &pages;
  }

  Choice choice_;
  Vector<std::int32_t> row_;
};

struct BoundChoosingRows : ChoosingRows {
  BoundChoosingRows(std::shared_ptr<const Contexts> of, const Vector<std::int64_t>& windows,
                    const Vector<std::int32_t>& tokens, const Vector<std::int64_t>& positions,
                    const Vector<std::uint64_t>& frames, const Vector<std::int32_t>& slots_of,
                    std::vector<std::shared_ptr<const BoundGroup>> alike, PageCache* places,
                    const Vector<std::int64_t>& slots_in_store,
                    std::shared_ptr<const BoundValueSums> sums,
                    const std::optional<Vector<std::int64_t>>& place_of)
      : ChoosingRows{of->rows,
                     windows.data(),
                     tokens.data(),
                     positions.data(),
                     of->row_begin.data(),
                     of->first_page.data(),
                     extent(frames.shape(0)),
                     frames.data(),
                     nullptr,
                     0,
                     {},
                     places,
                     slots_in_store.data(),
                     sums.get(),
                     place_of ? place_of->data() : nullptr},
        contexts(std::move(of)),
        sums_of_v(std::move(sums)),
        groups_(std::move(alike)),
        window_(windows),
        token_(tokens),
        position_(positions),
        frame_(frames),
        stored_(slots_in_store) {
    check_size(tokens, count, "token and position must be [rows]");
    check_size(positions, count, "token and position must be [rows]");
    check_size(windows, count, "window must be [rows]");
    for (std::int64_t r = 0; r < count; ++r) {
      require(token[r] >= 0, "a row's query lies outside the state");
      last_token = std::max<std::int64_t>(last_token, token[r]);
    }
    contexts->check_addresses(frames);
    require(cache != nullptr || std::find(frame, frame + blocks, 0) == frame + blocks,
            "a block has no frame, and there is no cache");
    if (cache != nullptr) check_size(stored_, blocks, "each block has a slot");
    if (slots_of.shape(0) > 0) set_slots(slots_of);
    set_groups();
    check_means(place_of);
  }

  std::shared_ptr<const Contexts> contexts;
  std::shared_ptr<const BoundValueSums> sums_of_v;
  std::int64_t last_token = -1;

 private:
  void set_slots(const Vector<std::int32_t>& numbers) {
    check_size(numbers, blocks, "each block has a slot");
    slot_ = numbers;
    slot = slot_.data();
    for (std::int64_t i = 0; i < blocks; ++i) {
      require(slot[i] >= 0 && slot[i] < blocks, "slots are numbered from 0");
      slots = std::max<std::int64_t>(slots, slot[i] + 1);
    }
  }

  void set_groups() {
    std::vector<bool> known(static_cast<std::size_t>(count));
    std::int64_t placed = 0;
    for (const auto& group : groups_) {
      require(group->contexts->shape.kv_heads == contexts->shape.kv_heads,
              "groups differ in their blocks");
      require(group->blocks < 0 || group->blocks == blocks, "records must be [blocks]");
      for (std::int64_t i = 0; i < group->count; ++i, ++placed) {
        const std::int32_t row = group->row[i];
        require(row >= 0 && row < count && !known[static_cast<std::size_t>(row)],
                "each row is in one group");
        require(i == 0 || group->row[i - 1] < row, "rows of a group must ascend");
        known[static_cast<std::size_t>(row)] = true;
        require(group->row_begin[i] == row_begin[row] &&
                    group->first_page[i + 1] - group->first_page[i] ==
                        first_page[row + 1] - first_page[row],
                "a group has other contexts than its rows");
      }
      groups.push_back(*group);
    }
    require(placed == count, "each row is in one group");
  }

  // Rows whose rest is estimated have sums of V.
  void check_means(const std::optional<Vector<std::int64_t>>& place_of) {
    require((means != nullptr) == place_of.has_value(), "means have a place for each row");
    if (place_of) {
      mean_place_ = *place_of;
      const BlockShape& shape = contexts->shape;
      check_size(mean_place_, count, "mean_place must be [rows]");
      require(means->kv_heads == shape.kv_heads && means->head_size == shape.head_size &&
                  means->block_tokens == shape.block_tokens,
              "sums of V are of other blocks");
    }
    for (const ChoosingGroup& group : groups) {
      if (group.scored == nullptr || !group.scored->estimates) continue;
      require(means != nullptr, "a row whose rest is estimated needs sums of V");
      for (std::int64_t i = 0; i < group.count; ++i) {
        const std::int64_t place = mean_place[group.row[i]];
        require(place >= 0 && place < sums_of_v->places, "a row has no sums of V");
      }
    }
  }

  std::vector<std::shared_ptr<const BoundGroup>> groups_;
  Vector<std::int64_t> window_, mean_place_;
  Vector<std::int32_t> token_;
  Vector<std::int64_t> position_;
  Vector<std::uint64_t> frame_;
  Vector<std::int64_t> stored_;
  Vector<std::int32_t> slot_;
};

struct BoundGuess : GuessedPages {
  BoundGuess(std::int64_t of, const Vector<std::int64_t>& rows, const Vector<std::int32_t>& numbers,
             const Vector<std::int32_t>& edges)
      : GuessedPages{of,
                     extent(rows.shape(0)),
                     rows.data(),
                     {extent(numbers.shape(0)), numbers.data(), edges.data()}},
        row_(rows),
        pages_(numbers),
        begin_(edges) {}

  void check(const ChoosingRows& rows, std::int64_t heads) const {
    const std::int64_t size = count * heads;
    require(extent(begin_.shape(0)) == size + 1 && lists.begin[0] == 0 &&
                lists.begin[size] == lists.count &&
                std::is_sorted(lists.begin, lists.begin + size + 1),
            "the lists' edges do not fit their pages");
    for (std::int64_t list = 0; list < size; ++list) {
      const std::int64_t of = row[list / heads];
      require(of >= 0 && of < rows.count, "a guess is of other rows");
      const std::int64_t end = rows.first_page[of + 1] - rows.first_page[of];
      for (std::int64_t i = lists.begin[list]; i < lists.begin[list + 1]; ++i) {
        require(lists.pages[i] >= 0 && lists.pages[i] < end,
                "a page lies outside its row's context");
      }
    }
  }

 private:
  Vector<std::int64_t> row_;
  Vector<std::int32_t> pages_, begin_;
};

template <typename T>
ArrayOut<T> copied(const std::vector<T>& values) {
  return to_numpy(std::vector<T>(values));
}

template <typename T>
ArrayOut<T> copied(const T* values, std::int64_t count) {
  return to_numpy(std::vector<T>(values, values + count));
}

// What the layers of a step chose, for who asks after it.
class ChosenLists {
 public:
  explicit ChosenLists(std::size_t layers) : pages_(layers), begin_(layers) {}

  void keep(std::int64_t layer, const ChosenPages& chosen, std::int64_t lists) {
    if (chosen.count == 0) return;
    pages_[static_cast<std::size_t>(layer)].assign(chosen.pages, chosen.pages + chosen.count);
    begin_[static_cast<std::size_t>(layer)].assign(chosen.begin, chosen.begin + lists + 1);
  }

  std::vector<std::int64_t> layers() const {
    std::vector<std::int64_t> found;
    for (std::size_t at = 0; at < pages_.size(); ++at) {
      if (!pages_[at].empty()) found.push_back(extent(at));
    }
    return found;
  }

  std::optional<std::pair<ArrayOut<std::int32_t>, ArrayOut<std::int32_t>>> of(
      std::int64_t layer) const {
    require(layer >= 0 && layer < extent(pages_.size()), "there is no such layer");
    const auto at = static_cast<std::size_t>(layer);
    if (pages_[at].empty()) return std::nullopt;
    return std::pair{copied(pages_[at]), copied(begin_[at])};
  }

 private:
  std::vector<std::vector<std::int32_t>> pages_, begin_;  // [layers]
};

class BoundPlan {
 public:
  BoundPlan(const BlockShape& hbm, const BlockShape& slot, std::int64_t header_bytes,
            std::int64_t tokens, std::shared_ptr<const BoundBlocks> window,
            std::vector<std::shared_ptr<const BoundBlocks>> streamed,
            std::shared_ptr<const BoundChoosingRows> choosing, std::vector<bool> chooses,
            std::int64_t threads, bool keeps)
      : window_(std::move(window)),
        streamed_(std::move(streamed)),
        hbm_(hbm),
        plan_{hbm,    slot,    header_bytes,
              tokens, threads, window_.get(),
              {},     nullptr, {chooses.begin(), chooses.end()},
              {},     {}},
        chosen_(std::make_shared<ChosenLists>(streamed_.size())),
        keeps_(keeps) {
    attention::check_threads(threads);
    require(header_bytes >= 0 && tokens >= 0, "header_bytes or tokens out of range");
    require(hbm.payload() == slot.payload() && hbm.groups() == slot.groups() &&
                hbm.kv_heads == slot.kv_heads && hbm.dtype == slot.dtype,
            "blocks in HBM and in slots differ in more than the page stride");
    require(chooses.size() == streamed_.size(), "streamed and chooses must be [layers]");
    check_queries(*window_->bound);
    for (const auto& blocks : streamed_) {
      check_queries(*blocks->bound);
      plan_.streamed.push_back(blocks.get());
    }
    choose(std::move(choosing));
  }

  ~BoundPlan() { decode::give_back(plan_); }
  BoundPlan(const BoundPlan&) = delete;
  BoundPlan& operator=(const BoundPlan&) = delete;

  void choose(std::shared_ptr<const BoundChoosingRows> choosing) {
    decode::give_back(plan_);
    stopped_ = false;
    choosing_ = std::move(choosing);
    plan_.choosing = choosing_.get();
    if (!choosing_) return;
    require(choosing_->last_token < plan_.tokens, "a row's query lies outside the state");
    const BlockShape& shape = choosing_->contexts->shape;
    require(shape.kv_heads == hbm_.kv_heads && shape.groups() == hbm_.groups() &&
                shape.payload() == hbm_.payload(),
            "contexts and windows differ in their blocks");
    require(choosing_->means == nullptr || choosing_->means->layers == extent(streamed_.size()),
            "sums of V are of other layers");
    for (const ChoosingGroup& group : choosing_->groups) check_windows(group);
  }

  // Whether the layer has ended.
  bool run_layer(std::int64_t layer, nb::handle query, nb::handle cache, nb::handle out,
                 double scale, attention::AttentionClock& clock,
                 std::optional<std::int64_t> sliding_window,
                 const std::optional<Vector<float>>& sinks, double soft_cap,
                 const std::optional<Vector<float>>& slopes, double value_scale, std::size_t room,
                 const BoundGuess* guess) {
    stopped_ = false;
    require(layer >= 0 && layer < extent(streamed_.size()), "there is no such layer");
    const nb::object shape = query.attr("shape");
    require(nb::len(shape) == 3, "query must be [T, Hq, D]");
    const std::int64_t heads = nb::cast<std::int64_t>(shape[1]);
    hbm_.check_heads(heads);
    const attention::CacheBlocks blocks = attention::blocks_of(cache, hbm_);
    const attention::LogitShape logits = attention::to_shape(soft_cap, slopes, heads);
    slopes_ = slopes;
    sinks_ = sinks;
    operands_ = {layer,
                 attention::vectors_of("query", query, heads, hbm_.head_size),
                 attention::vectors_of("out", out, heads, hbm_.head_size),
                 blocks.address,
                 blocks.stride,
                 static_cast<float>(scale),
                 std::min(sliding_window.value_or(attention::kUnbounded), attention::kUnbounded),
                 sinks ? sinks->data() : nullptr,
                 logits,
                 static_cast<float>(value_scale),
                 room,
                 guess};
    require(operands_.query.tokens == plan_.tokens && operands_.out.tokens == plan_.tokens,
            "the plan is of other tokens");
    require(std::isfinite(scale), "scale must be finite");
    require(window_->count == 0 || window_->last_place < static_cast<std::uint64_t>(blocks.count),
            "a block id lies outside the cache");
    require(!sliding_window || *sliding_window > 0, "sliding_window must be positive");
    if (sinks) check_size(*sinks, heads, "sinks must be [q_heads]");
    if (guess != nullptr) {
      require(choosing_ && choosing_->cache != nullptr, "there is nothing to look up in");
      guess->check(*choosing_, hbm_.kv_heads);
    }
    {
      const Unlocked unlocked;
      stopped_ = !decode::run_layer(plan_, operands_, clock);
    }
    operands_.guess = nullptr;  // which lasts as long as this call
    if (!stopped_ && keeps_) chosen_->keep(layer, plan_.work.chosen, choosing_lists());
    return !stopped_;
  }

  const std::shared_ptr<ChosenLists>& chosen() const { return chosen_; }

  // Of each group: pages, edges of their lists, mass, and by what they were chosen, if by anything:
  // weights of all pages, and the windows' mass; and which tokens, if not all.
  nb::list choices() const {
    require(stopped_, "no layer has stopped");
    nb::list made;
    for (std::size_t g = 0; g < plan_.work.groups.size(); ++g) {
      const GroupWork& work = plan_.work.groups[g];
      const ListedPages* const listed = choosing_->groups[g].listed;
      const std::int64_t lists = choosing_->groups[g].count * hbm_.kv_heads;
      if (listed != nullptr) {
        made.append(nb::make_tuple(copied(listed->pages, listed->begin[lists]),
                                   copied(listed->begin, lists + 1), nb::none(), nb::none(),
                                   nb::none(), nb::none()));
        continue;
      }
      nb::object weights = nb::none(), window = nb::none(), mask = nb::none();
      if (choosing_->groups[g].scored->by_token) {
        mask = nb::cast(to_mask(work.token_mask, work.chosen.columns.size()));
      } else {
        weights = nb::cast(copied(work.weights));
        window = nb::cast(copied(work.window_mass));
      }
      made.append(nb::make_tuple(copied(work.chosen.columns), copied(work.chosen.begin),
                                 copied(work.chosen.mass), weights, window, mask));
    }
    return made;
  }

  // As PageCache::acquire() answers for all pages.
  nb::object asked() {
    WorkSpace& work = plan_.work;
    if (!stopped_ || !work.asked) return nb::none();
    const AskedPages& asked = *work.asked;
    std::vector<std::int32_t> which(static_cast<std::size_t>(work.chosen.count), kNoPlace);
    for (std::size_t i = 0; i < work.outside.size(); ++i) {
      which[static_cast<std::size_t>(work.outside[i])] = asked.which[i];
    }
    nb::object answer =
        nb::make_tuple(to_numpy(std::move(which)), copied(asked.keys), copied(asked.places),
                       asked.held, asked.framed, asked.coming, asked.guessed);
    work.asked.reset();
    return answer;
  }

  void resume(const Vector<std::uint64_t>& address, const Vector<std::int64_t>& position,
              const Vector<std::int32_t>& begin, const Vector<std::int32_t>& end,
              const std::optional<attention::Mask>& token_mask, attention::AttentionClock& clock) {
    require(stopped_, "no layer has stopped");
    const std::int64_t lists = choosing_->count * hbm_.kv_heads, pages = extent(address.shape(0));
    check_size(position, pages, "address and position differ in length");
    check_size(begin, lists, "begin and end must be [rows * kv_heads]");
    check_size(end, lists, "begin and end must be [rows * kv_heads]");
    for (std::int64_t i = 0; i < lists; ++i) {
      require(begin.data()[i] >= 0 && begin.data()[i] <= end.data()[i] && end.data()[i] <= pages,
              "a list reaches beyond the pages");
    }
    require(plan_.work.attended + pages <= plan_.work.chosen.count, "more pages than were chosen");
    require(!token_mask || (extent(token_mask->shape(0)) == pages &&
                            extent(token_mask->shape(1)) == hbm_.page_tokens),
            "token_mask must be [pages, page_tokens]");
    const Unlocked unlocked;
    decode::resume(plan_, operands_,
                   {pages, address.data(), position.data(), begin.data(), end.data(),
                    token_mask ? token_mask->data() : nullptr},
                   clock);
    stopped_ = plan_.work.attended < plan_.work.chosen.count;
  }

  const ChoiceTotals& totals() const { return plan_.totals; }

 private:
  nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<2>> to_mask(const std::vector<std::uint8_t>& values,
                                                            std::size_t pages) const {
    auto* const made = new std::vector<std::uint8_t>(values);
    const nb::capsule owner(
        made, [](void* p) noexcept { delete static_cast<std::vector<std::uint8_t>*>(p); });
    return {made->data(), {pages, static_cast<std::size_t>(hbm_.page_tokens)}, owner};
  }

  std::int64_t choosing_lists() const {
    return choosing_ == nullptr ? 0 : choosing_->count * hbm_.kv_heads;
  }

  // What is read of windows lies in them: keys behind the contexts, and V of the queries' tokens.
  void check_windows(const ChoosingGroup& group) const {
    if (group.scored == nullptr) return;
    if (group.scored->channels == 0 && !group.scored->estimates) return;
    const std::int64_t block = hbm_.block_tokens;
    for (std::int64_t i = 0; i < group.count; ++i) {
      const std::int64_t window = choosing_->window[group.row[i]];
      require(window >= 0 && window < window_->rows.count, "a row that chooses has no window");
      const std::int64_t begin = window_->rows.begin[window], end = window_->rows.end[window];
      require(group.window_tokens[i] <= (end - begin) * block,
              "a window has more tokens than its blocks hold");
      const std::int64_t behind =
          begin < end ? choosing_->position[group.row[i]] - window_->position[end - 1] : -1;
      require(!group.scored->estimates || (behind >= 0 && behind < block),
              "a row's token lies outside its window");
    }
  }

  void check_queries(const BoundRows& rows) const {
    require(rows.last_query <= plan_.tokens, "a row's queries lie outside the state");
  }

  std::shared_ptr<const BoundBlocks> window_;
  std::vector<std::shared_ptr<const BoundBlocks>> streamed_;
  std::shared_ptr<const BoundChoosingRows> choosing_;
  BlockShape hbm_;
  StepPlan plan_;
  std::shared_ptr<ChosenLists> chosen_;
  bool keeps_;
  LayerOperands operands_{};
  std::optional<Vector<float>> slopes_, sinks_;  // which the operands point into
  bool stopped_ = false;
};

}  // namespace

void bind_decode(nb::module_& module) {
  nb::enum_<PageRecord>(module, "PageRecord", "Summary of a page's K.")
      .value("BOUNDS", PageRecord::kBounds, "Minimum and maximum of each channel.")
      .value("SPREAD", PageRecord::kSpread, "Mean and variance of each channel.")
      .value("CODES", PageRecord::kCodes, "Each key in a few bits a channel.")
      .value("CHANNELS", PageRecord::kChannels, "K itself, channel-major.");
  nb::class_<BoundBlocks>(module, "PlacedBlocks",
                          R"(Rows over blocks that stay at their places for a whole step.

``place [B]``: number of each block in HBM, or absolute address of its frame in DRAM. ``position
[B]``: of its first token in the request.)")
      .def(nb::init<std::shared_ptr<const BoundRows>, const Vector<std::uint64_t>&,
                    const Vector<std::int64_t>&>(),
           nb::arg("rows"), nb::arg("place").noconvert(), nb::arg("position").noconvert());
  nb::class_<BoundScoredPages>(module, "ScoredPages",
                               R"(Choice of the pages of the largest weight.

``records [B]``: addresses of the blocks' records in layer 0, ``layer_bytes`` before those of the
next one; so many ``channels`` are looked at. The first ``sinks`` pages are chosen, then the others,
``most [R]`` for each KV head; with a mass that is ``wanted`` fewer, but ``least [R]``, where these
and the window cover it. ``by_token``: tokens are chosen and counted, with the pages that hold them.
``estimates``: unchosen pages count as their mean V.)")
      .def(nb::init<PageRecord, std::int64_t, std::int64_t, const Vector<std::uint64_t>&,
                    std::int64_t, std::int64_t, const Vector<std::int32_t>&,
                    const Vector<std::int32_t>&, double, bool, bool>(),
           nb::arg("record"), nb::arg("code_bits"), nb::arg("channels"),
           nb::arg("records").noconvert(), nb::arg("layer_bytes"), nb::arg("sinks"),
           nb::arg("least").noconvert(), nb::arg("most").noconvert(), nb::arg("wanted"),
           nb::arg("by_token"), nb::arg("estimates"))
      .def_prop_ro(
          "estimates", [](const BoundScoredPages& pages) { return pages.estimates; },
          "True if unchosen pages count as their mean V.");
  nb::class_<BoundListedPages>(module, "ListedPages",
                               R"(Choice of the same pages in every layer.

KV head h of row r has ``pages[begin[i]..begin[i + 1]]``, ``i = r * kv_heads + h``, ascending.)")
      .def(nb::init<const Vector<std::int32_t>&, const Vector<std::int32_t>&>(),
           nb::arg("pages").noconvert(), nb::arg("begin").noconvert());
  nb::class_<BoundGroup>(module, "ChoosingGroup",
                         R"(Some of the rows that choose, all of them alike.

``contexts``: of these; ``rows [r]``: their numbers among all that choose, ascending.)")
      .def(nb::init<std::shared_ptr<const Contexts>, const Vector<std::int32_t>&, Choice>(),
           nb::arg("contexts"), nb::arg("rows").noconvert(), nb::arg("choice"));
  nb::class_<BoundChoosingRows>(module, "ChoosingRows",
                                R"(Rows of one query each that choose pages of their contexts.

``window [R]``: numbers of their windows; ``token`` and ``position [R]`` are those of the queries;
``frame [B]``: address of each block's frame, 0 where it has none; ``slot [B]``: number of its slot,
from 0; empty: no two blocks have the same. Each row is in one of the ``groups``. Pages without a
frame are looked up in the ``cache``, by the slots of the store, ``stored [B]``; None: there are
none. ``means`` has the sums of V of rows whose rest is estimated, at ``mean_place [R]``.)")
      .def(nb::init<std::shared_ptr<const Contexts>, const Vector<std::int64_t>&,
                    const Vector<std::int32_t>&, const Vector<std::int64_t>&,
                    const Vector<std::uint64_t>&, const Vector<std::int32_t>&,
                    std::vector<std::shared_ptr<const BoundGroup>>, PageCache*,
                    const Vector<std::int64_t>&, std::shared_ptr<const BoundValueSums>,
                    const std::optional<Vector<std::int64_t>>&>(),
           nb::keep_alive<1, 9>(), nb::arg("contexts"), nb::arg("window").noconvert(),
           nb::arg("token").noconvert(), nb::arg("position").noconvert(),
           nb::arg("frame").noconvert(), nb::arg("slot").noconvert(), nb::arg("groups"),
           nb::arg("cache").none(), nb::arg("stored").noconvert(), nb::arg("means").none(),
           nb::arg("mean_place").noconvert().none());
  nb::class_<BoundGuess>(module, "GuessedPages",
                         R"(Pages that some rows will probably choose in a ``layer``.

``rows [r]``: their numbers among those that choose; ``pages`` and ``begin`` as of ``ListedPages``.)")
      .def(nb::init<std::int64_t, const Vector<std::int64_t>&, const Vector<std::int32_t>&,
                    const Vector<std::int32_t>&>(),
           nb::arg("layer"), nb::arg("rows").noconvert(), nb::arg("pages").noconvert(),
           nb::arg("begin").noconvert());
  nb::class_<ChoiceTotals>(module, "ChoiceTotals", "Sums over the layers that have run.")
      .def_ro("lists", &ChoiceTotals::lists, "Lists of pages.")
      .def_ro("selected", &ChoiceTotals::selected, "Pages in them.")
      .def_ro("tokens", &ChoiceTotals::tokens, "Tokens of these, that are attended to.")
      .def_ro("context", &ChoiceTotals::context, "Pages that there were to choose from.")
      .def_ro(
          "framed", &ChoiceTotals::framed,
          "Pages in the lists that lie in frames; those of several lists of a layer count once. "
          "This and the next one leave out layers that stopped.")
      .def_ro("held", &ChoiceTotals::held, "Likewise, that the cache has.")
      .def_ro("unmet", &ChoiceTotals::unmet, "Lists without the mass that was wanted.")
      .def_ro("channel_bytes", &ChoiceTotals::channel_bytes,
              "Bytes of K in the channels that were looked at.")
      .def_ro("missing", &ChoiceTotals::missing,
              "Softmax mass outside windows and lists, by estimate.");
  nb::class_<ChosenLists>(module, "ChosenLists", "Pages that the layers of a step chose.")
      .def_prop_ro("layers", &ChosenLists::layers, "Layers that have chosen some, ascending.")
      .def("of", &ChosenLists::of, nb::arg("layer"),
           "Pages of a layer, and the edges of their lists; None: it chose none, or has stopped.");
  module.def(
      "windows",
      [](const Vector<std::int64_t>& query_start, const Vector<std::int64_t>& length,
         const nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu>& table,
         const Vector<std::int64_t>& hbm_start, std::int64_t block_tokens) {
        Windows made =
            windows_of({query_start.data(), query_start.shape(0)}, {length.data(), length.shape(0)},
                       {table.data(), extent(table.shape(0)), extent(table.shape(1)),
                        table.stride(0), table.stride(1)},
                       {hbm_start.data(), hbm_start.shape(0)}, block_tokens);
        return nb::make_tuple(to_numpy(std::move(made.query_begin)),
                              to_numpy(std::move(made.query_count)),
                              to_numpy(std::move(made.first_position)),
                              to_numpy(std::move(made.begin)), to_numpy(std::move(made.end)),
                              to_numpy(std::move(made.block)), to_numpy(std::move(made.position)));
      },
      nb::arg("query_start").noconvert(), nb::arg("length").noconvert(),
      nb::arg("table").noconvert(), nb::arg("hbm_start").noconvert(), nb::arg("block_tokens"),
      nb::sig("def windows(query_start: NDArray[numpy.int64], length: NDArray[numpy.int64], "
              "table: NDArray[numpy.int32], hbm_start: NDArray[numpy.int64], block_tokens: int) -> "
              "tuple[NDArray[numpy.int32], NDArray[numpy.int32], NDArray[numpy.int64], "
              "NDArray[numpy.int32], NDArray[numpy.int32], NDArray[numpy.int64], "
              "NDArray[numpy.int64]]"),
      R"(Windows of rows in HBM, from block ``hbm_start [R]`` to the block of the last token.

Begin and count of each row's queries, position of the first; begin and end of its blocks in the
last two: ids of the blocks, by the ``table [R, blocks]``, and position of each one's first token.)");
  nb::class_<BoundPlan>(module, "StepPlan", R"(Attention of a step.

Made once per step, then run once per layer, in any order, by one thread at a time. ``streamed``
and ``chooses`` have an entry for each layer: the contexts that are attended to whole, and whether
the rows that choose do so. With ``keeps`` what they choose can be asked for later.)")
      .def(nb::init<
               const BlockShape&, const BlockShape&, std::int64_t, std::int64_t,
               std::shared_ptr<const BoundBlocks>, std::vector<std::shared_ptr<const BoundBlocks>>,
               std::shared_ptr<const BoundChoosingRows>, std::vector<bool>, std::int64_t, bool>(),
           nb::arg("hbm"), nb::arg("slot"), nb::arg("header_bytes"), nb::arg("tokens"),
           nb::arg("window"), nb::arg("streamed"), nb::arg("choosing").none(), nb::arg("chooses"),
           nb::arg("threads"), nb::arg("keeps"))
      .def("run_layer", &BoundPlan::run_layer, nb::arg("layer"), nb::arg("query"), nb::arg("cache"),
           nb::arg("out"), nb::arg("scale"), nb::arg("clock"), nb::arg("sliding_window").none(),
           nb::arg("sinks").noconvert().none(), nb::arg("soft_cap"),
           nb::arg("slopes").noconvert().none(), nb::arg("value_scale"), nb::arg("room"),
           nb::arg("guess").none(),
           R"(Attend to windows and contexts of a layer, and write ``out``.

``query`` and ``out [T, q_heads, head_size]`` and ``cache [num_blocks, ...]``, the layer's blocks in
HBM, are torch tensors. ``sliding_window``: of the keys in HBM; ``sinks [q_heads]``: logits of
attention sinks; ``soft_cap``, ``slopes`` and ``value_scale``: as of ``State``. Where chosen pages
are not in memory, or pages of the ``guess``, the layer stops, and False is the answer:
:meth:`resume` goes on. Places are taken for up to ``room`` distinct pages.)")
      .def("choose", &BoundPlan::choose, nb::arg("choosing").none(),
           "These rows choose from now on.")
      .def_prop_ro("chosen", &BoundPlan::chosen, "Pages that the layers have chosen, so far.")
      .def("choices", &BoundPlan::choices,
           nb::sig("def choices(self) -> list[tuple[NDArray[numpy.int32], NDArray[numpy.int32], "
                   "NDArray[numpy.float32] | None, NDArray[numpy.float32] | None, "
                   "NDArray[numpy.float32] | None, NDArray[numpy.uint8] | None]]"),
           R"(Choice of each group in the layer: pages, and edges of their lists.

Then the mass of each list and its window, if there is an estimate; if pages have weights, these, of
all pages, and masses of the windows; if tokens were chosen, a mask of them.)")
      .def("asked", &BoundPlan::asked,
           nb::sig("def asked(self) -> tuple[NDArray[numpy.int32], NDArray[numpy.int64], "
                   "NDArray[numpy.int32], int, int, int, int] | None"),
           R"(Places that a layer that has stopped has taken, as ``PageCache.acquire`` answers.

The caller owns it then. None: nothing, because there was no room.)")
      .def("resume", &BoundPlan::resume, nb::arg("address").noconvert(),
           nb::arg("position").noconvert(), nb::arg("begin").noconvert(),
           nb::arg("end").noconvert(), nb::arg("token_mask").noconvert().none(), nb::arg("clock"),
           R"(Go on with a layer that has stopped: attend to some of the chosen pages.

``address`` and ``position [P]``; ``begin`` and ``end [R * kv_heads]`` of the lists in these;
``token_mask [P, page_tokens]``, None: all tokens. The call that brings the last ones ends the
layer.)")
      .def_prop_ro("totals", &BoundPlan::totals, "Sums over the layers that have run.");
}

}  // namespace ssdkv::decode
