/* See table_pages.h. A look-up waits for memory a dozen times, one entry after the other; here many take each step together, so that
 * they wait together. The page format is that of LMDB's data version 1 (0.9), on which its own compatibility rests. Pages that a
 * snapshot sees are not written. What is not as expected is left to LMDB itself. */
#include <stddef.h>
#include <string.h>

#include "table_pages.h"

#define EXPORTED __attribute__((visibility("default")))
#define ABSENT 0xFFFFFFFFu /* where a length is expected */
#define UNKNOWN 0xFFFFFFFEu /* where a length or a number of values is: LMDB has to be asked */

#define PAGE_HEAD 16 /* number (8), padding (2), flags (2), end of the places (2), begin of the entries (2) */
#define ENTRY_HEAD 8 /* low and high half of a size, or of a page's number; flags, or its upper bits; key's bytes */
#define BRANCH 1
#define LEAF 2

static uint32_t u16(const unsigned char *at) { return at[0] | (uint32_t)at[1] << 8; }

static uint64_t u64(const unsigned char *at) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) value = value << 8 | at[i];
    return value;
}

/* Where a page lies; it is on its way into the cache. NULL: there is none of that number. */
static const unsigned char *page_of(const table_t *table, uint64_t number) {
    if (number >= table->pages) return NULL;
    const unsigned char *page = table->map + number * table->page_bytes;
    __builtin_prefetch(page);
    __builtin_prefetch(page + 64);
    return page;
}

static bool enter(const table_t *table, search_t *search, bool is_leaf) {
    const unsigned char *page = search->page;
    uint32_t end = u16(page + 12);
    if (u16(page + 10) != (is_leaf ? LEAF : BRANCH) || u64(page) * table->page_bytes != (uint64_t)(page - table->map)) return false;
    if (end <= PAGE_HEAD || end > table->page_bytes) return false;
    search->low = is_leaf ? 0 : 1; /* the first key of a branch stands for all that are less */
    search->high = (end - PAGE_HEAD) / 2;
    return true;
}

static const unsigned char *entry(const search_t *search, uint32_t place) {
    return search->page + u16(search->page + PAGE_HEAD + 2 * place);
}

static uint32_t middle(const search_t *search) { return (search->low + search->high) / 2; }

static bool is_within(const table_t *table, const search_t *search, const unsigned char *at, uint64_t bytes) {
    return (uint64_t)(at - search->page) + bytes <= table->page_bytes;
}

/* The value of a leaf's entry. False: it is in pages of its own, among others. */
static bool value_of(const table_t *table, const search_t *search, const unsigned char *at, const unsigned char **value, uint32_t *length) {
    *length = u16(at) | u16(at + 2) << 16;
    *value = at + ENTRY_HEAD + u16(at + 6);
    return !u16(at + 4) && is_within(table, search, *value, *length);
}

static bool take_value(const table_t *table, const search_t *search, const unsigned char *at, wanted_t *wanted) {
    const unsigned char *value;
    uint32_t length;
    if (!value_of(table, search, at, &value, &length)) return false;
    for (uint32_t line = 0; line < length; line += 64) __builtin_prefetch(value + line);
    wanted->value = value;
    wanted->length = length;
    return true;
}

/* One comparison of a search that has any left. Not `is_exact`: for where the first key lies that is not less. */
static bool step(const table_t *table, search_t *search, bool is_leaf, bool is_exact, wanted_t *wanted) {
    uint32_t place = middle(search);
    const unsigned char *at = entry(search, place);
    if (!is_within(table, search, at, ENTRY_HEAD)) return false;
    uint32_t key_bytes = u16(at + 6), least = key_bytes < wanted->key_bytes ? key_bytes : wanted->key_bytes;
    if (!is_within(table, search, at, ENTRY_HEAD + (uint64_t)key_bytes)) return false;
    int order = memcmp(wanted->key, at + ENTRY_HEAD, least);
    if (!order) order = (wanted->key_bytes > key_bytes) - (wanted->key_bytes < key_bytes);
    if (!order && is_leaf && is_exact) {
        search->low = search->high;
        return take_value(table, search, at, wanted);
    }
    if (order < 0 || (!order && is_leaf)) search->high = place;
    else search->low = place + 1;
    if (search->low < search->high) __builtin_prefetch(entry(search, middle(search)));
    return true;
}

