#include "attention/isa.hpp"

#include <atomic>
#include <stdexcept>

namespace ssdkv::attention {
namespace {

const std::vector<const Kernels*>& runnable() {
  static const std::vector<const Kernels*> found = [] {
    std::vector<const Kernels*> kernels;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      kernels.push_back(&kAvx512Kernels);
    }
    if (avx2) kernels.push_back(&kAvx2Kernels);
#endif
    kernels.push_back(&kPortableKernels);
    return kernels;
  }();
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : runnable()) names.emplace_back(kernels->name);
  return names;
}

const Kernels& active_kernels() {
  const Kernels* kernels = chosen.load(std::memory_order_acquire);
  return kernels != nullptr ? *kernels : *runnable().front();
}

void select_isa(std::string_view name) {
  for (const Kernels* kernels : runnable()) {
    if (name == kernels->name) {
      chosen.store(kernels, std::memory_order_release);
      return;
    }
  }
  std::string text = "this machine cannot run kernels for '" + std::string(name) + "'; it can run:";
  for (const std::string& known : available_isas()) text += " " + known;
  throw std::invalid_argument(text);
}

}  // namespace ssdkv::attention
