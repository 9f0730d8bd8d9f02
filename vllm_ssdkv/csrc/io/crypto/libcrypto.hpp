// OpenSSL's libcrypto, loaded when it is first needed: the module stands alone without it, and the
// system's updates of it apply.
#pragma once

#include <cstddef>
#include <string>

namespace ssdkv {

// The part of the interface that AES-256-GCM and HMAC-SHA256 need, as declared in <openssl/evp.h>
// and <openssl/hmac.h> of OpenSSL 3.
struct Libcrypto {
  void* (*new_context)() = nullptr;
  void (*free_context)(void* context) = nullptr;
  int (*init)(void* context, const void* cipher, void* engine, const unsigned char* key,
              const unsigned char* iv, int encrypt) = nullptr;
  int (*update)(void* context, unsigned char* out, int* written, const unsigned char* in,
                int nbytes) = nullptr;
  int (*final)(void* context, unsigned char* out, int* written) = nullptr;
  int (*control)(void* context, int type, int number, void* value) = nullptr;
  const void* (*sha256)() = nullptr;
  unsigned char* (*hmac)(const void* digest, const void* key, int key_bytes,
                         const unsigned char* data, size_t nbytes, unsigned char* out,
                         unsigned* written) = nullptr;
  const void* aes_256_gcm = nullptr;
  std::string version;  // as the library names itself
  std::string error;    // why it cannot be used; empty when it can
};

// Loads the library on the first call. Any thread.
const Libcrypto& libcrypto();

}  // namespace ssdkv