static bool descend(const table_t *table, search_t *search) {
    const unsigned char *at = entry(search, search->low - 1);
    if (!is_within(table, search, at, ENTRY_HEAD)) return false;
    if (search->low < (u16(search->page + 12) - PAGE_HEAD) / 2) {
        const unsigned char *next = entry(search, search->low);
        if (!is_within(table, search, next, ENTRY_HEAD) || !is_within(table, search, next, ENTRY_HEAD + (uint64_t)u16(next + 6)))
            return false;
        search->next = next + ENTRY_HEAD;
        search->next_bytes = u16(next + 6);
    }
    search->page = page_of(table, u16(at) | (uint64_t)u16(at + 2) << 16 | (uint64_t)u16(at + 4) << 32);
    return search->page != NULL;
}

bool kvobj_find_all(const table_t *table, search_t *searches, wanted_t *wanted, int count, bool is_exact) {
    for (int i = 0; i < count; i++) {
        wanted[i].value = NULL;
        searches[i].next = NULL;
    }
    for (int i = 0; i < count; i++)
        if (!(searches[i].page = page_of(table, table->root))) return false;
    for (uint32_t level = 1; level <= table->depth; level++) {
        bool is_leaf = level == table->depth;
        for (int i = 0; i < count; i++) {
            if (!enter(table, &searches[i], is_leaf)) return false;
            if (searches[i].low < searches[i].high) __builtin_prefetch(entry(&searches[i], middle(&searches[i])));
        }
        for (bool any = true; any;) {
            any = false;
            for (int i = 0; i < count; i++) {
                if (searches[i].low >= searches[i].high) continue;
                if (!step(table, &searches[i], is_leaf, is_exact, &wanted[i])) return false;
                any = true;
            }
        }
        for (int i = 0; !is_leaf && i < count; i++)
            if (!descend(table, &searches[i])) return false;
    }
    return true;
}

bool kvobj_find_values(const table_t *table, wanted_t *wanted, int count) {
    search_t searches[WANTED_AT_ONCE];
    return kvobj_find_all(table, searches, wanted, count, true);
}

/* The next few of `count` keys that lie end to end (ends: where each does); how many, -1: one is longer than keys are. */
static int take_keys(wanted_t *wanted, const unsigned char *keys, const uint32_t *ends, size_t count, size_t next) {
    int some = 0;
    for (; next < count && some < WANTED_AT_ONCE; next++, some++) {
        uint32_t begin = next ? ends[next - 1] : 0;
        if (ends[next] < begin || ends[next] - begin > LONGEST_KEY) return -1;
        wanted[some].key_bytes = ends[next] - begin;
        memcpy(wanted[some].key, keys + begin, wanted[some].key_bytes);
    }
    return some;
}

/* Values end to end, as far as there is room. */
typedef struct {
    unsigned char *to;
    uint64_t room, used;
} values_t;

static bool add(values_t *values, const unsigned char *value, uint32_t length) {
    if (values->room - values->used < length) return false;
    memcpy(values->to + values->used, value, length);
    values->used += length;
    return true;
}

/* Of each of `count` keys the value: its length, or ABSENT, or UNKNOWN where `to` has no room left for it. The bytes used of `to`, -1:
 * the pages are not as they are known here. */
EXPORTED int64_t kvobj_copy_values(const table_t *table, const unsigned char *keys, const uint32_t *ends, size_t count, uint32_t *lengths,
                                   unsigned char *to, uint64_t room) {
    wanted_t wanted[WANTED_AT_ONCE];
    values_t values = {to, room, 0};
    for (size_t next = 0, some; next < count; next += some) {
        int taken = take_keys(wanted, keys, ends, count, next);
        if (taken < 0) return -1;
        some = (size_t)taken;
        for (int i = 0; !table->depth && i < taken; i++) wanted[i].value = NULL;
        if (table->depth && !kvobj_find_values(table, wanted, taken)) return -1;
        for (size_t i = 0; i < some; i++) {
            if (!wanted[i].value) lengths[next + i] = ABSENT;
            else lengths[next + i] = add(&values, wanted[i].value, wanted[i].length) ? wanted[i].length : UNKNOWN;
        }
    }
    return (int64_t)values.used;
}

static bool begins_with(const unsigned char *key, uint32_t key_bytes, const wanted_t *wanted) {
    return key_bytes >= wanted->key_bytes && !memcmp(wanted->key, key, wanted->key_bytes);
}

