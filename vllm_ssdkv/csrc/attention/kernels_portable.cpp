#define SSDKV_ISA portable
#define SSDKV_ISA_NAME "portable"
#define SSDKV_KERNELS kPortableKernels
#include "attention/kernel/kernel.hpp"
