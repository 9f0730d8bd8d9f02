// AES-256-GCM over the pages of many slots, given by absolute address.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ssdkv {

constexpr size_t kKeyBytes = 32;
constexpr size_t kTagBytes = 16;
// What a page belongs to; its bytes [kPageAt, kPageAt + 4) are set to the page's number.
constexpr size_t kIdentityBytes = 72;
constexpr size_t kPageAt = 20;

// Pages first_page, first_page + 1, ... of n slots, `pages` of each. A page's nonce is its number
// as 32 bits, then zeros: a key must belong to one writing of one slot. Its associated data is the
// slot's identity with that number.
struct SlotPages {
  const uint8_t* keys;        // [n, 32]
  const uint8_t* identities;  // [n, 72]
  uint32_t first_page;
  const uint64_t* source;  // [n, pages], addresses
  const uint64_t* target;  // [n, pages]; may be equal to source
  size_t n;
  size_t pages;
  size_t nbytes;  // of each page
};

// `threads`: as in memory.hpp. Both throw std::runtime_error when libcrypto refuses.

// Encrypt; writes the tags, [n, pages, 16].
void seal(const SlotPages& what, unsigned threads, uint8_t* tags);

// Check against the tags and decrypt; sets good, [n, pages], to 0 or 1. A page that is not good is
// zeroed: nobody is to see what came out.
void open(const SlotPages& what, unsigned threads, const uint8_t* tags, uint8_t* good);

// The tag of no text, under the nonce of `page`, with these associated data.
void authenticate(const uint8_t* key, uint32_t page, const uint8_t* data, size_t nbytes,
                  uint8_t* tag);

constexpr size_t kHashBytes = 32;

// HMAC-SHA256. Throws as above.
void hmac_sha256(const uint8_t* key, size_t key_bytes, const uint8_t* data, size_t nbytes,
                 uint8_t* out);

}  // namespace ssdkv
