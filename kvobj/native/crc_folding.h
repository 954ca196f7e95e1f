/* A CRC in four vectors side by side: crcs.c includes this once for each width that a CPU's vectors may have. Wanted before, and gone
 * after:
 *
 *   TARGET                   the attribute of functions: what the CPU must have
 *   VECTOR, VECTOR_BYTES     of pairs of 64-bit words; the names of functions end in the latter
 *   LOADED(at)               the vector at an address
 *   STORED(at, vector)       put there
 *   ALONE(pair)              a vector that begins with the pair and is 0 behind it
 *   REPEATED(pair)           one of nothing but such pairs
 *   MULTIPLIED(a, b, which)  carry-less, the words of each pair that `which` says (as PCLMULQDQ)
 *   XORED(a, b, c)
 *   OVER_ONE, OVER_FOUR      the constants that move a sum over one vector and over four
 */
#define NAMED_(name, width) name##_##width
#define NAMED(name, width) NAMED_(name, width)
#define FOUR NAMED(four, VECTOR_BYTES)
#define FOLDED NAMED(folded, VECTOR_BYTES)
#define FOLDED_IN_STREAMS NAMED(folded_in_streams, VECTOR_BYTES)
#define MOVED(sum, over, there) XORED(MULTIPLIED(sum, over, 0x00), MULTIPLIED(sum, over, 0x11), there)

struct FOUR {
    VECTOR a, b, c, d;
};

TARGET INLINED struct FOUR NAMED(begun, VECTOR_BYTES)(uint64_t sum, const unsigned char *at) {
    return (struct FOUR){
        XORED(LOADED(at), ALONE(word_alone(sum)), ALONE(word_alone(0))),
        LOADED(at + VECTOR_BYTES),
        LOADED(at + 2 * VECTOR_BYTES),
        LOADED(at + 3 * VECTOR_BYTES),
    };
}

TARGET INLINED struct FOUR NAMED(gone_on, VECTOR_BYTES)(struct FOUR sums, VECTOR over_four, const unsigned char *at) {
    /* CPUs read ahead within a page alone: without this a fifth is lost where the bytes are in no cache. */
    for (size_t line = 0; line < 4 * VECTOR_BYTES; line += 64) prefetch(at + AHEAD_BYTES + line);
    return (struct FOUR){
        MOVED(sums.a, over_four, LOADED(at)),
        MOVED(sums.b, over_four, LOADED(at + VECTOR_BYTES)),
        MOVED(sums.c, over_four, LOADED(at + 2 * VECTOR_BYTES)),
        MOVED(sums.d, over_four, LOADED(at + 3 * VECTOR_BYTES)),
    };
}

/* The pair that stands for the four, and for the whole vectors of the `size` bytes from `at` on. */
TARGET INLINED __m128i NAMED(joined, VECTOR_BYTES)(const struct crc *crc, struct FOUR sums, const unsigned char *at, size_t size) {
    const VECTOR over_one = REPEATED(pair_at(crc->OVER_ONE));
    VECTOR sum = MOVED(MOVED(MOVED(sums.a, over_one, sums.b), over_one, sums.c), over_one, sums.d);
    for (; size >= VECTOR_BYTES; at += VECTOR_BYTES, size -= VECTOR_BYTES) sum = MOVED(sum, over_one, LOADED(at));
    unsigned char pairs[VECTOR_BYTES];
    STORED(pairs, sum);
    __m128i pair = pair_at(pairs);
    for (size_t i = 16; i < VECTOR_BYTES; i += 16) pair = moved(pair, pair_at(crc->over_16), pair_at(pairs + i));
    return pair;
}

/* `sum`, gone on over the `size` bytes, at least four vectors. */
TARGET static uint64_t FOLDED(const struct crc *crc, uint64_t sum, const unsigned char *at, size_t size) {
    const size_t step = 4 * VECTOR_BYTES;
    const VECTOR over_four = REPEATED(pair_at(crc->OVER_FOUR));
    struct FOUR sums = NAMED(begun, VECTOR_BYTES)(sum, at);
    for (at += step, size -= step; size >= step; at += step, size -= step)
        sums = NAMED(gone_on, VECTOR_BYTES)(sums, over_four, at);
    __m128i pair = NAMED(joined, VECTOR_BYTES)(crc, sums, at, size);
    return finished(crc, pair, at + size / VECTOR_BYTES * VECTOR_BYTES, size % VECTOR_BYTES);
}

#if VECTOR_BYTES < 64
/* As FOLDED, of CRC-32C, and of `bytes_in_streams(by, VECTOR_BYTES)` bytes: first those of the vectors, then three streams. */
TARGET static uint64_t FOLDED_IN_STREAMS(const struct streams *by, uint64_t sum, const unsigned char *at) {
    const struct crc *crc = &crcs[CRC32C];
    const VECTOR over_four = REPEATED(pair_at(crc->OVER_FOUR));
    const size_t step = 4 * VECTOR_BYTES, stream_step = STREAM_STEP(VECTOR_BYTES);
    const unsigned char *first = at + by->bytes / stream_step * step;
    const unsigned char *second = first + by->bytes, *third = second + by->bytes, *end = third + by->bytes;
    uint64_t a = 0, b = 0, c = 0;
    struct FOUR sums = NAMED(begun, VECTOR_BYTES)(sum, at);
    for (;;) {
        for (size_t word = 0; word < stream_step; word += 8) {
            a = _mm_crc32_u64(a, word_at(first + word));
            b = _mm_crc32_u64(b, word_at(second + word));
            c = _mm_crc32_u64(c, word_at(third + word));
        }
        at += step, first += stream_step, second += stream_step, third += stream_step;
        if (third == end) break;
        sums = NAMED(gone_on, VECTOR_BYTES)(sums, over_four, at);
    }
    __m128i pair = NAMED(joined, VECTOR_BYTES)(crc, sums, at, 0);
    __m128i streamed = _mm_clmulepi64_si128(word_alone(a), word_alone(by->over_two), 0x00);
    streamed = _mm_xor_si128(streamed, _mm_clmulepi64_si128(word_alone(b), word_alone(by->over_one), 0x00));
    return finished(crc, moved(pair, pair_at(by->over_three), streamed), at, 0) ^ c;
}
#endif

#undef NAMED_
#undef NAMED
#undef FOUR
#undef FOLDED
#undef FOLDED_IN_STREAMS
#undef MOVED
#undef TARGET
#undef VECTOR
#undef VECTOR_BYTES
#undef LOADED
#undef STORED
#undef ALONE
#undef REPEATED
#undef MULTIPLIED
#undef XORED
#undef OVER_ONE
#undef OVER_FOUR
