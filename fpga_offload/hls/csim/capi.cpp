// C simulation: the generated C ABI over the kernels of all shapes.
#include "csim/device.hpp"
#include "ssdkv_fpga.h"

namespace fpga = ssdkv::fpga;

struct ssdkv_fpga_device {
  std::unique_ptr<fpga::CsimDevice> kernels;
};

namespace {

std::unique_ptr<fpga::CsimDevice> make(std::uint32_t head_size, std::uint32_t group,
                                       bool bfloat16) {
  switch (head_size) {
    case 64:
      return fpga::make_csim_device<64>(group, bfloat16);
    case 128:
      return fpga::make_csim_device<128>(group, bfloat16);
    case 256:
      return fpga::make_csim_device<256>(group, bfloat16);
    default:
      return nullptr;
  }
}

std::int32_t code_of(std::uint64_t status) {
  return static_cast<std::int32_t>(reinterpret_cast<const ssdkv_fpga_status*>(status)->code);
}

}  // namespace

#define SSDKV_EXPORT extern "C" __attribute__((visibility("default")))

SSDKV_EXPORT std::uint32_t ssdkv_fpga_version() { return SSDKV_FPGA_VERSION; }

SSDKV_EXPORT std::uint32_t ssdkv_fpga_layout() { return SSDKV_FPGA_LAYOUT; }

SSDKV_EXPORT ssdkv_fpga_device* ssdkv_fpga_open(std::uint32_t head_size, std::uint32_t group,
                                                std::uint32_t flags) {
  auto kernels = make(head_size, group, (flags & SSDKV_FPGA_FLAG_BFLOAT16) != 0);
  return kernels ? new ssdkv_fpga_device{std::move(kernels)} : nullptr;
}

SSDKV_EXPORT void ssdkv_fpga_close(ssdkv_fpga_device* device) { delete device; }

SSDKV_EXPORT std::int32_t ssdkv_fpga_attend(ssdkv_fpga_device* device,
                                            const ssdkv_fpga_attend_args* args) {
  device->kernels->attend(*args);
  return code_of(args->status);
}

SSDKV_EXPORT std::int32_t ssdkv_fpga_sparf(ssdkv_fpga_device* device,
                                           const ssdkv_fpga_sparf_args* args) {
  device->kernels->sparf(*args);
  return code_of(args->status);
}
