// Bytes, four in a lane: a LaneU32 holds 128 values of a byte each, value 4 · lane + place in bits 8 · place of its lane. On a CPU that
// is 128 bytes in memory order. Flags are such bytes of which only the top bit (0x80) is ever set.
//
// + and << on a LaneU32 carry from one byte to the next: what is here and masks keep them apart.
#ifndef KVOBJ_PACKED_H
#define KVOBJ_PACKED_H

#define KV_PACKED 128

// The same byte in all places.
KV_FUNCTION LaneU32 kv_packed(u32 byte) { return kv_u32(byte * 0x01010101u); }

// All bits of the bytes below `count` set.
KV_FUNCTION LaneU32 kv_packed_below(u32 count) {
    const LaneU32 first = kv_lane() << 2;
    const LaneU32 here = kv_min(kv_select(first < kv_u32(count), kv_u32(count) - first, kv_u32(0)), kv_u32(4));
    return kv_select(here == kv_u32(4), kv_u32(~0u), (kv_u32(1) << ((here & kv_u32(3)) << 3)) - kv_u32(1));
}

#if defined(__CUDACC_RTC__) || defined(__CUDACC__)

// Byte by byte; minus modulo 256.
KV_FUNCTION LaneU32 kv_packed_minus(LaneU32 a, LaneU32 b) {
    return ((a | 0x80808080u) - (b & 0x7f7f7f7fu)) ^ ((a ^ ~b) & 0x80808080u);
}
KV_FUNCTION LaneU32 kv_packed_max(LaneU32 a, LaneU32 b) { return __vmaxu4(a, b); }

// 128 bytes, or the first `count` of them (the others read as 0 and are not written). Any alignment. What is short or not aligned goes
// byte by byte, out of line: it is rare, and there are many steps.
static __device__ __noinline__ u32 kv_load_bytewise(const u8* p, u32 count) {
    u32 x = 0;
    for (u32 at = 0; at < 4; at++)
        if (4 * kv_lane() + at < count) x |= (u32)p[4 * kv_lane() + at] << (8 * at);
    return x;
}
static __device__ __noinline__ void kv_store_bytewise(u8* p, u32 x, u32 count) {
    for (u32 at = 0; at < 4; at++)
        if (4 * kv_lane() + at < count) p[4 * kv_lane() + at] = (u8)(x >> (8 * at));
}
KV_FUNCTION LaneU32 kv_load_packed(const u8* p, u32 count) {
    return count < KV_PACKED || ((u64)p & 3) ? kv_load_bytewise(p, count) : ((const u32*)p)[kv_lane()];
}
KV_FUNCTION void kv_store_packed(u8* p, LaneU32 x, u32 count) {
    if (count < KV_PACKED || ((u64)p & 3)) kv_store_bytewise(p, x, count);
    else ((u32*)p)[kv_lane()] = x;
}

KV_FUNCTION LaneU32 kv_load_packed(const u8* p) { return kv_load_packed(p, KV_PACKED); }
KV_FUNCTION void kv_store_packed(u8* p, LaneU32 x) { kv_store_packed(p, x, KV_PACKED); }

// 128 values of 16 bits, or the first `count`, as their low and their high bytes. Any alignment of a u16.
static __device__ __noinline__ uint2 kv_load_valuewise(const u16* p, u32 count) {
    u32 x[4];
    for (u32 at = 0; at < 4; at++) x[at] = 4 * kv_lane() + at < count ? p[4 * kv_lane() + at] : 0u;
    return make_uint2(x[0] | x[1] << 16, x[2] | x[3] << 16);
}
static __device__ __noinline__ void kv_store_valuewise(u16* p, uint2 x, u32 count) {
    for (u32 at = 0; at < 4; at++)
        if (4 * kv_lane() + at < count) p[4 * kv_lane() + at] = (u16)((at < 2 ? x.x : x.y) >> (16 * (at & 1)));
}
KV_FUNCTION void kv_load_pairs(const u16* p, u32 count, LaneU32& low, LaneU32& high) {
    const uint2 x = count < KV_PACKED || ((u64)p & 7) ? kv_load_valuewise(p, count) : ((const uint2*)p)[kv_lane()];
    low = __byte_perm(x.x, x.y, 0x6420);
    high = __byte_perm(x.x, x.y, 0x7531);
}
KV_FUNCTION void kv_store_pairs(u16* p, LaneU32 low, LaneU32 high, u32 count) {
    const uint2 x = make_uint2(__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362));
    if (count < KV_PACKED || ((u64)p & 7)) kv_store_valuewise(p, x, count);
    else ((uint2*)p)[kv_lane()] = x;
}

