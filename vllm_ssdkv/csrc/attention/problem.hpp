// Plain descriptions of one attention call. No code lives here: the file is included by translation
// units that are compiled for different instruction sets, and anything emitted twice would be
// merged by the linker.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ssdkv::attention {

// K and V may be of any of these; queries and outputs are of the first three.
enum class DType : int {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kFloat8E4M3 = 3,
  kFloat8E5M2 = 4
};

// Local to each file that includes it, as what may be emitted must be.
static constexpr std::int64_t item_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype < DType::kFloat8E4M3 ? 2 : 1;
}

inline constexpr std::int64_t kMaxHeadSize = 512;

// Stands for a sliding window that no context reaches.
inline constexpr std::int64_t kUnbounded = std::int64_t{1} << 62;

// One layer's part of a block: [kv_heads][groups] pages, `page_stride` bytes apart. A page is K
// [page_tokens][head_size] followed at once by V of the same shape.
struct PageLayout {
  std::int64_t block_tokens;
  std::int64_t page_tokens;
  std::int64_t page_stride;
  std::int64_t kv_heads;
  std::int64_t head_size;
  DType dtype;
};

// What makes a logit of a scaled product s of query and key: soft_cap * tanh(s / soft_cap), unless
// the cap is 0, then plus the head's slope times the key's position less the query's (ALiBi).
struct LogitShape {
  float soft_cap = 0.0f;
  const float* slopes = nullptr;  // [query_heads]; null: there are none

  bool plain() const { return soft_cap == 0.0f && slopes == nullptr; }
};

// State of an online softmax of some query tokens, updated in place.
struct State {
  std::int64_t tokens;
  std::int64_t query_heads;
  std::int64_t head_size;
  float* maximum;      // [tokens][query_heads]
  float* denominator;  // [tokens][query_heads]
  float* accumulator;  // [tokens][query_heads][head_size]
  LogitShape shape = {};
  float value_scale = 1.0f;  // of V as stored; results are multiplied by it
};

// Ragged rows of queries, and the range of pages that each attends to.
struct Rows {
  std::int64_t count;
  const std::int32_t* query_begin;     // [count]
  const std::int32_t* query_count;     // [count]
  const std::int64_t* first_position;  // [count]
  const std::int32_t* begin;           // [lists]
  const std::int32_t* end;             // [lists]
  // Whether each (row, KV head) has a list of its own, [count][kv_heads] instead of [count], whose
  // blocks are single pages of that head (sparse attention); the layout's block is then one page.
  bool list_per_head;
};

// Blocks, or single pages, that lie anywhere.
struct Pages {
  std::int64_t count;
  const std::uint64_t* address;
  const std::int64_t* position;    // of the first token in the request
  const std::uint8_t* token_mask;  // [count][block_tokens]: 0 where a token takes no part; or null
};

// Vectors of tokens, [tokens][heads][head_size], tokens `stride` bytes apart.
struct Vectors {
  std::byte* data;
  DType dtype;
  std::int64_t stride;
  std::int64_t tokens;
  std::int64_t heads;
  std::int64_t head_size;
};

// One call of attention: queries, the keys that they see, and the state that gets them.
struct Problem {
  PageLayout layout;
  State state;
  Rows rows;
  Pages pages;
  Vectors query;
  float scale;
  // Keys that a query sees at most, the newest, its own included; kUnbounded: all before it.
  std::int64_t sliding_window = kUnbounded;
};

// A unit of work: some queries of one row, the query heads of one KV head, a range of the row's
// blocks. `partial` is null where the task updates the state itself, else [rows] maxima, [rows]
// denominators, then [rows][head_size] accumulators, rows = query_count * group size in (query,
// head) order.
struct Task {
  std::int32_t row;
  std::int32_t head;
  std::int32_t query_begin;  // within the row
  std::int32_t query_count;
  std::int32_t block_begin;
  std::int32_t block_end;
  float* partial;
};

// Place of finished outputs.
struct Output {
  State state;
  Vectors out;
  float* lse;  // [tokens][query_heads] or null
};

struct SparseKernels;

// The entry points of one instruction set.
struct Kernels {
  const char* name;
  // Bytes of scratch (64-byte aligned) that `attend` needs for a task of `rows` = queries * group
  // size.
  std::size_t (*scratch_bytes)(std::int64_t rows, std::int64_t head_size);
  void (*attend)(const Problem&, const Task&, std::byte* scratch);
  // Folds `count` partial states, which lie one after the other, into the state of `task` in that
  // order.
  void (*fold)(const Problem&, const Task&, const float* partials, std::int64_t count);
  void (*finish)(const Output&, std::int64_t token_begin, std::int64_t token_end);
  // One token's vectors as float32, [heads][head_size].
  void (*widen)(const Vectors&, std::int64_t token, float* to);
  const SparseKernels* sparse;
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace ssdkv::attention
