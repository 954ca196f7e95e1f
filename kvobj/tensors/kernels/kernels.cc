// The one translation unit of the CPU library. The GPU's is the same list of includes (kvobj.gpu.cuda_launcher reads it here).
#include "lanes.h"
#include "packed.h"

#include "common.cuh"
#include "rans.cuh"
#include "xa.cuh"
#include "crc.cuh"
#include "pack.cuh"
#include "f8.cuh"
#include "h4.cuh"
#include "blake3.cuh"
#include "eq.cuh"
#include "ek.cuh"
#include "x3.cuh"

#if !defined(__CUDACC_RTC__) && !defined(__CUDACC__)
extern "C" __attribute__((visibility("default"))) const char* kvobj_kernels_fingerprint() { return KVOBJ_KERNELS_FINGERPRINT; }
#endif
