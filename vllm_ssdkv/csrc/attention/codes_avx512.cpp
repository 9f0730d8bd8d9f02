#if defined(__x86_64__)
#define SSDKV_ISA avx512
#include "attention/kernel/codes.hpp"
#endif
