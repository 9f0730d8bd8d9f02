// Checks of arguments for the binding files of the kernels.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "attention/mean_value.hpp"
#include "attention/problem.hpp"

namespace ssdkv::attention {

namespace nb = nanobind;

template <typename T, typename Shape>
using Array = nb::ndarray<T, Shape, nb::c_contig, nb::device::cpu>;
template <typename T>
using Vector = Array<const T, nb::ndim<1>>;
using Mask = Array<const std::uint8_t, nb::ndim<2>>;
using Matrix = Array<float, nb::ndim<2>>;
using ConstMatrix = Array<const float, nb::ndim<2>>;
using Cube = Array<float, nb::ndim<3>>;
using ConstCube = Array<const float, nb::ndim<3>>;

inline void require(bool condition, const char* text) {
  if (!condition) throw std::invalid_argument(text);
}

inline DType to_dtype(int code) {
  require(code >= 0 && code <= static_cast<int>(DType::kFloat8E5M2), "there is no such dtype");
  return static_cast<DType>(code);
}

inline std::int64_t extent(std::size_t n) { return static_cast<std::int64_t>(n); }

// The operands of a call, as Python holds them: the plain struct, and the arrays that it points
// into. Each is checked once, when it is made; what is left to a call is whether they fit each
// other. See bindings.cpp.

struct BlockShape : PageLayout {
  explicit BlockShape(const PageLayout& sizes);

  std::int64_t payload() const { return 2 * page_tokens * head_size * item_bytes(dtype); }
  std::int64_t groups() const { return block_tokens / page_tokens; }
  // Of K and V in 8 bits kernels make and read no summaries but bounds.
  void check_wide() const {
    require(item_bytes(dtype) > 1, "these kernels know K and V of 16 and 32 bits only");
  }
  // Query heads of each KV head.
  void check_heads(std::int64_t q_heads) const {
    require(q_heads > 0 && q_heads % kv_heads == 0,
            "q_heads must be a positive multiple of kv_heads");
  }
};

struct BoundState : State {
  BoundState(Matrix m, Matrix l, Cube acc, double soft_cap,
             const std::optional<Vector<float>>& slopes, double scale_of_values);
  void check_same_queries(const State& other) const {
    require(
        tokens == other.tokens && query_heads == other.query_heads && head_size == other.head_size,
        "the states are not of the same queries");
  }

 private:
  Matrix m_, l_;
  Cube acc_;
  Vector<float> slopes_;
};

// Throws unless the shape is that of so many heads.
LogitShape to_shape(double soft_cap, const std::optional<Vector<float>>& slopes,
                    std::int64_t query_heads);

struct BoundRows : Rows {
  BoundRows(const Vector<std::int32_t>& begins, const std::optional<Vector<std::int32_t>>& counts,
            const Vector<std::int64_t>& positions, const Vector<std::int32_t>& list_begins,
            const Vector<std::int32_t>& list_ends, bool per_head);

  std::int64_t lists;
  std::int64_t last_query = 0;                  // end of the queries
  std::int64_t last_page = 0;                   // end of the pages
  std::int64_t max_queries = 0, max_pages = 0;  // of a row, and of a list

 private:
  Vector<std::int32_t> query_begin_;
  Vector<std::int32_t> query_count_;
  Vector<std::int64_t> first_position_;
  Vector<std::int32_t> begin_, end_;
  std::vector<std::int32_t> ones_;
};

struct BoundPages : Pages {
  BoundPages(const Vector<std::uint64_t>& addresses, const Vector<std::int64_t>& positions,
             const std::optional<Mask>& mask);

  std::int64_t mask_tokens = 0;

