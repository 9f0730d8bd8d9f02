#if defined(__x86_64__)
#define SSDKV_ISA avx2
#include "attention/kernel/codes.hpp"
#endif
