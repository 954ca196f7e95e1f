/* Keys and values of one table, found in the pages of LMDB's map. */
#ifndef KVOBJ_TABLE_PAGES_H
#define KVOBJ_TABLE_PAGES_H

#include <stdbool.h>
#include <stdint.h>

/* A table as a snapshot sees it, for as long as the snapshot is open. `pages`: of the file. */
typedef struct {
    const unsigned char *map;
    uint64_t pages, root;
    uint32_t page_bytes, depth;
} table_t;

#define LONGEST_KEY 511

typedef struct {
    const unsigned char *value; /* NULL: the table has no such key */
    uint32_t length, key_bytes;
    unsigned char key[LONGEST_KEY];
} wanted_t;

#define WANTED_AT_ONCE 16

typedef struct {
    const unsigned char *page;
    uint32_t low, high; /* what is looked for lies in [low, high) */
    const unsigned char *next; /* no key behind the page is less than this one; NULL: there is none behind it */
    uint32_t next_bytes;
} search_t;

/* Looks up to WANTED_AT_ONCE keys up in a table that is not empty (`depth` 0). False: the pages are not as they are known here, and
 * nothing was found. */
bool kvobj_find_values(const table_t *table, wanted_t *wanted, int count);

/* Takes all of `wanted` to the leaves of a table that is not empty where they belong, and finds them there; not `is_exact`: to where
 * the first key lies that is not less. False: the pages are not as they are known here. */
bool kvobj_find_all(const table_t *table, search_t *searches, wanted_t *wanted, int count, bool is_exact);

/* Gives `take` each key that begins with what is wanted, in order, until it answers false; `found` is where the search, not an exact
 * one, has ended. False: the pages are not as they are known here. */
bool kvobj_each_under(const table_t *table, const search_t *found, const wanted_t *wanted,
                      bool (*take)(void *context, const unsigned char *key, uint32_t key_bytes), void *context);

#endif
