// The lane vocabulary on a GPU: a lane value is a thread's scalar. See lanes.h.
#define KV_FUNCTION static __device__ __forceinline__
#define KV_CONSTANT static __device__ const
#define KV_STORAGE static __device__ // what a kernel fills once and others read

typedef u32 LaneU32;
typedef i32 LaneI32;
typedef float LaneF32;
typedef i64 LaneI64;
typedef bool LaneMask;

// KV_KERNEL(name, (parameters), (their names)) { body } : the body sees `warp`, the warp's number, below `warps`. Blocks have up to
// 1,024 threads, so that a multiprocessor that has one block alone is filled; that leaves 64 registers to a thread. A kernel that is
// better off with more of them has fewer threads: `#define KV_THREADS_OF_name ~, 768` leaves 80.
#define KV_THREADS(name) KV_SECOND(KV_THREADS_OF_##name, 1024, 0)
#define KV_SECOND(...) KV_SECOND_(__VA_ARGS__)
#define KV_SECOND_(first, second, ...) second
#define KV_KERNEL(name, parameters, names) KV_KERNEL_(name, KV_UNPACK parameters, KV_UNPACK names)
#define KV_UNPACK(...) __VA_ARGS__
#define KV_KERNEL_(name, parameters, names) KV_KERNEL__(name, (parameters), (names))
#define KV_KERNEL__(name, parameters, names)                                                            \
    static __device__ void name##_warp(u32 warp, KV_UNPACK parameters);                                 \
    extern "C" __global__ void __launch_bounds__(KV_THREADS(name), 1) kv_##name(u32 warps, KV_UNPACK parameters) {  \
        const u32 step = gridDim.x * (blockDim.x >> 5);                                                 \
        for (u32 at = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); at < warps; at += step)      \
            name##_warp(at, KV_UNPACK names);                                                           \
    }                                                                                                   \
    static __device__ void name##_warp(u32 warp, KV_UNPACK parameters)

// KV_WARP_MEMORY(kernel, bytes): each warp of the kernel has so much fast memory, which its lanes share (kernel_source.py reads it);
// undefined at first, and before its first use kv_sync() has to tell that the warp before is done with it.
#define KV_WARP_MEMORY(kernel, bytes) enum { kv_bytes_of_##kernel = bytes };
#ifndef KV_WARP_MEMORY_AT
extern __shared__ __align__(16) u32 kv_shared[];
#define KV_WARP_MEMORY_AT(bytes) (kv_shared + (threadIdx.x >> 5) * ((bytes) / 4))
#endif

// What a kernel is given as a number is an address of the device's own memory, which a compiler cannot know.
#ifndef KV_GLOBAL
template <class T> KV_FUNCTION T* kv_global(T* p) {
    __builtin_assume(__isGlobal((const void*)p));
    return p;
}
#define KV_GLOBAL(p) kv_global(p)
// Has memory bring the line of p nearer; p is memory that is there.
#define KV_FETCH(p) asm volatile("prefetch.global.L2 [%0];" ::"l"(p))
// Copies 16 bytes, aligned, from device memory to the warp's own, later: before KV_WAIT_FOR_COPIES, which leaves out those of
// the last LATER groups that KV_COPIES_END has ended. Other lanes see it after kv_sync.
#define KV_COPY_16(to, from) \
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory")
#define KV_COPIES_END() asm volatile("cp.async.commit_group;" ::: "memory")
#define KV_WAIT_FOR_COPIES(LATER) asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory")
#endif

#define KV_ONCE(statement) do { if ((threadIdx.x & 31u) == 0) { statement; } } while (0)

KV_FUNCTION void kv_sync() { __syncwarp(); }
KV_FUNCTION LaneU32 kv_lane() { return threadIdx.x & 31u; }
KV_FUNCTION LaneU32 kv_u32(u32 x) { return x; }
KV_FUNCTION LaneI64 kv_i64(i64 x) { return x; }
KV_FUNCTION LaneMask kv_mask(bool x) { return x; }

