/* The CRC-32C of each block of a span of bytes, in one call: see kvobj/codec/block_crcs.py, which does without where this is 0.
 *
 * With the instruction that x86-64 has for it since SSE 4.2. Source: RFC 3720 appendix B.4.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

#ifdef __x86_64__

__attribute__((target("sse4.2"))) static uint64_t crc_words(uint64_t crc, const unsigned char *at, size_t words) {
    for (uint64_t word; words--; at += 8) memcpy(&word, at, 8), crc = __builtin_ia32_crc32di(crc, word);
    return crc;
}

/* a·b in the field of CRC-32C, bits reversed as its registers are. */
static uint32_t field_product(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int bit = 31; bit >= 0; bit--) {
        product ^= b & -(a >> bit & 1);
        b = b >> 1 ^ (0x82F63B78u & -(b & 1));
    }
    return product;
}

/* What moves a CRC over so many zero bytes: x^(8·bytes). */
static uint32_t shift_over(uint64_t bytes) {
    uint32_t shift = 0x80000000u, power = 0x00800000u; /* 1, x^8 */
    for (; bytes; bytes >>= 1, power = field_product(power, power))
        if (bytes & 1) shift = field_product(shift, power);
    return shift;
}

/* In three streams, since the instruction has a latency of three. */
__attribute__((target("sse4.2"))) static uint32_t crc32c(const unsigned char *at, size_t size, uint32_t previous) {
    static _Thread_local size_t known_words;
    static _Thread_local uint32_t known_shift;
    size_t words = size / 24;
    uint64_t first = (uint32_t)~previous, second = 0, third = 0;
    const unsigned char *b = at + 8 * words, *c = b + 8 * words;
    for (size_t i = 0; i < words; i++) {
        uint64_t x, y, z;
        memcpy(&x, at + 8 * i, 8), memcpy(&y, b + 8 * i, 8), memcpy(&z, c + 8 * i, 8);
        first = __builtin_ia32_crc32di(first, x);
        second = __builtin_ia32_crc32di(second, y);
        third = __builtin_ia32_crc32di(third, z);
    }
    if (words && words != known_words) known_words = words, known_shift = shift_over(8 * words);
    uint32_t crc = (uint32_t)first;
    if (words) {
        crc = field_product(known_shift, crc) ^ (uint32_t)second;
        crc = field_product(known_shift, crc) ^ (uint32_t)third;
    }
    at = c + 8 * words, size -= 24 * words;
    crc = (uint32_t)crc_words(crc, at, size / 8);
    for (size_t i = size / 8 * 8; i < size; i++) crc = __builtin_ia32_crc32qi(crc, at[i]);
    return ~crc;
}

/* Whether this CPU has what the other needs. */
EXPORTED bool kvobj_has_block_crcs(void) { return __builtin_cpu_supports("sse4.2"); }

/* The CRCs of the blocks that the span `at` touches; how many. Its first block began `before` bytes earlier, with the CRC `previous`
 * of those; the last may be unfinished. */
EXPORTED uint64_t kvobj_block_crcs(
    const unsigned char *at, uint64_t size, uint64_t before, uint32_t previous, uint64_t block_bytes, uint32_t *crcs) {
    uint64_t count = 0;
    while (size) {
        uint64_t bytes = block_bytes - before < size ? block_bytes - before : size;
        crcs[count++] = crc32c(at, bytes, previous);
        at += bytes, size -= bytes;
        before = previous = 0;
    }
    return count;
}

#else

EXPORTED bool kvobj_has_block_crcs(void) { return false; }

#endif
