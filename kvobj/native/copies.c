/* Copies of many pieces of memory, shared out among as many threads as call: see kvobj/same_host/copying.py.
 *
 * Bytes of a large batch leave the caches before anybody reads them again, so they are written past them where the processor can
 * do that: a plain copy first reads what it is about to overwrite, and takes half as long again.
 */
#define _POSIX_C_SOURCE 199309L /* clock_gettime */
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
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

/* Whether what is read ahead goes into the caches as any other read does. On Intel's server processors (Xeon of 2.8 GHz with AVX-512)
 * a copy whose reads pass them by has half the rate (tools/bench_copies.py); on AMD's (Zen 3) it was the faster. */
static int reads_near(void) {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel");
}

static inline __attribute__((always_inline)) void stream_lines(unsigned char *target, const unsigned char *source, size_t size_bytes,
                                                               int is_near) {
    size_t head = (LINE_BYTES - (uintptr_t)target % LINE_BYTES) % LINE_BYTES;
    if (size_bytes < head + LINE_BYTES) {
        memcpy(target, source, size_bytes);
        return;
    }
    memcpy(target, source, head);
    size_t at = head;
    for (; size_bytes - at >= LINE_BYTES; at += LINE_BYTES) {
        const char *ahead = (const char *)(source + at + AHEAD_BYTES); /* never a fault */
        if (is_near) {
            _mm_prefetch(ahead, _MM_HINT_T0);
        } else {
            _mm_prefetch(ahead, _MM_HINT_NTA); /* leaves the caches to others */
        }
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

static void stream(unsigned char *target, const unsigned char *source, size_t size_bytes, int is_near) {
    if (is_near) {
        stream_lines(target, source, size_bytes, 1);
    } else {
        stream_lines(target, source, size_bytes, 0);
    }
}
#else
static int reads_near(void) {
    return 0;
}

static void stream(unsigned char *target, const unsigned char *source, size_t size_bytes, int is_near) {
    (void)is_near;
    memcpy(target, source, size_bytes);
}
#endif

#define WAIT_NANOSECONDS 200000
#define PAUSES_A_ROUND 16

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whether all steps come to be copied within two hundred microseconds, by others: who sleeps until another thread has ended its last
 * step is woken where that one runs, and may wait there for a turn as long as ten such batches take. */
static int are_all_done(const uint64_t *done, uint64_t steps) {
    int64_t until = 0;
    for (;;) {
        for (int pause = 0; pause < PAUSES_A_ROUND; pause++) {
            if (__atomic_load_n(done, __ATOMIC_ACQUIRE) == steps) {
                return 1;
            }
#if defined(__x86_64__)
            _mm_pause();
#endif
        }
        /* By the clock, not by rounds: beside busy processes each turn given away comes back milliseconds later. */
        int64_t now = nanoseconds();
        if (until == 0) {
            until = now + WAIT_NANOSECONDS;
        } else if (now >= until) {
            return 0;
        }
        sched_yield(); /* the other may be waiting for this processor */
    }
}

/* Copy pieces, step by step, until none is left to be begun. `taken` and `done` count the steps that some thread has begun and ended,
 * 0 at first: every thread that is given the same pieces and counts takes its share. Pieces overlap nowhere. `way`: through the caches
 * (0), or written past them and read ahead as suits the processor (1), past the caches too (2), or into them (3). Returns 1 where
 * every step has ended, which one that `waits` waits for a little, else 0. */
EXPORTED int kvobj_copy_steps(const uint64_t *triples, uint64_t count, uint64_t *taken, uint64_t *done, int way, int waits) {
    const piece *pieces = (const piece *)triples;
    uint64_t at = 0, steps_before = 0;
    int is_near = way == 3 || (way == 1 && reads_near());
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
            return waits ? are_all_done(done, steps_before) : __atomic_load_n(done, __ATOMIC_ACQUIRE) == steps_before;
        }
        uint64_t offset = (step - steps_before) * STEP_BYTES;
        uint64_t left = pieces[at].size_bytes - offset;
        size_t size_bytes = (size_t)(left < STEP_BYTES ? left : STEP_BYTES);
        unsigned char *target = (unsigned char *)(uintptr_t)(pieces[at].target + offset);
        const unsigned char *source = (const unsigned char *)(uintptr_t)(pieces[at].source + offset);
        if (way) {
            stream(target, source, size_bytes, is_near);
        } else {
            memcpy(target, source, size_bytes);
        }
        __atomic_fetch_add(done, 1, __ATOMIC_RELEASE);
    }
}
