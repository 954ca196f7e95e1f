/* Memory of the tables. Large ones lie in huge pages where the system has some to give: accesses go all over a million entries, and
 * with small pages nearly each of them would wait for the page tables too. */
#ifndef KVOBJ_GIPE_MEMORY_H
#define KVOBJ_GIPE_MEMORY_H

#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* madvise */
#endif
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* For functions that only prefetch: the compiler takes such a one for a function without effects, and leaves its calls out. */
#define PREFETCHING static inline __attribute__((always_inline))

#define HUGE_PAGE ((size_t)2 << 20)

/* `bytes` of memory, the first `kept` of which are those of `old`, which is freed; the rest is anything. NULL: `old` is as it was. */
static void *gipe_regrow(void *old, size_t kept, size_t bytes) {
    if (bytes < 2 * HUGE_PAGE) return realloc(old, bytes);
    void *made = aligned_alloc(HUGE_PAGE, (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (!made) return NULL;
#ifdef MADV_HUGEPAGE
    madvise(made, bytes, MADV_HUGEPAGE); /* a wish: nothing depends on it */
#endif
    if (kept) memcpy(made, old, kept);
    free(old);
    return made;
}

#endif
