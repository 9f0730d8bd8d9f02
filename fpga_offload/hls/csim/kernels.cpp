// C simulation: the kernels for heads of SSDKV_HEAD_SIZE channels, one such file compiled for each.
#include "attention.hpp"
#include "csim/device.hpp"
#include "sparf.hpp"

namespace ssdkv {
namespace fpga {
namespace {

template <int D, int G, typename T>
class Kernels final : public CsimDevice {
 public:
  void attend(const ssdkv_fpga_attend_args& args) override {
    run_attend<D, G, T>(state_.job, args.pages, SSDKV_FPGA_ATTEND_FROM(args));
  }

  void sparf(const ssdkv_fpga_sparf_args& args) override {
    run_sparf<D, G, T>(state_, args.pages, args.channel_pages, SSDKV_FPGA_SPARF_FROM(args));
  }

 private:
  // Kernels are run one at a time, so what they keep on chip may share memory.
  SparfState<D, G> state_ = {};
};

template <int D, typename T>
std::unique_ptr<CsimDevice> make(std::uint32_t group) {
  switch (group) {
    case 1:
      return std::make_unique<Kernels<D, 1, T>>();
    case 2:
      return std::make_unique<Kernels<D, 2, T>>();
    case 4:
      return std::make_unique<Kernels<D, 4, T>>();
    case 5:
      return std::make_unique<Kernels<D, 5, T>>();
    case 8:
      return std::make_unique<Kernels<D, 8, T>>();
    default:
      return nullptr;
  }
}

}  // namespace

template <>
std::unique_ptr<CsimDevice> make_csim_device<SSDKV_HEAD_SIZE>(std::uint32_t group, bool bfloat16) {
  return bfloat16 ? make<SSDKV_HEAD_SIZE, BFloat16>(group) : make<SSDKV_HEAD_SIZE, Float16>(group);
}

}  // namespace fpga
}  // namespace ssdkv
