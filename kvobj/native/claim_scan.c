/* What a claim or a condemnation asks of many chunks of a bucket: are their rows live under the blobs expected, do all their children
 * go with them, and of those that go what is to be counted and unlinked. See kvobj/catalog/claim_scan.py, whose pure twins are the
 * changes themselves. Reads the pages of one snapshot; what it does not know is left to them.
 */
#include <stdlib.h>
#include <string.h>

#include "row_reader.h"
#include "table_pages.h"

#define EXPORTED __attribute__((visibility("default")))
#define ROOT_BYTES 8
#define HASH_BYTES 16
#define PLACE_BYTES (ROOT_BYTES + HASH_BYTES)
#define LINK_BYTES (PLACE_BYTES + HASH_BYTES)
#define BLOB_ID_BYTES 16
#define SPACES 64
#define SPACE_BYTES 255

enum { OK = 0, UNKNOWN = 2 };
enum { STAYS = 0, GOES = 1, HAS_PARENT = 2, HAS_OTHERS_BELOW = 4 }; /* outcomes; all but the first are summed up */
enum { LOSSY = 24, FIELDS = 25, FIELDS_LEAST = 20 };

/* ---- BLAKE3 of up to 1024 bytes, which is one chunk of its tree ---- */

static const uint32_t START[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
static const unsigned char ORDER[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
};
enum { CHUNK_START = 1, CHUNK_END = 2, ROOT = 8, BLOCK_BYTES = 64 };

static uint32_t turned(uint32_t word, int by) { return word >> by | word << (32 - by); }

static inline void mix(uint32_t *v, int a, int b, int c, int d, uint32_t x, uint32_t y) {
    v[a] += v[b] + x;
    v[d] = turned(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = turned(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 7);
}

static void compress(uint32_t *chain, const unsigned char *block, uint32_t bytes, uint32_t flags) {
    uint32_t words[16], v[16];
    for (int i = 0; i < 16; i++)
        words[i] = block[4 * i] | (uint32_t)block[4 * i + 1] << 8 | (uint32_t)block[4 * i + 2] << 16 | (uint32_t)block[4 * i + 3] << 24;
    memcpy(v, chain, 32);
    memcpy(v + 8, START, 16);
    v[12] = v[13] = 0;
    v[14] = bytes;
    v[15] = flags;
    for (int round = 0; round < 7; round++) {
        const unsigned char *o = ORDER[round];
        for (int i = 0; i < 4; i++) mix(v, i, 4 + i, 8 + i, 12 + i, words[o[2 * i]], words[o[2 * i + 1]]);
        for (int i = 0; i < 4; i++) mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, words[o[8 + 2 * i]], words[o[9 + 2 * i]]);
    }
    for (int i = 0; i < 8; i++) chain[i] = v[i] ^ v[i + 8];
}

static bool key_hash(const unsigned char *key, size_t length, unsigned char *hash) {
    uint32_t chain[8], flags = CHUNK_START;
    if (length > 1024) return false;
    memcpy(chain, START, sizeof chain);
    for (; length > BLOCK_BYTES; key += BLOCK_BYTES, length -= BLOCK_BYTES, flags = 0) compress(chain, key, BLOCK_BYTES, flags);
    unsigned char last[BLOCK_BYTES] = {0};
    memcpy(last, key, length);
    compress(chain, last, (uint32_t)length, flags | CHUNK_END | ROOT);
    for (int i = 0; i < HASH_BYTES; i++) hash[i] = (unsigned char)(chain[i / 4] >> 8 * (i % 4));
    return true;
}

/* ---- which of the chunks go, by their keys' hashes ---- */

typedef struct {
    const unsigned char *hashes;
    uint32_t *places; /* of those that go, one more than their places; 0: free */
    uint64_t mask;
} going_t;

static uint32_t *slot_of(const going_t *going, const unsigned char *hash) {
    uint64_t at;
    memcpy(&at, hash, sizeof at);
    while (going->places[at & going->mask] && memcmp(going->hashes + (size_t)(going->places[at & going->mask] - 1) * HASH_BYTES, hash, HASH_BYTES)) at++;
    return &going->places[at & going->mask];
}

/* ---- rows ---- */

typedef struct {
    bool is_live, has_parent;
    const unsigned char *blob_id, *parent, *space;
    uint64_t size, tokens, parent_bytes, space_bytes;
} row_t;

static bool is(const unsigned char *bytes, uint64_t length, const char *word) { return length == strlen(word) && !memcmp(bytes, word, length); }

/* A row up to its state; `whole`: all of it, and only one of a form that a claim here knows all of. False: not known here. */
static bool read_row(const unsigned char *value, uint32_t length, bool whole, row_t *row) {
    reader_t r = {value, value + length};
    const unsigned char *bytes;
    uint64_t fields, blobs, parts, bytes_count;
    memset(row, 0, sizeof *row);
    if (!array(&r, &fields) || fields < FIELDS_LEAST || fields > FIELDS || !skip_some(&r, 2)) return false;
    if (!array(&r, &blobs) || !blobs || (whole && blobs > 1) || !array(&r, &parts) || !parts) return false;
    if (!binary(&r, &row->blob_id, &bytes_count) || bytes_count != BLOB_ID_BYTES || !skip_some(&r, parts - 1) || !skip_some(&r, blobs - 1)) return false;
    if (!number(&r, &row->size) || !skip_some(&r, 3) || !text(&r, &bytes, &bytes_count)) return false;
    if (whole && !is(bytes, bytes_count, "local")) return false;
    if (!skip_some(&r, 5) || !text(&r, &bytes, &bytes_count)) return false;
    row->is_live = is(bytes, bytes_count, "live");
    if (!row->is_live) return is(bytes, bytes_count, "condemned");
    if (!whole) return true;
    if (!skip_some(&r, 1) || r.at == r.end) return false;
    if (*r.at == 0xC0) r.at++;
    else if (!text(&r, &row->parent, &row->parent_bytes)) return false;
    row->has_parent = row->parent_bytes > 0;
    if (!skip_some(&r, 2) || !text(&r, &row->space, &row->space_bytes) || !number(&r, &row->tokens)) return false;
    if (!skip_some(&r, (fields < LOSSY ? fields : LOSSY) - FIELDS_LEAST)) return false;
    if (fields > LOSSY && (r.at == r.end || *r.at++ != 0xC0)) return false; /* blobs of its own */
    return r.at == r.end && row->size <= INT64_MAX && row->tokens <= INT64_MAX;
}

/* `scan_t` of kvobj/catalog/claim_scan.py. Pointers to what is not asked or wanted are NULL. */
typedef struct {
    const table_t *objects, *objects_above, *children, *children_above; /* the latter three not where they are empty */
    const unsigned char *root, *keys;
    const uint32_t *ends; /* of each key in `keys` */
    uint64_t count;
    const unsigned char *blob_ids; /* the first one that each row is to have; NULL: rows are not asked */
    const unsigned char *held;     /* of each key whether a pin holds it */
    unsigned char *outcomes;       /* of each */
    /* What a claim wants to know besides; all or none. Of each that goes: */
    uint64_t *sizes, *tokens;
    unsigned char *hashes;  /* also where nothing else is wanted */
    unsigned char *links;   /* what it is known by among its parent's children, where it has one */
    unsigned char *spaces;  /* which of the namespaces below it is in */
    unsigned char *names;   /* of namespaces, SPACE_BYTES + 1 each: the last byte is the length */
    uint32_t names_count;
    uint32_t may_have_others; /* whether one goes that has others below it, too: somebody else asks about these */
} scan_t;

typedef struct {
    const going_t *going;
    bool all_go, is_known;
} below_t;

static bool take_child(void *context, const unsigned char *key, uint32_t key_bytes) {
    below_t *below = context;
    if (key_bytes != LINK_BYTES) return below->is_known = false;
    return below->all_go = *slot_of(below->going, key + PLACE_BYTES) != 0;
}

static bool take_facts(scan_t *scan, size_t place, const row_t *row) {
    scan->sizes[place] = row->size;
    scan->tokens[place] = row->tokens;
    if (row->has_parent) {
        unsigned char *link = scan->links + place * LINK_BYTES;
        size_t begin = scan->ends[place], length = place + 1 < scan->count ? scan->ends[place + 1] - begin : 0;
        memcpy(link, scan->root, ROOT_BYTES);
        if (length == row->parent_bytes && !memcmp(scan->keys + begin, row->parent, length)) /* as a rule the parent comes next */
            memcpy(link + ROOT_BYTES, scan->hashes + (place + 1) * HASH_BYTES, HASH_BYTES);
        else if (!key_hash(row->parent, row->parent_bytes, link + ROOT_BYTES)) return false;
        memcpy(link + PLACE_BYTES, scan->hashes + place * HASH_BYTES, HASH_BYTES);
    }
    uint32_t number = 0;
    for (; number < scan->names_count; number++) {
        const unsigned char *name = scan->names + number * (SPACE_BYTES + 1);
        if (name[SPACE_BYTES] == row->space_bytes && !memcmp(name, row->space, row->space_bytes)) break;
    }
    if (number == scan->names_count) {
        if (number == SPACES || row->space_bytes > SPACE_BYTES) return false;
        unsigned char *name = scan->names + number * (SPACE_BYTES + 1);
        memcpy(name, row->space, row->space_bytes);
        name[SPACE_BYTES] = (unsigned char)row->space_bytes;
        scan->names_count++;
    }
    scan->spaces[place] = (unsigned char)number;
    return true;
}

static bool want(wanted_t *wanted, const unsigned char *root, const unsigned char *bytes, size_t length) {
    if (ROOT_BYTES + length > LONGEST_KEY) return false;
    memcpy(wanted->key, root, ROOT_BYTES);
    memcpy(wanted->key + ROOT_BYTES, bytes, length);
    wanted->key_bytes = (uint32_t)(ROOT_BYTES + length);
    return true;
}

/* A few of the chunks, from `first` on. False: something is not known here. */
static bool scan_some(scan_t *scan, going_t *going, size_t first, int some) {
    wanted_t rows[WANTED_AT_ONCE], places[WANTED_AT_ONCE];
    search_t searches[WANTED_AT_ONCE], below[2][WANTED_AT_ONCE];
    const table_t *tables[2] = {scan->children, scan->children_above};
    for (int i = 0; scan->blob_ids && i < some; i++) {
        size_t begin = first + i ? scan->ends[first + i - 1] : 0;
        if (!want(&rows[i], scan->root, scan->keys + begin, scan->ends[first + i] - begin)) return false;
        rows[i].value = NULL;
    }
    if (scan->blob_ids && scan->objects_above) {
        if (!kvobj_find_all(scan->objects_above, searches, rows, some, true)) return false;
        for (int i = 0; i < some; i++)
            if (rows[i].value) return false; /* another row is behind it, or none: who claims it has to look at both */
    }
    if (scan->blob_ids && scan->objects->depth && !kvobj_find_all(scan->objects, searches, rows, some, true)) return false;
    for (int i = 0; i < some; i++)
        if (!want(&places[i], scan->root, scan->hashes + (first + i) * HASH_BYTES, HASH_BYTES)) return false;
    for (int t = 0; t < 2; t++)
        if (tables[t] && !kvobj_find_all(tables[t], below[t], places, some, false)) return false;
    for (int i = 0; i < some; i++) {
        size_t at = first + i;
        row_t row;
        scan->outcomes[at] = STAYS;
        if (scan->held && scan->held[at]) continue;
        if (scan->blob_ids) {
            if (!rows[i].value) continue;
            if (!read_row(rows[i].value, rows[i].length, scan->sizes != NULL, &row)) return false;
            if (!row.is_live || memcmp(row.blob_id, scan->blob_ids + at * BLOB_ID_BYTES, BLOB_ID_BYTES)) continue;
        }
        uint32_t *slot = slot_of(going, scan->hashes + at * HASH_BYTES);
        if (scan->sizes && *slot) continue; /* named twice */
        below_t children = {going, true, true};
        for (int t = 0; t < 2 && children.all_go && children.is_known; t++)
            if (tables[t] && !kvobj_each_under(tables[t], &below[t][i], &places[i], take_child, &children)) return false;
        if (!children.is_known) return false;
        if (!children.all_go && !scan->may_have_others) continue;
        if (scan->sizes && !take_facts(scan, at, &row)) return false;
        scan->outcomes[at] = GOES | (scan->sizes && row.has_parent ? HAS_PARENT : 0) | (children.all_go ? 0 : HAS_OTHERS_BELOW);
        *slot = (uint32_t)at + 1;
    }
    return true;
}

EXPORTED int kvobj_scan_claims(scan_t *scan) {
    uint64_t slots = 64;
    uint32_t begin = 0;
    if (scan->count >= UINT32_MAX / 4) return UNKNOWN;
    while (slots < 2 * scan->count) slots *= 2;
    going_t going = {scan->hashes, calloc(slots, sizeof(uint32_t)), slots - 1};
    bool is_known = going.places != NULL;
    for (size_t i = 0; is_known && i < scan->count; begin = scan->ends[i++])
        is_known = scan->ends[i] >= begin && key_hash(scan->keys + begin, scan->ends[i] - begin, scan->hashes + i * HASH_BYTES);
    for (size_t first = 0; is_known && first < scan->count; first += WANTED_AT_ONCE) {
        size_t left = scan->count - first;
        is_known = scan_some(scan, &going, first, left < WANTED_AT_ONCE ? (int)left : WANTED_AT_ONCE);
    }
    free(going.places);
    return is_known ? OK : UNKNOWN;
}
