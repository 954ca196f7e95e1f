// The lane vocabulary on a CPU: a lane value is 32 values in vector registers (GCC and clang vector extensions). See lanes.h.
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KV_PART_BYTES 64
#define KV_AVX512 1
#elif defined(__AVX2__)
#define KV_PART_BYTES 32
#else
#define KV_PART_BYTES 16
#endif
#define KV_PARTS (128 / KV_PART_BYTES)

#define KV_FUNCTION static inline __attribute__((always_inline))
#define KV_RARE static __attribute__((noinline)) // not worth its code at every place that calls it
#define KV_CONSTANT static const
#define KV_STORAGE static // what a kernel fills once and others read
#define KV_EACH for (int kv_part = 0; kv_part < KV_PARTS; kv_part++)
#define KV_EACH_LANE for (int kv_at = 0; kv_at < 32; kv_at++)

// A part has a width of its own for i64: as many lanes as of i32, so that both count parts alike.
template <class T> struct Lanes {
    typedef T Part __attribute__((vector_size(KV_PART_BYTES * sizeof(T) / 4)));
    Part part[KV_PARTS];
    Lanes() = default;
#if KV_PART_BYTES > 16
    // Part by part: compilers copy large structs in pieces of 16 bytes, and reading a part back then waits for both of its pieces.
    inline __attribute__((always_inline)) Lanes(const Lanes& x) { KV_EACH part[kv_part] = x.part[kv_part]; }
    inline __attribute__((always_inline)) Lanes& operator=(const Lanes& x) { KV_EACH part[kv_part] = x.part[kv_part]; return *this; }
#endif
    KV_FUNCTION Lanes of(T x) { Lanes r; KV_EACH r.part[kv_part] = x - Part{}; return r; }
    inline __attribute__((always_inline)) Lanes(T x) { KV_EACH part[kv_part] = x - Part{}; }
    inline __attribute__((always_inline)) T operator[](int lane) const { return part[lane / (32 / KV_PARTS)][lane % (32 / KV_PARTS)]; }
    inline __attribute__((always_inline)) void set(int lane, T x) { part[lane / (32 / KV_PARTS)][lane % (32 / KV_PARTS)] = x; }
};
typedef Lanes<u32> LaneU32;
typedef Lanes<i32> LaneI32;
typedef Lanes<float> LaneF32;
typedef Lanes<i64> LaneI64;

#ifdef KV_AVX512
struct LaneMask { u32 bits; };
#else
struct LaneMask { LaneI32 set; }; // -1 or 0
#endif

#define KV_BINARY(type, op)                                                                                                       \
    KV_FUNCTION type operator op(type a, type b) { type r; KV_EACH r.part[kv_part] = a.part[kv_part] op b.part[kv_part]; return r; } \
    KV_FUNCTION type& operator op##=(type& a, type b) { a = a op b; return a; }
#define KV_INTEGER(type, scalar)                                                                                                  \
    KV_BINARY(type, +) KV_BINARY(type, -) KV_BINARY(type, *) KV_BINARY(type, &) KV_BINARY(type, |) KV_BINARY(type, ^)            \
    KV_FUNCTION type operator<<(type a, u32 n) { type r; KV_EACH r.part[kv_part] = a.part[kv_part] << (scalar)n; return r; }      \
    KV_FUNCTION type operator>>(type a, u32 n) { type r; KV_EACH r.part[kv_part] = a.part[kv_part] >> (scalar)n; return r; }      \
    KV_FUNCTION type operator<<(type a, int n) { return a << (u32)n; }                                                            \
    KV_FUNCTION type operator>>(type a, int n) { return a >> (u32)n; }                                                            \
    KV_FUNCTION type operator<<(type a, type n) { type r; KV_EACH r.part[kv_part] = a.part[kv_part] << n.part[kv_part]; return r; } \
    KV_FUNCTION type operator>>(type a, type n) { type r; KV_EACH r.part[kv_part] = a.part[kv_part] >> n.part[kv_part]; return r; } \
    KV_FUNCTION type operator~(type a) { type r; KV_EACH r.part[kv_part] = ~a.part[kv_part]; return r; }                          \
    KV_FUNCTION type operator-(type a) { type r; KV_EACH r.part[kv_part] = -a.part[kv_part]; return r; }
KV_INTEGER(LaneU32, u32)
KV_INTEGER(LaneI32, i32)
KV_INTEGER(LaneI64, i64)
KV_BINARY(LaneF32, +) KV_BINARY(LaneF32, -) KV_BINARY(LaneF32, *)
KV_FUNCTION LaneF32 operator-(LaneF32 a) { LaneF32 r; KV_EACH r.part[kv_part] = -a.part[kv_part]; return r; }

