/* The CRC-32C of each block of a span of bytes, in one call: see kvobj/codec/block_crcs.py, which does without where this is 0. */
#include "crcs.h"

#include <stdbool.h>

#define EXPORTED __attribute__((visibility("default")))

/* Whether this CPU has what the other needs. */
EXPORTED bool kvobj_has_block_crcs(void) { return kvobj_crc_width() > 0; }

#ifdef __x86_64__

/* The CRCs of the blocks that the span `at` touches; how many. Its first block began `before` bytes earlier, with the CRC `previous`
 * of those; the last may be unfinished. */
EXPORTED uint64_t kvobj_block_crcs(
    const unsigned char *at, uint64_t size, uint64_t before, uint32_t previous, uint64_t block_bytes, uint32_t *crcs) {
    uint64_t count = 0;
    while (size) {
        uint64_t bytes = block_bytes - before < size ? block_bytes - before : size;
        crcs[count++] = kvobj_crc32c(at, bytes, previous);
        at += bytes, size -= bytes;
        before = previous = 0;
    }
    return count;
}

#endif