// How many flags lie in lanes below, and how many in all.
KV_FUNCTION u32 kv_flag_ranks(LaneU32 flags, u32& all) {
    const u32 here = __popc(flags), below = (1u << kv_lane()) - 1u;
    const u32 ones = __ballot_sync(0xffffffffu, here & 1u), twos = __ballot_sync(0xffffffffu, here & 2u);
    const u32 fours = __ballot_sync(0xffffffffu, here & 4u);
    all = __popc(ones) + 2 * __popc(twos) + 4 * __popc(fours);
    return __popc(ones & below) + 2 * __popc(twos & below) + 4 * __popc(fours & below);
}
// The flagged bytes, in order, to consecutive bytes at `p`: returns how many.
KV_FUNCTION u32 kv_compress_packed(u8* p, LaneU32 x, LaneU32 flags) {
    u32 all, rank = kv_flag_ranks(flags, all);
    for (u32 at = 0; at < 4; at++)
        if (flags >> (8 * at) & 0x80u) p[rank++] = (u8)(x >> (8 * at));
    return all;
}
// The flagged bytes become, in order, consecutive bytes from `p`; returns how many they are. More than `limit`: nothing is read.
KV_FUNCTION u32 kv_expand_packed(const u8* p, u32 limit, LaneU32& x, LaneU32 flags) {
    u32 all, rank = kv_flag_ranks(flags, all);
    if (all > limit) return all;
    for (u32 at = 0; at < 4; at++)
        if (flags >> (8 * at) & 0x80u) x = (x & ~(0xffu << (8 * at))) | (u32)p[rank++] << (8 * at);
    return all;
}

// Where all is aligned and there: 128 bytes, 128 values of 16 bits.
KV_FUNCTION LaneU32 kv_load_packed_aligned(const u8* p) { return ((const u32*)p)[kv_lane()]; }
KV_FUNCTION void kv_store_packed_aligned(u8* p, LaneU32 x) { ((u32*)p)[kv_lane()] = x; }
KV_FUNCTION uint2 kv_load_pairs_aligned(const u8* p) { return ((const uint2*)p)[kv_lane()]; }
KV_FUNCTION void kv_store_pairs_aligned(u8* p, LaneU32 low, LaneU32 high) {
    ((uint2*)p)[kv_lane()] = make_uint2(__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362));
}

