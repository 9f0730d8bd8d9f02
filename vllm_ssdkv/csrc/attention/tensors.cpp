#include "attention/tensors.hpp"

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace ssdkv::attention {
namespace {

// Attributes of a tensor.
struct Tensor {
  explicit Tensor(nb::handle of)
      : tensor(of),
        shape(sizes(of.attr("shape"))),
        strides(sizes(of.attr("stride")())),
        item_bytes(nb::cast<std::int64_t>(of.attr("itemsize"))),
        dtype(dtype_of(of.attr("dtype"))),
        on_host(nb::cast<bool>(of.attr("is_cpu"))) {}

  std::uint64_t address() const { return nb::cast<std::uint64_t>(tensor.attr("data_ptr")()); }

  // Whether elements of the dimensions from this one on lie side by side.
  bool is_dense(std::size_t from) const {
    std::int64_t next = 1;
    for (std::size_t i = shape.size(); i-- > from;) {
      if (shape[i] != 1 && strides[i] != next) return false;  // the stride of one element is any
      next *= shape[i];
    }
    return true;
  }

  std::int64_t elements(std::size_t from) const {
    std::int64_t count = 1;
    for (std::size_t i = from; i < shape.size(); ++i) count *= shape[i];
    return count;
  }

  std::string text() const {
    const auto str = [](const nb::object& value) { return std::string(nb::str(value).c_str()); };
    return str(tensor.attr("dtype")) + " " + str(nb::tuple(tensor.attr("shape"))) + " on " +
           str(tensor.attr("device")) + " with strides " + str(tensor.attr("stride")());
  }

  nb::handle tensor;
  std::vector<std::int64_t> shape, strides;
  std::int64_t item_bytes;
  std::optional<DType> dtype;
  bool on_host;

 private:
  static std::vector<std::int64_t> sizes(nb::object tuple) {
    std::vector<std::int64_t> values(nb::len(tuple));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = nb::cast<std::int64_t>(tuple[i]);
    return values;
  }

  static std::optional<DType> dtype_of(const nb::object& dtype) {
    // Each of torch's dtypes is one object, which lives as long as the process.
    static const auto* const known = new std::vector<nb::object>{
        nb::module_::import_("torch").attr("float32"),
        nb::module_::import_("torch").attr("bfloat16"),
        nb::module_::import_("torch").attr("float16"),
        nb::module_::import_("torch").attr("float8_e4m3fn"),
        nb::module_::import_("torch").attr("float8_e5m2"),
    };
    for (std::size_t i = 0; i < known->size(); ++i) {
      if (dtype.is((*known)[i])) return static_cast<DType>(i);
    }
    return std::nullopt;
  }
};

}  // namespace

Vectors vectors_of(const std::string& name, nb::handle tensor, std::int64_t heads,
                   std::int64_t head_size) {
  const Tensor t(tensor);
  const bool fits = t.shape.size() == 3 && t.shape[1] == heads && t.shape[2] == head_size;
  if (!fits || !t.dtype || item_bytes(*t.dtype) == 1 || !t.on_host ||
      (t.elements(0) > 0 && (t.strides[1] != head_size || t.strides[2] != 1))) {
    throw std::invalid_argument(
        name + " must be [T, " + std::to_string(heads) + ", " + std::to_string(head_size) +
        "] of float32, float16 or bfloat16 on the CPU with contiguous heads, got " + t.text());
  }
  // The stride of a dimension of size one is any.
  const std::int64_t step = t.shape[0] > 1 ? t.strides[0] : heads * head_size;
  require(step >= heads * head_size, "the stride of tokens is smaller than their heads");
  return {reinterpret_cast<std::byte*>(t.address()),
          *t.dtype,
          step * t.item_bytes,
          t.shape[0],
          heads,
          head_size};
}

CacheBlocks blocks_of(nb::handle tensor, const BlockShape& shape) {
  const Tensor t(tensor);
  if (t.shape.size() < 2 || (t.shape[0] > 0 && !t.is_dense(1))) {
    throw std::invalid_argument("a cache must be [num_blocks, ...] with contiguous blocks, got " +
                                t.text());
  }
  const std::int64_t bytes = shape.kv_heads * shape.groups() * shape.page_stride;
  const bool fits = t.shape[0] == 0 || t.elements(1) * t.item_bytes >= bytes;
  if (t.dtype != shape.dtype || !t.on_host || !fits) {
    throw std::invalid_argument("a cache of " + t.text() + " cannot hold blocks of " +
                                std::to_string(bytes) + " bytes of the layout's dtype on the CPU");
  }
  const std::int64_t stride = t.strides[0] * t.item_bytes;
  require(t.shape[0] <= 1 || stride >= bytes, "the blocks of a cache overlap");
  return {t.address(), t.shape[0], stride};
}

}  // namespace ssdkv::attention
