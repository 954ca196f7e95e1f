/* CRC-32 at the speed of memory: see kvobj/codec/native_crc32.py, which does without where this is 0.
 *
 * The CRC of zlib, gzip and S3's CRC32, by carry-less multiplication (x86-64 with PCLMULQDQ): 64 bytes at a time are folded onto the 64
 * behind them, or 256 where one instruction multiplies four pairs (VPCLMULQDQ with AVX-512). Sources: V. Gopal and others, "Fast CRC
 * Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009; RFC 1952 §8 for the CRC itself.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

#ifdef __x86_64__
#include <immintrin.h>

/* Four bits at a time, for the few bytes that are not folded. */
static uint32_t plain(uint32_t crc, const unsigned char *at, size_t size) {
    static const uint32_t table[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
        0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };
    for (; size; size--) {
        crc ^= *at++;
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return crc;
}

/* `sum`, moved ahead by what the constants stand for, and what lies there. */
__attribute__((target("pclmul"))) static inline __m128i fold(__m128i sum, __m128i ahead, __m128i there) {
    __m128i low = _mm_clmulepi64_si128(sum, ahead, 0x00), high = _mm_clmulepi64_si128(sum, ahead, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

/* x^(8·64+32), x^(8·64-32) and x^(8·16+32), x^(8·16-32) modulo the polynomial, bits reversed. */
#define OVER_64 _mm_set_epi64x(0x1c6e41596, 0x154442bd4)
#define OVER_16 _mm_set_epi64x(0x0ccaa009e, 0x1751997d0)

/* Of the four sums that stand for all before `at`, and the `size` bytes from there on. */
__attribute__((target("pclmul"))) static uint32_t rest(
    __m128i a, __m128i b, __m128i c, __m128i d, const unsigned char *at, size_t size) {
    d = fold(fold(fold(a, OVER_16, b), OVER_16, c), OVER_16, d);
    for (; size >= 16; at += 16, size -= 16) d = fold(d, OVER_16, _mm_loadu_si128((const __m128i *)at));
    unsigned char last[16];
    _mm_storeu_si128((__m128i *)last, d);
    return plain(plain(0, last, sizeof last), at, size);
}

__attribute__((target("pclmul"))) static uint32_t folded(uint32_t crc, const unsigned char *at, size_t size) {
    const __m128i over_64 = OVER_64;
    const __m128i *from = (const __m128i *)at;
    __m128i a = _mm_xor_si128(_mm_loadu_si128(from), _mm_cvtsi32_si128((int)crc));
    __m128i b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    for (at += 64, size -= 64; size >= 64; at += 64, size -= 64) {
        from = (const __m128i *)at;
        a = fold(a, over_64, _mm_loadu_si128(from));
        b = fold(b, over_64, _mm_loadu_si128(from + 1));
        c = fold(c, over_64, _mm_loadu_si128(from + 2));
        d = fold(d, over_64, _mm_loadu_si128(from + 3));
    }
    return rest(a, b, c, d, at, size);
}

#define WIDE_BYTES 256

#if defined __clang__ || __GNUC__ >= 10
#define WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul")))

WIDE static inline __m512i fold_wide(__m512i sum, __m512i ahead, __m512i there) {
    __m512i low = _mm512_clmulepi64_epi128(sum, ahead, 0x00), high = _mm512_clmulepi64_epi128(sum, ahead, 0x11);
    return _mm512_xor_si512(_mm512_xor_si512(low, high), there);
}

WIDE static uint32_t folded_wide(uint32_t crc, const unsigned char *at, size_t size) {
    /* x^(8·256+32) and x^(8·256-32). */
    const __m512i over_256 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x1322d1430, 0x11542778a));
    const __m512i over_64 = _mm512_broadcast_i32x4(OVER_64);
    __m512i a = _mm512_xor_si512(_mm512_loadu_si512(at), _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    __m512i b = _mm512_loadu_si512(at + 64), c = _mm512_loadu_si512(at + 128), d = _mm512_loadu_si512(at + 192);
    for (at += WIDE_BYTES, size -= WIDE_BYTES; size >= WIDE_BYTES; at += WIDE_BYTES, size -= WIDE_BYTES) {
        a = fold_wide(a, over_256, _mm512_loadu_si512(at));
        b = fold_wide(b, over_256, _mm512_loadu_si512(at + 64));
        c = fold_wide(c, over_256, _mm512_loadu_si512(at + 128));
        d = fold_wide(d, over_256, _mm512_loadu_si512(at + 192));
    }
    d = fold_wide(fold_wide(fold_wide(a, over_64, b), over_64, c), over_64, d);
    for (; size >= 64; at += 64, size -= 64) d = fold_wide(d, over_64, _mm512_loadu_si512(at));
    __m128i first = _mm512_extracti32x4_epi32(d, 0), second = _mm512_extracti32x4_epi32(d, 1);
    return rest(first, second, _mm512_extracti32x4_epi32(d, 2), _mm512_extracti32x4_epi32(d, 3), at, size);
}

static bool is_wide(void) { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"); }

#else /* a compiler that does not know the instruction */
#define folded_wide folded
static bool is_wide(void) { return false; }
#endif

/* Whether this CPU has what the other needs. */
EXPORTED bool kvobj_has_crc32(void) { return __builtin_cpu_supports("pclmul"); }

/* The CRC of the bytes, going on from `previous`, that of the bytes before them. */
EXPORTED uint32_t kvobj_crc32(const unsigned char *at, uint64_t size, uint32_t previous) {
    uint32_t crc = ~previous;
    if (size >= WIDE_BYTES && is_wide()) return ~folded_wide(crc, at, size);
    return ~(size < 64 ? plain(crc, at, size) : folded(crc, at, size));
}

#else

EXPORTED bool kvobj_has_crc32(void) { return false; }

#endif