// Bit patterns and conversions.
KV_FUNCTION LaneU32 kv_as_u32(LaneI32 x) { return (u32)x; }
KV_FUNCTION LaneU32 kv_bits(LaneF32 x) { return __float_as_uint(x); }
KV_FUNCTION LaneI32 kv_as_i32(LaneU32 x) { return (i32)x; }
KV_FUNCTION LaneF32 kv_from_bits(LaneU32 x) { return __uint_as_float(x); }
KV_FUNCTION LaneF32 kv_to_f32(LaneI32 x) { return __int2float_rn(x); }
KV_FUNCTION LaneI32 kv_truncate(LaneF32 x) { return __float2int_rz(x); }
KV_FUNCTION LaneI64 kv_widen(LaneI32 x) { return x; }
KV_FUNCTION LaneI32 kv_narrow(LaneI64 x) { return (i32)x; }
KV_FUNCTION LaneF32 kv_sqrt(LaneF32 x) { return __fsqrt_rn(x); }
KV_FUNCTION float kv_reciprocal(float x) { return __frcp_rn(x); } // uniform: once a step, never on the data path
KV_FUNCTION float kv_sqrt_uniform(float x) { return __fsqrt_rn(x); }
KV_FUNCTION u32 kv_bits_uniform(float x) { return __float_as_uint(x); }
KV_FUNCTION float kv_from_bits_uniform(u32 x) { return __uint_as_float(x); }
KV_FUNCTION float kv_to_f32_uniform(i32 x) { return __int2float_rn(x); }

KV_FUNCTION LaneU32 kv_select(LaneMask m, LaneU32 a, LaneU32 b) { return m ? a : b; }
KV_FUNCTION LaneI32 kv_select(LaneMask m, LaneI32 a, LaneI32 b) { return m ? a : b; }
KV_FUNCTION LaneF32 kv_select(LaneMask m, LaneF32 a, LaneF32 b) { return m ? a : b; }
KV_FUNCTION LaneMask kv_and(LaneMask a, LaneMask b) { return a && b; }
KV_FUNCTION LaneMask kv_or(LaneMask a, LaneMask b) { return a || b; }
KV_FUNCTION LaneMask kv_not(LaneMask a) { return !a; }
KV_FUNCTION LaneU32 kv_min(LaneU32 a, LaneU32 b) { return a < b ? a : b; }
KV_FUNCTION LaneU32 kv_max(LaneU32 a, LaneU32 b) { return a > b ? a : b; }
KV_FUNCTION LaneI32 kv_min(LaneI32 a, LaneI32 b) { return a < b ? a : b; }
KV_FUNCTION LaneI32 kv_max(LaneI32 a, LaneI32 b) { return a > b ? a : b; }
#ifndef KV_INVERSE_ROUGHLY
KV_FUNCTION float kv_inverse_roughly(float x) { // off by up to two units in the last place
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}
#define KV_INVERSE_ROUGHLY kv_inverse_roughly
#endif
// floor(x / f) for 1 <= f < 4096 and x < f * 2^20: from a float that is off by at most one. Any result where that does not hold.
KV_FUNCTION LaneU32 kv_quotient(LaneU32 x, LaneU32 f) {
    const u32 q = (u32)__float2int_rz(__uint2float_rn(x) * KV_INVERSE_ROUGHLY(__uint2float_rn(f)));
    const i32 rest = (i32)(x - q * f);
    return q + (u32)(rest >> 31) + (rest >= (i32)f ? 1u : 0u);
}
KV_FUNCTION u32 kv_popc(u32 x) { return __popc(x); }
KV_FUNCTION u32 kv_ctz(u32 x) { return x ? (u32)__ffs((int)x) - 1u : 32u; } // 32 of zero
KV_FUNCTION i32 kv_clz64(u64 x) { return __clzll((i64)x); } // 64 of zero

