// Python face of the CPU attention kernels. Arguments are checked here, before any address is
// followed; what cannot be checked is that raw addresses point at memory of the stated shape.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "attention/arguments.hpp"
#include "attention/attend.hpp"
#include "attention/clock.hpp"
#include "attention/isa.hpp"
#include "attention/openmp_team.hpp"
#include "attention/transfer.hpp"
#include "base/unlocked.hpp"

namespace ssdkv::attention {
namespace {

template <typename State, typename Accumulator>
void check_state(const State& m, const State& l, const Accumulator& acc) {
  require(m.shape(0) == l.shape(0) && m.shape(1) == l.shape(1) && m.shape(0) == acc.shape(0) &&
              m.shape(1) == acc.shape(1),
          "m and l must be [tokens, q_heads] and acc [tokens, q_heads, head_size]");
}

// What calls over blocks and calls over pages have in common. `lists` is the number of block lists:
// one per row, or one per row and KV head.
struct AttendCall {
  std::uint64_t q_address;
  int q_dtype;
  std::int64_t q_stride_bytes;
  double scale;
  Matrix m;
  Matrix l;
  Cube acc;
  std::int64_t q_heads;
  std::int64_t threads;

  Problem problem(const PageLayout& layout) const {
    Problem p{};
    p.layout = layout;
    check_state(m, l, acc);
    require(q_heads > 0 && q_heads % layout.kv_heads == 0,
            "q_heads must be a positive multiple of kv_heads");
    require(extent(m.shape(1)) == q_heads && extent(acc.shape(2)) == layout.head_size,
            "m, l and acc do not match q_heads and head_size");
    require(std::isfinite(scale), "scale must be finite");
    require(threads > 0, "threads must be positive");
    p.query_heads = q_heads;
    p.query = reinterpret_cast<const std::byte*>(q_address);
    p.query_dtype = to_dtype(q_dtype);
    p.query_stride = q_stride_bytes;
    require(q_stride_bytes >= q_heads * layout.head_size * item_bytes(p.query_dtype),
            "q_stride_bytes is smaller than the heads of one token");
    p.scale = static_cast<float>(scale);
    p.maximum = m.data();
    p.denominator = l.data();
    p.accumulator = acc.data();
    return p;
  }
};

// Sets the lists of blocks; checks that they lie within `blocks`.
void set_lists(Problem& p, const Vector<std::int32_t>& begin, const Vector<std::int32_t>& end,
               const Vector<std::uint64_t>& base, const Vector<std::int64_t>& position) {
  const std::int64_t blocks = extent(base.shape(0));
  require(extent(position.shape(0)) == blocks, "addresses and positions differ in length");
  for (std::size_t i = 0; i < begin.shape(0); ++i) {
    require(begin.data()[i] >= 0 && begin.data()[i] <= end.data()[i] && end.data()[i] <= blocks,
            "a list reaches beyond the addresses");
  }
  p.row_block_begin = begin.data();
  p.row_block_end = end.data();
  p.block_base = base.data();
  p.block_position = position.data();
}

void py_attend(std::uint64_t q_address, int q_dtype, std::int64_t q_stride_bytes, double scale,
               Matrix m, Matrix l, Cube acc, Vector<std::int32_t> row_query_begin,
               Vector<std::int32_t> row_query_count, Vector<std::int64_t> row_first_position,
               Vector<std::int32_t> row_block_begin, Vector<std::int32_t> row_block_end,
               Vector<std::uint64_t> block_base, Vector<std::int64_t> block_position,
               std::int64_t block_tokens, std::int64_t page_tokens, std::int64_t page_stride,
               std::int64_t kv_heads, std::int64_t q_heads, std::int64_t head_size, int kv_dtype,
               std::int64_t threads, std::optional<std::int64_t> sliding_window) {
  Problem p =
      AttendCall{q_address, q_dtype, q_stride_bytes, scale, m, l, acc, q_heads, threads}.problem(
          to_layout(block_tokens, page_tokens, page_stride, kv_heads, head_size, kv_dtype));
  if (sliding_window) {
    require(*sliding_window > 0, "sliding_window must be positive");
    p.sliding_window = std::min(*sliding_window, kUnbounded);
  }
  const std::int64_t tokens = extent(m.shape(0));
  const std::int64_t rows = extent(row_query_begin.shape(0));
  require(extent(row_query_count.shape(0)) == rows && extent(row_first_position.shape(0)) == rows &&
              extent(row_block_begin.shape(0)) == rows && extent(row_block_end.shape(0)) == rows,
          "the row_* arrays differ in length");
  for (std::size_t r = 0; r < row_query_begin.shape(0); ++r) {
    const std::int64_t begin = row_query_begin.data()[r];
    const std::int64_t count = row_query_count.data()[r];
    require(begin >= 0 && count >= 0 && begin + count <= tokens,
            "a row's queries lie outside m, l and acc");
  }
  set_lists(p, row_block_begin, row_block_end, block_base, block_position);
  p.row_query_begin = row_query_begin.data();
  p.row_query_count = row_query_count.data();
  p.row_first_position = row_first_position.data();
  const Unlocked unlocked;
  attend(active_kernels(), p, rows, threads);
}

void py_attend_pages(std::uint64_t q_address, int q_dtype, std::int64_t q_stride_bytes,
                     double scale, Matrix m, Matrix l, Cube acc, Vector<std::int32_t> query_token,
                     Vector<std::int64_t> query_position, Vector<std::int32_t> begin,
                     Vector<std::int32_t> end, Vector<std::uint64_t> address,
                     Vector<std::int64_t> position,
                     std::optional<Array<const std::uint8_t, nb::ndim<2>>> token_mask,
                     std::int64_t page_tokens, std::int64_t kv_heads, std::int64_t q_heads,
                     std::int64_t head_size, int kv_dtype, std::int64_t threads) {
  const std::int64_t payload = 2 * page_tokens * head_size * item_bytes(to_dtype(kv_dtype));
  Problem p =
      AttendCall{q_address, q_dtype, q_stride_bytes, scale, m, l, acc, q_heads, threads}.problem(
          to_layout(page_tokens, page_tokens, payload, kv_heads, head_size, kv_dtype));
  const std::int64_t tokens = extent(m.shape(0));
  const std::int64_t rows = extent(query_token.shape(0));
  require(extent(query_position.shape(0)) == rows && extent(begin.shape(0)) == rows * kv_heads &&
              extent(end.shape(0)) == rows * kv_heads,
          "query_position must be [rows], begin and end [rows * kv_heads]");
  for (std::size_t r = 0; r < query_token.shape(0); ++r) {
    require(query_token.data()[r] >= 0 && query_token.data()[r] < tokens,
            "a query token lies outside m, l and acc");
  }
  set_lists(p, begin, end, address, position);
  if (token_mask) {
    require(extent(token_mask->shape(0)) == extent(address.shape(0)) &&
                extent(token_mask->shape(1)) == page_tokens,
            "token_mask must be [pages, page_tokens]");
    p.token_mask = token_mask->data();
  }
  const std::vector<std::int32_t> ones(query_token.shape(0), 1);
  p.list_per_head = true;
  p.row_query_begin = query_token.data();
  p.row_query_count = ones.data();
  p.row_first_position = query_position.data();
  const Unlocked unlocked;
  attend(active_kernels(), p, rows, threads);
}

void py_finish(ConstMatrix m, ConstMatrix l, ConstCube acc, std::uint64_t out_address,
               int out_dtype, std::int64_t out_stride_bytes, std::optional<Matrix> lse,
               std::int64_t threads) {
  check_state(m, l, acc);
  require(threads > 0, "threads must be positive");
  Output o{};
  o.maximum = m.data();
  o.denominator = l.data();
  o.accumulator = acc.data();
  o.query_heads = extent(m.shape(1));
  o.head_size = extent(acc.shape(2));
  o.out = reinterpret_cast<std::byte*>(out_address);
  o.dtype = to_dtype(out_dtype);
  o.out_stride = out_stride_bytes;
  require(out_stride_bytes >= o.query_heads * o.head_size * item_bytes(o.dtype),
          "out_stride_bytes is smaller than the heads of one token");
  if (lse) {
    require(lse->shape(0) == m.shape(0) && lse->shape(1) == m.shape(1),
            "lse must be [tokens, q_heads]");
    o.lse = lse->data();
  }
  const std::int64_t tokens = extent(m.shape(0));
  if (o.query_heads * o.head_size == 0) return;
  const Unlocked unlocked;
  finish(active_kernels(), o, tokens, threads);
}

// A few thousand numbers: letting other Python threads run would cost more than it takes.
void py_merge(Matrix m, Matrix l, Cube acc, ConstMatrix part_m, ConstMatrix part_l,
              ConstCube part_acc) {
  check_state(m, l, acc);
  check_state(part_m, part_l, part_acc);
  require(part_acc.shape(0) == acc.shape(0) && part_acc.shape(1) == acc.shape(1) &&
              part_acc.shape(2) == acc.shape(2),
          "the states are not of the same queries");
  merge({m.data(), l.data(), acc.data()}, {part_m.data(), part_l.data(), part_acc.data()},
        extent(m.shape(0) * m.shape(1)), extent(acc.shape(2)));
}

void py_store_kv(std::uint64_t key_address, std::uint64_t value_address, int dtype,
                 std::int64_t key_stride_bytes, std::int64_t value_stride_bytes,
                 Vector<std::int64_t> slot_mapping, std::uint64_t cache_address,
                 std::int64_t block_stride_bytes, std::int64_t page_stride,
                 std::int64_t block_tokens, std::int64_t page_tokens, std::int64_t kv_heads,
                 std::int64_t head_size, std::int64_t threads) {
  Scatter s{};
  s.layout = to_layout(block_tokens, page_tokens, page_stride, kv_heads, head_size, dtype);
  require(threads > 0, "threads must be positive");
  const std::int64_t token = kv_heads * head_size * item_bytes(s.layout.dtype);
  require(key_stride_bytes >= token && value_stride_bytes >= token,
          "a token stride is smaller than the heads of one token");
  require(block_stride_bytes >= kv_heads * (block_tokens / page_tokens) * page_stride,
          "block_stride_bytes is smaller than the pages of one block");
  s.key = reinterpret_cast<const std::byte*>(key_address);
  s.value = reinterpret_cast<const std::byte*>(value_address);
  s.key_stride = key_stride_bytes;
  s.value_stride = value_stride_bytes;
  s.slots = slot_mapping.data();
  s.cache = reinterpret_cast<std::byte*>(cache_address);
  s.block_stride = block_stride_bytes;
  const std::int64_t tokens = extent(slot_mapping.shape(0));
  const Unlocked unlocked;
  scatter_tokens(s, tokens, threads);
}

void py_copy(const Vector<std::uint64_t>& source, const Vector<std::uint64_t>& destination,
             std::int64_t pages, std::int64_t payload_bytes, std::int64_t source_stride,
             std::int64_t destination_stride, bool clear_padding, std::int64_t threads) {
  require(source.shape(0) == destination.shape(0), "source and destination differ in length");
  require(pages >= 0 && payload_bytes >= 0 && threads > 0,
          "pages, payload_bytes or threads out of range");
  require(source_stride >= payload_bytes && destination_stride >= payload_bytes,
          "a page stride is smaller than payload_bytes");
  const PageCopy copy{source.data(),
                      destination.data(),
                      pages,
                      {payload_bytes, source_stride, destination_stride, clear_padding}};
  const std::int64_t items = extent(source.shape(0));
  const Unlocked unlocked;
  copy_pages(copy, items, threads);
}

void py_pack(const Vector<std::uint64_t>& source, const Vector<std::uint64_t>& destination,
             std::int64_t pages, std::int64_t payload_bytes, std::int64_t source_stride,
             std::int64_t destination_stride, std::int64_t threads) {
  py_copy(source, destination, pages, payload_bytes, source_stride, destination_stride, true,
          threads);
}

void py_unpack(const Vector<std::uint64_t>& source, const Vector<std::uint64_t>& destination,
               std::int64_t pages, std::int64_t payload_bytes, std::int64_t source_stride,
               std::int64_t destination_stride, std::int64_t threads) {
  py_copy(source, destination, pages, payload_bytes, source_stride, destination_stride, false,
          threads);
}

}  // namespace
}  // namespace ssdkv::attention

