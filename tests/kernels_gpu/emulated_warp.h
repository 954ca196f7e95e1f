// CUDA's words that lanes_gpu.h uses, for g++: each thread of a warp is a fiber, and what threads do together is a meeting of all 32
// (emulated_warp.cc). With the compiler's -fsanitize=thread and shift-exponent every access to memory and every shift is seen there too.
#ifndef KVOBJ_EMULATED_WARP_H
#define KVOBJ_EMULATED_WARP_H

#define __CUDACC_RTC__ // what lanes.h and its neighbours ask
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))

struct Emulated3 {
    unsigned x, y, z;
};
extern "C" Emulated3 threadIdx, blockIdx, blockDim, gridDim; // of the fiber that runs
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

enum EmulatedKind : unsigned { MEET_SYNC, MEET_BALLOT, MEET_SHFL, MEET_SHFL_XOR, MEET_SHFL_UP, MEET_ADD, MEET_MAX, MEET_MIN };

// All 32 fibers of a warp call it, with the same kind, width and mask; each gets its result.
extern "C" unsigned long long emulated_meet(EmulatedKind kind, unsigned width, unsigned mask, unsigned long long value, unsigned argument);
extern "C" unsigned emulated_atomic_add(unsigned* at, unsigned x);
extern "C" float emulated_divide_roughly(float x, float y);
extern "C" void emulated_logical_warp(unsigned warp);
extern "C" unsigned* emulated_warp_memory(unsigned bytes); // of the warp that runs
#define KV_WARP_MEMORY_AT(bytes) emulated_warp_memory(bytes)
#define KV_GLOBAL(p) (p)
#define KV_FETCH(p) ((void)(p))
#define KV_COPY_16(to, from) (*(uint4*)(to) = *(const uint4*)(from))
#define KV_COPIES_END() ((void)0)
#define KV_WAIT_FOR_COPIES(LATER) ((void)0)
extern "C" void emulated_launch(const char* kernel, void (*grid)(void*), void* arguments, unsigned long size);

// lanes_gpu.h's KV_KERNEL__, run so: what it has for a kernel's grid stands between. To be put in its place.
#define KV_EMULATED_KERNEL(name, parameters, names)                                                         \
    static void name##_warp(u32 warp, KV_UNPACK parameters);                                                \
    extern "C" __attribute__((visibility("default"))) void kv_##name(u32 warps, KV_UNPACK parameters) {      \
        auto grid = [=] {                                                                                   \
            const u32 step = gridDim.x * (blockDim.x >> 5);                                                 \
            for (u32 at = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); at < warps; at += step) {    \
                emulated_logical_warp(at);                                                                  \
                name##_warp(at, KV_UNPACK names);                                                           \
            }                                                                                               \
        };                                                                                                  \
        emulated_launch(#name, [](void* each) { (*(decltype(grid)*)each)(); }, &grid, sizeof grid);         \
    }                                                                                                       \
    static void name##_warp(u32 warp, KV_UNPACK parameters)

template <class T> inline __attribute__((always_inline)) T emulated_exchange(EmulatedKind kind, unsigned mask, T x, unsigned argument) {
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &x, sizeof(T));
    bits = emulated_meet(kind, sizeof(T), mask, bits, argument);
    __builtin_memcpy(&x, &bits, sizeof(T));
    return x;
}
inline void __syncwarp() { emulated_meet(MEET_SYNC, 0, ~0u, 0, 0); }
inline unsigned __ballot_sync(unsigned mask, int x) { return (unsigned)emulated_meet(MEET_BALLOT, 0, mask, x != 0, 0); }
template <class T> inline T __shfl_sync(unsigned mask, T x, int lane) { return emulated_exchange(MEET_SHFL, mask, x, (unsigned)lane); }
template <class T> inline T __shfl_xor_sync(unsigned mask, T x, int bits) { return emulated_exchange(MEET_SHFL_XOR, mask, x, (unsigned)bits); }
template <class T> inline T __shfl_up_sync(unsigned mask, T x, unsigned step) { return emulated_exchange(MEET_SHFL_UP, mask, x, step); }
inline unsigned __reduce_add_sync(unsigned mask, unsigned x) { return (unsigned)emulated_meet(MEET_ADD, 4, mask, x, 0); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned x) { return (unsigned)emulated_meet(MEET_MAX, 4, mask, x, 0); }
inline unsigned __reduce_min_sync(unsigned mask, unsigned x) { return (unsigned)emulated_meet(MEET_MIN, 4, mask, x, 0); }
inline unsigned atomicAdd(unsigned* at, unsigned x) { return emulated_atomic_add(at, x); }

inline unsigned __float_as_uint(float x) { unsigned r; __builtin_memcpy(&r, &x, 4); return r; }
inline float __uint_as_float(unsigned x) { float r; __builtin_memcpy(&r, &x, 4); return r; }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline int __float2int_rz(float x) { // PTX: cvt.rzi.s32.f32 saturates, and gives 0 of what is no number
    if (x != x) return 0;
    return x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : (int)x;
}
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
#define KV_INVERSE_ROUGHLY(x) emulated_divide_roughly(1.0f, x)
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) { // PTX: shf.l.wrap
    return (unsigned)((((unsigned long long)high << 32 | low) << (by & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return (unsigned)(((unsigned long long)high << 32 | low) >> (by & 31)); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned select) { // PTX: prmt
    const unsigned long long all = (unsigned long long)high << 32 | low;
    unsigned r = 0;
    for (int at = 0; at < 4; at++) {
        const unsigned which = select >> (4 * at) & 15, byte = (unsigned)(all >> (8 * (which & 7))) & 255;
        r |= (which & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * at);
    }
    return r;
}
inline unsigned __dp2a_lo(unsigned a, unsigned b, unsigned sum) { return sum + (a & 0xffff) * (b & 255) + (a >> 16) * (b >> 8 & 255); }
inline unsigned __dp2a_hi(unsigned a, unsigned b, unsigned sum) { return __dp2a_lo(a, b >> 16, sum); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    const unsigned low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
    return low | ((a >> 16) > (b >> 16) ? a >> 16 : b >> 16) << 16;
}
inline unsigned __vmaxu4(unsigned a, unsigned b) {
    unsigned r = 0;
    for (int by = 0; by < 32; by += 8) r |= ((a >> by & 255) > (b >> by & 255) ? a >> by & 255 : b >> by & 255) << by;
    return r;
}

#endif
