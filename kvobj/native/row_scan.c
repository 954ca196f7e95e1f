/* Rows into records, and records into the list of a reply: see kvobj/catalog/chunk_records.py. Objects made one by one from the same
 * rows give the same bytes.
 *
 * Reads what the catalog wrote itself, and still trusts no length in it. What it does not know it leaves to the pure twin.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "row_reader.h"
#include "table_pages.h"

#define EXPORTED __attribute__((visibility("default")))
#define RECORD_BYTES 72
#define BLOB_ID_BYTES 16
#define DIGEST_BYTES 32
#define CODEC_BYTES 15
#define CHUNK_ID_BYTES 32
#define SIZE_AT 48
#define FLAGS_AT 56
#define CODEC_AT 57
#define HAS_DIGEST 1
#define SEVERAL_BLOBS 2

enum { OK = 0, NOT_LIVE = 1, UNKNOWN = 2 };
enum { BLOBS = 2, SIZE = 3, DIGEST = 12, STATE = 13 };

static bool digest(reader_t *r, unsigned char *record) {
    const unsigned char *bytes;
    uint64_t length;
    if (r->at < r->end && *r->at == 0xC0) return r->at++, true;
    if (!binary(r, &bytes, &length) || length != DIGEST_BYTES) return false;
    memcpy(record + BLOB_ID_BYTES, bytes, DIGEST_BYTES);
    record[FLAGS_AT] |= HAS_DIGEST;
    return true;
}

static bool first_blob(reader_t *r, unsigned char *record) {
    const unsigned char *bytes;
    uint64_t count, length;
    if (!array(r, &count) || count < 5) return false;
    if (!binary(r, &bytes, &length) || length != BLOB_ID_BYTES) return false;
    memcpy(record, bytes, BLOB_ID_BYTES);
    if (!skip_some(r, 3) || !text(r, &bytes, &length) || length > CODEC_BYTES) return false;
    memcpy(record + CODEC_AT, bytes, length);
    return skip_some(r, count - 5);
}

/* A row up to its state, which says what it is; `left`: fields behind that. */
static int row(reader_t *r, unsigned char *record, uint64_t *left) {
    const unsigned char *bytes;
    uint64_t fields, blobs, size, length;
    memset(record, 0, RECORD_BYTES);
    if (!array(r, &fields) || fields <= STATE || !skip_some(r, BLOBS)) return UNKNOWN;
    if (!array(r, &blobs) || !blobs || !first_blob(r, record) || !skip_some(r, blobs - 1)) return UNKNOWN;
    if (blobs > 1) record[FLAGS_AT] |= SEVERAL_BLOBS;
    if (!number(r, &size) || size > INT64_MAX) return UNKNOWN;
    for (int i = 0; i < 8; i++) record[SIZE_AT + i] = (unsigned char)(size >> 8 * i);
    if (!skip_some(r, DIGEST - SIZE - 1) || !digest(r, record) || !text(r, &bytes, &length)) return UNKNOWN;
    bool is_live = length == 4 && !memcmp(bytes, "live", 4);
    if (!is_live && !(length == 9 && !memcmp(bytes, "condemned", 9))) return UNKNOWN;
    *left = fields - STATE - 1;
    return is_live ? OK : NOT_LIVE;
}

/* rows: `count` rows end to end; the i-th becomes the i-th record. OK, or what the first other row is. */
EXPORTED int kvobj_scan_rows(const unsigned char *rows, size_t length, size_t count, unsigned char *records) {
    reader_t r = {rows, rows + length};
    for (size_t i = 0; i < count; i++) {
        uint64_t left;
        int is = row(&r, records + i * RECORD_BYTES, &left);
        if (is != OK) return is;
        if (!skip_some(&r, left)) return UNKNOWN;
    }
    return r.at == r.end ? OK : UNKNOWN;
}

static bool take_key(wanted_t *wanted, const unsigned char *root, size_t root_bytes, const unsigned char *key, size_t key_bytes) {
    if (root_bytes + key_bytes > LONGEST_KEY) return false;
    memcpy(wanted->key, root, root_bytes);
    memcpy(wanted->key + root_bytes, key, key_bytes);
    wanted->key_bytes = (uint32_t)(root_bytes + key_bytes);
    return true;
}

