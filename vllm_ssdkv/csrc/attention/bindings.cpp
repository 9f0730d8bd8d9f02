// Python face of the CPU attention kernels. Arguments are checked here, before any address is
// followed; what cannot be checked is that raw addresses point at memory of the stated shape.
#include "decode/bindings.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>

#include "attention/arguments.hpp"
#include "attention/attend.hpp"
#include "attention/clock.hpp"
#include "attention/isa.hpp"
#include "attention/openmp_team.hpp"
#include "attention/tensors.hpp"
#include "attention/transfer.hpp"
#include "base/unlocked.hpp"

namespace ssdkv::attention {

BlockShape::BlockShape(const PageLayout& sizes) : PageLayout(sizes) {
  require(page_tokens > 0 && block_tokens > 0 && block_tokens % page_tokens == 0,
          "block_tokens must be a positive multiple of page_tokens");
  require(kv_heads > 0, "kv_heads must be positive");
  require(head_size > 0 && head_size % 8 == 0 && head_size <= kMaxHeadSize,
          "head_size must be a multiple of 8, at most 512");
  require(page_stride >= payload(), "page_stride is smaller than K and V of one page");
}

LogitShape to_shape(double soft_cap, const std::optional<Vector<float>>& slopes,
                    std::int64_t query_heads) {
  require(std::isfinite(soft_cap) && soft_cap >= 0, "soft_cap must be finite and not negative");
  require(!slopes || extent(slopes->shape(0)) == query_heads, "slopes must be [q_heads]");
  return {static_cast<float>(soft_cap), slopes ? slopes->data() : nullptr};
}

BoundState::BoundState(Matrix m, Matrix l, Cube acc, double soft_cap,
                       const std::optional<Vector<float>>& slopes, double scale_of_values)
    : State{extent(m.shape(0)), extent(m.shape(1)), extent(acc.shape(2)),
            m.data(),           l.data(),           acc.data()},
      m_(m),
      l_(l),
      acc_(acc) {
  require(extent(l.shape(0)) == tokens && extent(l.shape(1)) == query_heads &&
              extent(acc.shape(0)) == tokens && extent(acc.shape(1)) == query_heads,
          "m and l must be [tokens, q_heads] and acc [tokens, q_heads, head_size]");
  shape = to_shape(soft_cap, slopes, query_heads);
  value_scale = static_cast<float>(scale_of_values);
  if (slopes) slopes_ = *slopes;
}

BoundRows::BoundRows(const Vector<std::int32_t>& begins,
                     const std::optional<Vector<std::int32_t>>& counts,
                     const Vector<std::int64_t>& positions, const Vector<std::int32_t>& list_begins,
                     const Vector<std::int32_t>& list_ends, bool per_head)
    : Rows{extent(begins.shape(0)), begins.data(),    nullptr, positions.data(),
           list_begins.data(),      list_ends.data(), per_head},
      lists(extent(list_begins.shape(0))),
      query_begin_(begins),
      first_position_(positions),
      begin_(list_begins),
      end_(list_ends) {
  if (counts) {
    query_count_ = *counts;
    query_count = query_count_.data();
  } else {
    ones_.assign(begins.shape(0), 1);
    query_count = ones_.data();
  }
  require(extent(positions.shape(0)) == count && (!counts || extent(counts->shape(0)) == count) &&
              extent(list_ends.shape(0)) == lists &&
              (per_head ? (count == 0 ? lists == 0 : lists % count == 0) : lists == count),
          "query_begin, query_count and first_position must be [rows], begin and end [lists]");
  for (std::int64_t r = 0; r < count; ++r) {
    require(query_begin[r] >= 0 && query_count[r] >= 0, "a row's queries lie outside the state");
    last_query = std::max(last_query, std::int64_t{query_begin[r]} + query_count[r]);
    max_queries = std::max<std::int64_t>(max_queries, query_count[r]);
  }
  for (std::int64_t i = 0; i < lists; ++i) {
    require(begin[i] >= 0 && begin[i] <= end[i], "a list reaches beyond the addresses");
    last_page = std::max<std::int64_t>(last_page, end[i]);
    max_pages = std::max<std::int64_t>(max_pages, end[i] - begin[i]);
  }
}

BoundPages::BoundPages(const Vector<std::uint64_t>& addresses,
                       const Vector<std::int64_t>& positions, const std::optional<Mask>& mask)
    : Pages{extent(addresses.shape(0)), addresses.data(), positions.data(), nullptr},
      address_(addresses),
      position_(positions) {
  require(extent(positions.shape(0)) == count, "addresses and positions differ in length");
  if (!mask) return;
  require(extent(mask->shape(0)) == count, "token_mask must be [pages, page_tokens]");
  token_mask_ = *mask;
  token_mask = token_mask_.data();
  mask_tokens = extent(mask->shape(1));
}

namespace {

Vectors to_vectors(std::uint64_t address, int dtype, std::int64_t stride, std::int64_t tokens,
                   std::int64_t heads, std::int64_t head_size) {
  const Vectors made{
      reinterpret_cast<std::byte*>(address), to_dtype(dtype), stride, tokens, heads, head_size};
  require(tokens >= 0 && heads >= 0 && head_size >= 0, "vectors have a negative size");
  require(item_bytes(made.dtype) > 1, "vectors are of 16 or 32 bits");
  require(stride >= heads * head_size * item_bytes(made.dtype),
          "the stride of tokens is smaller than their heads");
  return made;
}

void check_fit(const Vectors& vectors, const State& state) {
  require(vectors.tokens == state.tokens && vectors.heads == state.query_heads &&
              vectors.head_size == state.head_size,
          "the state is of other tokens, heads or channels");
}

void py_attend(const Vectors& query, double scale, const BoundState& state, const BoundRows& rows,
               const BoundPages& pages, const BlockShape& shape, std::int64_t threads,
               std::optional<std::int64_t> sliding_window) {
  check_threads(threads);
  shape.check_heads(query.heads);
  check_fit(query, state);
  require(query.head_size == shape.head_size, "queries and keys differ in head_size");
  require(std::isfinite(scale), "scale must be finite");
  require(rows.last_query <= state.tokens, "a row's queries lie outside the state");
  require(rows.last_page <= pages.count, "a list reaches beyond the addresses");
  Problem p{shape, state, rows, pages, query, static_cast<float>(scale)};
  if (rows.list_per_head) {
    require(rows.lists == rows.count * shape.kv_heads, "begin and end must be [rows * kv_heads]");
    p.layout.block_tokens = shape.page_tokens;
    p.layout.page_stride = shape.payload();
  }
  require(pages.token_mask == nullptr || pages.mask_tokens == p.layout.block_tokens,
          "token_mask must be [pages, page_tokens]");
  if (sliding_window) {
    require(*sliding_window > 0, "sliding_window must be positive");
    p.sliding_window = std::min(*sliding_window, kUnbounded);
  }
  const Unlocked unlocked;
  attend(active_kernels(), p, threads);
}

void py_finish(const BoundState& state, const Vectors& out, std::optional<Matrix> lse,
               std::int64_t threads) {
  check_threads(threads);
  check_fit(out, state);
  require(
      !lse || (extent(lse->shape(0)) == state.tokens && extent(lse->shape(1)) == state.query_heads),
      "lse must be [tokens, q_heads]");
  const Unlocked unlocked;
  finish(active_kernels(), {state, out, lse ? lse->data() : nullptr}, threads);
}

// A few thousand numbers: letting other Python threads run would cost more than it takes.
void py_merge(const BoundState& state, const BoundState& part) {
  state.check_same_queries(part);
  merge(state, part);
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> py_log_sum_exp(const BoundState& state,
                                                          const Vector<std::int64_t>& token) {
  const auto heads = static_cast<std::size_t>(state.query_heads);
  auto made = std::make_unique<float[]>(token.shape(0) * heads);
  for (std::size_t r = 0; r < token.shape(0); ++r) {
    require(token.data()[r] >= 0 && token.data()[r] < state.tokens,
            "a token lies outside the state");
    log_sum_exp(state, token.data()[r], made.get() + r * heads);
  }
  float* const values = made.release();
  const nb::capsule owner(values, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return {values, {token.shape(0), heads}, owner};
}

void py_store_kv(nb::handle key, nb::handle value, const Vector<std::int64_t>& slot_mapping,
                 nb::handle cache, const BlockShape& shape, std::int64_t threads, double key_scale,
                 double value_scale) {
  check_threads(threads);
  const bool narrows = item_bytes(shape.dtype) == 1;
  const std::int64_t tokens = extent(slot_mapping.shape(0));
  const Vectors keys = vectors_of("key", key, shape.kv_heads, shape.head_size);
  const Vectors values = vectors_of("value", value, shape.kv_heads, shape.head_size);
  for (const Vectors* part : {&keys, &values}) {
    require(part->tokens == tokens && (narrows || part->dtype == shape.dtype),
            "K and V must be of the tokens and dtype of the blocks");
  }
  require(key_scale > 0 && value_scale > 0, "scales must be positive");
  const CacheBlocks blocks = blocks_of(cache, shape);
  const std::int64_t places = blocks.count * shape.block_tokens;
  for (std::int64_t t = 0; t < tokens; ++t) {
    require(slot_mapping.data()[t] < places, "a slot lies outside the cache's blocks");
  }
  const Scatter s{shape,
                  keys,
                  values,
                  slot_mapping.data(),
                  reinterpret_cast<std::byte*>(blocks.address),
                  blocks.stride,
                  static_cast<float>(key_scale),
                  static_cast<float>(value_scale)};
  const Unlocked unlocked;
  scatter_tokens(active_kernels(), s, threads);
}

void py_copy_blocks(Vector<std::uint64_t> source, const BlockShape& from,
                    Vector<std::uint64_t> destination, const BlockShape& to, bool clear_padding,
                    std::int64_t threads) {
  check_threads(threads);
  require(source.shape(0) == destination.shape(0), "source and destination differ in length");
  require(from.payload() == to.payload() && from.groups() == to.groups() &&
              from.kv_heads == to.kv_heads,
          "the blocks differ in more than the page stride");
  const PageCopy copy{source.data(),
                      destination.data(),
                      from.kv_heads * from.groups(),
                      {from.payload(), from.page_stride, to.page_stride, clear_padding}};
  const std::int64_t items = extent(source.shape(0));
  const Unlocked unlocked;
  copy_pages(copy, items, threads);
}

}  // namespace
}  // namespace ssdkv::attention

NB_MODULE(_kernels, module) {
  namespace nb = nanobind;
  using namespace ssdkv::attention;  // NOLINT: binding code only
  using nb::arg;
  module.doc() = R"(Native CPU attention kernels (``csrc/attention``).

Raw addresses are those of torch or numpy memory that the caller keeps alive. Arrays are
C-contiguous, on the CPU, of exactly the stated dtype (numpy or torch; no silent conversion). Every
function blocks until done and may be called from any thread. It releases the GIL, but for those
that take microseconds: ``merge``, ``log_sum_exp``, ``without``, ``compensate``, ``count_choice``,
``ValueSums`` and the clock. It runs on the OpenMP team that torch has for that thread; ``threads``
bounds it and counts the caller.
Dtypes are ``FLOAT32``, ``BFLOAT16`` and ``FLOAT16``, of blocks also ``FLOAT8_E4M3`` and
``FLOAT8_E5M2``; all arithmetic is fp32.

All raise ValueError on shapes or numbers that do not fit together and TypeError on arrays of
another dtype or layout.)";
  module.attr("FLOAT32") = static_cast<int>(DType::kFloat32);
  module.attr("BFLOAT16") = static_cast<int>(DType::kBFloat16);
  module.attr("FLOAT16") = static_cast<int>(DType::kFloat16);
  module.attr("FLOAT8_E4M3") = static_cast<int>(DType::kFloat8E4M3);
  module.attr("FLOAT8_E5M2") = static_cast<int>(DType::kFloat8E5M2);
  module.attr("SPLIT_PAGES") = static_cast<int>(kSplitPages);
  module.def(
      "isa", [] { return std::string(active_kernels().name); },
      "Name of the instruction set in force: \"avx512\", \"avx2\" or \"portable\".");
  module.def("isas", &available_isas, "Instruction sets this machine can run, best first.");
  module.def(
      "set_isa", [](const std::string& name) { select_isa(name); }, arg("name"),
      "Use the kernels of another instruction set, for the whole process. Raises ValueError.");
  module.def("team_available", &team_available,
             "True if calls run on the host's OpenMP team; else on the caller's thread alone.");
  nb::class_<BlockShape>(module, "BlockShape",
                         R"(A layer's part of a block: ``[kv_heads][groups]`` pages.

Pages are ``page_stride`` bytes apart; a page is K ``[page_tokens][head_size]``, then V.)")
      .def(
          "__init__",
          [](BlockShape* self, std::int64_t block_tokens, std::int64_t page_tokens,
             std::int64_t page_stride, std::int64_t kv_heads, std::int64_t head_size, int dtype) {
            new (self) BlockShape(PageLayout{block_tokens, page_tokens, page_stride, kv_heads,
                                             head_size, to_dtype(dtype)});
          },
          arg("block_tokens"), arg("page_tokens"), arg("page_stride"), arg("kv_heads"),
          arg("head_size"), arg("dtype"));
  nb::class_<Vectors>(module, "Vectors",
                      "Vectors of tokens, ``[tokens][heads][head_size]``, at an address, tokens "
                      "``stride`` bytes apart.")
      .def(
          "__init__",
          [](Vectors* self, std::uint64_t address, int dtype, std::int64_t stride,
             std::int64_t tokens, std::int64_t heads, std::int64_t head_size) {
            new (self) Vectors(to_vectors(address, dtype, stride, tokens, heads, head_size));
          },
          arg("address"), arg("dtype"), arg("stride"), arg("tokens"), arg("heads"),
          arg("head_size"));
  module.def("vectors", &vectors_of, arg("name"), arg("tensor"), arg("heads"), arg("head_size"),
             R"(A torch tensor ``[T, heads, head_size]`` as kernels take it.

The caller keeps it alive. Raises ValueError, naming it, if heads have holes.)");
  nb::class_<BoundState>(module, "State",
                         R"(State of an online softmax: ``m, l [T, q_heads]``, ``acc`` of them.

``m``: running maximum of scaled logits, starts at -inf; ``l``: running sum of ``exp(logit - m)``,
starts at 0; ``acc [T, q_heads, head_size]``: unnormalised output, starts at 0. A logit is ``soft_cap
* tanh(s / soft_cap)`` of a scaled product ``s`` (0: the product), plus the head's slope, ``slopes
[q_heads]``, times the key's position less the query's. ``value_scale``: of V as stored.)")
      .def(nb::init<Matrix, Matrix, Cube, double, const std::optional<Vector<float>>&, double>(),
           arg("m").noconvert(), arg("l").noconvert(), arg("acc").noconvert(),
           arg("soft_cap") = 0.0, arg("slopes").noconvert() = nb::none(), arg("value_scale") = 1.0);
  nb::class_<BoundRows>(module, "Rows",
                        R"(Ragged rows of queries, and the range of pages that each sees.

Queries ``query_begin[r] + i``, ``i < query_count[r]`` (None: one each), stand at positions
``first_position[r] + i`` and see pages ``begin[r]..end[r]``; with a ``list_per_head`` the query
heads of KV head h see ``begin[i]..end[i]``, ``i = r * kv_heads + h``, which are single pages of
that head. Rows must not share queries.)")
      .def(nb::init<const Vector<std::int32_t>&, const std::optional<Vector<std::int32_t>>&,
                    const Vector<std::int64_t>&, const Vector<std::int32_t>&,
                    const Vector<std::int32_t>&, bool>(),
           arg("query_begin").noconvert(), arg("query_count").noconvert().none(),
           arg("first_position").noconvert(), arg("begin").noconvert(), arg("end").noconvert(),
           arg("list_per_head") = false)
      .def_ro("max_queries", &BoundRows::max_queries, "Queries of a row, at most.")
      .def_ro("max_pages", &BoundRows::max_pages, "Pages of a list, at most.");
  nb::class_<BoundPages>(module, "Pages",
                         R"(Blocks, or single pages, at absolute addresses.

``position``: of the first token of each; ``token_mask [pages, page_tokens]``: 0 where a token takes
no part.)")
      .def(nb::init<const Vector<std::uint64_t>&, const Vector<std::int64_t>&,
                    const std::optional<Mask>&>(),
           arg("address").noconvert(), arg("position").noconvert(),
           arg("token_mask").noconvert() = nb::none());
  module.def("attend", &py_attend, arg("query"), arg("scale"), arg("state"), arg("rows"),
             arg("pages"), arg("shape"), arg("threads"), arg("sliding_window") = nb::none(),
             R"(Attend rows of queries to pages of KV and update the running softmax in place.

Each query sees the keys at or before its position, at most the newest ``sliding_window`` of them.
Keys that no query of a tile may see are not read. Repeated calls with disjoint sets of pages add up
to attention over their union, in any order, up to fp32 rounding; rows that see no key are left as
they are. The same call with the same ``threads`` gives the same bits.)");
  module.def("finish", &py_finish, arg("state"), arg("out"), arg("lse").noconvert().none(),
             arg("threads"), "out = acc / l * value_scale (zero where l is 0); lse = m + log(l).");
  module.def("log_sum_exp", &py_log_sum_exp, arg("state"), arg("token").noconvert(),
             "Log-sum-exp of the logits that some query tokens have seen, [n, q_heads].");
  module.def("merge", &py_merge, arg("state"), arg("part"),
             "Fold the state of further keys into a state of the same queries.");
  module.def("store_kv", &py_store_kv, arg("key"), arg("value"), arg("slot_mapping").noconvert(),
             arg("cache"), arg("shape"), arg("threads"), arg("key_scale") = 1.0,
             arg("value_scale") = 1.0,
             R"(Scatter new K and V, torch tensors, into the blocks of a layer's ``cache``, another.

``slot_mapping[t] = block * block_tokens + offset``; negative slots are skipped. Blocks of 8 bits
get K and V divided by their scales, rounded as vLLM's CPU backend does: towards zero, and what is
too large, or NaN, to the largest number.)");
  module.def("copy_blocks", &py_copy_blocks, arg("source").noconvert(), arg("from_shape"),
             arg("destination").noconvert(), arg("to_shape"), arg("clear_padding"), arg("threads"),
             "Copy blocks between addresses; shapes differ in the page stride alone.");
  nb::class_<AttentionClock>(module, "AttentionClock",
                             R"(Seconds by part, one of :data:`vllm_ssdkv.kernels.step_clock.PARTS`.

Used by the thread that runs the forward pass. On a GPU kernels run later than they are called: what
is measured there is the time of the host.)")
      .def(nb::init<>())
      .def("start", &AttentionClock::start, "Attention of a layer begins.")
      .def("lap", &AttentionClock::lap, arg("part"),
           "Count the time since the last call as this part's. Raises IndexError: there is none.")
      .def_prop_ro(
          "seconds", [](const AttentionClock& clock) { return clock.seconds(); },
          "Seconds in each part, so far.")
      .def_prop_ro("window_seconds", &AttentionClock::window_seconds,
                   "Seconds of attending to windows, which are in those of attending.")
      .def_prop_ro("fetched_at", &AttentionClock::fetched_at,
                   "Time at which the latest look-up or fetch ended, as of ``time.monotonic``.");
  bind_sparse(module);
  bind_next_best(module);
  ssdkv::decode::bind_decode(module);
}
