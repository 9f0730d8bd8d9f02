// C simulation only: stands in for the vendor's header of this name. Own code.
#pragma once

#include <cstddef>

namespace hls {

constexpr std::size_t power_of_two(std::size_t n, std::size_t power = 1) {
  return power >= n ? power : power_of_two(n, 2 * power);
}

// N elements side by side, aligned to their whole size.
template <typename T, std::size_t N>
class alignas(power_of_two(sizeof(T) * N)) vector {
 public:
  T& operator[](std::size_t i) { return elements_[i]; }
  const T& operator[](std::size_t i) const { return elements_[i]; }

 private:
  T elements_[N];
};

}  // namespace hls