 private:
  Vector<std::uint64_t> address_;
  Vector<std::int64_t> position_;
  Mask token_mask_;
};

inline void check_threads(std::int64_t threads) {
  require(threads > 0, "threads must be positive");
}

// Rows of a table of columns; throws unless first_column starts at 0 and never falls.
inline std::int64_t rows_of(const Vector<std::int64_t>& first_column) {
  require(first_column.shape(0) > 0 && first_column.data()[0] == 0,
          "a table's columns must begin at 0");
  for (std::size_t r = 1; r < first_column.shape(0); ++r) {
    require(first_column.data()[r] >= first_column.data()[r - 1], "a row has negative columns");
  }
  return extent(first_column.shape(0)) - 1;
}

inline std::int64_t columns_of(const Vector<std::int64_t>& first_column) {
  return first_column.data()[first_column.shape(0) - 1];
}

template <typename A>
void check_size(const A& array, std::int64_t size, const char* text) {
  require(extent(array.size()) == size, text);
}

inline void check_bits(std::int64_t bits) {
  require(bits == 1 || bits == 2 || bits == 4, "codes have 1, 2 or 4 bits");
}

// Checks that every row's blocks lie within the addresses and are as many as its columns say.
inline void check_blocks(const Vector<std::int32_t>& begin, const Vector<std::int32_t>& end,
                         std::int64_t rows, std::int64_t addresses) {
  check_size(begin, rows, "a row needs one begin and one end of its blocks");
  check_size(end, rows, "a row needs one begin and one end of its blocks");
  for (std::int64_t r = 0; r < rows; ++r) {
    require(begin.data()[r] >= 0 && begin.data()[r] <= end.data()[r] && end.data()[r] <= addresses,
            "a row's blocks reach beyond the addresses");
  }
}

// Contexts and windows of rows: the same in every layer of a step.
struct Contexts {
  BlockShape shape;
  Vector<std::int32_t> row_begin, row_end, window_tokens;
  Vector<std::int64_t> first_page, first_token;
  std::int64_t rows;

  Contexts(const BlockShape& of, Vector<std::int32_t> begin, Vector<std::int32_t> end,
           Vector<std::int32_t> window, Vector<std::int64_t> pages, Vector<std::int64_t> tokens)
      : shape(of),
        row_begin(begin),
        row_end(end),
        window_tokens(window),
        first_page(pages),
        first_token(tokens),
        rows(rows_of(pages)) {
    check_blocks(begin, end, rows, INT32_MAX);
    check_size(window, rows, "window_tokens must be [rows]");
    require(rows_of(tokens) == rows, "first_page and first_token differ in rows");
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t blocks = end.data()[r] - begin.data()[r];
      require(pages.data()[r + 1] - pages.data()[r] == blocks * shape.groups(),
              "a row's pages are not those of its blocks");
      require(window.data()[r] >= 0 && tokens.data()[r + 1] - tokens.data()[r] ==
                                           blocks * shape.block_tokens + window.data()[r],
              "a row's tokens are not those of its blocks and window");
    }
  }

  void check_addresses(const Vector<std::uint64_t>& addresses) const {
    for (std::int64_t r = 0; r < rows; ++r) {
      require(row_end.data()[r] <= extent(addresses.shape(0)),
              "a row's blocks reach beyond the addresses");
    }
  }
};

// Sums of V, by place; the arrays are written to.
struct BoundValueSums : ValueSums {
  BoundValueSums(const Array<float, nb::ndim<4>>& of_blocks,
                 const Array<float, nb::ndim<4>>& behind,
                 const Array<std::int64_t, nb::ndim<2>>& counts, std::int64_t tokens_of_block)
      : ValueSums{extent(of_blocks.shape(1)),
                  extent(of_blocks.shape(2)),
                  extent(of_blocks.shape(3)),
                  tokens_of_block,
                  of_blocks.data(),
                  behind.data(),
                  counts.data()},
        places(extent(of_blocks.shape(0))),
        blocks_(of_blocks),
        rest_(behind),
        tokens_(counts) {
    require(block_tokens > 0, "a block has tokens");
    for (std::size_t i = 0; i < 4; ++i) {
      require(blocks_.shape(i) == rest_.shape(i), "the sums differ in shape");
    }
    require(extent(tokens_.shape(0)) == places && extent(tokens_.shape(1)) == layers,
            "tokens must be [places, layers]");
  }

  std::int64_t places;

 private:
  Array<float, nb::ndim<4>> blocks_, rest_;
  Array<std::int64_t, nb::ndim<2>> tokens_;
};

// The functions of page selection and sparse attention, in sparse_bindings.cpp.
void bind_sparse(nb::module_& module);
void bind_next_best(nb::module_& module);

}  // namespace ssdkv::attention
