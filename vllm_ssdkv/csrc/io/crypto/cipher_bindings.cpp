#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/unlocked.hpp"
#include "io/bindings.hpp"
#include "io/crypto/cipher.hpp"
#include "io/crypto/libcrypto.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ssdkv {
namespace {

template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tags = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

void check_text(size_t nbytes) {
  if (nbytes > static_cast<size_t>(std::numeric_limits<int>::max())) {
    throw std::invalid_argument("more bytes than libcrypto takes at once");
  }
}

SlotPages checked(const Matrix<uint8_t>& keys, const Matrix<uint8_t>& identities,
                  uint32_t first_page, const Matrix<uint64_t>& source,
                  const Matrix<uint64_t>& target, size_t nbytes) {
  const size_t n = source.shape(0);
  const size_t pages = source.shape(1);
  if (keys.shape(0) != n || identities.shape(0) != n || target.shape(0) != n ||
      target.shape(1) != pages) {
    throw std::invalid_argument("the arrays differ in length");
  }
  if (keys.shape(1) != kKeyBytes || identities.shape(1) != kIdentityBytes) {
    throw std::invalid_argument("keys have 32 bytes, identities 72");
  }
  check_text(nbytes);
  if (pages > std::numeric_limits<uint32_t>::max() - first_page) {
    throw std::invalid_argument("page numbers exceed 32 bits");
  }
  for (size_t i = 0; nbytes != 0 && i < n * pages; ++i) {
    if (source.data()[i] == 0 || target.data()[i] == 0) {
      throw std::invalid_argument("an address is zero");
    }
  }
  return {keys.data(), identities.data(), first_page, source.data(), target.data(), n, pages,
          nbytes};
}

ArrayOut<uint8_t> py_seal(const Matrix<uint8_t>& keys, const Matrix<uint8_t>& identities,
                          uint32_t first_page, const Matrix<uint64_t>& source,
                          const Matrix<uint64_t>& target, size_t nbytes, unsigned threads) {
  const SlotPages what = checked(keys, identities, first_page, source, target, nbytes);
  std::vector<uint8_t> tags(what.n * what.pages * kTagBytes);
  {
    const Unlocked unlocked;
    seal(what, threads, tags.data());
  }
  return to_numpy(std::move(tags));
}

ArrayOut<uint8_t> py_open(const Matrix<uint8_t>& keys, const Matrix<uint8_t>& identities,
                          uint32_t first_page, const Matrix<uint64_t>& addresses, size_t nbytes,
                          const Tags& tags, unsigned threads) {
  const SlotPages what = checked(keys, identities, first_page, addresses, addresses, nbytes);
  if (tags.shape(0) != what.n || tags.shape(1) != what.pages || tags.shape(2) != kTagBytes) {
    throw std::invalid_argument("one tag of 16 bytes for each page");
  }
  std::vector<uint8_t> good(what.n * what.pages);
  {
    const Unlocked unlocked;
    open(what, threads, tags.data(), good.data());
  }
  return to_numpy(std::move(good));
}

ArrayOut<uint8_t> py_authenticate(const Matrix<uint8_t>& keys, uint32_t page,
                                  const Matrix<uint8_t>& data) {
  const size_t n = data.shape(0);
  const size_t nbytes = data.shape(1);
  if (keys.shape(0) != n) throw std::invalid_argument("the arrays differ in length");
  if (keys.shape(1) != kKeyBytes) throw std::invalid_argument("keys have 32 bytes");
  check_text(nbytes);
  std::vector<uint8_t> tags(n * kTagBytes);
  {
    const Unlocked unlocked;
    for (size_t i = 0; i < n; ++i) {
      authenticate(keys.data() + i * kKeyBytes, page, data.data() + i * nbytes, nbytes,
                   tags.data() + i * kTagBytes);
    }
  }
  return to_numpy(std::move(tags));
}

ArrayOut<uint8_t> py_hmac_sha256(const ArrayIn<uint8_t>& key, const Matrix<uint8_t>& data) {
  const size_t n = data.shape(0);
  const size_t nbytes = data.shape(1);
  check_text(key.shape(0));
  std::vector<uint8_t> out(n * kHashBytes);
  {
    const Unlocked unlocked;
    for (size_t i = 0; i < n; ++i) {
      hmac_sha256(key.data(), key.shape(0), data.data() + i * nbytes, nbytes,
                  out.data() + i * kHashBytes);
    }
  }
  return to_numpy(std::move(out));
}

}  // namespace

void bind_cipher(nb::module_& m) {
  m.def(
      "libcrypto", [] { return std::make_pair(libcrypto().version, libcrypto().error); },
      "Version of OpenSSL's libcrypto, and why it cannot be used.");
  m.def("gcm_seal", &py_seal, "keys"_a.noconvert(), "identities"_a.noconvert(), "first_page"_a,
        "source"_a.noconvert(), "target"_a.noconvert(), "nbytes"_a, "threads"_a = 0,
        "Encrypt pages with AES-256-GCM; their tags.");
  m.def("gcm_open", &py_open, "keys"_a.noconvert(), "identities"_a.noconvert(), "first_page"_a,
        "addresses"_a.noconvert(), "nbytes"_a, "tags"_a.noconvert(), "threads"_a = 0,
        "Check and decrypt pages in place; which were right.");
  m.def("gcm_authenticate", &py_authenticate, "keys"_a.noconvert(), "page"_a, "data"_a.noconvert(),
        "Tags of no text with these associated data.");
  m.def("hmac_sha256", &py_hmac_sha256, "key"_a.noconvert(), "data"_a.noconvert(),
        "HMAC-SHA256 of each row.");
}

}  // namespace ssdkv
