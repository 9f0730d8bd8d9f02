// Vectors of one instruction set: loads that widen, stores that round, lane permutations, exp.
//
// Included once by each kernels_*.cpp, which are compiled with different flags. Everything sits in
// a namespace named after the instruction set and is local to the file; no standard library
// template is used, because the linker may keep any one of several copies of an inline function,
// and the copy with AVX-512 in it would then run on machines without.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "attention/problem.hpp"

namespace ssdkv::attention::SSDKV_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#else
constexpr int kLanes = 4;
#if defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
#endif

using Vec = float __attribute__((vector_size(4 * kLanes)));
using IntVec = std::int32_t __attribute__((vector_size(4 * kLanes)));
using UintVec = std::uint32_t __attribute__((vector_size(4 * kLanes)));
using HalfVec = std::uint16_t __attribute__((vector_size(2 * kLanes)));
using ByteVec = std::int8_t __attribute__((vector_size(kLanes)));
using BitsVec = std::uint8_t __attribute__((vector_size(kLanes)));
using Lanes = std::make_integer_sequence<int, kLanes>;

// Storage types of the dtypes, and of the mean in codes: only their size and the overload they
// select matter.
enum class BFloat16 : std::uint16_t {};
enum class Float16 : std::uint16_t {};
enum class Float8E4M3 : std::uint8_t {};
enum class Float8E5M2 : std::uint8_t {};
enum class Int8 : std::int8_t {};

constexpr float kInfinity = __builtin_inff();

// Calls work(T{}) for the storage type T of a dtype of 16 or 32 bits.
template <typename Work>
void for_dtype(DType dtype, const Work& work) {
  if (dtype == DType::kFloat32) return work(float{});
  if (dtype == DType::kBFloat16) return work(BFloat16{});
  if (dtype == DType::kFloat16) return work(Float16{});
}

// The same for any dtype, which K and V may be stored as.
template <typename Work>
void for_stored(DType dtype, const Work& work) {
  if (dtype == DType::kFloat8E4M3) return work(Float8E4M3{});
  if (dtype == DType::kFloat8E5M2) return work(Float8E5M2{});
  for_dtype(dtype, work);
}

inline Vec splat(float x) { return x - Vec{}; }

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

inline Vec read(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

inline void write(float* to, Vec v) { std::memcpy(to, &v, sizeof(v)); }

// The maskz forms spare GCC 12 a false warning about the undefined vector that the plain ones start
// from (its bug 105593).
inline UintVec widen(const void* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<UintVec>(
      _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<UintVec>(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
#else
  HalfVec halves;
  std::memcpy(&halves, from, sizeof(halves));
  return __builtin_convertvector(halves, UintVec);
#endif
}

// load<T>(address): kLanes elements as fp32.
template <typename T>
Vec load(const std::byte* from);

template <>
inline Vec load<float>(const std::byte* from) {
  Vec v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

template <>
inline Vec load<BFloat16>(const std::byte* from) {
  return reinterpret_cast<Vec>(widen(from) << 16);
}

template <>
inline Vec load<Float16>(const std::byte* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(
      _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return reinterpret_cast<Vec>(
      _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  const UintVec half = widen(from);
  const UintVec magnitude = (half & 0x7fff) << 13;
  UintVec bits = magnitude + (112u << 23);
  bits = magnitude >= 0x7c00u << 13 ? bits + (112u << 23) : bits;  // infinity, NaN
  // Subnormal: give it exponent -14, then take the implicit one away again.
  const Vec small = reinterpret_cast<Vec>(bits + (1u << 23)) - 0x1p-14f;
  bits = magnitude < 0x400u << 13 ? reinterpret_cast<UintVec>(small) : bits;
  return reinterpret_cast<Vec>(bits | (half & 0x8000) << 16);
#endif
}

// Both kinds of 8 bits are float16 but for where their bits stand, and for the exponent's bias.
inline HalfVec widen_bits(const std::byte* from) {
  BitsVec bits;
  std::memcpy(&bits, from, sizeof(bits));
  return __builtin_convertvector(bits, HalfVec);
}

inline Vec load_halves(HalfVec halves) {
  return load<Float16>(reinterpret_cast<const std::byte*>(&halves));
}

template <>
inline Vec load<Float8E5M2>(const std::byte* from) {
  return load_halves(widen_bits(from) << 8);
}

template <>
inline Vec load<Float8E4M3>(const std::byte* from) {
  const HalfVec bits = widen_bits(from);
  const HalfVec magnitude = bits & 0x7f;
  const HalfVec number = (bits & 0x80) << 8 | magnitude << 7;
  return load_halves(magnitude == 0x7f ? HalfVec{} + 0x7e00 : number) *
         256.0f;  // it has no infinity
}

template <>
inline Vec load<Int8>(const std::byte* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Vec>(
      _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes)));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Vec>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
#else
  ByteVec bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, Vec);
#endif
}

template <typename T>
inline Vec load_some(const std::byte* from, std::int64_t count) {
  if (count >= kLanes) return load<T>(from);
  std::byte padded[kLanes * sizeof(T)] = {};
  std::memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(T));
  return load<T>(padded);
}

// store<T>(address, v): kLanes elements, rounded to nearest even.
template <typename T>
void store(std::byte* to, Vec v);

template <>
inline void store<float>(std::byte* to, Vec v) {
  std::memcpy(to, &v, sizeof(v));
}

template <>
inline void store<BFloat16>(std::byte* to, Vec v) {
  const UintVec bits = reinterpret_cast<UintVec>(v);
  UintVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = v == v ? rounded : UintVec{} + 0x7fc0;  // rounding could carry out of a NaN
#if defined(__AVX512F__)
  const __m256i halves = _mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(rounded));
#else
  const HalfVec halves = __builtin_convertvector(rounded, HalfVec);
#endif
  std::memcpy(to, &halves, sizeof(halves));
}

template <>
inline void store<Float16>(std::byte* to, Vec v) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  const __m128i halves = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#else
  _Float16 halves[kLanes];
  for (int i = 0; i < kLanes; ++i) halves[i] = static_cast<_Float16>(v[i]);
#endif
  std::memcpy(to, &halves, sizeof(halves));
}