NB_MODULE(_kernels, module) {
  namespace nb = nanobind;
  using namespace ssdkv::attention;  // NOLINT: binding code only
  module.attr("FLOAT32") = static_cast<int>(DType::kFloat32);
  module.attr("BFLOAT16") = static_cast<int>(DType::kBFloat16);
  module.attr("FLOAT16") = static_cast<int>(DType::kFloat16);
  module.attr("SPLIT_PAGES") = static_cast<int>(kSplitPages);
  module.def(
      "isa", [] { return std::string(active_kernels().name); },
      "Instruction set of the kernels in force.");
  module.def("isas", &available_isas, "Instruction sets this machine can run, best first.");
  module.def(
      "set_isa", [](const std::string& name) { select_isa(name); }, nb::arg("name"),
      "Use the kernels of another instruction set, for the whole process. Raises ValueError.");
  module.def("team_available", &team_available,
             "Whether calls run on the host's OpenMP team; else on the caller's thread alone.");
  module.def("attend", &py_attend, nb::arg("q_address"), nb::arg("q_dtype"),
             nb::arg("q_stride_bytes"), nb::arg("scale"), nb::arg("m").noconvert(),
             nb::arg("l").noconvert(), nb::arg("acc").noconvert(),
             nb::arg("row_query_begin").noconvert(), nb::arg("row_query_count").noconvert(),
             nb::arg("row_first_position").noconvert(), nb::arg("row_block_begin").noconvert(),
             nb::arg("row_block_end").noconvert(), nb::arg("block_base").noconvert(),
             nb::arg("block_position").noconvert(), nb::arg("block_tokens"), nb::arg("page_tokens"),
             nb::arg("page_stride"), nb::arg("kv_heads"), nb::arg("q_heads"), nb::arg("head_size"),
             nb::arg("kv_dtype"), nb::arg("threads"), nb::arg("sliding_window") = nb::none(),
             "Attend ragged rows of queries to blocks of KV; updates the running softmax (m, l, "
             "acc) in place.");
  module.def("attend_pages", &py_attend_pages, nb::arg("q_address"), nb::arg("q_dtype"),
             nb::arg("q_stride_bytes"), nb::arg("scale"), nb::arg("m").noconvert(),
             nb::arg("l").noconvert(), nb::arg("acc").noconvert(),
             nb::arg("query_token").noconvert(), nb::arg("query_position").noconvert(),
             nb::arg("begin").noconvert(), nb::arg("end").noconvert(),
             nb::arg("address").noconvert(), nb::arg("position").noconvert(),
             nb::arg("token_mask").noconvert().none(), nb::arg("page_tokens"), nb::arg("kv_heads"),
             nb::arg("q_heads"), nb::arg("head_size"), nb::arg("kv_dtype"), nb::arg("threads"),
             "As attend, for one query per row and a list of pages per row and KV head.");
  module.def("finish", &py_finish, nb::arg("m").noconvert(), nb::arg("l").noconvert(),
             nb::arg("acc").noconvert(), nb::arg("out_address"), nb::arg("out_dtype"),
             nb::arg("out_stride_bytes"), nb::arg("lse").noconvert().none(), nb::arg("threads"),
             "out = acc / l (zero where l is 0); lse = m + log(l).");
  module.def("merge", &py_merge, nb::arg("m").noconvert(), nb::arg("l").noconvert(),
             nb::arg("acc").noconvert(), nb::arg("part_m").noconvert(),
             nb::arg("part_l").noconvert(), nb::arg("part_acc").noconvert(),
             "Fold the state of further keys into a state of the same queries.");
  module.def("store_kv", &py_store_kv, nb::arg("key_address"), nb::arg("value_address"),
             nb::arg("dtype"), nb::arg("key_stride_bytes"), nb::arg("value_stride_bytes"),
             nb::arg("slot_mapping").noconvert(), nb::arg("cache_address"),
             nb::arg("block_stride_bytes"), nb::arg("page_stride"), nb::arg("block_tokens"),
             nb::arg("page_tokens"), nb::arg("kv_heads"), nb::arg("head_size"), nb::arg("threads"),
             "Scatter new K and V into blocks; negative slots are skipped.");
  module.def("pack_blocks", &py_pack, nb::arg("source").noconvert(),
             nb::arg("destination").noconvert(), nb::arg("pages"), nb::arg("payload_bytes"),
             nb::arg("source_stride"), nb::arg("destination_stride"), nb::arg("threads"),
             "Copy items of `pages` pages; zeroes the padding of the destination.");
  module.def("unpack_blocks", &py_unpack, nb::arg("source").noconvert(),
             nb::arg("destination").noconvert(), nb::arg("pages"), nb::arg("payload_bytes"),
             nb::arg("source_stride"), nb::arg("destination_stride"), nb::arg("threads"),
             "Copy items of `pages` pages; leaves the padding of the destination alone.");
  nb::class_<AttentionClock>(module, "AttentionClock")
      .def(nb::init<>())
      .def("start", &AttentionClock::start)
      .def("lap", &AttentionClock::lap, nb::arg("part"))
      .def_prop_ro("seconds", [](const AttentionClock& clock) { return clock.seconds(); });
  bind_sparse(module);
  bind_next_best(module);
}