// The flags of eight steps together: of byte b of step s in bit 4 * s + b of its lane. Their order is that of steps, in a step of
// lanes, in a lane of bytes; one sum over the lanes tells all ranks.
KV_FUNCTION u32 kv_flag_bits(LaneU32 flags, u32 step) { return ((flags >> 7) * 0x10204080u >> 28) << (4 * step); }
struct KvFlagField {
    u32 bits;               // of the lane
    u32 even, odd;          // in the lanes below, a byte a step: those of steps 0, 2, 4, 6 and of 1, 3, 5, 7
    u32 all_even, all_odd;  // in all lanes
};
KV_FUNCTION KvFlagField kv_flag_field(u32 bits) {
    u32 counts = bits - ((bits >> 1) & 0x55555555u);
    counts = (counts & 0x33333333u) + ((counts >> 2) & 0x33333333u);
    const u32 own_even = counts & 0x0f0f0f0fu, own_odd = (counts >> 4) & 0x0f0f0f0fu;
    u32 even = own_even, odd = own_odd;
    KV_UNROLL for (u32 step = 1; step < 32; step *= 2) {
        const u32 more_even = __shfl_up_sync(0xffffffffu, even, step), more_odd = __shfl_up_sync(0xffffffffu, odd, step);
        if (kv_lane() >= step) {
            even += more_even;
            odd += more_odd;
        }
    }
    const u32 all_even = __shfl_sync(0xffffffffu, even, 31), all_odd = __shfl_sync(0xffffffffu, odd, 31);
    return {bits, even - own_even, odd - own_odd, all_even, all_odd};
}
KV_FUNCTION u32 kv_sum_of_bytes(u32 x, u32 count) { // of the lowest, up to four
    const u32 these = count ? x & (~0u >> (32 - 8 * count)) : 0u;
    const u32 pairs = (these & 0x00ff00ffu) + ((these >> 8) & 0x00ff00ffu);
    return (pairs & 0xffffu) + (pairs >> 16);
}
KV_FUNCTION u32 kv_flag_count(const KvFlagField& f) { return kv_sum_of_bytes(f.all_even, 4) + kv_sum_of_bytes(f.all_odd, 4); }
KV_FUNCTION u32 kv_flag_rank(const KvFlagField& f, u32 bit) { // of a flag of the lane, among all
    const u32 step = bit >> 2, below = f.bits & ((1u << bit) - 1u) & (15u << (4 * step));
    return kv_sum_of_bytes(f.all_even, (step + 1) >> 1) + kv_sum_of_bytes(f.all_odd, step >> 1) +
           (((step & 1 ? f.odd : f.even) >> (8 * (step >> 1))) & 255u) + __popc(below);
}
// Ranks of flags where all are fewer than 256: of the first of a lane's in each step, a byte a step.
struct KvFewFlags {
    u32 bits, even, odd;
};
KV_FUNCTION KvFewFlags kv_few_flags(const KvFlagField& f) {
    const u32 before = (f.all_even + f.all_odd) * 0x01010100u; // each two steps
    return {f.bits, f.even + before, f.odd + before + f.all_even};
}
KV_FUNCTION u32 kv_few_rank(const KvFewFlags& f, u32 bit) {
    const u32 first = bit & ~3u, ranks = bit & 4 ? f.odd : f.even;
    return (ranks >> (first & ~7u) & 255u) + __popc(f.bits >> first & ((1u << (bit & 3)) - 1u));
}
// The flagged bytes of eight steps, in order, to consecutive bytes at `p`: returns how many. `room`: 32 bytes of the lane's own memory,
// four of each step's, 128 apart.
KV_FUNCTION u32 kv_compress_field(u8* p, const LaneU32 (&x)[8], u32 bits, u32* room) {
    const KvFlagField f = kv_flag_field(bits);
    const u32 all = kv_flag_count(f);
    if (!all) return 0;
    KV_UNROLL for (u32 step = 0; step < 8; step++) room[step * KV_LANES] = x[step];
    const KvFewFlags few = kv_few_flags(f);
    const bool are_few = all < 256;
    for (u32 left = bits; left; left &= left - 1) {
        const u32 bit = kv_ctz(left), rank = are_few ? kv_few_rank(few, bit) : kv_flag_rank(f, bit);
        p[rank] = ((const u8*)room)[(bit >> 2) * KV_PACKED + (bit & 3)];
    }
    return all;
}
// The flagged bytes of eight steps become, in order, the bytes from `p` on, of which there are `limit`; returns how many they are.
// More than `limit`: nothing is read. `near` is p's first bytes, one a lane, anything beyond the limit. `room` as of kv_compress_field.
KV_FUNCTION u32 kv_expand_field(const u8* p, u32 limit, LaneU32 near, LaneU32 (&x)[8], u32 bits, u32* room) {
    const KvFlagField f = kv_flag_field(bits);
    const u32 all = kv_flag_count(f);
    if (all > limit || !all) return all;
    KV_UNROLL for (u32 step = 0; step < 8; step++) room[step * KV_LANES] = x[step];
    const KvFewFlags few = kv_few_flags(f);
    const bool are_few = all < 256;
    for (u32 left = bits; kv_ballot(left != 0); left &= left - 1) {
        const u32 bit = left ? kv_ctz(left) : 0u, rank = are_few ? kv_few_rank(few, bit) : kv_flag_rank(f, bit);
        u32 byte = __shfl_sync(0xffffffffu, near, (int)(rank & 31u));
        if (left && rank >= 32) byte = p[rank];
        if (left) ((u8*)room)[(bit >> 2) * KV_PACKED + (bit & 3)] = (u8)byte;
    }
    KV_UNROLL for (u32 step = 0; step < 8; step++) x[step] = room[step * KV_LANES];
    return all;
}