#ifdef KV_AVX512
#define KV_COMPARE(type, op, code, kind)                                                                                         \
    KV_FUNCTION LaneMask operator op(type a, type b) {                                                                           \
        return {(u32)_mm512_cmp_##kind##_mask(KV_VECTOR_##kind(a.part[0]), KV_VECTOR_##kind(b.part[0]), code) |                  \
                (u32)_mm512_cmp_##kind##_mask(KV_VECTOR_##kind(a.part[1]), KV_VECTOR_##kind(b.part[1]), code) << 16};            \
    }
#define KV_VECTOR_epu32(x) ((__m512i)(x))
#define KV_VECTOR_epi32(x) ((__m512i)(x))
#define KV_VECTOR_ps(x) ((__m512)(x))
#define KV_COMPARISONS(type, kind, lt, le, gt, ge, eq, ne)                                                                       \
    KV_COMPARE(type, <, lt, kind) KV_COMPARE(type, <=, le, kind) KV_COMPARE(type, >, gt, kind) KV_COMPARE(type, >=, ge, kind)    \
    KV_COMPARE(type, ==, eq, kind) KV_COMPARE(type, !=, ne, kind)
KV_COMPARISONS(LaneU32, epu32, _MM_CMPINT_LT, _MM_CMPINT_LE, _MM_CMPINT_NLE, _MM_CMPINT_NLT, _MM_CMPINT_EQ, _MM_CMPINT_NE)
KV_COMPARISONS(LaneI32, epi32, _MM_CMPINT_LT, _MM_CMPINT_LE, _MM_CMPINT_NLE, _MM_CMPINT_NLT, _MM_CMPINT_EQ, _MM_CMPINT_NE)
KV_COMPARISONS(LaneF32, ps, _CMP_LT_OQ, _CMP_LE_OQ, _CMP_GT_OQ, _CMP_GE_OQ, _CMP_EQ_OQ, _CMP_NEQ_UQ)
KV_FUNCTION LaneMask kv_and(LaneMask a, LaneMask b) { return {a.bits & b.bits}; }
KV_FUNCTION LaneMask kv_or(LaneMask a, LaneMask b) { return {a.bits | b.bits}; }
KV_FUNCTION LaneMask kv_not(LaneMask a) { return {~a.bits}; }
KV_FUNCTION LaneMask kv_mask(bool x) { return {x ? ~0u : 0u}; }
KV_FUNCTION u32 kv_ballot(LaneMask m) { return m.bits; }
KV_FUNCTION LaneMask kv_lanes_of(u32 ballot) { return {ballot}; }
#define KV_SELECT(type)                                                                                                          \
    KV_FUNCTION type kv_select(LaneMask m, type a, type b) {                                                                     \
        type r;                                                                                                                  \
        KV_EACH r.part[kv_part] = (type::Part)_mm512_mask_blend_epi32((__mmask16)(m.bits >> (16 * kv_part)),                     \
                                                                      (__m512i)b.part[kv_part], (__m512i)a.part[kv_part]);       \
        return r;                                                                                                                \
    }
#else
#define KV_COMPARE(type, op)                                                                                                     \
    KV_FUNCTION LaneMask operator op(type a, type b) {                                                                           \
        LaneMask r;                                                                                                              \
        KV_EACH r.set.part[kv_part] = (LaneI32::Part)(a.part[kv_part] op b.part[kv_part]);                                       \
        return r;                                                                                                                \
    }
#define KV_COMPARISONS(type)                                                                                                     \
    KV_COMPARE(type, <) KV_COMPARE(type, <=) KV_COMPARE(type, >) KV_COMPARE(type, >=) KV_COMPARE(type, ==) KV_COMPARE(type, !=)
KV_COMPARISONS(LaneU32)
KV_COMPARISONS(LaneI32)
KV_COMPARISONS(LaneF32)
KV_FUNCTION LaneMask kv_and(LaneMask a, LaneMask b) { return {a.set & b.set}; }
KV_FUNCTION LaneMask kv_or(LaneMask a, LaneMask b) { return {a.set | b.set}; }
KV_FUNCTION LaneMask kv_not(LaneMask a) { return {~a.set}; }
KV_FUNCTION LaneMask kv_mask(bool x) { return {LaneI32(x ? -1 : 0)}; }
KV_FUNCTION u32 kv_ballot(LaneMask m) {
    u32 bits = 0;
#if defined(__AVX2__)
    KV_EACH bits |= (u32)_mm256_movemask_ps((__m256)m.set.part[kv_part]) << (8 * kv_part);
#elif defined(__x86_64__)
    KV_EACH bits |= (u32)_mm_movemask_ps((__m128)m.set.part[kv_part]) << (4 * kv_part);
#else
    KV_EACH_LANE bits |= (u32)(m.set[kv_at] & 1) << kv_at;
#endif
    return bits;
}
#define KV_SELECT(type)                                                                                                          \
    KV_FUNCTION type kv_select(LaneMask m, type a, type b) {                                                                     \
        type r;                                                                                                                  \
        KV_EACH r.part[kv_part] = (type::Part)(((LaneI32::Part)a.part[kv_part] & m.set.part[kv_part]) |                          \
                                               ((LaneI32::Part)b.part[kv_part] & ~m.set.part[kv_part]));                         \
        return r;                                                                                                                \
    }
#endif
KV_SELECT(LaneU32)
KV_SELECT(LaneI32)
KV_SELECT(LaneF32)

// KV_KERNEL(name, (parameters), (their names)) { body } : the body sees `warp`, the warp's number, below `warps`.
#ifndef KV_EXPORT
#define KV_EXPORT(name) kv_##name
#endif
#define KV_UNPACK(...) __VA_ARGS__
#define KV_KERNEL(name, parameters, names)                                                                                       \
    static inline void name##_warp(u32 warp, KV_UNPACK parameters);                                                              \
    extern "C" __attribute__((visibility("default"))) void kv_##name(u32 warps, KV_UNPACK parameters) {                          \
        for (u32 at = 0; at < warps; at++) name##_warp(at, KV_UNPACK names);                                                     \
    }                                                                                                                            \
    static inline void name##_warp(u32 warp, KV_UNPACK parameters)

