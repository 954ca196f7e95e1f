// The vocabulary that kernels are written in, once for the GPU and once for the CPU.
//
// A kernel is the program of one warp of 32 lanes. A *lane value* (LaneU32, LaneI32, LaneF32, LaneI64, LaneMask) is one scalar a
// thread on the GPU and 32 values in vector registers on the CPU; a plain C value is *uniform*: the same in every lane. The same
// expression compiles for both: `x = f * (x >> 12) + slot`. What the two machines do differently has a name below and nothing else
// may be used: no threadIdx, no intrinsic, no library, no include.
//
// Rules that keep both sides equal, bit for bit:
// - control flow is uniform: `if` and loops test uniform values; lanes differ by kv_select and by masks alone;
// - memory is touched by the functions below alone, except that uniform reads (`p[i]`, i uniform) are plain C;
// - a uniform write is KV_ONCE(p[i] = v): one lane does it on the GPU; kv_sync() before others read it back, and before anything is
//   written that others have read or written: no other function orders memory;
// - integers wrap (compiled with -fwrapv); floats are only + - *, conversions named here and kv_sqrt: no contraction, no division.
//
// Written for nvrtc (C++17, no headers at all) and g++ or clang (C++17; vector extensions; one build for each of AVX-512, AVX2 and
// the rest).
#ifndef KVOBJ_LANES_H
#define KVOBJ_LANES_H

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef short i16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#define KV_LANES 32

// KV_WIDE is 1 where memory answers late and registers are many, on a GPU: loops there fetch what several steps need before they use
// any of it, and a table that is gathered from is kept small. The same bytes come of both.
//
// KV_UNROLL stands before a loop of a constant count over a small array of lane values, so that a GPU keeps them in registers;
// KV_ROUTINE is a function large enough to be called on a CPU: lane values go to it by address.
#if defined(__CUDACC_RTC__) || defined(__CUDACC__)
#define KV_WIDE 1
#define KV_UNROLL _Pragma("unroll")
#define KV_ROUTINE static __device__ __forceinline__
#include "lanes_gpu.h"
#else
#define KV_WIDE 0
#define KV_UNROLL
#define KV_ROUTINE static __attribute__((noinline))
#include "lanes_cpu.h"
#endif

#endif
