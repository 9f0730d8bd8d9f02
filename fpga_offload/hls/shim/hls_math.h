// C simulation only: stands in for the vendor's header of this name. Own code.
#pragma once

#include <cmath>

namespace hls {

inline float exp(float x) { return std::exp(x); }
inline float exp2(float x) { return std::exp2(x); }
inline float log(float x) { return std::log(x); }
inline float sqrt(float x) { return std::sqrt(x); }
inline float ceil(float x) { return std::ceil(x); }
inline float fabs(float x) { return std::fabs(x); }
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }

}  // namespace hls
