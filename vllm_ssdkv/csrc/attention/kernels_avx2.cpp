#if defined(__x86_64__)
#define SSDKV_ISA avx2
#define SSDKV_ISA_NAME "avx2"
#define SSDKV_KERNELS kAvx2Kernels
#include "attention/kernel/kernel.hpp"
#endif