// Lane i has element i of consecutive memory; with a count, lanes from there on read 0 and write nothing. Any alignment of the type.
KV_FUNCTION LaneU32 kv_load_u8(const u8* p) { return p[kv_lane()]; }
KV_FUNCTION LaneU32 kv_load_u16(const u16* p) { return p[kv_lane()]; }
KV_FUNCTION LaneU32 kv_load_u32(const u32* p) { return p[kv_lane()]; }
KV_FUNCTION LaneF32 kv_load_f32(const float* p) { return p[kv_lane()]; }
KV_FUNCTION LaneI64 kv_load_i64(const i64* p) { return p[kv_lane()]; }
KV_FUNCTION LaneU32 kv_load_u8(const u8* p, u32 count) { return kv_lane() < count ? (u32)p[kv_lane()] : 0u; }
KV_FUNCTION LaneU32 kv_load_u16(const u16* p, u32 count) { return kv_lane() < count ? (u32)p[kv_lane()] : 0u; }
KV_FUNCTION LaneU32 kv_load_u32(const u32* p, u32 count) { return kv_lane() < count ? p[kv_lane()] : 0u; }
KV_FUNCTION void kv_store_u8(u8* p, LaneU32 x) { p[kv_lane()] = (u8)x; }
KV_FUNCTION void kv_store_u16(u16* p, LaneU32 x) { p[kv_lane()] = (u16)x; }
KV_FUNCTION void kv_store_u32(u32* p, LaneU32 x) { p[kv_lane()] = x; }
KV_FUNCTION void kv_store_u8(u8* p, LaneU32 x, u32 count) { if (kv_lane() < count) p[kv_lane()] = (u8)x; }
KV_FUNCTION void kv_store_u16(u16* p, LaneU32 x, u32 count) { if (kv_lane() < count) p[kv_lane()] = (u16)x; }
KV_FUNCTION void kv_store_u32(u32* p, LaneU32 x, u32 count) { if (kv_lane() < count) p[kv_lane()] = x; }

// Lane i reads table[index]; every index must be in bounds, those of lanes nobody uses too.
KV_FUNCTION LaneU32 kv_gather_u32(const u32* table, LaneU32 index) { return table[index]; }
// Sum of the products of the two 16-bit halves of each lane with those of b, all of them below 2^15.
KV_FUNCTION LaneU32 kv_pair_products(LaneU32 a, u32 b) { return (a & 0xffffu) * (b & 0xffffu) + (a >> 16) * (b >> 16); }
// sum + the products of two 16-bit counts with the low bytes of two costs, or with their high bytes, which kv_cost_bytes put there.
KV_FUNCTION u32 kv_cost_bytes(u32 first, u32 second) { return __byte_perm(first, second, 0x5140); }
KV_FUNCTION u32 kv_low_costs(u32 sum, u32 counts, u32 costs) { return __dp2a_lo(counts, costs, sum); }
KV_FUNCTION u32 kv_high_costs(u32 sum, u32 counts, u32 costs) { return __dp2a_hi(counts, costs, sum); }
// Adds 1 to counts[index] for each of the first `count` lanes; lanes may share a counter. `counts` is 4-byte aligned.
KV_FUNCTION void kv_count_u16(u16* counts, LaneU32 index, u32 count) {
    if (kv_lane() < count) atomicAdd((u32*)(counts + (index & ~1u)), 1u << (16u * (index & 1u)));
}

// Across lanes.
KV_FUNCTION u32 kv_ballot(LaneMask m) { return __ballot_sync(0xffffffffu, m); }
KV_FUNCTION LaneMask kv_lanes_of(u32 ballot) { return (ballot >> kv_lane()) & 1u; }
KV_FUNCTION LaneU32 kv_rank(u32 ballot) { return __popc(ballot & ((1u << kv_lane()) - 1u)); } // set bits below the lane
KV_FUNCTION u32 kv_broadcast(LaneU32 x, u32 lane) { return __shfl_sync(0xffffffffu, x, (int)lane); }
// sum + the products of the low and of the high halves of a and b, as signed 16-bit integers; wraps.
KV_FUNCTION LaneI32 kv_dot_i16(LaneI32 sum, LaneU32 a, LaneU32 b) {
    return (i32)((u32)sum + (u32)((i32)(i16)a * (i32)(i16)b) + (u32)((i32)a >> 16) * (u32)((i32)b >> 16));
}
// Lane i has the value of lane i ^ BITS; a power of two below 32.
template <u32 BITS> KV_FUNCTION LaneF32 kv_swap_lanes(LaneF32 x) { return __shfl_xor_sync(0xffffffffu, x, (int)BITS); }
// Lane i has the value of the table's lane index, all below 8.
KV_FUNCTION LaneF32 kv_lookup_8(LaneF32 table, LaneU32 index) { return __shfl_sync(0xffffffffu, table, (int)index); }
KV_FUNCTION u32 kv_sum(LaneU32 x) { return __reduce_add_sync(0xffffffffu, x); }
KV_FUNCTION u32 kv_greatest(LaneU32 x) { return __reduce_max_sync(0xffffffffu, x); }
KV_FUNCTION u32 kv_least(LaneU32 x) { return __reduce_min_sync(0xffffffffu, x); }
KV_FUNCTION float kv_sum(LaneF32 x) { // lane i and lane i + 16 first, then + 8, + 4, + 2, + 1
    for (int bits = 16; bits; bits >>= 1) x = x + __shfl_xor_sync(0xffffffffu, x, bits);
    return x;
}
KV_FUNCTION i64 kv_sum(LaneI64 x) {
    for (int bits = 16; bits; bits >>= 1) x += __shfl_xor_sync(0xffffffffu, x, bits);
    return x;
}

