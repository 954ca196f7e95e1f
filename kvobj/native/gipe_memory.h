/* Memory of the tables. Large ones lie in huge pages where the system has some to give: accesses go all over a million entries, and
 * with small pages nearly each of them would wait for the page tables too. On Linux they grow without a copy: the pages move to other
 * addresses, and what is new is taken as it is first written to. */
#ifndef KVOBJ_GIPE_MEMORY_H
#define KVOBJ_GIPE_MEMORY_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* madvise, mremap */
#endif
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* For functions that only prefetch: the compiler takes such a one for a function without effects, and leaves its calls out. */
#define PREFETCHING static inline __attribute__((always_inline))

#define HUGE_PAGE ((size_t)2 << 20)

static inline size_t in_huge_pages(size_t bytes) { return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE; }
static inline bool is_large(size_t bytes) { return bytes >= 2 * HUGE_PAGE; }

#ifdef MREMAP_MAYMOVE
/* Addresses for so much, the first of them that of a huge page; NULL: there are none. Nothing may be written there unless `is_usable`. */
static char *map_aligned(size_t bytes, bool is_usable) {
    char *mapped = mmap(NULL, bytes + HUGE_PAGE, is_usable ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return NULL;
    size_t before = (HUGE_PAGE - (uintptr_t)mapped % HUGE_PAGE) % HUGE_PAGE;
    if (before) munmap(mapped, before);
    munmap(mapped + before + bytes, HUGE_PAGE - before);
    return mapped + before;
}

static void *large_make(size_t bytes) {
    void *made = map_aligned(bytes, true);
    if (made) madvise(made, bytes, MADV_HUGEPAGE); /* a wish: nothing depends on it */
    return made;
}

static void large_free(void *memory, size_t bytes) { munmap(memory, bytes); }

/* A mremap that fails may have unmapped `place` before or not, and another thread may have it by then: it is left alone. So whether there
 * is as much more is asked first, where nothing is in doubt. */
static void *large_grow(void *old, size_t old_bytes, size_t bytes) {
    if (bytes == old_bytes) return old;
    void *place = map_aligned(bytes, false);
    if (!place) return NULL;
    void *more = mmap(NULL, bytes - old_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (more == MAP_FAILED) {
        munmap(place, bytes);
        return NULL;
    }
    munmap(more, bytes - old_bytes);
    void *moved = mremap(old, old_bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place);
    return moved == MAP_FAILED ? NULL : moved;
}
#else
static void *large_make(size_t bytes) {
    void *made = aligned_alloc(HUGE_PAGE, bytes);
    if (made) memset(made, 0, bytes);
    return made;
}

static void large_free(void *memory, size_t bytes) {
    (void)bytes;
    free(memory);
}

static void *large_grow(void *old, size_t old_bytes, size_t bytes) {
    void *made = large_make(bytes);
    if (!made) return NULL;
    memcpy(made, old, old_bytes);
    free(old);
    return made;
}
#endif

/* `bytes` of zeros; freed by `gipe_free` with the same `bytes`. NULL: there is no memory. */
static void *gipe_zeros(size_t bytes) { return is_large(bytes) ? large_make(in_huge_pages(bytes)) : calloc(1, bytes); }

static void gipe_free(void *memory, size_t bytes) {
    if (memory && is_large(bytes)) large_free(memory, in_huge_pages(bytes));
    else free(memory);
}

/* As realloc, to no less than there was, for what `gipe_zeros` or this has made. NULL: `old` is as it was. */
static void *gipe_grow(void *old, size_t old_bytes, size_t bytes) {
    if (!is_large(bytes)) return realloc(old, bytes);
    if (old && is_large(old_bytes)) return large_grow(old, in_huge_pages(old_bytes), in_huge_pages(bytes));
    void *made = gipe_zeros(bytes);
    if (!made) return NULL;
    if (old) memcpy(made, old, old_bytes);
    free(old);
    return made;
}

#endif