inline HalfVec store_halves(Vec v) {
  HalfVec halves;
  store<Float16>(reinterpret_cast<std::byte*>(&halves), v);
  return halves;
}

// Vector of numbers that the type has.
template <>
inline void store<Float8E5M2>(std::byte* to, Vec v) {
  const BitsVec bits = __builtin_convertvector(store_halves(v) >> 8, BitsVec);
  std::memcpy(to, &bits, sizeof(bits));
}

template <>
inline void store<Float8E4M3>(std::byte* to, Vec v) {
  const HalfVec halves = store_halves(v * 0x1p-8f);
  const HalfVec magnitude = (halves & 0x7fff) > 0x7c00 ? HalfVec{} + 0x7f : halves >> 7 & 0x7f;
  const BitsVec bits = __builtin_convertvector((halves >> 8 & 0x80) | magnitude, BitsVec);
  std::memcpy(to, &bits, sizeof(bits));
}

// Vector of whole numbers within -128 .. 127.
template <>
inline void store<Int8>(std::byte* to, Vec v) {
  const IntVec whole = __builtin_convertvector(v, IntVec);
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(whole));
#else
  const ByteVec bytes = __builtin_convertvector(whole, ByteVec);
#endif
  std::memcpy(to, &bytes, sizeof(bytes));
}

template <typename T>
inline void store_some(std::byte* to, Vec v, std::int64_t count) {
  if (count >= kLanes) return store<T>(to, v);
  std::byte padded[kLanes * sizeof(T)];
  store<T>(padded, v);
  std::memcpy(to, padded, static_cast<std::size_t>(count) * sizeof(T));
}

// e^x for x <= 0, within 1 ulp or so; 0 below the smallest normal number, minus infinity included.
// The range reduction and the polynomial are those of Cephes' expf (Moshier, 1992).
inline Vec exp_nonpositive(Vec x) {
  const Vec clamped = max(splat(-87.33654f), x);  // in this order NaN stays NaN
  const Vec magic = splat(0x1.8p23f);  // adding it leaves the rounded integer in the low bits
  const Vec shifted = clamped * 1.44269504088896341f + magic;
  const Vec n = shifted - magic;
  const Vec r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  const UintVec scaled = reinterpret_cast<UintVec>(p) + (reinterpret_cast<UintVec>(shifted) << 23);
  return x < splat(-87.33654f) ? Vec{} : reinterpret_cast<Vec>(scaled);
}

// Lane i of the result comes from lane From(i) of the pair (a, b).
template <int (*From)(int), int... I>
inline Vec shuffle(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, From(I)...);
}
template <int (*From)(int)>
inline Vec shuffle(Vec a, Vec b) {
  return shuffle<From>(a, b, Lanes{});
}

