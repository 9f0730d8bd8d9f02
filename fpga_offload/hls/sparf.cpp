// Kernel `sparf` for the vendor's compiler; macros as of attend.cpp.
#include "sparf.hpp"

using namespace ssdkv::fpga;

#if SSDKV_BFLOAT16
using Element = BFloat16;
#else
using Element = Float16;
#endif

extern "C" void sparf(SSDKV_FPGA_SPARF_PARAMETERS) {
  SSDKV_FPGA_SPARF_INTERFACE
  static SparfState<SSDKV_HEAD_SIZE, SSDKV_GROUP> state;
#pragma HLS DISAGGREGATE variable = state
#pragma HLS ARRAY_PARTITION variable = state.job.query dim = 1 complete
#pragma HLS ARRAY_PARTITION variable = state.job.recent dim = 2 complete
#pragma HLS ARRAY_PARTITION variable = state.job.recent dim = 3 complete
#pragma HLS ARRAY_PARTITION variable = state.job.totals dim = 2 complete
#pragma HLS ARRAY_PARTITION variable = state.job.totals dim = 3 complete
#pragma HLS ARRAY_PARTITION variable = state.reduced dim = 2 complete
#pragma HLS BIND_STORAGE variable = state.job.logits type = ram_2p impl = uram
#pragma HLS BIND_STORAGE variable = state.keys type = ram_2p impl = uram
  run_sparf<SSDKV_HEAD_SIZE, SSDKV_GROUP, Element>(
      state, SSDKV_FPGA_BEAT_BYTES, SSDKV_FPGA_CHANNEL_BEAT_BYTES, SSDKV_FPGA_SPARF_NAMES);
}
