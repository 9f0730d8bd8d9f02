// Kernel `attend` for the vendor's compiler, of the shape that its macros name:
// v++ -c -k attend -DSSDKV_HEAD_SIZE=128 -DSSDKV_GROUP=4 -DSSDKV_BFLOAT16=1.
#include "attention.hpp"

using namespace ssdkv::fpga;

#if SSDKV_BFLOAT16
using Element = BFloat16;
#else
using Element = Float16;
#endif

extern "C" void attend(SSDKV_FPGA_ATTEND_PARAMETERS) {
  SSDKV_FPGA_ATTEND_INTERFACE
  static JobState<SSDKV_HEAD_SIZE, SSDKV_GROUP> state;
#pragma HLS DISAGGREGATE variable = state
#pragma HLS ARRAY_PARTITION variable = state.query dim = 1 complete
#pragma HLS ARRAY_PARTITION variable = state.recent dim = 2 complete
#pragma HLS ARRAY_PARTITION variable = state.recent dim = 3 complete
#pragma HLS ARRAY_PARTITION variable = state.totals dim = 2 complete
#pragma HLS ARRAY_PARTITION variable = state.totals dim = 3 complete
#pragma HLS BIND_STORAGE variable = state.logits type = ram_2p impl = uram
#pragma HLS BIND_STORAGE variable = state.digests type = ram_2p impl = uram
  run_attend<SSDKV_HEAD_SIZE, SSDKV_GROUP, Element>(state, SSDKV_FPGA_BEAT_BYTES,
                                                    SSDKV_FPGA_ATTEND_NAMES);
}