// Within each 128-bit quarter: interleave the low or high halves, by lanes or by pairs of lanes.
constexpr int low_lanes(int i) { return (i & ~3) + (i & 3) / 2 + (i & 1) * kLanes; }
constexpr int high_lanes(int i) { return low_lanes(i) + 2; }
constexpr int low_pairs(int i) { return (i & ~2) + (i & 2) / 2 * kLanes; }
constexpr int high_pairs(int i) { return low_pairs(i) + 2; }
// Even or odd 128-bit quarters of a, then of b.
constexpr int even_quarters(int i) { return i / 4 * 8 + i % 4; }
constexpr int odd_quarters(int i) { return even_quarters(i) + 4; }

template <int Distance>
constexpr int swapped(int i) {
  return i ^ Distance;
}

inline float horizontal_max(Vec v) {
  if constexpr (kLanes > 8) v = max(v, shuffle<swapped<8>>(v, v));
  if constexpr (kLanes > 4) v = max(v, shuffle<swapped<4>>(v, v));
  v = max(v, shuffle<swapped<2>>(v, v));
  v = max(v, shuffle<swapped<1>>(v, v));
  return v[0];
}

inline float horizontal_sum(Vec v) {
  if constexpr (kLanes > 8) v += shuffle<swapped<8>>(v, v);
  if constexpr (kLanes > 4) v += shuffle<swapped<4>>(v, v);
  v += shuffle<swapped<2>>(v, v);
  v += shuffle<swapped<1>>(v, v);
  return v[0];
}

// Lane i of the result is the sum of the lanes of v[i].
inline Vec sums_of(const Vec (&v)[kLanes]) {
  Vec quads[kLanes / 4];
#pragma GCC unroll 4
  for (int q = 0; q < kLanes / 4; ++q) {
    const Vec* four = v + 4 * q;
    const Vec ab = shuffle<low_lanes>(four[0], four[1]) + shuffle<high_lanes>(four[0], four[1]);
    const Vec cd = shuffle<low_lanes>(four[2], four[3]) + shuffle<high_lanes>(four[2], four[3]);
    quads[q] = shuffle<low_pairs>(ab, cd) + shuffle<high_pairs>(ab, cd);
  }
  if constexpr (kLanes == 16) {
    const Vec first =
        shuffle<even_quarters>(quads[0], quads[1]) + shuffle<odd_quarters>(quads[0], quads[1]);
    const Vec second =
        shuffle<even_quarters>(quads[2], quads[3]) + shuffle<odd_quarters>(quads[2], quads[3]);
    return shuffle<even_quarters>(first, second) + shuffle<odd_quarters>(first, second);
  } else if constexpr (kLanes == 8) {
    return shuffle<even_quarters>(quads[0], quads[1]) + shuffle<odd_quarters>(quads[0], quads[1]);
  } else {
    return quads[0];
  }
}

// Transposes a square of kLanes x kLanes in registers.
inline void transpose(Vec (&v)[kLanes]) {
  Vec u[kLanes];
#pragma GCC unroll 4
  for (int q = 0; q < kLanes; q += 4) {
    const Vec a = shuffle<low_lanes>(v[q], v[q + 1]);
    const Vec b = shuffle<high_lanes>(v[q], v[q + 1]);
    const Vec c = shuffle<low_lanes>(v[q + 2], v[q + 3]);
    const Vec d = shuffle<high_lanes>(v[q + 2], v[q + 3]);
    // Quarter j of u[q + i] holds column 4j + i of rows q to q + 3.
    u[q] = shuffle<low_pairs>(a, c);
    u[q + 1] = shuffle<high_pairs>(a, c);
    u[q + 2] = shuffle<low_pairs>(b, d);
    u[q + 3] = shuffle<high_pairs>(b, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    if constexpr (kLanes == 16) {
      const Vec even_top = shuffle<even_quarters>(u[i], u[4 + i]);
      const Vec odd_top = shuffle<odd_quarters>(u[i], u[4 + i]);
      const Vec even_low = shuffle<even_quarters>(u[8 + i], u[12 + i]);
      const Vec odd_low = shuffle<odd_quarters>(u[8 + i], u[12 + i]);
      v[i] = shuffle<even_quarters>(even_top, even_low);
      v[8 + i] = shuffle<odd_quarters>(even_top, even_low);
      v[4 + i] = shuffle<even_quarters>(odd_top, odd_low);
      v[12 + i] = shuffle<odd_quarters>(odd_top, odd_low);
    } else if constexpr (kLanes == 8) {
      v[i] = shuffle<even_quarters>(u[i], u[4 + i]);
      v[4 + i] = shuffle<odd_quarters>(u[i], u[4 + i]);
    } else {
      v[i] = u[i];
    }
  }
}

}  // namespace
}  // namespace ssdkv::attention::SSDKV_ISA