#define KV_WARP_MEMORY(kernel, bytes) // of a GPU
#define KV_GLOBAL(p) (p)
#define KV_ONCE(statement) do { statement; } while (0)

KV_FUNCTION void kv_sync() {}
KV_FUNCTION LaneU32 kv_lane() {
    LaneU32 r;
    KV_EACH for (int at = 0; at < 32 / KV_PARTS; at++) r.part[kv_part][at] = (u32)(kv_part * (32 / KV_PARTS) + at);
    return r;
}
KV_FUNCTION LaneU32 kv_u32(u32 x) { return LaneU32(x); }
KV_FUNCTION LaneI64 kv_i64(i64 x) { return LaneI64(x); }

// Bit patterns and conversions.
template <class To, class From> KV_FUNCTION To kv_same_bits(From x) {
    To r;
    KV_EACH r.part[kv_part] = (typename To::Part)x.part[kv_part];
    return r;
}
template <class To, class From> KV_FUNCTION To kv_converted(From x) {
    To r;
    KV_EACH r.part[kv_part] = __builtin_convertvector(x.part[kv_part], typename To::Part);
    return r;
}
KV_FUNCTION LaneU32 kv_as_u32(LaneI32 x) { return kv_same_bits<LaneU32>(x); }
KV_FUNCTION LaneU32 kv_bits(LaneF32 x) { return kv_same_bits<LaneU32>(x); }
KV_FUNCTION LaneI32 kv_as_i32(LaneU32 x) { return kv_same_bits<LaneI32>(x); }
KV_FUNCTION LaneF32 kv_from_bits(LaneU32 x) { return kv_same_bits<LaneF32>(x); }
KV_FUNCTION LaneF32 kv_to_f32(LaneI32 x) { return kv_converted<LaneF32>(x); }
KV_FUNCTION LaneI32 kv_truncate(LaneF32 x) { return kv_converted<LaneI32>(x); }
KV_FUNCTION LaneI64 kv_widen(LaneI32 x) { return kv_converted<LaneI64>(x); }
KV_FUNCTION LaneI32 kv_narrow(LaneI64 x) { return kv_converted<LaneI32>(x); }
KV_FUNCTION float kv_sqrt_uniform(float x) { return __builtin_sqrtf(x); }
KV_FUNCTION LaneF32 kv_sqrt(LaneF32 x) {
    LaneF32 r;
    KV_EACH for (int at = 0; at < 32 / KV_PARTS; at++) r.part[kv_part][at] = __builtin_sqrtf(x.part[kv_part][at]);
    return r;
}
KV_FUNCTION float kv_reciprocal(float x) { return 1.0f / x; } // uniform: once a step, never on the data path
KV_FUNCTION u32 kv_bits_uniform(float x) { u32 r; __builtin_memcpy(&r, &x, 4); return r; }
KV_FUNCTION float kv_from_bits_uniform(u32 x) { float r; __builtin_memcpy(&r, &x, 4); return r; }
KV_FUNCTION float kv_to_f32_uniform(i32 x) { return (float)x; }

