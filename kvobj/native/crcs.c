/* CRC-32, CRC-32C and CRC-64/NVME at the speed of memory: see kvobj/codec/native_crcs.py, which does without where this is 0.
 *
 * By carry-less multiplication (x86-64 with PCLMULQDQ): what a vector holds stands for all bytes before it, and is moved onto bytes
 * behind it, four vectors at a time. Each is of 16 bytes, or of 32 or 64 where one instruction multiplies several pairs of words
 * (VPCLMULQDQ with AVX2 or AVX-512). A CRC of 32 bits is made as one of 64 with the polynomial P·x^32, so that constants alone differ
 * (tools/make_crc_constants.py). For CRC-32C there is an instruction, too, which another part of the CPU works on meanwhile, three
 * streams at a time since it has a latency of three.
 *
 * Sources: V. Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009. The CRCs
 * themselves: RFC 1952 §8, RFC 3720 appendix B.4, NVM Express NVM Command Set specification.
 */
#include "crcs.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

#ifdef __x86_64__
#include <immintrin.h>

enum { CRC32, CRC32C, CRC64NVME };

/* Words hold polynomials with their bits reversed: the highest bit is that of x^0. */
struct crc {
    uint64_t ones;       /* of the CRC's own bits: what a sum begins with, and what is added at the end */
    uint64_t polynomial; /* without x^64 */
    uint64_t inverse;    /* x^127 divided by the polynomial */
    uint64_t over_16[2], over_32[2], over_64[2], over_128[2], over_256[2]; /* what moves a pair of words over so many bytes */
    uint64_t nibbles[16];                                                  /* what four bits that leave a sum add to it */
};

/* Three streams of CRC-32C behind what is in vectors. */
struct streams {
    size_t bytes;                /* of each */
    uint64_t over_three[2];      /* what moves a pair of words over all three */
    uint64_t over_two, over_one; /* what makes a pair of the sum of a stream, for two more streams behind it, and for one */
};

#include "crc_constants.h"

/* Four bits at a time, for what is too short for a vector. */
static uint64_t plain(const struct crc *crc, uint64_t sum, const unsigned char *at, size_t size) {
    for (; size; size--) {
        sum ^= *at++;
        sum = sum >> 4 ^ crc->nibbles[sum & 15];
        sum = sum >> 4 ^ crc->nibbles[sum & 15];
    }
    return sum;
}

#define NEEDED "pclmul,sse4.2"
#define IN_PAIRS __attribute__((target(NEEDED)))
#define INLINED static inline __attribute__((always_inline))

IN_PAIRS INLINED __m128i pair_at(const void *at) { return _mm_loadu_si128((const __m128i *)at); }
IN_PAIRS INLINED __m128i word_alone(uint64_t word) { return _mm_cvtsi64_si128((long long)word); }
IN_PAIRS INLINED void prefetch(const void *at) { _mm_prefetch((const char *)at, _MM_HINT_T0); }

IN_PAIRS INLINED uint64_t word_at(const unsigned char *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* `sum`, moved over what the constants stand for, and what lies there. */
IN_PAIRS INLINED __m128i moved(__m128i sum, __m128i over, __m128i there) {
    __m128i first = _mm_clmulepi64_si128(sum, over, 0x00), second = _mm_clmulepi64_si128(sum, over, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, second), there);
}

/* The sum of the pair, which stands for all before `at`, at least 16 bytes, and of the `size` bytes from there on. */
IN_PAIRS INLINED uint64_t finished(const struct crc *crc, __m128i pair, const unsigned char *at, size_t size) {
    const __m128i over_16 = pair_at(crc->over_16);
    for (; size >= 16; at += 16, size -= 16) pair = moved(pair, over_16, pair_at(at));
    if (size) {
        /* Seen from `size` bytes into it: what of the pair moves to the end of one pair, and what to the start of the next, which the last
         * bytes fill up where this is negative. They are loaded with some before them. */
        static const signed char places[48] = {
            -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0,  1,  2,  3,  4,  5,  6,  7,
            8,  9,  10, 11, 12, 13, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
        };
        __m128i others = pair_at(places + 16 + size);
        __m128i next = _mm_blendv_epi8(_mm_shuffle_epi8(pair, others), pair_at(at + size - 16), others);
        pair = moved(_mm_shuffle_epi8(pair, pair_at(places + size)), over_16, next);
    }
    /* The sum is the pair, times x^64, modulo the polynomial. Times x^64 its second word takes the place of the first, and that is moved
     * there; of these 128 bits the first 64 are divided, by multiplication (Barrett), and what the quotient stands for is subtracted. */
    __m128i left = _mm_xor_si128(_mm_clmulepi64_si128(pair, over_16, 0x10), _mm_srli_si128(pair, 8));
    __m128i quotient = _mm_clmulepi64_si128(left, word_alone(crc->inverse), 0x00);
    __m128i product = _mm_clmulepi64_si128(quotient, word_alone(crc->polynomial), 0x00);
    uint64_t low = (uint64_t)_mm_cvtsi128_si64(product), high = (uint64_t)_mm_extract_epi64(product, 1);
    return (uint64_t)_mm_extract_epi64(left, 1) ^ (high << 1 | low >> 63);
}

/* Of at least 16 bytes. */
IN_PAIRS static uint64_t folded_short(const struct crc *crc, uint64_t sum, const unsigned char *at, size_t size) {
    return finished(crc, _mm_xor_si128(pair_at(at), word_alone(sum)), at + 16, size - 16);
}