/* Of those of `count` keys that are not `found` yet the rows that the table has under root and key: they become the records of their
 * places. ends: where each key ends in `keys`. OK, or what the first other row is. */
EXPORTED int kvobj_find_rows(const table_t *table, const unsigned char *root, size_t root_bytes, const unsigned char *keys,
                             const uint32_t *ends, size_t count, unsigned char *found, unsigned char *records) {
    wanted_t wanted[WANTED_AT_ONCE];
    size_t places[WANTED_AT_ONCE];
    if (!table->depth) return OK;
    for (size_t next = 0; next < count;) {
        int some = 0;
        for (; next < count && some < WANTED_AT_ONCE; next++) {
            if (found[next]) continue;
            size_t begin = next ? ends[next - 1] : 0;
            if (!take_key(&wanted[some], root, root_bytes, keys + begin, ends[next] - begin)) return UNKNOWN;
            places[some++] = next;
        }
        if (!kvobj_find_values(table, wanted, some)) return UNKNOWN;
        for (int i = 0; i < some; i++) {
            if (!wanted[i].value) continue;
            reader_t r = {wanted[i].value, wanted[i].value + wanted[i].length};
            uint64_t left;
            int is = row(&r, records + places[i] * RECORD_BYTES, &left);
            if (is != OK) return is;
            if (!skip_some(&r, left) || r.at != r.end) return UNKNOWN;
            found[places[i]] = 1;
        }
    }
    return OK;
}

static size_t padded_length(const char *from, size_t most) {
    const char *end = memchr(from, 0, most);
    return end ? (size_t)(end - from) : most;
}

static unsigned char *put_text(unsigned char *to, const void *text_, size_t length) {
    *to++ = (unsigned char)(0xA0 | length);
    memcpy(to, text_, length);
    return to + length;
}

static unsigned char *put_binary(unsigned char *to, const void *bytes, unsigned char length) {
    *to++ = 0xC4;
    *to++ = length;
    memcpy(to, bytes, length);
    return to + length;
}

static unsigned char *put_number(unsigned char *to, uint64_t value) {
    if (value < 0x80) return *to++ = (unsigned char)value, to;
    int log = value > 0xFFFFFFFFu ? 3 : value > 0xFFFF ? 2 : value > 0xFF ? 1 : 0;
    *to++ = (unsigned char)(0xCC + log);
    for (int shift = (8 << log) - 8; shift >= 0; shift -= 8) *to++ = (unsigned char)(value >> shift);
    return to;
}

/* The maps of a msgpack list, without its head, of records with 32-byte ids; tiers: of each record an index into `names` (16 bytes
 * each, NUL padded) and into `sums`, to which its size is added. `to` has 192 bytes a record. Returns the length. */
EXPORTED size_t kvobj_chunk_maps(const unsigned char *ids, const unsigned char *records, const unsigned char *tiers, const char *names,
                                 uint64_t *sums, size_t count, unsigned char *to) {
    unsigned char *begin = to;
    for (size_t i = 0; i < count; i++, records += RECORD_BYTES) {
        uint64_t size = 0;
        for (int at = 7; at >= 0; at--) size = size << 8 | records[SIZE_AT + at];
        sums[tiers[i]] += size;
        *to++ = 0x85;
        to = put_binary(put_text(to, "id", 2), ids + i * CHUNK_ID_BYTES, CHUNK_ID_BYTES);
        to = put_number(put_text(to, "size_bytes", 10), size);
        to = put_text(to, "digest", 6);
        if (records[FLAGS_AT] & HAS_DIGEST) to = put_binary(to, records + BLOB_ID_BYTES, DIGEST_BYTES);
        else *to++ = 0xC0;
        const char *tier = names + (size_t)tiers[i] * 16, *codec = (const char *)records + CODEC_AT;
        to = put_text(put_text(to, "tier", 4), tier, padded_length(tier, 15));
        to = put_text(put_text(to, "codec", 5), codec, padded_length(codec, CODEC_BYTES));
    }
    return (size_t)(to - begin);
}