KV_FUNCTION LaneU32 kv_min(LaneU32 a, LaneU32 b) { return kv_select(a < b, a, b); }
KV_FUNCTION LaneU32 kv_max(LaneU32 a, LaneU32 b) { return kv_select(a > b, a, b); }
KV_FUNCTION LaneI32 kv_min(LaneI32 a, LaneI32 b) { return kv_select(a < b, a, b); }
KV_FUNCTION LaneI32 kv_max(LaneI32 a, LaneI32 b) { return kv_select(a > b, a, b); }
// floor(x / f) for 1 <= f < 4096 and x < f * 2^20: from a float that is off by at most one. Any result where that does not hold.
KV_FUNCTION LaneU32 kv_quotient(LaneU32 x, LaneU32 f) {
    LaneU32 r;
    KV_EACH {
        const LaneU32::Part y = x.part[kv_part], by = f.part[kv_part];
#ifdef KV_AVX512
        const __m512 estimate = _mm512_div_ps(_mm512_cvtepu32_ps((__m512i)y), _mm512_cvtepu32_ps((__m512i)by));
        const LaneI32::Part q = (LaneI32::Part)_mm512_cvttps_epi32(estimate);
#else
        const LaneF32::Part high = __builtin_convertvector((LaneI32::Part)(y >> 16), LaneF32::Part);
        const LaneF32::Part low = __builtin_convertvector((LaneI32::Part)(y & 0xffff), LaneF32::Part);
        const LaneF32::Part estimate = (high * 65536.0f + low) / __builtin_convertvector((LaneI32::Part)by, LaneF32::Part);
        const LaneI32::Part q = __builtin_convertvector(estimate, LaneI32::Part);
#endif
        const LaneI32::Part rest = (LaneI32::Part)y - q * (LaneI32::Part)by;
        r.part[kv_part] = (LaneU32::Part)(q + (rest >> 31) + (((LaneI32::Part)by - 1 - rest) >> 31 & 1));
    }
    return r;
}
KV_FUNCTION u32 kv_popc(u32 x) { return (u32)__builtin_popcount(x); }
KV_FUNCTION u32 kv_ctz(u32 x) { return x ? (u32)__builtin_ctz(x) : 32u; } // 32 of zero
KV_FUNCTION i32 kv_clz64(u64 x) { return x ? __builtin_clzll(x) : 64; } // 64 of zero

// Lane i has element i of consecutive memory; with a count, lanes from there on read 0 and write nothing. Any alignment.
template <class T, class L> KV_FUNCTION L kv_load_as(const T* p) {
    typedef T Narrow __attribute__((vector_size(KV_PART_BYTES / 4 * sizeof(T))));
    L r;
    KV_EACH {
        Narrow x;
        __builtin_memcpy(&x, p + kv_part * (32 / KV_PARTS), sizeof x);
        r.part[kv_part] = __builtin_convertvector(x, typename L::Part);
    }
    return r;
}
template <class T, class L> KV_FUNCTION void kv_store_as(T* p, L x) {
    typedef T Narrow __attribute__((vector_size(KV_PART_BYTES / 4 * sizeof(T))));
    KV_EACH {
        const Narrow y = __builtin_convertvector(x.part[kv_part], Narrow);
        __builtin_memcpy(p + kv_part * (32 / KV_PARTS), &y, sizeof y);
    }
}
template <class T> KV_RARE LaneU32 kv_load_some(const T* p, u32 count) {
    T some[32] = {};
    __builtin_memcpy(some, p, (count < 32 ? count : 32) * sizeof(T));
    return kv_load_as<T, LaneU32>(some);
}
template <class T> KV_RARE void kv_store_some(T* p, LaneU32 x, u32 count) {
    T some[32];
    kv_store_as<T>(some, x);
    __builtin_memcpy(p, some, (count < 32 ? count : 32) * sizeof(T));
}
// GCC widens and narrows bytes one by one unless told how.
#if defined(__SSE4_1__)
#if defined(KV_AVX512)
#define KV_WIDEN_U8(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(p)))
#define KV_WIDEN_U16(p) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(p)))
#elif defined(__AVX2__)
#define KV_WIDEN_U8(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p)))
#define KV_WIDEN_U16(p) _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p)))
#else
#define KV_WIDEN_U8(p) _mm_cvtepu8_epi32(_mm_loadu_si32(p))
#define KV_WIDEN_U16(p) _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)(p)))
#endif
KV_FUNCTION LaneU32 kv_load_u8(const u8* p) {
    LaneU32 r;
    KV_EACH r.part[kv_part] = (LaneU32::Part)KV_WIDEN_U8(p + kv_part * (32 / KV_PARTS));
    return r;
}
KV_FUNCTION LaneU32 kv_load_u16(const u16* p) {
    LaneU32 r;
    KV_EACH r.part[kv_part] = (LaneU32::Part)KV_WIDEN_U16(p + kv_part * (32 / KV_PARTS));
    return r;
}
#else
KV_FUNCTION LaneU32 kv_load_u8(const u8* p) { return kv_load_as<u8, LaneU32>(p); }
KV_FUNCTION LaneU32 kv_load_u16(const u16* p) { return kv_load_as<u16, LaneU32>(p); }
#endif
KV_FUNCTION LaneU32 kv_load_u32(const u32* p) { return kv_load_as<u32, LaneU32>(p); }
KV_FUNCTION LaneF32 kv_load_f32(const float* p) { return kv_load_as<float, LaneF32>(p); }
KV_FUNCTION LaneI64 kv_load_i64(const i64* p) { return kv_load_as<i64, LaneI64>(p); }
KV_FUNCTION LaneU32 kv_load_u8(const u8* p, u32 count) { return count >= 32 ? kv_load_u8(p) : kv_load_some(p, count); }
KV_FUNCTION LaneU32 kv_load_u16(const u16* p, u32 count) { return count >= 32 ? kv_load_u16(p) : kv_load_some(p, count); }
KV_FUNCTION LaneU32 kv_load_u32(const u32* p, u32 count) { return count >= 32 ? kv_load_u32(p) : kv_load_some(p, count); }
KV_FUNCTION void kv_store_u8(u8* p, LaneU32 x) {
#if defined(KV_AVX512)
    KV_EACH _mm_storeu_si128((__m128i*)(p + 16 * kv_part), _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)x.part[kv_part]));
