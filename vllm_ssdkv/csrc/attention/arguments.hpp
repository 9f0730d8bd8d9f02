// Checks of arguments for the binding files of the kernels.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>

#include "attention/problem.hpp"

namespace ssdkv::attention {

namespace nb = nanobind;

template <typename T, typename Shape>
using Array = nb::ndarray<T, Shape, nb::c_contig, nb::device::cpu>;
template <typename T>
using Vector = Array<const T, nb::ndim<1>>;
using Matrix = Array<float, nb::ndim<2>>;
using ConstMatrix = Array<const float, nb::ndim<2>>;
using Cube = Array<float, nb::ndim<3>>;
using ConstCube = Array<const float, nb::ndim<3>>;

inline void require(bool condition, const char* text) {
  if (!condition) throw std::invalid_argument(text);
}

inline DType to_dtype(int code) {
  require(code >= 0 && code <= 2, "dtype must be FLOAT32 (0), BFLOAT16 (1) or FLOAT16 (2)");
  return static_cast<DType>(code);
}

inline std::int64_t item_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline std::int64_t extent(std::size_t n) { return static_cast<std::int64_t>(n); }

inline PageLayout to_layout(std::int64_t block_tokens, std::int64_t page_tokens,
                            std::int64_t page_stride, std::int64_t kv_heads, std::int64_t head_size,
                            int dtype) {
  require(page_tokens > 0 && block_tokens > 0 && block_tokens % page_tokens == 0,
          "block_tokens must be a positive multiple of page_tokens");
  require(kv_heads > 0, "kv_heads must be positive");
  require(head_size > 0 && head_size % 8 == 0 && head_size <= kMaxHeadSize,
          "head_size must be a multiple of 8, at most 256");
  const PageLayout layout{block_tokens, page_tokens, page_stride,
                          kv_heads,     head_size,   to_dtype(dtype)};
  require(page_stride >= 2 * page_tokens * head_size * item_bytes(layout.dtype),
          "page_stride is smaller than K and V of one page");
  return layout;
}

// The functions of page selection and sparse attention, in sparse_bindings.cpp.
void bind_sparse(nb::module_& module);
void bind_next_best(nb::module_& module);

}  // namespace ssdkv::attention
