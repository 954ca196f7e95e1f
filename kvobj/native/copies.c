/* Copies of many pieces of memory, shared out among as many threads as call: see kvobj/same_host/copying.py.
 *
 * Bytes of a large batch leave the caches before anybody reads them again, so they are written past them where the processor can
 * do that: a plain copy first reads what it is about to overwrite, and takes half as long again.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define EXPORTED __attribute__((visibility("default")))
#define STEP_BYTES ((uint64_t)1024 * 1024)

typedef struct {
    uint64_t target, source, size_bytes;
} piece;

#if defined(__x86_64__)
#define LINE_BYTES 64
#define AHEAD_BYTES 1024

static void stream(unsigned char *target, const unsigned char *source, size_t size_bytes) {
    size_t head = (LINE_BYTES - (uintptr_t)target % LINE_BYTES) % LINE_BYTES;
    if (size_bytes < head + LINE_BYTES) {
        memcpy(target, source, size_bytes);
        return;
    }
    memcpy(target, source, head);
    size_t at = head;
    for (; size_bytes - at >= LINE_BYTES; at += LINE_BYTES) {
        _mm_prefetch((const char *)(source + at + AHEAD_BYTES), _MM_HINT_NTA); /* never a fault; leaves the caches to others */
        __m128i first = _mm_loadu_si128((const __m128i *)(source + at));
        __m128i second = _mm_loadu_si128((const __m128i *)(source + at + 16));
        __m128i third = _mm_loadu_si128((const __m128i *)(source + at + 32));
        __m128i fourth = _mm_loadu_si128((const __m128i *)(source + at + 48));
        _mm_stream_si128((__m128i *)(target + at), first);
        _mm_stream_si128((__m128i *)(target + at + 16), second);
        _mm_stream_si128((__m128i *)(target + at + 32), third);
        _mm_stream_si128((__m128i *)(target + at + 48), fourth);
    }
    memcpy(target + at, source + at, size_bytes - at);
    /* Streamed stores are not ordered with others: whoever is told that the bytes are there must find them. */
    _mm_sfence();
}
#else
static void stream(unsigned char *target, const unsigned char *source, size_t size_bytes) {
    memcpy(target, source, size_bytes);
}
#endif

/* Copy pieces, step by step, until none is left. `taken` counts the steps that some thread has begun, 0 at first: every thread that
 * is given the same pieces and count takes its share. Pieces overlap nowhere. `is_streamed`: past the caches. */
EXPORTED void kvobj_copy_pieces(const uint64_t *triples, uint64_t count, uint64_t *taken, int is_streamed) {
    const piece *pieces = (const piece *)triples;
    uint64_t at = 0, steps_before = 0;
    for (;;) {
        uint64_t step = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
        for (; at < count; at++) {
            uint64_t steps = (pieces[at].size_bytes + STEP_BYTES - 1) / STEP_BYTES;
            if (step - steps_before < steps) {
                break;
            }
            steps_before += steps;
        }
        if (at >= count) {
            return;
        }
        uint64_t offset = (step - steps_before) * STEP_BYTES;
        uint64_t left = pieces[at].size_bytes - offset;
        size_t size_bytes = (size_t)(left < STEP_BYTES ? left : STEP_BYTES);
        unsigned char *target = (unsigned char *)(uintptr_t)(pieces[at].target + offset);
        const unsigned char *source = (const unsigned char *)(uintptr_t)(pieces[at].source + offset);
        if (is_streamed) {
            stream(target, source, size_bytes);
        } else {
            memcpy(target, source, size_bytes);
        }
    }
}