#elif defined(__AVX2__)
    const __m256i mask = _mm256_set1_epi32(255);
    const __m256i a = _mm256_packus_epi32(_mm256_and_si256((__m256i)x.part[0], mask), _mm256_and_si256((__m256i)x.part[1], mask));
    const __m256i b = _mm256_packus_epi32(_mm256_and_si256((__m256i)x.part[2], mask), _mm256_and_si256((__m256i)x.part[3], mask));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)p, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), order));
#elif defined(__SSE4_1__)
    const __m128i mask = _mm_set1_epi32(255);
    for (int half = 0; half < 2; half++) {
        __m128i q[4];
        for (int at = 0; at < 4; at++) q[at] = _mm_and_si128((__m128i)x.part[4 * half + at], mask);
        const __m128i bytes = _mm_packus_epi16(_mm_packus_epi32(q[0], q[1]), _mm_packus_epi32(q[2], q[3]));
        _mm_storeu_si128((__m128i*)(p + 16 * half), bytes);
    }
#else
    kv_store_as<u8>(p, x);
#endif
}
KV_FUNCTION void kv_store_u16(u16* p, LaneU32 x) {
#if defined(KV_AVX512)
    KV_EACH _mm256_storeu_si256((__m256i*)(p + 16 * kv_part), _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)x.part[kv_part]));
#elif defined(__AVX2__)
    const __m256i mask = _mm256_set1_epi32(0xffff);
    for (int half = 0; half < 2; half++) {
        const __m256i a = _mm256_and_si256((__m256i)x.part[2 * half], mask), b = _mm256_and_si256((__m256i)x.part[2 * half + 1], mask);
        _mm256_storeu_si256((__m256i*)(p + 16 * half), _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
    }
#elif defined(__SSE4_1__)
    const __m128i mask = _mm_set1_epi32(0xffff);
    for (int at = 0; at < 4; at++) {
        const __m128i a = _mm_and_si128((__m128i)x.part[2 * at], mask), b = _mm_and_si128((__m128i)x.part[2 * at + 1], mask);
        _mm_storeu_si128((__m128i*)(p + 8 * at), _mm_packus_epi32(a, b));
    }
#else
    kv_store_as<u16>(p, x);
#endif
}
KV_FUNCTION void kv_store_u32(u32* p, LaneU32 x) { kv_store_as<u32>(p, x); }
KV_FUNCTION void kv_store_u8(u8* p, LaneU32 x, u32 count) { if (count >= 32) kv_store_u8(p, x); else kv_store_some(p, x, count); }
KV_FUNCTION void kv_store_u16(u16* p, LaneU32 x, u32 count) { if (count >= 32) kv_store_u16(p, x); else kv_store_some(p, x, count); }
KV_FUNCTION void kv_store_u32(u32* p, LaneU32 x, u32 count) { if (count >= 32) kv_store_u32(p, x); else kv_store_some(p, x, count); }

