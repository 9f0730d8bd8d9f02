// One-dimensional numpy arrays in and out of the bindings of every module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <span>
#include <utility>
#include <vector>

namespace ssdkv {

template <class T>
using ArrayIn =
    nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using ArrayInOut =
    nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using ArrayOut = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;

template <class T>
std::span<const T> span(const ArrayIn<T>& array) {
  return {array.data(), array.shape(0)};
}

template <class T>
std::span<T> span(ArrayInOut<T>& array) {
  return {array.data(), array.shape(0)};
}

// Hand a vector to Python as a one-dimensional numpy array that owns it.
template <class T>
ArrayOut<T> to_numpy(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  const nanobind::capsule owner(owned,
                                [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return ArrayOut<T>(owned->data(), {owned->size()}, owner);
}

}  // namespace ssdkv