// The lanes of the mask, in order, to or from consecutive u16: returns how many.
KV_FUNCTION u32 kv_compress_u16(u16* p, LaneU32 x, LaneMask m) {
    const u32 ballot = kv_ballot(m);
    if (m) p[kv_rank(ballot)] = (u16)x;
    return __popc(ballot);
}
KV_FUNCTION LaneU32 kv_expand_u16(const u16* p, LaneMask m) { // 0 in the other lanes
    const u32 ballot = kv_ballot(m);
    return m ? (u32)p[kv_rank(ballot)] : 0u;
}

// For uniform values, memory and streams.
KV_FUNCTION u32 kv_min_uniform(u32 a, u32 b) { return a < b ? a : b; }
template <class T> KV_FUNCTION void kv_copy_as(u8* to, const u8* from, u64 size_bytes) {
    const u64 whole = size_bytes / sizeof(T);
    u64 at = kv_lane();
    for (; at + 7 * 32 < whole; at += 8 * 32) { // fetched together
        T x[8];
        KV_UNROLL for (u32 part = 0; part < 8; part++) x[part] = ((const T*)from)[at + 32 * part];
        KV_UNROLL for (u32 part = 0; part < 8; part++) ((T*)to)[at + 32 * part] = x[part];
    }
    for (; at < whole; at += 32) ((T*)to)[at] = ((const T*)from)[at];
    const u64 rest = whole * sizeof(T) + kv_lane(); // fewer than 32 bytes
    if (rest < size_bytes) to[rest] = from[rest];
}
KV_FUNCTION void kv_copy_few(u8* to, const u8* from, u32 size_bytes) { // a few bytes, mostly
    for (u32 at = kv_lane(); at < size_bytes; at += KV_LANES) to[at] = from[at];
}
KV_FUNCTION void kv_copy(u8* to, const u8* from, u64 size_bytes) {
    const u64 low = (u64)to | (u64)from;
    if (!(low & 15)) kv_copy_as<uint4>(to, from, size_bytes);
    else if (!(low & 3)) kv_copy_as<u32>(to, from, size_bytes);
    else if (!(low & 1)) kv_copy_as<u16>(to, from, size_bytes);
    else kv_copy_as<u8>(to, from, size_bytes);
}
// `count` elements, steps between them in elements. Aligned to the element.
template <class T> KV_FUNCTION void kv_copy_strided_as(u8* to, u32 to_step, const u8* from, u32 from_step, u32 count) {
    for (u64 at = kv_lane(); at < count; at += 32) ((T*)to)[at * to_step] = ((const T*)from)[at * from_step];
}
KV_FUNCTION void kv_copy_strided(u8* to, u32 to_step, const u8* from, u32 from_step, u32 count, u32 element_bytes) {
    if (element_bytes == 2) kv_copy_strided_as<u16>(to, to_step, from, from_step, count);
    else if (element_bytes == 4) kv_copy_strided_as<u32>(to, to_step, from, from_step, count);
    else kv_copy_strided_as<u8>(to, to_step, from, from_step, count);
}
KV_FUNCTION LaneU32 kv_prefix_sums(LaneU32 x) { // of the lanes below
    u32 sum = x;
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
        if (kv_lane() >= step) sum += other;
    }
    return sum - x;
}
// The same, read from memory of which 64 bytes from p are there: the other lanes hold anything.
KV_FUNCTION LaneU32 kv_expand_u16_near(const u16* p, LaneMask m) { return p[kv_rank(kv_ballot(m))]; }
// The lanes of the mask, in order, to the u16 before `end`: returns how many. Leaves anything in the 32 u16 before them.
KV_FUNCTION u32 kv_push_u16(u16* end, LaneU32 x, LaneMask m) {
    const u32 ballot = kv_ballot(m);
    if (m) end[(i32)(kv_rank(ballot) - __popc(ballot))] = (u16)x;
    return __popc(ballot);
}
