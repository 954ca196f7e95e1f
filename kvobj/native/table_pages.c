/* See table_pages.h. A look-up waits for memory a dozen times, one entry after the other; here many take each step together, so that
 * they wait together. The page format is that of LMDB's data version 1 (0.9), on which its own compatibility rests. Pages that a
 * snapshot sees are not written. What is not as expected is left to LMDB itself. */
#include <stddef.h>
#include <string.h>

#include "table_pages.h"

#define PAGE_HEAD 16 /* number (8), padding (2), flags (2), end of the places (2), begin of the entries (2) */
#define ENTRY_HEAD 8 /* low and high half of a size, or of a page's number; flags, or its upper bits; key's bytes */
#define BRANCH 1
#define LEAF 2

typedef struct {
    const unsigned char *page;
    uint32_t low, high; /* what is looked for lies in [low, high) */
} search_t;

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

static bool take_value(const table_t *table, const search_t *search, const unsigned char *at, wanted_t *wanted) {
    uint32_t length = u16(at) | u16(at + 2) << 16;
    const unsigned char *value = at + ENTRY_HEAD + wanted->key_bytes;
    if (u16(at + 4) || !is_within(table, search, value, length)) return false; /* in pages of its own, among others */
    for (uint32_t line = 0; line < length; line += 64) __builtin_prefetch(value + line);
    wanted->value = value;
    wanted->length = length;
    return true;
}

/* One comparison of a search that has any left. */
static bool step(const table_t *table, search_t *search, bool is_leaf, wanted_t *wanted) {
    uint32_t place = middle(search);
    const unsigned char *at = entry(search, place);
    if (!is_within(table, search, at, ENTRY_HEAD)) return false;
    uint32_t key_bytes = u16(at + 6), least = key_bytes < wanted->key_bytes ? key_bytes : wanted->key_bytes;
    if (!is_within(table, search, at, ENTRY_HEAD + (uint64_t)key_bytes)) return false;
    int order = memcmp(wanted->key, at + ENTRY_HEAD, least);
    if (!order) order = (wanted->key_bytes > key_bytes) - (wanted->key_bytes < key_bytes);
    if (!order && is_leaf) {
        search->low = search->high;
        return take_value(table, search, at, wanted);
    }
    if (order < 0) search->high = place;
    else search->low = place + 1;
    if (search->low < search->high) __builtin_prefetch(entry(search, middle(search)));
    return true;
}

static bool descend(const table_t *table, search_t *search) {
    const unsigned char *at = entry(search, search->low - 1);
    if (!is_within(table, search, at, ENTRY_HEAD)) return false;
    search->page = page_of(table, u16(at) | (uint64_t)u16(at + 2) << 16 | (uint64_t)u16(at + 4) << 32);
    return search->page != NULL;
}

bool kvobj_find_values(const table_t *table, wanted_t *wanted, int count) {
    search_t searches[WANTED_AT_ONCE];
    for (int i = 0; i < count; i++) wanted[i].value = NULL;
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
                if (!step(table, &searches[i], is_leaf, &wanted[i])) return false;
                any = true;
            }
        }
        for (int i = 0; !is_leaf && i < count; i++)
            if (!descend(table, &searches[i])) return false;
    }
    return true;
}
