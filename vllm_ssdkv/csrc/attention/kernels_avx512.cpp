#if defined(__x86_64__)
#define SSDKV_ISA avx512
#define SSDKV_ISA_NAME "avx512"
#define SSDKV_KERNELS kAvx512Kernels
#include "attention/kernel/kernel.hpp"
#endif
