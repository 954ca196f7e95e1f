// The GPU's half of the kernels as a library for the CPU: kv_<kernel>(warps, arguments…), which runs a small grid of emulated warps.
#include "emulated_warp.h"
#include "lanes.h"

#undef KV_KERNEL__
#define KV_KERNEL__ KV_EMULATED_KERNEL

#include "kernels.cc"