#else

typedef u8 KvBytes __attribute__((vector_size(KV_PART_BYTES)));

KV_FUNCTION LaneU32 kv_packed_minus(LaneU32 a, LaneU32 b) {
    LaneU32 r;
    KV_EACH r.part[kv_part] = (LaneU32::Part)((KvBytes)a.part[kv_part] - (KvBytes)b.part[kv_part]);
    return r;
}
KV_FUNCTION LaneU32 kv_packed_max(LaneU32 a, LaneU32 b) {
    LaneU32 r;
    KV_EACH {
        const KvBytes x = (KvBytes)a.part[kv_part], y = (KvBytes)b.part[kv_part];
        r.part[kv_part] = (LaneU32::Part)(x > y ? x : y);
    }
    return r;
}

typedef LaneU32::Part KvUnaligned __attribute__((aligned(1), may_alias)); // one move a part, where memcpy takes halves
KV_FUNCTION LaneU32 kv_load_packed(const u8* p) {
    LaneU32 r;
    KV_EACH r.part[kv_part] = *(const KvUnaligned*)(p + KV_PART_BYTES * kv_part);
    return r;
}
KV_FUNCTION LaneU32 kv_load_packed(const u8* p, u32 count) {
    if (count >= KV_PACKED) return kv_load_packed(p);
    LaneU32 r(0);
    __builtin_memcpy((void*)&r, p, count);
    return r;
}
KV_FUNCTION void kv_store_packed(u8* p, LaneU32 x) { KV_EACH *(KvUnaligned*)(p + KV_PART_BYTES * kv_part) = x.part[kv_part]; }
KV_FUNCTION void kv_store_packed(u8* p, LaneU32 x, u32 count) {
    if (count >= KV_PACKED) kv_store_packed(p, x);
    else __builtin_memcpy(p, &x, count);
}