#define AHEAD_BYTES 1024 /* 512 to 3072 make no difference */

/* Of each stream, beside four vectors. Those of 16 bytes are the slower way, so more goes through the streams. */
#define STREAM_STEP(vector_bytes) (1024 / (vector_bytes))

INLINED size_t bytes_in_streams(const struct streams *by, size_t vector_bytes) {
    return 3 * by->bytes + by->bytes / STREAM_STEP(vector_bytes) * 4 * vector_bytes;
}

#define TARGET IN_PAIRS
#define VECTOR __m128i
#define VECTOR_BYTES 16
#define LOADED(at) pair_at(at)
#define STORED(at, vector) _mm_storeu_si128((__m128i *)(at), vector)
#define ALONE(pair) (pair)
#define REPEATED(pair) (pair)
#define MULTIPLIED(a, b, which) _mm_clmulepi64_si128(a, b, which)
#define XORED(a, b, c) _mm_xor_si128(_mm_xor_si128(a, b), c)
#define OVER_ONE over_16
#define OVER_FOUR over_64
#include "crc_folding.h"

#if defined __clang__ || __GNUC__ >= 10
#define TARGET __attribute__((target(NEEDED ",avx2,vpclmulqdq")))
#define VECTOR __m256i
#define VECTOR_BYTES 32
#define LOADED(at) _mm256_loadu_si256((const __m256i *)(at))
#define STORED(at, vector) _mm256_storeu_si256((__m256i *)(at), vector)
#define ALONE(pair) _mm256_zextsi128_si256(pair)
#define REPEATED(pair) _mm256_broadcastsi128_si256(pair)
#define MULTIPLIED(a, b, which) _mm256_clmulepi64_epi128(a, b, which)
#define XORED(a, b, c) _mm256_xor_si256(_mm256_xor_si256(a, b), c)
#define OVER_ONE over_32
#define OVER_FOUR over_128
#include "crc_folding.h"

#define TARGET __attribute__((target(NEEDED ",avx512f,vpclmulqdq")))
#define VECTOR __m512i
#define VECTOR_BYTES 64
#define LOADED(at) _mm512_loadu_si512(at)
#define STORED(at, vector) _mm512_storeu_si512(at, vector)
#define ALONE(pair) _mm512_zextsi128_si512(pair)
#define REPEATED(pair) _mm512_broadcast_i32x4(pair)
#define MULTIPLIED(a, b, which) _mm512_clmulepi64_epi128(a, b, which)
#define XORED(a, b, c) _mm512_ternarylogic_epi64(a, b, c, 0x96)
#define OVER_ONE over_64
#define OVER_FOUR over_256
#include "crc_folding.h"

/* AVX2 and AVX-512 are named as supported only where the system keeps their registers too; VPCLMULQDQ alone says nothing of it. */
static uint32_t widest(void) {
    if (!__builtin_cpu_supports("vpclmulqdq") || !__builtin_cpu_supports("avx2")) return 16;
    return __builtin_cpu_supports("avx512f") ? 64 : 32;
}

#else /* a compiler that does not know the instruction */
#define folded_32 folded_16
#define folded_64 folded_16
#define folded_in_streams_32 folded_in_streams_16
static uint32_t widest(void) { return 16; }
#endif

EXPORTED uint32_t kvobj_crc_width(void) {
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.2") ? widest() : 0;
}

INLINED uint64_t crc_of(uint32_t which, uint32_t width, const unsigned char *at, size_t size, uint64_t previous) {
    const struct crc *crc = &crcs[which];
    uint64_t sum = previous ^ crc->ones;
    if (which == CRC32C && width < 64)
        for (const struct streams *by = streams; by < streams + sizeof streams / sizeof *streams; by++) {
            const size_t span = bytes_in_streams(by, width);
            for (; size >= span; at += span, size -= span)
                sum = (width == 32 ? folded_in_streams_32 : folded_in_streams_16)(by, sum, at);
        }
    if (size >= 256 && width == 64)
        sum = folded_64(crc, sum, at, size);
    else if (size >= 128 && width >= 32)
        sum = folded_32(crc, sum, at, size);
    else
        sum = (size >= 64 ? folded_16 : size >= 16 ? folded_short : plain)(crc, sum, at, size);
    return sum ^ crc->ones;
}

EXPORTED uint32_t kvobj_crc32(const unsigned char *at, uint64_t size, uint32_t previous) {
    return (uint32_t)crc_of(CRC32, kvobj_crc_width(), at, size, previous);
}

EXPORTED uint32_t kvobj_crc32c(const unsigned char *at, uint64_t size, uint32_t previous) {
    return (uint32_t)crc_of(CRC32C, kvobj_crc_width(), at, size, previous);
}

EXPORTED uint64_t kvobj_crc64nvme(const unsigned char *at, uint64_t size, uint64_t previous) {
    return crc_of(CRC64NVME, kvobj_crc_width(), at, size, previous);
}

/* Any of them, 0 to 2 in this order, with vectors no wider than the CPU's: for tests. */
EXPORTED uint64_t kvobj_crc_of_width(uint32_t which, uint32_t width, const unsigned char *at, uint64_t size, uint64_t previous) {
    return crc_of(which, width, at, size, previous);
}

#else

EXPORTED uint32_t kvobj_crc_width(void) { return 0; }

#endif
