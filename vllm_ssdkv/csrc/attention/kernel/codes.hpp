// K in a few bits (RaBitQ, Gao and Long 2024, with several bits a channel), and logits from it.
//
// Compiled without contraction of products and sums, and every sum has one order: all instruction
// sets give the same bits. 16 lanes are 16 tokens of a tile, or 16 query heads, whatever the
// registers' width.
#pragma once

#include "attention/codes.hpp"
#include "attention/kernel/blocks.hpp"
#include "attention/scoring.hpp"

namespace ssdkv::attention::SSDKV_ISA {
namespace {

constexpr int kParts = static_cast<int>(kCodeTile) / kLanes;

// 16 lanes.
struct Wide {
  Vec part[kParts];
};

template <typename Make>
inline Wide each(const Make& make) {
  Wide made;
  for (int i = 0; i < kParts; ++i) made.part[i] = make(i);
  return made;
}

inline Wide operator+(const Wide& a, const Wide& b) {
  return each([&](int i) { return a.part[i] + b.part[i]; });
}
inline Wide operator-(const Wide& a, const Wide& b) {
  return each([&](int i) { return a.part[i] - b.part[i]; });
}
inline Wide operator*(const Wide& a, const Wide& b) {
  return each([&](int i) { return a.part[i] * b.part[i]; });
}
inline Wide all(float x) {
  return each([&](int) { return splat(x); });
}
inline Wide read_wide(const float* from) {
  return each([&](int i) { return read(from + i * kLanes); });
}
inline void write_wide(float* to, const Wide& v) {
  for (int i = 0; i < kParts; ++i) write(to + i * kLanes, v.part[i]);
}

// Folds 16 lanes to one: those 8 apart, then 4, 2, 1.
template <typename Join>
inline Vec fold_parts(const Wide& v, const Join& join) {
  if constexpr (kParts == 1) return v.part[0];
  if constexpr (kParts == 2) return join(v.part[0], v.part[1]);
  if constexpr (kParts == 4) {
    return join(join(v.part[0], v.part[2]), join(v.part[1], v.part[3]));
  }
}
inline float sum_of(const Wide& v) {
  return horizontal_sum(fold_parts(v, [](Vec a, Vec b) { return a + b; }));
}
inline float largest_of(const Wide& v) {
  return horizontal_max(fold_parts(v, [](Vec a, Vec b) { return max(a, b); }));
}

// Natural logarithm of positive normal numbers, within 1 ulp or so (Cephes' logf, Moshier 1992).
// NaN stays NaN.
inline Vec log_positive(Vec x) {
  const UintVec bits = reinterpret_cast<UintVec>(x);
  // Exponent and mantissa such that the mantissa lies within sqrt(1/2) .. sqrt(2).
  const IntVec exponent = reinterpret_cast<IntVec>(bits - 0x3f3504f3u) >> 23;
  const Vec e = __builtin_convertvector(exponent, Vec);
  const Vec m = reinterpret_cast<Vec>(bits - (reinterpret_cast<UintVec>(exponent) << 23)) - 1.0f;
  Vec p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const Vec square = m * m;
  const Vec made = ((m * square * p - e * 2.12194440e-4f) - 0.5f * square) + m + e * 0.693359375f;
  return x == x ? made : x;
}

// Two rounds of signs, the same for every store of a format version.
constexpr std::uint64_t mixed(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
constexpr bool is_negative(int round, std::int64_t channel) {
  return mixed(static_cast<std::uint64_t>(round * 256 + channel)) >> 63 != 0;
}
struct Signs {
  float of[2][kMaxHeadSize];
  constexpr Signs() : of{} {
    for (int round = 0; round < 2; ++round) {
      for (std::int64_t d = 0; d < kMaxHeadSize; ++d) {
        of[round][d] = is_negative(round, d) ? -1.0f : 1.0f;
      }
    }
  }
};
constexpr Signs kSigns{};

inline Wide times(const Wide& v, float by) { return v * all(by); }
inline float times(float v, float by) { return v * by; }

// y = H S2 H S1 x for channels of one vector, or of 16, in place; a size that is no power of two in
// pieces, the largest first.
template <typename Channel>
void rotate(Channel* x, std::int64_t size) {
  for (std::int64_t begin = 0; begin < size;) {
    std::int64_t piece = 1;
    while (2 * piece <= size - begin) piece *= 2;
    Channel* const y = x + begin;
    for (const float* signs : {kSigns.of[0] + begin, kSigns.of[1] + begin}) {
      for (std::int64_t d = 0; d < piece; ++d) y[d] = times(y[d], signs[d]);
      for (std::int64_t step = 1; step < piece; step *= 2) {
        for (std::int64_t first = 0; first < piece; first += 2 * step) {
          for (std::int64_t d = first; d < first + step; ++d) {
            const Channel low = y[d], high = y[d + step];
            y[d] = low + high;
            y[d + step] = low - high;
          }
        }
      }
    }
    const float norm = 1.0f / static_cast<float>(piece);  // of both rounds: a power of two
    for (std::int64_t d = 0; d < piece; ++d) y[d] = times(y[d], norm);
    begin += piece;
  }
}

// The levels above 0 of the quantiser of the normal distribution with the least squared error
// (Lloyd 1982, Max 1960), and the edges between them.
template <int Bits>
struct Levels;
template <>
struct Levels<1> {
  static constexpr float level[] = {0.7978846f};
};
template <>
struct Levels<2> {
  static constexpr float level[] = {0.4527800f, 1.5104176f};
};
template <>
struct Levels<4> {
  static constexpr float level[] = {0.1283950f, 0.3880483f, 0.6567591f, 0.9423405f,
                                    1.2562312f, 1.6180464f, 2.0690172f, 2.7326356f};
};

// The level that has a number, ascending.
template <int Bits>
float level_of(int number) {
  constexpr int kHalf = 1 << (Bits - 1);
  return number < kHalf ? -Levels<Bits>::level[kHalf - 1 - number]
                        : Levels<Bits>::level[number - kHalf];
}

template <typename Work>
void for_bits(std::int64_t bits, const Work& work) {
  if (bits == 1) return work(Width<1>{});
  if (bits == 2) return work(Width<2>{});
  work(Width<4>{});
}

// The number of each lane's level, and the level.
struct Quantised {
  Wide number;
  Wide level;
};

template <int Bits>
inline Quantised quantise(const Wide& u) {
  constexpr const auto& levels = Levels<Bits>::level;
  constexpr int kHalf = 1 << (Bits - 1);
  Quantised found;
  for (int i = 0; i < kParts; ++i) {
    const Vec x = u.part[i];
    const auto negative = x < Vec{};
    const Vec size = negative ? -x : x;
    Vec above = {}, level = splat(levels[0]);
#pragma GCC unroll 8
    for (int k = 1; k < kHalf; ++k) {
      const auto over = size > splat(0.5f * (levels[k - 1] + levels[k]));
      above = over ? splat(static_cast<float>(k)) : above;
      level = over ? splat(levels[k]) : level;
    }
    found.number.part[i] = negative ? splat(static_cast<float>(kHalf - 1)) - above
                                    : splat(static_cast<float>(kHalf)) + above;
    found.level.part[i] = negative ? -level : level;
  }
  return found;
}

// The rotated mean of K over a head's tokens, as int8 times one step, of channels that are finite
// in them all; `mean` is what that stands for.
template <typename T>
void write_mean(const PageLayout& layout, const CodeShape& shape, const std::byte* pages,
                float* mean, std::byte* record) {
  const std::int64_t size = layout.head_size;
  for_channels(size, [&](auto abreast, std::int64_t d) {
    constexpr int kWide = decltype(abreast)::value;
    Vec sum[kWide] = {};
    for_tokens<T, kWide>(layout, pages, d, [&](int i, Vec v) { sum[i] += v; });
    for (int i = 0; i < kWide; ++i) {
      const Vec mean_of = sum[i] / splat(static_cast<float>(layout.block_tokens));
      write(mean + d + i * kLanes, mean_of - mean_of == Vec{} ? mean_of : Vec{});
    }
  });
  rotate(mean, size);
  float most = 0;
  for (std::int64_t d = 0; d < size; ++d) {
    const float magnitude = __builtin_fabsf(mean[d]);
    most = magnitude > most ? magnitude : most;
  }
  const float step = most < kInfinity ? most / 127.0f : 0.0f;
  for (std::int64_t d = 0; d < size; d += kLanes) {
    const Vec magic = splat(0x1.8p23f);  // adding it rounds
    const Vec whole = step > 0 ? (read(mean + d) / splat(step) + magic) - magic : Vec{};
    const Vec limit = splat(127.0f);  // a step that is subnormal may be too small
    const Vec held = whole > limit ? limit : (whole < -limit ? -limit : whole);
    store_some<Int8>(record + shape.mean + d, held, size - d);
    write(mean + d, held * step);
  }
  const std::int64_t padding = shape.step - shape.mean - size;
  if (padding > 0) {
    std::memset(record + shape.mean + size, 0, static_cast<std::size_t>(padding));
  }
  std::memcpy(record + shape.step, &step, sizeof(step));
}

// Keys of 16 tokens from `token` on: lane t of x[d] is channel d of token t. Behind the last one it
// stands in for those that are missing.
template <typename T>
void read_tile(const PageLayout& layout, const std::byte* pages, std::int64_t token, Wide* x) {
  constexpr auto kItem = static_cast<std::int64_t>(sizeof(T));
  const Keys<kCodeTile> keys(layout, pages, token);
  for (std::int64_t d = 0; d < layout.head_size; d += kLanes) {
    for (int part = 0; part < kParts; ++part) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        square[i] = load_some<T>(keys.at[part * kLanes + i] + d * kItem, layout.head_size - d);
      }
      transpose(square);
      for (int i = 0; i < kLanes && d + i < layout.head_size; ++i) x[d + i].part[part] = square[i];
    }
  }
}

// Codes and weights of a tile, of which x is the keys and `mean` their rotated mean. The weight
// makes the product of code and rotated key what the key's product with itself is; NaN where a key
// is not finite.
template <int Bits>
void write_tile(const CodeShape& shape, std::int64_t size, const float* mean, Wide* x,
                std::byte* codes, std::byte* weights) {
  constexpr int kShared = 8 / Bits;
  rotate(x, size);
  Wide square = {};
  for (std::int64_t d = 0; d < size; ++d) {
    x[d] = x[d] - all(mean[d]);
    square = square + x[d] * x[d];
  }
  const Wide unit = each([&](int i) {
    Vec root = {};
    for (int lane = 0; lane < kLanes; ++lane) {
      root[lane] = __builtin_sqrtf(square.part[i][lane] / static_cast<float>(size));
    }
    return root > Vec{} ? 1.0f / root : Vec{};
  });
  Wide along = {};
  for (std::int64_t line = 0; line < shape.lines; ++line) {
    IntVec bytes[kParts] = {};
    for (int j = 0; j < kShared; ++j) {
      const std::int64_t d = line * kShared + j;
      if (d >= size) break;
      const Quantised found = quantise<Bits>(x[d] * unit);
      along = along + found.level * x[d];
      for (int i = 0; i < kParts; ++i)
        bytes[i] |= __builtin_convertvector(found.number.part[i], IntVec) << (j * Bits);
    }
    for (int i = 0; i < kParts; ++i) {
      const ByteVec low = __builtin_convertvector(bytes[i], ByteVec);
      std::memcpy(codes + line * kCodeTile + i * kLanes, &low, sizeof(low));
    }
  }
  for (int i = 0; i < kParts; ++i) {
    const Vec weight = square.part[i] == Vec{} ? Vec{} : square.part[i] / along.part[i];
    const Vec marked = weight - weight == Vec{} ? weight : splat(__builtin_nanf(""));
    store<BFloat16>(weights + 2 * i * kLanes, marked);
  }
}

// ---- logits ----

// Sums over a tile's lines of what two tables say of each byte's halves, for R query heads. Every
// entry is below 128, so that two of them fit a byte; a sum fits 16 bits.
template <int R>
void look_up(const std::byte* codes, std::int64_t lines, const std::uint8_t* const* low,
             const std::uint8_t* const* high, Wide* sums) {
#if defined(__AVX512BW__)
  const __m512i nibble = _mm512_set1_epi8(0xf);
  __m512i both[R], odd[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) both[r] = odd[r] = _mm512_setzero_si512();
  for (std::int64_t line = 0; line < lines; line += 4) {
    const __m512i bytes = _mm512_loadu_si512(codes + line * kCodeTile);
    const __m512i first = _mm512_and_si512(bytes, nibble);
    const __m512i second = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512i pair = _mm512_add_epi8(
          _mm512_shuffle_epi8(_mm512_loadu_si512(low[r] + line * kCodeTile), first),
          _mm512_shuffle_epi8(_mm512_loadu_si512(high[r] + line * kCodeTile), second));
      both[r] = _mm512_add_epi16(both[r], pair);
      odd[r] = _mm512_add_epi16(odd[r], _mm512_srli_epi16(pair, 8));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m512i even = _mm512_sub_epi16(both[r], _mm512_slli_epi16(odd[r], 8));
    // Tokens 0 to 7 of each of the four lines in the quarters of one, 8 to 15 in the other's.
    const __m512i firsts = _mm512_unpacklo_epi16(even, odd[r]);
    const __m512i lasts = _mm512_unpackhi_epi16(even, odd[r]);
    // The maskz forms: see widen().
    const auto folded = [](__m512i v) {
      const __m256i two = _mm256_add_epi16(_mm512_maskz_extracti64x4_epi64(0xf, v, 0),
                                           _mm512_maskz_extracti64x4_epi64(0xf, v, 1));
      return _mm_add_epi16(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
    };
    const __m256i whole = _mm256_set_m128i(folded(lasts), folded(firsts));
    sums[r].part[0] = reinterpret_cast<Vec>(
        _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, whole)));
  }
#elif defined(__AVX2__)
  const __m256i nibble = _mm256_set1_epi8(0xf);
  const auto at = [](const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  };
  __m256i both[R], odd[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) both[r] = odd[r] = _mm256_setzero_si256();
  for (std::int64_t line = 0; line < lines; line += 2) {
    const __m256i bytes = at(codes + line * kCodeTile);
    const __m256i first = _mm256_and_si256(bytes, nibble);
    const __m256i second = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256i pair =
          _mm256_add_epi8(_mm256_shuffle_epi8(at(low[r] + line * kCodeTile), first),
                          _mm256_shuffle_epi8(at(high[r] + line * kCodeTile), second));
      both[r] = _mm256_add_epi16(both[r], pair);
      odd[r] = _mm256_add_epi16(odd[r], _mm256_srli_epi16(pair, 8));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m256i even = _mm256_sub_epi16(both[r], _mm256_slli_epi16(odd[r], 8));
    const auto folded = [](__m256i v) {
      return _mm256_cvtepu16_epi32(
          _mm_add_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
    };
    sums[r].part[0] =
        reinterpret_cast<Vec>(_mm256_cvtepi32_ps(folded(_mm256_unpacklo_epi16(even, odd[r]))));
    sums[r].part[1] =
        reinterpret_cast<Vec>(_mm256_cvtepi32_ps(folded(_mm256_unpackhi_epi16(even, odd[r]))));
  }
#else
  for (int r = 0; r < R; ++r) {
    std::uint32_t sum[kCodeTile] = {};
    for (std::int64_t line = 0; line < lines; ++line) {
      for (int t = 0; t < kCodeTile; ++t) {
        const auto byte = static_cast<std::uint8_t>(codes[line * kCodeTile + t]);
        sum[t] += low[r][line * kCodeTile + (byte & 0xf)];
        sum[t] += high[r][line * kCodeTile + (byte >> 4)];
      }
    }
    float made[kCodeTile];
    for (int t = 0; t < kCodeTile; ++t) made[t] = static_cast<float>(sum[t]);
    sums[r] = read_wide(made);
  }
#endif
}

// What logits of one query head need: itself, rotated, its tables, [2][lines][16], and logit =
// scale * query . mean + weight * (of_step * sum + of_zero).
struct CodeQuery {
  const float* rotated;
  const std::uint8_t* low;
  const std::uint8_t* high;
  float of_step;
  float of_zero;
};

// Tables of a rotated query: an entry is the product of query and levels over the channels that
// half a byte holds, in steps above the least one of these channels.
template <int Bits>
CodeQuery make_tables(const float* rotated, std::int64_t size, std::int64_t lines, float scale,
                      std::uint8_t* tables) {
  constexpr int kShared = 4 / Bits;
  constexpr int kHalf = 1 << (Bits - 1);
  constexpr const auto& levels = Levels<Bits>::level;
  const auto largest = [&](std::int64_t d) {
    float sum = 0;
    for (int j = 0; j < kShared && d + j < size; ++j) {
      sum += __builtin_fabsf(rotated[d + j]) * levels[kHalf - 1];
    }
    return sum;
  };
  float most = 0, least = 0;
  for (std::int64_t d = 0; d < size; d += kShared) {
    const float here = largest(d);
    most = here > most || here != here ? here : most;
    least += here;
  }
  const float step = most > 0 && most < kInfinity ? most / 63.5f : 0.0f;
  const float inverse = step > 0 ? 1.0f / step : 0.0f;
  Wide level[kShared];  // of lane i's j-th channel
  for (int j = 0; j < kShared; ++j) {
    float of[kCodeTile];
    for (int i = 0; i < kCodeTile; ++i) {
      of[i] = level_of<Bits>((i >> (j * Bits)) % (1 << Bits));
    }
    level[j] = read_wide(of);
  }
  std::uint8_t* const low = tables;
  std::uint8_t* const high = tables + lines * kCodeTile;
  for (std::int64_t half = 0; half < 2 * lines; ++half) {
    const std::int64_t d = half * kShared;
    Wide entry = all(d < size ? largest(d) : 0.0f);
    for (int j = 0; j < kShared && d + j < size; ++j) {
      entry = entry + all(rotated[d + j]) * level[j];
    }
    std::uint8_t* const to = (half % 2 == 0 ? low : high) + half / 2 * kCodeTile;
    for (int i = 0; i < kParts; ++i) {
      const Vec steps = entry.part[i] * inverse + 0.5f;
      const Vec held = inverse > 0 ? (steps > splat(127.0f) ? splat(127.0f) : steps) : Vec{};
      const ByteVec bytes = __builtin_convertvector(__builtin_convertvector(held, IntVec), ByteVec);
      std::memcpy(to + i * kLanes, &bytes, sizeof(bytes));
    }
  }
  // A query that is not finite shows in every logit.
  const float broken = most < kInfinity ? 0.0f : __builtin_nanf("");
  return {rotated, low, high, scale * step, broken - scale * least};
}

// Product of a rotated query and a head's rotated mean.
inline float mean_product(const float* rotated, const std::byte* mean, std::int64_t size) {
  Wide sum = {};
  for (std::int64_t d = 0; d < size; d += kCodeTile) {
    for (int i = 0; i < kParts; ++i) {
      const std::int64_t at = d + i * kLanes;
      if (at >= size) break;
      const Vec q = load_some<float>(reinterpret_cast<const std::byte*>(rotated + at), size - at);
      sum.part[i] += q * load_some<Int8>(mean + at, size - at);
    }
  }
  return sum_of(sum);
}

inline float read_float(const std::byte* from) {
  float x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

// Log of the mean of exp over the tokens of each of `pages`; NaN where a token's logit is.
void page_means(const float* logits, std::int64_t pages, std::int64_t tokens, float* to) {
  const Vec count = splat(static_cast<float>(tokens));
  for (std::int64_t begin = 0; begin < pages; begin += kLanes) {
    float top[kLanes] = {}, total[kLanes] = {};
    const std::int64_t end = pages - begin < kLanes ? pages - begin : kLanes;
    for (std::int64_t page = 0; page < end; ++page) {
      const float* x = logits + (begin + page) * tokens;
      const auto tile = [&](std::int64_t t) {
        if (tokens - t >= kCodeTile) return read_wide(x + t);
        float some[kCodeTile];
        for (std::int64_t i = 0; i < kCodeTile; ++i)
          some[i] = t + i < tokens ? x[t + i] : -kInfinity;
        return read_wide(some);
      };
      Wide most = all(-kInfinity);
      for (std::int64_t t = 0; t < tokens; t += kCodeTile) {
        const Wide v = tile(t);
        for (int i = 0; i < kParts; ++i) most.part[i] = max(v.part[i], most.part[i]);
      }
      const float shift = largest_of(most);
      Wide sum = {};
      for (std::int64_t t = 0; t < tokens; t += kCodeTile) {
        const Wide v = tile(t);
        sum = sum + each([&](int i) { return exp_nonpositive(v.part[i] - shift); });
      }
      top[page] = shift;
      total[page] = sum_of(sum);
    }
    const Vec logit = read(top) + log_positive(read(total) / count);
    store_some<float>(reinterpret_cast<std::byte*>(to + begin), logit, end);
  }
}

// The query heads of a KV head, ready to score codes.
struct CodeHead {
  const PageScoring& s;
  std::int64_t group;
  CodeQuery* queries;
  float* logits;  // [4][tiles * kCodeTile]

  CodeHead(const PageScoring& scoring, std::int64_t row, std::int64_t head, std::byte* scratch)
      : s(scoring), group(s.query_heads / s.layout.kv_heads) {
    const std::int64_t size = s.layout.head_size;
    const float* query = s.query + (row * s.query_heads + head * group) * size;
    auto* const x = reinterpret_cast<Wide*>(scratch);
    scratch += size * static_cast<std::int64_t>(sizeof(Wide));
    logits = reinterpret_cast<float*>(scratch);
    scratch += 4 * s.codes.tiles * kCodeTile * 4;
    auto* rotated = reinterpret_cast<float*>(scratch);
    scratch += group * size * 4;
    queries = reinterpret_cast<CodeQuery*>(scratch);
    scratch += group * static_cast<std::int64_t>(sizeof(CodeQuery));
    auto* tables = reinterpret_cast<std::uint8_t*>(scratch);
    for (std::int64_t first = 0; first < group; first += kCodeTile) {
      const std::int64_t count = group - first < kCodeTile ? group - first : kCodeTile;
      for (std::int64_t d = 0; d < size; ++d) {
        float lanes[kCodeTile] = {};
        for (std::int64_t g = 0; g < count; ++g) lanes[g] = query[(first + g) * size + d];
        x[d] = read_wide(lanes);
      }
      rotate(x, size);
      for (std::int64_t g = 0; g < count; ++g) {
        for (std::int64_t d = 0; d < size; ++d) {
          rotated[d] = reinterpret_cast<const float*>(x + d)[g];
        }
        for_bits(s.codes.bits, [&](auto bits) {
          queries[first + g] =
              make_tables<decltype(bits)::value>(rotated, size, s.codes.lines, s.scale, tables);
        });
        rotated += size;
        tables += 2 * s.codes.lines * kCodeTile;
      }
    }
  }

  // Logits of all of a block's tokens for R query heads from g on.
  template <int R>
  void score(const std::byte* record, std::int64_t g) const {
    const std::uint8_t *low[R], *high[R];
    Wide of_mean[R];
    const float step = s.scale * read_float(record + s.codes.step);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const CodeQuery& query = queries[g + r];
      low[r] = query.low;
      high[r] = query.high;
      of_mean[r] =
          all(step * mean_product(query.rotated, record + s.codes.mean, s.layout.head_size));
    }
    for (std::int64_t tile = 0; tile < s.codes.tiles; ++tile) {
      Wide sums[R];
      look_up<R>(record + tile * s.codes.lines * kCodeTile, s.codes.lines, low, high, sums);
      const std::byte* const weights = record + s.codes.weights + tile * kCodeTile * 2;
      const Wide weight = each([&](int i) { return load<BFloat16>(weights + 2 * i * kLanes); });
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const CodeQuery& query = queries[g + r];
        const Wide product = sums[r] * all(query.of_step) + all(query.of_zero);
        write_wide(logits + (r * s.codes.tiles + tile) * kCodeTile, of_mean[r] + weight * product);
      }
    }
  }
};

}  // namespace

