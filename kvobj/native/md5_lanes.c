/* MD5 of up to eight streams of bytes side by side: see kvobj/codec/md5_lanes.py.
 *
 * Each step of MD5 waits for the one before, so that one stream leaves most of a core idle, and eight together take half as long
 * again as one. Lane i of a vector is the i-th stream's. The vectors are the compiler's own, for any machine; compiled for AVX-512
 * the same took a twelfth less, which is not worth a second way. Source: RFC 1321.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))
#define LANES 8
#define BLOCK_BYTES 64
#define WORDS 16
#define STATE_WORDS 4

typedef uint32_t lanes_t __attribute__((vector_size(4 * LANES)));

static const uint32_t sines[64] = {
    0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee, 0xf57c0faf, 0x4787c62a, 0xa8304613, 0xfd469501, /* round 1 */
    0x698098d8, 0x8b44f7af, 0xffff5bb1, 0x895cd7be, 0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821,
    0xf61e2562, 0xc040b340, 0x265e5a51, 0xe9b6c7aa, 0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8, /* 2 */
    0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed, 0xa9e3e905, 0xfcefa3f8, 0x676f02d9, 0x8d2a4c8a,
    0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c, 0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70, /* 3 */
    0x289b7ec6, 0xeaa127fa, 0xd4ef3085, 0x04881d05, 0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665,
    0xf4292244, 0x432aff97, 0xab9423a7, 0xfc93a039, 0x655b59c3, 0x8f0ccc92, 0xffeff47d, 0x85845dd1, /* 4 */
    0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1, 0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391,
};

static uint32_t load(const unsigned char *from) {
    uint32_t value;
    memcpy(&value, from, sizeof value);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap32(value);
#endif
    return value;
}

static void store(unsigned char *to, uint32_t value) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap32(value);
#endif
    memcpy(to, &value, sizeof value);
}

/* G's halves have no bit in common, so its `or` may be a sum, of which all but the half with the newest word, b, is made early. */
#define F(b, c, d) ((d) ^ ((b) & ((c) ^ (d))))
#define G(b, c, d) (((b) & (d)) + ((c) & ~(d)))
#define H(b, c, d) ((b) ^ ((c) ^ (d)))
#define I(b, c, d) ((c) ^ ((b) | ~(d)))
#define STEP(f, a, b, c, d, step, word, turn)                  \
    do {                                                       \
        a += words[(word) % WORDS] + sines[step];              \
        a += f(b, c, d);                                       \
        a = ((a << (turn)) | (a >> (32 - (turn)))) + b;        \
    } while (0)
/* Steps from the given one on; their words are `gap` apart. */
#define FOUR(f, step, word, gap, s, t, u, v)                        \
    do {                                                            \
        STEP(f, a, b, c, d, step, word, s);                         \
        STEP(f, d, a, b, c, (step) + 1, (word) + (gap), t);         \
        STEP(f, c, d, a, b, (step) + 2, (word) + 2 * (gap), u);     \
        STEP(f, b, c, d, a, (step) + 3, (word) + 3 * (gap), v);     \
    } while (0)
#define ROUND(f, step, word, gap, s, t, u, v)                            \
    do {                                                                 \
        FOUR(f, step, word, gap, s, t, u, v);                            \
        FOUR(f, (step) + 4, (word) + 4 * (gap), gap, s, t, u, v);        \
        FOUR(f, (step) + 8, (word) + 8 * (gap), gap, s, t, u, v);        \
        FOUR(f, (step) + 12, (word) + 12 * (gap), gap, s, t, u, v);      \
    } while (0)

static void advance_lanes(lanes_t state[STATE_WORDS], const unsigned char *const from[LANES], uint64_t blocks) {
    lanes_t a = state[0], b = state[1], c = state[2], d = state[3];
    for (uint64_t at = 0; at < blocks * BLOCK_BYTES; at += BLOCK_BYTES) {
        lanes_t words[WORDS], a_before = a, b_before = b, c_before = c, d_before = d;
        for (int word = 0; word < WORDS; word++)
            for (int lane = 0; lane < LANES; lane++) words[word][lane] = load(from[lane] + at + 4 * (uint64_t)word);
        ROUND(F, 0, 0, 1, 7, 12, 17, 22);
        ROUND(G, 16, 1, 5, 5, 9, 14, 20);
        ROUND(H, 32, 5, 3, 4, 11, 16, 23);
        ROUND(I, 48, 0, 7, 6, 10, 15, 21);
        a += a_before, b += b_before, c += c_before, d += d_before;
    }
    state[0] = a, state[1] = b, state[2] = c, state[3] = d;
}

/* How many streams go side by side. */
EXPORTED int kvobj_md5_lanes(void) { return LANES; }

/* Go on with `count` streams, `kvobj_md5_lanes` at most: each with its own number of whole blocks of 64 bytes from its own place in
 * memory. `states`: 16 bytes of each, one after the other; what a stream ends with is its digest. */
EXPORTED void kvobj_md5_advance(int count, unsigned char *states, const uint64_t *memory, const uint64_t *blocks) {
    uint64_t done = 0;
    for (;;) {
        /* The shortest of those that go on says how far all of them go; a lane without a stream goes beside it and is forgotten. */
        int shortest = -1;
        for (int lane = 0; lane < count; lane++)
            if (blocks[lane] > done && (shortest < 0 || blocks[lane] < blocks[shortest])) shortest = lane;
        if (shortest < 0) return;
        lanes_t state[STATE_WORDS];
        const unsigned char *from[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            int stream = lane < count && blocks[lane] > done ? lane : shortest;
            from[lane] = (const unsigned char *)(uintptr_t)memory[stream] + done * BLOCK_BYTES;
            for (int word = 0; word < STATE_WORDS; word++)
                state[word][lane] = load(states + 4 * (STATE_WORDS * stream + word));
        }
        advance_lanes(state, from, blocks[shortest] - done);
        for (int lane = 0; lane < count; lane++)
            for (int word = 0; word < STATE_WORDS; word++)
                if (blocks[lane] > done) store(states + 4 * (STATE_WORDS * lane + word), state[word][lane]);
        done = blocks[shortest];
    }
}
