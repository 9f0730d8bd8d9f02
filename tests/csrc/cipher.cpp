// AES-256-GCM of pages and HMAC-SHA256: known values, any number of threads, pages that are wrong.
#include "io/crypto/cipher.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "io/crypto/libcrypto.hpp"
#include "suite.hpp"

namespace ssdkv::test {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes noise(size_t nbytes, uint64_t seed) {
  Random random(seed);
  Bytes bytes(nbytes);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random(256));
  return bytes;
}

void need_libcrypto() {
  if (!libcrypto().error.empty()) skip(libcrypto().error);
}

Bytes from_hex(std::string_view text) {
  Bytes bytes;
  for (size_t i = 0; i < text.size(); i += 2) {
    bytes.push_back(static_cast<uint8_t>(std::stoi(std::string(text.substr(i, 2)), nullptr, 16)));
  }
  return bytes;
}

void known_values() {
  need_libcrypto();
  // Test case 13 of "The Galois/Counter Mode of Operation" (McGrew and Viega): nothing at all.
  const Bytes key(kKeyBytes);
  std::array<uint8_t, kTagBytes> tag{};
  authenticate(key.data(), 0, nullptr, 0, tag.data());
  check(Bytes(tag.begin(), tag.end()) == from_hex("530f8afbc74536b9a963b4f1c4cb738b"), "GCM's tag");
  // Test case 1 of RFC 4231.
  const Bytes mac_key(20, 0x0b);
  const std::string_view text = "Hi There";
  std::array<uint8_t, kHashBytes> mac{};
  hmac_sha256(mac_key.data(), mac_key.size(), reinterpret_cast<const uint8_t*>(text.data()),
              text.size(), mac.data());
  check(Bytes(mac.begin(), mac.end()) ==
            from_hex("b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
        "the HMAC");
}

// Slots whose pages lie without gaps, so that what is written past one changes the next.
struct Slots {
  size_t n, pages, nbytes;
  uint32_t first_page;
  Bytes keys, identities, text;

  Slots(size_t n_, size_t pages_, size_t nbytes_, uint32_t first)
      : n(n_),
        pages(pages_),
        nbytes(nbytes_),
        first_page(first),
        keys(noise(n * kKeyBytes, 1)),
        identities(noise(n * kIdentityBytes, 2)),
        text(noise(total() * nbytes, 3)) {}

  size_t total() const { return n * pages; }

  std::vector<uint64_t> addresses(const Bytes& bytes) const {
    std::vector<uint64_t> at;
    for (size_t i = 0; i < total(); ++i) {
      at.push_back(reinterpret_cast<uint64_t>(bytes.data() + i * nbytes));
    }
    return at;
  }

  SlotPages over(const std::vector<uint64_t>& source, const std::vector<uint64_t>& target) const {
    return {keys.data(), identities.data(), first_page, source.data(), target.data(), n, pages,
            nbytes};
  }

  // Ciphertext and tags.
  std::pair<Bytes, Bytes> sealed(unsigned threads) const {
    Bytes out(text.size()), tags(total() * kTagBytes);
    const auto source = addresses(text), target = addresses(out);
    seal(over(source, target), threads, tags.data());
    return {out, tags};
  }

  // Decrypts in place; which pages were good.
  Bytes opened(Bytes& bytes, const Bytes& tags, unsigned threads) const {
    Bytes good(total(), 7);
    const auto at = addresses(bytes);
    open(over(at, at), threads, tags.data(), good.data());
    return good;
  }
};

void there_and_back() {
  need_libcrypto();
  for (const auto& [n, pages, nbytes] : {std::array<size_t, 3>{1, 1, 1},
                                         {3, 5, 4096},
                                         {40, 9, 8192},
                                         {2, 3, 1'500'001},
                                         {7, 0, 16},
                                         {0, 4, 16},
                                         {5, 2, 0}}) {
    const Slots slots(n, pages, nbytes, 17);
    auto [bytes, tags] = slots.sealed(1);
    check(nbytes < 16 || bytes.empty() || bytes != slots.text, "it is encrypted");
    for (const unsigned threads : {0U, 2U, 5U}) {
      check(slots.sealed(threads) == std::pair(bytes, tags), "the same for any threads");
    }
    Bytes same = bytes;
    check(slots.opened(same, tags, 4) == Bytes(slots.total(), 1), "every page is good");
    check(same == slots.text, "every byte comes back");
  }
}

void wrong_pages() {
  need_libcrypto();
  Random random(5);
  for (int round = 0; round < 20; ++round) {
    const Slots slots(1 + random(20), 1 + random(6), 1 + random(5000), 0);
    auto [bytes, tags] = slots.sealed(0);
    Bytes expected(slots.total(), 1), text = slots.text;
    for (size_t i = 0; i < slots.total(); ++i) {
      if (random(3) != 0) continue;
      Bytes& where = random(2) != 0 ? bytes : tags;
      const size_t width = &where == &bytes ? slots.nbytes : kTagBytes;
      where[i * width + random(width)] ^= static_cast<uint8_t>(1U << random(8));
      expected[i] = 0;
      std::fill_n(text.begin() + static_cast<ptrdiff_t>(i * slots.nbytes), slots.nbytes,
                  uint8_t{0});
    }
    check(slots.opened(bytes, tags, 3) == expected, "the wrong ones are named");
    check(bytes == text, "and nobody sees what came out of them");
  }
}

// Writer, loader and streams seal and open at the same time, each its own pages.
void many_at_once() {
  need_libcrypto();
  const Slots slots(30, 8, 4096, 3);
  const auto right = slots.sealed(1);
  in_threads(4, [&](unsigned thread) {
    for (int round = 0; round < 5; ++round) {
      auto [bytes, tags] = slots.sealed(thread % 3);
      check(bytes == right.first && tags == right.second, "sealed as by one thread");
      check(slots.opened(bytes, tags, thread % 3) == Bytes(slots.total(), 1), "opened");
      check(bytes == slots.text, "every byte comes back");
      std::array<uint8_t, kHashBytes> mac{};
      hmac_sha256(slots.keys.data(), kKeyBytes, slots.text.data(), 1000, mac.data());
    }
  });
}

}  // namespace

Tests cipher_tests() {
  return {{"cipher: known values", known_values},
          {"cipher: there and back", there_and_back},
          {"cipher: wrong pages", wrong_pages},
          {"cipher: many at once", many_at_once}};
}

}  // namespace ssdkv::test