void encode_head(const PageLayout& layout, const CodeShape& shape, const std::byte* pages,
                 std::byte* scratch, std::byte* record) {
  auto* const x = reinterpret_cast<Wide*>(scratch);
  auto* const mean = reinterpret_cast<float*>(x + layout.head_size);
  for_dtype(layout.dtype, [&](auto item) {
    using T = decltype(item);
    write_mean<T>(layout, shape, pages, mean, record);
    for (std::int64_t tile = 0; tile < shape.tiles; ++tile) {
      read_tile<T>(layout, pages, tile * kCodeTile, x);
      for_bits(shape.bits, [&](auto bits) {
        write_tile<decltype(bits)::value>(shape, layout.head_size, mean, x,
                                          record + tile * shape.lines * kCodeTile,
                                          record + shape.weights + tile * kCodeTile * 2);
      });
    }
  });
}

void code_logits(const PageScoring& s, std::int64_t row, std::int64_t head,
                 std::int64_t block_begin, std::int64_t block_end, std::byte* scratch) {
  const std::int64_t groups = s.layout.block_tokens / s.layout.page_tokens;
  const std::int64_t columns = s.first_column[row + 1] - s.first_column[row];
  const CodeHead place(s, row, head, scratch);
  float* const to = s.logits + s.first_column[row] * s.query_heads + head * place.group * columns;
  const auto record_of = [&](std::int64_t block) {
    return reinterpret_cast<const std::byte*>(s.records[s.row_begin[row] + block]) +
           head * s.codes.bytes;
  };
  for (std::int64_t block = block_begin; block < block_end; ++block) {
    const std::byte* const record = record_of(block);
    const std::byte* const ahead = record_of(block + 1 < block_end ? block + 1 : block);
    for (std::int64_t i = 0; i < s.codes.bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    for_panels(place.group, [&]<int R>(std::int64_t g) {
      place.score<R>(record, g);
      for (int r = 0; r < R; ++r) {
        page_means(place.logits + r * s.codes.tiles * kCodeTile, groups, s.layout.page_tokens,
                   to + (g + r) * columns + block * groups);
      }
    });
  }
}

}  // namespace ssdkv::attention::SSDKV_ISA
