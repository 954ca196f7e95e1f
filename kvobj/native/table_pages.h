/* Values of many keys of one table, found in the pages of LMDB's map. */
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

/* Looks up to WANTED_AT_ONCE keys up in a table that is not empty (`depth` 0). False: the pages are not as they are known here, and
 * nothing was found. */
bool kvobj_find_values(const table_t *table, wanted_t *wanted, int count);

#endif