KV_FUNCTION void kv_load_pairs(const u16* p, LaneU32& low, LaneU32& high) {
    const u8* bytes = (const u8*)p;
#if defined(KV_AVX512) && defined(__AVX512VBMI__)
    const __m512i even = _mm512_add_epi8(_mm512_set_epi8(
        63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48, 47, 46, 45, 44, 43, 42, 41, 40, 39, 38, 37, 36, 35, 34, 33, 32,
        31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        _mm512_set_epi8(
        63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48, 47, 46, 45, 44, 43, 42, 41, 40, 39, 38, 37, 36, 35, 34, 33, 32,
        31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    const __m512i odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));
    KV_EACH {
        const __m512i a = _mm512_loadu_si512(bytes + 128 * kv_part), b = _mm512_loadu_si512(bytes + 128 * kv_part + 64);
        low.part[kv_part] = (LaneU32::Part)_mm512_permutex2var_epi8(a, even, b);
        high.part[kv_part] = (LaneU32::Part)_mm512_permutex2var_epi8(a, odd, b);
    }
#elif defined(__AVX2__)
    const __m256i ff = _mm256_set1_epi16(255);
    KV_EACH {
        const __m256i a = _mm256_loadu_si256((const __m256i*)(bytes + 64 * kv_part));
        const __m256i b = _mm256_loadu_si256((const __m256i*)(bytes + 64 * kv_part + 32));
        const __m256i l = _mm256_packus_epi16(_mm256_and_si256(a, ff), _mm256_and_si256(b, ff));
        const __m256i h = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
        low.part[kv_part] = (LaneU32::Part)_mm256_permute4x64_epi64(l, 0xd8);
        high.part[kv_part] = (LaneU32::Part)_mm256_permute4x64_epi64(h, 0xd8);
    }
#elif defined(__SSE2__)
    const __m128i ff = _mm_set1_epi16(255);
    KV_EACH {
        const __m128i a = _mm_loadu_si128((const __m128i*)(bytes + 32 * kv_part));
        const __m128i b = _mm_loadu_si128((const __m128i*)(bytes + 32 * kv_part + 16));
        low.part[kv_part] = (LaneU32::Part)_mm_packus_epi16(_mm_and_si128(a, ff), _mm_and_si128(b, ff));
        high.part[kv_part] = (LaneU32::Part)_mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
    }
#else
    u8 lows[128], highs[128];
    for (int at = 0; at < 128; at++) { lows[at] = bytes[2 * at]; highs[at] = bytes[2 * at + 1]; }
    low = kv_load_packed(lows);
    high = kv_load_packed(highs);
#endif
}
KV_FUNCTION void kv_load_pairs(const u16* p, u32 count, LaneU32& low, LaneU32& high) {
    u16 some[128];
    if (count < KV_PACKED) {
        __builtin_memset(some, 0, sizeof some);
        __builtin_memcpy(some, p, 2 * count);
    }
    kv_load_pairs(count < KV_PACKED ? some : p, low, high);
}
KV_FUNCTION void kv_store_pairs(u16* p, LaneU32 low, LaneU32 high) {
    u8* bytes = (u8*)p;
#if defined(KV_AVX512) && defined(__AVX512VBMI__)
    const __m512i first = _mm512_set_epi8(
        95, 31, 94, 30, 93, 29, 92, 28, 91, 27, 90, 26, 89, 25, 88, 24, 87, 23, 86, 22, 85, 21, 84, 20, 83, 19, 82, 18, 81, 17, 80, 16,
        79, 15, 78, 14, 77, 13, 76, 12, 75, 11, 74, 10, 73, 9, 72, 8, 71, 7, 70, 6, 69, 5, 68, 4, 67, 3, 66, 2, 65, 1, 64, 0);
    const __m512i second = _mm512_add_epi8(first, _mm512_set1_epi8(32));
    KV_EACH {
        const __m512i l = (__m512i)low.part[kv_part], h = (__m512i)high.part[kv_part];
        _mm512_storeu_si512(bytes + 128 * kv_part, _mm512_permutex2var_epi8(l, first, h));
        _mm512_storeu_si512(bytes + 128 * kv_part + 64, _mm512_permutex2var_epi8(l, second, h));
    }
#elif defined(__AVX2__)
    KV_EACH {
        const __m256i l = (__m256i)low.part[kv_part], h = (__m256i)high.part[kv_part];
        const __m256i a = _mm256_unpacklo_epi8(l, h), b = _mm256_unpackhi_epi8(l, h);
        _mm256_storeu_si256((__m256i*)(bytes + 64 * kv_part), _mm256_permute2x128_si256(a, b, 0x20));
        _mm256_storeu_si256((__m256i*)(bytes + 64 * kv_part + 32), _mm256_permute2x128_si256(a, b, 0x31));
    }
#elif defined(__SSE2__)
    KV_EACH {
        const __m128i l = (__m128i)low.part[kv_part], h = (__m128i)high.part[kv_part];
        _mm_storeu_si128((__m128i*)(bytes + 32 * kv_part), _mm_unpacklo_epi8(l, h));
        _mm_storeu_si128((__m128i*)(bytes + 32 * kv_part + 16), _mm_unpackhi_epi8(l, h));
    }
#else
    u8 lows[128], highs[128];
    kv_store_packed(lows, low);
    kv_store_packed(highs, high);
    for (int at = 0; at < 128; at++) { bytes[2 * at] = lows[at]; bytes[2 * at + 1] = highs[at]; }
#endif
}
KV_FUNCTION void kv_store_pairs(u16* p, LaneU32 low, LaneU32 high, u32 count) {
    u16 some[128];
    kv_store_pairs(count < KV_PACKED ? some : p, low, high);
    if (count < KV_PACKED) __builtin_memcpy(p, some, 2 * count);
}

// The flags of 64 bytes as bits; `half` 0 or 1.
KV_FUNCTION u64 kv_flag_bits(LaneU32 flags, int half) {
#if defined(KV_AVX512)
    return _mm512_movepi8_mask((__m512i)flags.part[half]);
#elif defined(__AVX2__)
    return (u32)_mm256_movemask_epi8((__m256i)flags.part[2 * half]) |
           (u64)(u32)_mm256_movemask_epi8((__m256i)flags.part[2 * half + 1]) << 32;
#elif defined(__SSE2__)
    u64 bits = 0;
    for (int at = 0; at < 4; at++) bits |= (u64)(u32)_mm_movemask_epi8((__m128i)flags.part[4 * half + at]) << (16 * at);
    return bits;
#else
    u8 each[128];
    kv_store_packed(each, flags);
    u64 bits = 0;
    for (int at = 0; at < 64; at++) bits |= (u64)(each[64 * half + at] >> 7) << at;
    return bits;
#endif
}
KV_FUNCTION u32 kv_compress_packed(u8* p, LaneU32 x, LaneU32 flags) {
    const u64 bits[2] = {kv_flag_bits(flags, 0), kv_flag_bits(flags, 1)};
    u32 count = 0;
#if defined(KV_AVX512) && defined(__AVX512VBMI2__)
    KV_EACH {
        const u32 here = (u32)__builtin_popcountll(bits[kv_part]);
        const __m512i packed = _mm512_maskz_compress_epi8(bits[kv_part], (__m512i)x.part[kv_part]);
        _mm512_mask_storeu_epi8(p + count, here == 64 ? ~0ull : (1ull << here) - 1, packed);
        count += here;
    }
#else
    if (bits[0] | bits[1]) {
        u8 each[128];
        kv_store_packed(each, x);
        for (int half = 0; half < 2; half++)
            for (u64 left = bits[half]; left; left &= left - 1) p[count++] = each[64 * half + __builtin_ctzll(left)];
    }
#endif
    return count;
}
KV_FUNCTION u32 kv_expand_packed(const u8* p, u32 limit, LaneU32& x, LaneU32 flags) {
    const u64 bits[2] = {kv_flag_bits(flags, 0), kv_flag_bits(flags, 1)};
    const u32 first = (u32)__builtin_popcountll(bits[0]), count = first + (u32)__builtin_popcountll(bits[1]);
    if (count > limit || !count) return count;
#if defined(KV_AVX512) && defined(__AVX512VBMI2__)
    const u32 here[2] = {first, count - first};
    KV_EACH {
        const __m512i packed = _mm512_maskz_loadu_epi8(here[kv_part] == 64 ? ~0ull : (1ull << here[kv_part]) - 1, p);
        x.part[kv_part] = (LaneU32::Part)_mm512_mask_expand_epi8((__m512i)x.part[kv_part], bits[kv_part], packed);
        p += here[kv_part];
    }
#else
    u8 each[128];
    kv_store_packed(each, x);
    for (int half = 0; half < 2; half++)
        for (u64 left = bits[half]; left; left &= left - 1) each[64 * half + __builtin_ctzll(left)] = *p++;
    x = kv_load_packed(each);
#endif
    return count;
}

#endif
#endif
