/* Reads msgpack as the catalog wrote it, and trusts no length in it: every function is false where the bytes end too early or are not
 * what was asked for. */
#ifndef KVOBJ_ROW_READER_H
#define KVOBJ_ROW_READER_H

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    const unsigned char *at, *end;
} reader_t;

static inline bool big_endian(reader_t *r, int bytes, uint64_t *value) {
    if (r->end - r->at < bytes) return false;
    *value = 0;
    while (bytes--) *value = *value << 8 | *r->at++;
    return true;
}

static inline bool array(reader_t *r, uint64_t *count) {
    if (r->at == r->end) return false;
    unsigned char head = *r->at++;
    if ((head & 0xF0) == 0x90) return *count = head & 0x0F, true;
    if (head == 0xDC) return big_endian(r, 2, count);
    if (head == 0xDD) return big_endian(r, 4, count);
    return false;
}

static inline bool number(reader_t *r, uint64_t *value) {
    if (r->at == r->end) return false;
    unsigned char head = *r->at++;
    if (head < 0x80) return *value = head, true;
    if (head < 0xCC || head > 0xCF) return false;
    return big_endian(r, 1 << (head - 0xCC), value);
}

static inline bool take(reader_t *r, uint64_t length, const unsigned char **bytes) {
    if ((uint64_t)(r->end - r->at) < length) return false;
    *bytes = r->at;
    r->at += length;
    return true;
}

static inline bool binary(reader_t *r, const unsigned char **bytes, uint64_t *length) {
    if (r->at == r->end) return false;
    unsigned char head = *r->at++;
    if (head < 0xC4 || head > 0xC6) return false;
    return big_endian(r, 1 << (head - 0xC4), length) && take(r, *length, bytes);
}

static inline bool text(reader_t *r, const unsigned char **bytes, uint64_t *length) {
    if (r->at == r->end) return false;
    unsigned char head = *r->at++;
    if ((head & 0xE0) == 0xA0) *length = head & 0x1F;
    else if (head < 0xD9 || head > 0xDB || !big_endian(r, 1 << (head - 0xD9), length)) return false;
    return take(r, *length, bytes);
}

/* Whatever comes next, with all that is in it. A count that is not true runs into the end. */
static inline bool skip(reader_t *r) {
    for (uint64_t pending = 1; pending; pending--) {
        const unsigned char *bytes;
        uint64_t length = 0;
        if (r->at == r->end) return false;
        unsigned char head = *r->at++;
        if (head < 0x80 || head >= 0xE0 || head == 0xC0 || head == 0xC2 || head == 0xC3) continue;
        if (head < 0x90) pending += 2 * (uint64_t)(head & 0x0F);
        else if (head < 0xA0) pending += head & 0x0F;
        else if (head < 0xC0) length = head & 0x1F;
        else if (head == 0xC1) return false;
        else if (head <= 0xC6) { if (!big_endian(r, 1 << (head - 0xC4), &length)) return false; }
        else if (head <= 0xC9) { if (!big_endian(r, 1 << (head - 0xC7), &length)) return false; length++; }
        else if (head <= 0xCB) length = head == 0xCA ? 4 : 8;
        else if (head <= 0xCF) length = (uint64_t)1 << (head - 0xCC);
        else if (head <= 0xD3) length = (uint64_t)1 << (head - 0xD0);
        else if (head <= 0xD8) length = ((uint64_t)1 << (head - 0xD4)) + 1;
        else if (head <= 0xDB) { if (!big_endian(r, 1 << (head - 0xD9), &length)) return false; }
        else {
            uint64_t count;
            if (!big_endian(r, head == 0xDC || head == 0xDE ? 2 : 4, &count)) return false;
            pending += head >= 0xDE ? 2 * count : count;
        }
        if (!take(r, length, &bytes)) return false;
    }
    return true;
}

/* Most of a row's fields are of one byte, or short texts: those without the loop over what is in them. */
static inline bool skip_some(reader_t *r, uint64_t count) {
    for (; count; count--) {
        if (r->at == r->end) return false;
        unsigned char head = *r->at;
        if (head < 0x80 || head == 0x80 || head == 0x90 || head == 0xC0) r->at++;
        else if ((head & 0xE0) == 0xA0 && r->end - r->at > (head & 0x1F)) r->at += 1 + (head & 0x1F);
        else if (!skip(r)) return false;
    }
    return true;
}

#endif
