#include <stdexcept>
#include <utility>
#include <vector>

#include "base/unlocked.hpp"
#include "io/bindings.hpp"
#include "io/slot/digest.hpp"
#include "io/slot/memory.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ssdkv {
namespace {

using U64 = ArrayIn<uint64_t>;

void check_same_length(size_t a, size_t b) {
  if (a != b) throw std::invalid_argument("the arrays differ in length");
}

// Catches the address of an empty or closed buffer; any other wrong address is the caller's.
void check_not_null(const uint64_t* addresses, size_t n, uint64_t nbytes) {
  for (size_t i = 0; nbytes != 0 && i < n; ++i) {
    if (addresses[i] == 0) throw std::invalid_argument("an address is zero");
  }
}

ArrayOut<uint64_t> py_checksum(const U64& addresses, size_t nbytes, unsigned threads) {
  const size_t n = addresses.shape(0);
  check_not_null(addresses.data(), n, nbytes);
  std::vector<uint64_t> out(n);
  {
    const Unlocked unlocked;
    checksum(addresses.data(), n, nbytes, threads, out.data());
  }
  return to_numpy(std::move(out));
}

ArrayOut<int64_t> py_verify(const U64& addresses, const U64& expected, size_t nbytes,
                            unsigned threads) {
  const size_t n = addresses.shape(0);
  check_same_length(n, expected.shape(0));
  check_not_null(addresses.data(), n, nbytes);
  std::vector<int64_t> wrong;
  {
    const Unlocked unlocked;
    wrong = verify(addresses.data(), expected.data(), n, nbytes, threads);
  }
  return to_numpy(std::move(wrong));
}

ArrayOut<uint64_t> py_digest(const U64& addresses, const U64& nbytes, unsigned threads) {
  const size_t n = addresses.shape(0);
  check_same_length(n, nbytes.shape(0));
  for (size_t i = 0; i < n; ++i) check_not_null(addresses.data() + i, 1, nbytes.data()[i]);
  std::vector<uint64_t> out;
  {
    const Unlocked unlocked;
    out = digest(addresses.data(), nbytes.data(), n, threads);
  }
  return to_numpy(std::move(out));
}

ArrayOut<uint64_t> py_read_words(const U64& addresses) {
  check_not_null(addresses.data(), addresses.shape(0), 1);
  return to_numpy(read_words(addresses.data(), addresses.shape(0)));
}

void copy_pieces(const U64& src, const U64& dst, const uint64_t* nbytes, uint64_t step,
                 unsigned threads) {
  const size_t n = src.shape(0);
  check_same_length(n, dst.shape(0));
  std::vector<Piece> pieces;
  pieces.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const Piece piece{src.data()[i], dst.data()[i], nbytes[i * step]};
    check_not_null(&piece.src, 1, piece.nbytes);
    check_not_null(&piece.dst, 1, piece.nbytes);
    if (piece.nbytes != 0) pieces.push_back(piece);
  }
  const Unlocked unlocked;
  copy(pieces, threads);
}

}  // namespace

void bind_memory(nb::module_& m) {
  m.def("checksum", &py_checksum, "addresses"_a.noconvert(), "nbytes"_a, "threads"_a = 0,
        "xxh3-64 (seed 0) of nbytes at each absolute address.");
  m.def("verify", &py_verify, "addresses"_a.noconvert(), "expected"_a.noconvert(), "nbytes"_a,
        "threads"_a = 0, "Positions whose xxh3-64 differs from the expected one.");
  m.def("digest", &py_digest, "addresses"_a.noconvert(), "nbytes"_a.noconvert(), "threads"_a = 0,
        "Digest of nbytes[i] bytes at each absolute address, as vllm_ssdkv.kernels.tensor_digest "
        "has it.");
  m.def("read_words", &py_read_words, "addresses"_a.noconvert(),
        "The 8 bytes at each absolute address.");
  m.def("populate", &populate, "address"_a, "nbytes"_a, nb::call_guard<Unlocked>(),
        "Give a range of memory its pages now; 0 or an errno.");
  m.def(
      "copy",
      [](const U64& src, const U64& dst, uint64_t nbytes, unsigned threads) {
        copy_pieces(src, dst, &nbytes, 0, threads);
      },
      "src"_a.noconvert(), "dst"_a.noconvert(), "nbytes"_a, "threads"_a = 0,
      "memcpy of nbytes from each source to each destination address.");
  m.def(
      "copy",
      [](const U64& src, const U64& dst, const U64& nbytes, unsigned threads) {
        check_same_length(src.shape(0), nbytes.shape(0));
        copy_pieces(src, dst, nbytes.data(), 1, threads);
      },
      "src"_a.noconvert(), "dst"_a.noconvert(), "nbytes"_a.noconvert(), "threads"_a = 0);
}

}  // namespace ssdkv
