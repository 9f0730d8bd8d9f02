// Checksums and copies, in one thread and in several.
#include "io/slot/memory.hpp"

#include <algorithm>

#include "suite.hpp"

namespace ssdkv::test {
namespace {

std::vector<uint8_t> noise(size_t nbytes, uint64_t seed) {
  Random random(seed);
  std::vector<uint8_t> bytes(nbytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random(256));
  return bytes;
}

uint64_t address(const uint8_t* at) { return reinterpret_cast<uint64_t>(at); }

void known_values() {
  const uint64_t where = 0;
  uint64_t sum = 0;
  checksum(&where, 1, 0, 1, &sum);
  check(sum == 0x2d06800538d394c2, "xxh3-64 of nothing");
}

void same_for_any_threads() {
  // Pieces lie without gaps, so that a read past the end of the last one leaves the buffer.
  constexpr size_t kPiece = 4099, kCount = 1500;
  const auto bytes = noise(kPiece * kCount, 1);
  std::vector<uint64_t> at(kCount), one(kCount), many(kCount);
  for (size_t i = 0; i < kCount; ++i) at[i] = address(bytes.data() + i * kPiece);
  checksum(at.data(), kCount, kPiece, 1, one.data());
  in_threads(3, [&](unsigned thread) {
    std::vector<uint64_t> sums(kCount);
    checksum(at.data(), kCount, kPiece, thread + 2, sums.data());
    check(sums == one, "sums do not depend on the threads");
  });
  check(verify(at.data(), one.data(), kCount, kPiece, 4).empty(), "all sums are right");
  many = one;
  many[3] ^= 1;
  many[1400] ^= 1;
  const auto wrong = verify(at.data(), many.data(), kCount, kPiece, 4);
  check(wrong == std::vector<int64_t>{3, 1400}, "the wrong ones are named");
}

void copies() {
  for (const auto& [piece, count] :
       {std::pair<size_t, size_t>{4096, 2000}, {9'000'001, 2}, {1, 5}}) {
    const auto from = noise(piece * count, 2);
    std::vector<uint8_t> to(from.size());
    std::vector<Piece> pieces;
    for (size_t i = 0; i < count; ++i) {
      const size_t target = count - 1 - i;
      pieces.push_back(
          {address(from.data() + i * piece), address(to.data() + target * piece), piece});
    }
    copy(pieces, 0);
    for (size_t i = 0; i < count; ++i) {
      const auto begin = from.begin() + static_cast<ptrdiff_t>(i * piece);
      check(std::equal(begin, begin + static_cast<ptrdiff_t>(piece),
                       to.begin() + static_cast<ptrdiff_t>((count - 1 - i) * piece)),
            "every piece arrived");
    }
  }
  copy({}, 0);
}

}  // namespace

Tests memory_tests() {
  return {{"memory: known values", known_values},
          {"memory: same sums for any threads", same_for_any_threads},
          {"memory: copies", copies}};
}

}  // namespace ssdkv::test