// Lane i reads table[index]; every index must be in bounds, those of lanes nobody uses too.
template <class T> KV_FUNCTION LaneU32 kv_gather_each(const T* table, LaneU32 index) {
    LaneU32 r;
    KV_EACH for (int at = 0; at < 32 / KV_PARTS; at++) r.part[kv_part][at] = table[index.part[kv_part][at]];
    return r;
}
KV_FUNCTION LaneU32 kv_gather_u32(const u32* table, LaneU32 index) {
#ifdef KV_AVX512
    LaneU32 r;
    const __m512i none = _mm512_setzero_si512(); // GCC 12 warns of its own header without
    KV_EACH r.part[kv_part] = (LaneU32::Part)_mm512_mask_i32gather_epi32(none, 0xffff, (__m512i)index.part[kv_part], table, 4);
    return r;
#elif defined(__AVX2__)
    LaneU32 r;
    KV_EACH r.part[kv_part] = (LaneU32::Part)_mm256_i32gather_epi32((const int*)table, (__m256i)index.part[kv_part], 4);
    return r;
#else
    return kv_gather_each(table, index);
#endif
}
// Sum of the products of the two 16-bit halves of each lane with those of b, all of them below 2^15.
KV_FUNCTION LaneU32 kv_pair_products(LaneU32 a, u32 b) {
    LaneU32 r;
#if defined(KV_AVX512)
    KV_EACH r.part[kv_part] = (LaneU32::Part)_mm512_madd_epi16((__m512i)a.part[kv_part], _mm512_set1_epi32((i32)b));
#elif defined(__AVX2__)
    KV_EACH r.part[kv_part] = (LaneU32::Part)_mm256_madd_epi16((__m256i)a.part[kv_part], _mm256_set1_epi32((i32)b));
#elif defined(__x86_64__)
    KV_EACH r.part[kv_part] = (LaneU32::Part)_mm_madd_epi16((__m128i)a.part[kv_part], _mm_set1_epi32((i32)b));
#else
    r = (a & LaneU32(0xffffu)) * LaneU32(b & 0xffffu) + (a >> 16) * LaneU32(b >> 16);
#endif
    return r;
}
// Adds 1 to counts[index] for each of the first `count` lanes; lanes may share a counter. `counts` is 4-byte aligned.
KV_FUNCTION void kv_count_u16(u16* counts, LaneU32 index, u32 count) {
    u32 all[32];
    KV_EACH __builtin_memcpy(all + kv_part * (32 / KV_PARTS), &index.part[kv_part], sizeof index.part[kv_part]);
    if (count >= 32) for (int at = 0; at < 32; at++) counts[all[at]]++;
    else for (u32 at = 0; at < count; at++) counts[all[at]]++;
}

// Across lanes.
#ifndef KV_AVX512
KV_FUNCTION LaneMask kv_lanes_of(u32 ballot) { return ((LaneU32(ballot) >> kv_lane()) & LaneU32(1)) != LaneU32(0); }
#endif
KV_FUNCTION u32 kv_broadcast(LaneU32 x, u32 lane) { return x[(int)lane]; }
// sum + the products of the low and of the high halves of a and b, as signed 16-bit integers; wraps.
KV_FUNCTION LaneI32 kv_dot_i16(LaneI32 sum, LaneU32 a, LaneU32 b) {
#if defined(KV_AVX512)
    KV_EACH sum.part[kv_part] += (LaneI32::Part)_mm512_madd_epi16((__m512i)a.part[kv_part], (__m512i)b.part[kv_part]);
#elif defined(__AVX2__)
    KV_EACH sum.part[kv_part] += (LaneI32::Part)_mm256_madd_epi16((__m256i)a.part[kv_part], (__m256i)b.part[kv_part]);
#elif defined(__x86_64__)
    KV_EACH sum.part[kv_part] += (LaneI32::Part)_mm_madd_epi16((__m128i)a.part[kv_part], (__m128i)b.part[kv_part]);
#else
    const LaneI32 x = kv_as_i32(a), y = kv_as_i32(b);
    sum += ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
    return sum;
}
// Lane i has the value of lane i ^ BITS; a power of two below 32.
template <u32 BITS> KV_FUNCTION LaneF32 kv_swap_lanes(LaneF32 x) {
    const int in_part = 32 / KV_PARTS;
    LaneF32 r;
    KV_EACH {
        if ((int)BITS >= in_part) { r.part[kv_part] = x.part[kv_part ^ ((int)BITS / in_part)]; continue; }
#if defined(KV_AVX512)
        const __m512 y = (__m512)x.part[kv_part];
        r.part[kv_part] = (LaneF32::Part)(BITS == 1 ? _mm512_permute_ps(y, 0xb1) : BITS == 2 ? _mm512_permute_ps(y, 0x4e)
                                          : BITS == 4 ? _mm512_shuffle_f32x4(y, y, 0xb1) : _mm512_shuffle_f32x4(y, y, 0x4e));
#elif defined(__AVX2__)
        const __m256 y = (__m256)x.part[kv_part];
        r.part[kv_part] = (LaneF32::Part)(BITS == 1 ? _mm256_permute_ps(y, 0xb1) : BITS == 2 ? _mm256_permute_ps(y, 0x4e)
                                          : _mm256_permute2f128_ps(y, y, 1));
#elif defined(__x86_64__)
        const __m128 y = (__m128)x.part[kv_part];
        r.part[kv_part] = (LaneF32::Part)(BITS == 1 ? _mm_shuffle_ps(y, y, 0xb1) : _mm_shuffle_ps(y, y, 0x4e));
#else
        for (int at = 0; at < in_part; at++) r.part[kv_part][at] = x.part[kv_part][at ^ (int)BITS];
#endif
    }
    return r;
}
// Lane i has the value of the table's lane index, all below 8.
KV_FUNCTION LaneF32 kv_lookup_8(LaneF32 table, LaneU32 index) {
    LaneF32 r;
#if defined(KV_AVX512)
    KV_EACH r.part[kv_part] = (LaneF32::Part)_mm512_permutexvar_ps((__m512i)index.part[kv_part], (__m512)table.part[0]);
#elif defined(__AVX2__)
    KV_EACH r.part[kv_part] = (LaneF32::Part)_mm256_permutevar8x32_ps((__m256)table.part[0], (__m256i)index.part[kv_part]);
#else
    KV_EACH_LANE r.set(kv_at, table[(int)index[kv_at]]);
#endif
    return r;
}
KV_FUNCTION float kv_sum(LaneF32 x) { // lane i and lane i + 16 first, then + 8, + 4, + 2, + 1
    for (int left = KV_PARTS / 2; left; left /= 2) for (int at = 0; at < left; at++) x.part[at] += x.part[at + left];
    float some[32 / KV_PARTS];
    __builtin_memcpy(some, &x.part[0], sizeof some);
    for (int left = 16 / KV_PARTS; left; left /= 2) for (int at = 0; at < left; at++) some[at] += some[at + left];
    return some[0];
}
KV_FUNCTION u32 kv_sum(LaneU32 x) {
    LaneU32::Part total = x.part[0];
    for (int at = 1; at < KV_PARTS; at++) total += x.part[at];
    u32 r = 0;
    for (int at = 0; at < 32 / KV_PARTS; at++) r += total[at];
    return r;
}
KV_FUNCTION i64 kv_sum(LaneI64 x) {
    LaneI64::Part total = x.part[0];
    for (int at = 1; at < KV_PARTS; at++) total += x.part[at];
    i64 r = 0;
    for (int at = 0; at < 32 / KV_PARTS; at++) r += total[at];
    return r;
}
KV_FUNCTION u32 kv_greatest(LaneU32 x) {
    LaneU32::Part most = x.part[0];
    for (int at = 1; at < KV_PARTS; at++) most = most > x.part[at] ? most : x.part[at];
#ifdef KV_AVX512
    return _mm512_reduce_max_epu32((__m512i)most);
#else
    u32 r = most[0];
    for (int at = 1; at < 32 / KV_PARTS; at++) r = r > most[at] ? r : most[at];
    return r;
#endif
}
KV_FUNCTION u32 kv_least(LaneU32 x) {
    LaneU32::Part least = x.part[0];
    for (int at = 1; at < KV_PARTS; at++) least = least < x.part[at] ? least : x.part[at];
#ifdef KV_AVX512
    return _mm512_reduce_min_epu32((__m512i)least);
#else
    u32 r = least[0];
    for (int at = 1; at < 32 / KV_PARTS; at++) r = r < least[at] ? r : least[at];
    return r;
#endif
}

