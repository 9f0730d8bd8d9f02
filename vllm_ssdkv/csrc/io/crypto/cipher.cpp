#include "io/crypto/cipher.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "base/parallel.hpp"
#include "io/crypto/libcrypto.hpp"

namespace ssdkv {
namespace {

constexpr size_t kParallelBytes = 1U << 20;  // below this, one thread
constexpr size_t kShareBytes = 256U << 10;   // work that one thread takes at a time
constexpr size_t kNonceBytes = 12;
constexpr size_t kNoSlot = std::numeric_limits<size_t>::max();

constexpr int kGetTag = 0x10;  // EVP_CTRL_AEAD_GET_TAG
constexpr int kSetTag = 0x11;  // EVP_CTRL_AEAD_SET_TAG

void put_number(uint8_t* at, uint32_t number) {
  for (int i = 0; i < 4; ++i) at[i] = static_cast<uint8_t>(number >> (8 * i));
}

enum class Direction : int { kOpen = 0, kSeal = 1 };
enum class Outcome { kGood, kWrongTag, kRefused };

// One EVP context; used by one thread.
class Gcm {
 public:
  explicit Gcm(Direction direction)
      : crypto_(libcrypto()), direction_(static_cast<int>(direction)) {
    if (!crypto_.error.empty()) return;
    context_ = crypto_.new_context();
    if (context_ == nullptr) return;
    if (crypto_.init(context_, crypto_.aes_256_gcm, nullptr, nullptr, nullptr, direction_) != 1) {
      crypto_.free_context(context_);
      context_ = nullptr;
    }
  }
  ~Gcm() {
    if (context_ != nullptr) crypto_.free_context(context_);  // wipes the key
  }
  Gcm(const Gcm&) = delete;
  Gcm& operator=(const Gcm&) = delete;

  bool usable() const { return context_ != nullptr; }

  bool set_key(const uint8_t* key) {
    return crypto_.init(context_, nullptr, nullptr, key, nullptr, direction_) == 1;
  }

  // One message under the current key. Sealing writes the tag, opening checks it.
  Outcome run(uint32_t page, const uint8_t* data, int data_bytes, const uint8_t* in, uint8_t* out,
              int nbytes, uint8_t* tag) {
    uint8_t nonce[kNonceBytes] = {};
    put_number(nonce, page);
    int written = 0;
    if (crypto_.init(context_, nullptr, nullptr, nullptr, nonce, direction_) != 1 ||
        crypto_.update(context_, nullptr, &written, data, data_bytes) != 1 ||
        (nbytes != 0 && crypto_.update(context_, out, &written, in, nbytes) != 1)) {
      return Outcome::kRefused;
    }
    uint8_t rest[kTagBytes];  // GCM leaves nothing to be written at the end
    if (direction_ == static_cast<int>(Direction::kOpen)) {
      if (crypto_.control(context_, kSetTag, kTagBytes, tag) != 1) return Outcome::kRefused;
      return crypto_.final(context_, rest, &written) == 1 ? Outcome::kGood : Outcome::kWrongTag;
    }
    if (crypto_.final(context_, rest, &written) != 1 ||
        crypto_.control(context_, kGetTag, kTagBytes, tag) != 1) {
      return Outcome::kRefused;
    }
    return Outcome::kGood;
  }

 private:
  const Libcrypto& crypto_;
  int direction_;
  void* context_ = nullptr;
};

// Run every page; tell(i, outcome) per page. Returns false when libcrypto refused any.
template <class Tell>
bool run_all(const SlotPages& what, Direction direction, unsigned threads, uint8_t* tags,
             const Tell& tell) {
  std::atomic<bool> refused{false};
  const size_t total = what.n * what.pages;
  const size_t share = std::max<size_t>(1, kShareBytes / std::max<size_t>(what.nbytes, 1));
  const int nbytes = static_cast<int>(what.nbytes);
  const auto body = [&](size_t first, size_t last) noexcept {
    Gcm gcm(direction);
    if (!gcm.usable()) {
      refused = true;
      return;
    }
    uint8_t identity[kIdentityBytes];
    size_t current = kNoSlot;
    for (size_t i = first; i < last; ++i) {
      const size_t slot = i / what.pages;
      if (slot != current) {
        current = slot;
        std::memcpy(identity, what.identities + slot * kIdentityBytes, kIdentityBytes);
        if (!gcm.set_key(what.keys + slot * kKeyBytes)) {
          refused = true;
          return;
        }
      }
      const uint32_t page = what.first_page + static_cast<uint32_t>(i % what.pages);
      put_number(identity + kPageAt, page);
      const Outcome outcome =
          gcm.run(page, identity, kIdentityBytes, reinterpret_cast<const uint8_t*>(what.source[i]),
                  reinterpret_cast<uint8_t*>(what.target[i]), nbytes, tags + i * kTagBytes);
      if (outcome == Outcome::kRefused) {
        refused = true;
        return;
      }
      tell(i, outcome);
    }
  };
  parallel(total, share, choose_threads(total * what.nbytes, kParallelBytes, threads), body);
  return !refused;
}

[[noreturn]] void refuse(const std::string& what = "AES-256-GCM") {
  const Libcrypto& crypto = libcrypto();
  throw std::runtime_error("libcrypto refuses " + what + ": " +
                           (crypto.error.empty() ? crypto.version : crypto.error));
}

}  // namespace

void seal(const SlotPages& what, unsigned threads, uint8_t* tags) {
  if (!run_all(what, Direction::kSeal, threads, tags, [](size_t, Outcome) noexcept {})) refuse();
}

void open(const SlotPages& what, unsigned threads, const uint8_t* tags, uint8_t* good) {
  const auto tell = [&](size_t i, Outcome outcome) noexcept {
    good[i] = outcome == Outcome::kGood ? 1 : 0;
    if (outcome != Outcome::kGood) {
      std::memset(reinterpret_cast<void*>(what.target[i]), 0, what.nbytes);
    }
  };
  // EVP takes the expected tag as a pointer to what it may not change.
  if (!run_all(what, Direction::kOpen, threads, const_cast<uint8_t*>(tags), tell)) refuse();
}

void authenticate(const uint8_t* key, uint32_t page, const uint8_t* data, size_t nbytes,
                  uint8_t* tag) {
  Gcm gcm(Direction::kSeal);
  if (!gcm.usable() || !gcm.set_key(key) ||
      gcm.run(page, data, static_cast<int>(nbytes), nullptr, nullptr, 0, tag) != Outcome::kGood) {
    refuse();
  }
}

void hmac_sha256(const uint8_t* key, size_t key_bytes, const uint8_t* data, size_t nbytes,
                 uint8_t* out) {
  const Libcrypto& crypto = libcrypto();
  if (!crypto.error.empty() || crypto.hmac(crypto.sha256(), key, static_cast<int>(key_bytes), data,
                                           nbytes, out, nullptr) == nullptr) {
    refuse("HMAC-SHA256");
  }
}

}  // namespace ssdkv
