// C simulation: kernels of one shape behind one interface.
#pragma once

#include <cstdint>
#include <memory>

#include "ssdkv_fpga.h"

namespace ssdkv {
namespace fpga {

class CsimDevice {
 public:
  virtual ~CsimDevice() = default;
  virtual void attend(const ssdkv_fpga_attend_args& args) = 0;
  virtual void sparf(const ssdkv_fpga_sparf_args& args) = 0;
};

// Kernels for heads of D channels; null for a group that there are none for.
template <int D>
std::unique_ptr<CsimDevice> make_csim_device(std::uint32_t group, bool bfloat16);

}  // namespace fpga
}  // namespace ssdkv