static bool is_less(const unsigned char *one, uint32_t one_bytes, const unsigned char *other, uint32_t other_bytes) {
    int order = memcmp(one, other, one_bytes < other_bytes ? one_bytes : other_bytes);
    return order ? order < 0 : one_bytes < other_bytes;
}

bool kvobj_each_under(const table_t *table, const search_t *found, const wanted_t *wanted,
                      bool (*take)(void *context, const unsigned char *key, uint32_t key_bytes), void *context) {
    search_t at = *found;
    for (;;) {
        uint32_t entries = (u16(at.page + 12) - PAGE_HEAD) / 2;
        for (uint32_t place = at.low; place < entries; place++) {
            const unsigned char *one = entry(&at, place);
            if (!is_within(table, &at, one, ENTRY_HEAD)) return false;
            uint32_t key_bytes = u16(one + 6);
            if (!is_within(table, &at, one, ENTRY_HEAD + (uint64_t)key_bytes)) return false;
            if (!begins_with(one + ENTRY_HEAD, key_bytes, wanted) || !take(context, one + ENTRY_HEAD, key_bytes)) return true;
        }
        if (!at.next || !begins_with(at.next, at.next_bytes, wanted)) return true;
        wanted_t first; /* what the next leaf begins with, or a little less: it leads there */
        search_t next = {0};
        if (at.next_bytes > LONGEST_KEY) return false;
        first.key_bytes = at.next_bytes;
        memcpy(first.key, at.next, at.next_bytes);
        if (!kvobj_find_all(table, &next, &first, 1, false) || next.page == at.page) return false;
        if (next.next && !is_less(first.key, first.key_bytes, next.next, next.next_bytes)) return false; /* it would never end */
        at = next;
    }
}

/* Appends the values of a leaf's entries whose keys begin with what is wanted. How many; UNKNOWN where that may go on in another leaf,
 * a value lies elsewhere, or there is no room: then nothing is appended. */
static uint32_t take_under(const table_t *table, const search_t *search, const wanted_t *wanted, values_t *values, uint32_t *lengths,
                           size_t lengths_room) {
    uint32_t entries = (u16(search->page + 12) - PAGE_HEAD) / 2, found = 0;
    uint64_t used = values->used;
    for (uint32_t place = search->low;; place++, found++) {
        if (place == entries) {
            if (search->next && begins_with(search->next, search->next_bytes, wanted)) break;
            return found;
        }
        const unsigned char *at = entry(search, place), *value;
        uint32_t length;
        if (!is_within(table, search, at, ENTRY_HEAD) || !is_within(table, search, at, ENTRY_HEAD + (uint64_t)u16(at + 6))) break;
        if (!begins_with(at + ENTRY_HEAD, u16(at + 6), wanted)) return found;
        if (found == lengths_room || !value_of(table, search, at, &value, &length) || !add(values, value, length)) break;
        lengths[found] = length;
    }
    values->used = used;
    return UNKNOWN;
}

/* Of each of `count` prefixes the values of all keys that begin with it: their number or UNKNOWN into `counts`, their lengths one after
 * the other into `lengths`, which has room for so many. The bytes used of `to`, -1: the pages are not as they are known here. */
EXPORTED int64_t kvobj_copy_values_under(const table_t *table, const unsigned char *prefixes, const uint32_t *ends, size_t count,
                                         uint32_t *counts, uint32_t *lengths, size_t lengths_room, unsigned char *to, uint64_t room) {
    wanted_t wanted[WANTED_AT_ONCE];
    search_t searches[WANTED_AT_ONCE];
    values_t values = {to, room, 0};
    for (size_t next = 0, some; next < count; next += some) {
        int taken = take_keys(wanted, prefixes, ends, count, next);
        if (taken < 0) return -1;
        some = (size_t)taken;
        if (table->depth && !kvobj_find_all(table, searches, wanted, taken, false)) return -1;
        for (size_t i = 0; i < some; i++) {
            uint32_t found = table->depth ? take_under(table, &searches[i], &wanted[i], &values, lengths, lengths_room) : 0;
            counts[next + i] = found;
            if (found == UNKNOWN) continue;
            lengths += found;
            lengths_room -= found;
        }
    }
    return (int64_t)values.used;
}