// The lanes of the mask, in order, to or from consecutive u16: returns how many. Writes no byte past them, reads none.
KV_FUNCTION u32 kv_compress_u16(u16* p, LaneU32 x, LaneMask m) {
    const u32 ballot = kv_ballot(m);
#if defined(KV_AVX512) && defined(__AVX512VBMI2__)
    u16 narrow[32];
    kv_store_u16(narrow, x);
    const u32 count = kv_popc(ballot);
    const __m512i packed = _mm512_maskz_compress_epi16(ballot, _mm512_loadu_si512(narrow));
    _mm512_mask_storeu_epi16(p, count == 32 ? ~0u : (1u << count) - 1u, packed); // compress-to-memory is slow microcode
    return count;
#else
    u32 count = 0;
    for (u32 left = ballot; left; left &= left - 1) p[count++] = (u16)x[__builtin_ctz(left)];
    return count;
#endif
}
KV_FUNCTION LaneU32 kv_expand_u16(const u16* p, LaneMask m) { // 0 in the other lanes
    const u32 ballot = kv_ballot(m);
#if defined(KV_AVX512) && defined(__AVX512VBMI2__)
    const u32 count = kv_popc(ballot);
    const __m512i packed = _mm512_maskz_loadu_epi16(count == 32 ? ~0u : (1u << count) - 1u, p);
    const __m512i spread = _mm512_maskz_expand_epi16(ballot, packed);
    LaneU32 r;
    r.part[0] = (LaneU32::Part)_mm512_cvtepu16_epi32(_mm512_castsi512_si256(spread));
    r.part[1] = (LaneU32::Part)_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(spread, 1));
    return r;
#else
    LaneU32 r(0);
    for (u32 left = ballot; left; left &= left - 1) r.set(__builtin_ctz(left), *p++);
    return r;
#endif
}

