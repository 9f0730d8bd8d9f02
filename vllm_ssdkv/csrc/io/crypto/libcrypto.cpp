#include "io/crypto/libcrypto.hpp"

#include <dlfcn.h>

namespace ssdkv {
namespace {

// The sonames of the releases whose EVP interface is the one declared in the header.
constexpr const char* kNames[] = {"libcrypto.so.3", "libcrypto.so.4"};
constexpr int kVersionText = 0;  // OPENSSL_VERSION

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

Libcrypto load() {
  Libcrypto found;
  void* library = nullptr;
  for (const char* name : kNames) {
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
    const char* why = dlerror();  // NOLINT(concurrency-mt-unsafe): glibc keeps it for each thread
    found.error += (found.error.empty() ? "" : "; ") + std::string(why != nullptr ? why : name);
  }
  if (library == nullptr) return found;
  found.error.clear();
  void* (*fetch)(void* context, const char* algorithm, const char* properties) = nullptr;
  const char* (*version)(int type) = nullptr;
  const bool complete =
      find(library, "EVP_CIPHER_CTX_new", found.new_context) &&
      find(library, "EVP_CIPHER_CTX_free", found.free_context) &&
      find(library, "EVP_CipherInit_ex", found.init) &&
      find(library, "EVP_CipherUpdate", found.update) &&
      find(library, "EVP_CipherFinal_ex", found.final) &&
      find(library, "EVP_CIPHER_CTX_ctrl", found.control) &&
      find(library, "EVP_sha256", found.sha256) && find(library, "HMAC", found.hmac) &&
      find(library, "EVP_CIPHER_fetch", fetch) && find(library, "OpenSSL_version", version);
  if (!complete) {
    found.error = "it lacks functions of OpenSSL 3";
    return found;
  }
  found.version = version(kVersionText);
  // Fetched once: EVP_aes_256_gcm() would be looked up again at every use.
  found.aes_256_gcm = fetch(nullptr, "AES-256-GCM", nullptr);
  if (found.aes_256_gcm == nullptr) found.error = found.version + " has no AES-256-GCM";
  return found;
}

}  // namespace

const Libcrypto& libcrypto() {
  static const Libcrypto loaded = load();
  return loaded;
}

}  // namespace ssdkv
