/* Takes the framing between chunks out of memory that was received whole, in place: see kvobj/wire/joined_chunks.py, the one user.
 *
 * Source: RFC 9112 §7.1, and the S3 API reference for aws-chunked bodies without signatures, which frame alike: a line end, a size in
 * hexadecimal digits, a line end, so many bytes. Whatever is not exactly that is left to who calls, as is the last chunk, of no bytes.
 */
#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))
#define DIGITS_MAX 16

/* As joined_chunks.py lays it out. */
typedef struct {
    uint64_t at;          /* bytes looked at */
    uint64_t filled;      /* bytes of data in front */
    uint64_t chunk_left;  /* of the present chunk's data, what is still to come */
    uint64_t chunk_bytes; /* the present chunk's size */
    uint64_t chunks;      /* chunks that have begun */
} joining;

static int digit_of(unsigned char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* How many bytes the framing in front of the next chunk's data has; 0 where it is not whole, or not as it should be. */
static uint64_t framing_of(const unsigned char *bytes, uint64_t size, uint64_t *chunk_bytes) {
    if (size < 2 || bytes[0] != '\r' || bytes[1] != '\n') return 0;
    uint64_t at = 2, value = 0;
    for (; at < size && at < 2 + DIGITS_MAX; at++) {
        int digit = digit_of(bytes[at]);
        if (digit < 0) break;
        value = value << 4 | (uint64_t)digit;
    }
    if (at == 2 || size - at < 2 || bytes[at] != '\r' || bytes[at + 1] != '\n') return 0;
    *chunk_bytes = value;
    return at + 2;
}

/* Move the data of all chunks in `bytes` to its front, from where `j` says on. It ends at the end of the bytes, or in front of framing
 * that it leaves to the caller: of a chunk of no bytes, of one larger than what is left of `limit` bytes of data, or of one behind a
 * chunk smaller than `minimum`. */
EXPORTED void kvobj_join_chunks(unsigned char *bytes, uint64_t size, uint64_t limit, uint64_t minimum, joining *j) {
    while (j->at < size) {
        if (j->chunk_left) {
            uint64_t count = j->chunk_left < size - j->at ? j->chunk_left : size - j->at;
            if (j->filled != j->at) memmove(bytes + j->filled, bytes + j->at, count);
            j->filled += count, j->at += count, j->chunk_left -= count;
            limit -= count;
            continue;
        }
        uint64_t chunk_bytes, framing = framing_of(bytes + j->at, size - j->at, &chunk_bytes);
        if (!framing || !chunk_bytes || chunk_bytes > limit || j->chunk_bytes < minimum) return;
        j->at += framing;
        j->chunk_left = j->chunk_bytes = chunk_bytes;
        j->chunks++;
    }
}