// For uniform values, memory and streams.
KV_FUNCTION u32 kv_min_uniform(u32 a, u32 b) { return a < b ? a : b; }
KV_FUNCTION void kv_copy(u8* to, const u8* from, u64 size_bytes) { __builtin_memcpy(to, from, size_bytes); }
KV_FUNCTION void kv_copy_few(u8* to, const u8* from, u32 size_bytes) { kv_copy(to, from, size_bytes); }
template <class T> KV_FUNCTION void kv_copy_strided_as(u8* to, u32 to_step, const u8* from, u32 from_step, u32 count) {
    for (u64 at = 0; at < count; at++) __builtin_memcpy(to + at * to_step * sizeof(T), from + at * from_step * sizeof(T), sizeof(T));
}
KV_FUNCTION void kv_copy_strided(u8* to, u32 to_step, const u8* from, u32 from_step, u32 count, u32 element_bytes) {
    if (element_bytes == 2) kv_copy_strided_as<u16>(to, to_step, from, from_step, count);
    else if (element_bytes == 4) kv_copy_strided_as<u32>(to, to_step, from, from_step, count);
    else kv_copy_strided_as<u8>(to, to_step, from, from_step, count);
}
KV_FUNCTION LaneU32 kv_prefix_sums(LaneU32 x) { // of the lanes below
    LaneU32 r;
    u32 sum = 0;
    KV_EACH_LANE { r.set(kv_at, sum); sum += x[kv_at]; }
    return r;
}
// The same, read from memory of which 64 bytes from p are there: the other lanes hold anything.
#if defined(__AVX2__) && !(defined(KV_AVX512) && defined(__AVX512VBMI2__))
struct KvExpansions { // for each byte of a mask: which of eight consecutive values each lane takes; for packing them at the end of eight
    u8 from[256][8], packed[256][8];
    constexpr KvExpansions() : from(), packed() {
        for (int mask = 0; mask < 256; mask++) {
            int count = 0;
            for (int lane = 0; lane < 8; lane++) from[mask][lane] = (u8)(mask >> lane & 1 ? count++ : 0);
            int at = 8;
            for (int lane = 7; lane >= 0; lane--)
                if (mask >> lane & 1) packed[mask][--at] = (u8)lane;
        }
    }
};
static constexpr KvExpansions kv_expansions;
#endif
KV_FUNCTION LaneU32 kv_expand_u16_near(const u16* p, LaneMask m) {
    const u32 ballot = kv_ballot(m);
    LaneU32 r;
#if defined(KV_AVX512) && defined(__AVX512VBMI2__)
    const __m512i spread = _mm512_maskz_expand_epi16(ballot, _mm512_loadu_si512(p));
    r.part[0] = (LaneU32::Part)_mm512_cvtepu16_epi32(_mm512_castsi512_si256(spread));
    r.part[1] = (LaneU32::Part)_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(spread, 1));
#elif defined(__AVX2__) && !defined(KV_AVX512)
    KV_EACH {
        const u32 bits = ballot >> (8 * kv_part) & 255, before = kv_popc(ballot & ((1u << (8 * kv_part)) - 1u));
        const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + before)));
        const __m256i from = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)kv_expansions.from[bits]));
        r.part[kv_part] = (LaneU32::Part)_mm256_permutevar8x32_epi32(words, from);
    }
#else
    r = kv_expand_u16(p, m);
    (void)ballot;
#endif
    return r;
}
// The lanes of the mask, in order, to the u16 before `end`: returns how many. Leaves anything in the 32 u16 before them.
KV_FUNCTION u32 kv_push_u16(u16* end, LaneU32 x, LaneMask m) {
    const u32 ballot = kv_ballot(m), count = kv_popc(ballot);
#if defined(KV_AVX512) && defined(__AVX512VBMI2__)
    const __m512i narrow = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16((__m512i)x.part[0])),
                                              _mm512_cvtepi32_epi16((__m512i)x.part[1]), 1);
    _mm512_mask_storeu_epi16(end - count, count == 32 ? ~0u : (1u << count) - 1u, _mm512_maskz_compress_epi16(ballot, narrow));
#elif defined(__AVX2__) && !defined(KV_AVX512)
    const __m256i halves = _mm256_set1_epi32(0xffff);
    for (int part = KV_PARTS; part-- > 0;) { // what stands before the values of one part is overwritten by the next
        const u32 bits = ballot >> (8 * part) & 255;
        const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)kv_expansions.packed[bits]));
        const __m256i found = _mm256_and_si256(_mm256_permutevar8x32_epi32((__m256i)x.part[part], order), halves);
        const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(found), _mm256_extracti128_si256(found, 1));
        _mm_storeu_si128((__m128i*)(end - 8), words);
        end -= kv_popc(bits);
    }
#else
    u16* p = end - count;
    for (u32 left = ballot; left; left &= left - 1) *p++ = (u16)x[__builtin_ctz(left)];
#endif
    return count;
}
