/* GIPE: Gittins-index prefix eviction (docs/policy.md). The types; gipe_index.h and gipe_rank.h are parts of gipe.c in files of their own.
 * kvobj/policy/gipe_python.py is the twin, and both must decide alike to the last bit: the same operations on doubles in the same
 * order, ties to the lower class, then to the lower bucket.
 *
 * Sizes: 32 bytes a known chunk (cached or ghost), 4 to 8 more in the index, 24 for each tier that holds it, 8 and 2 bits a log entry.
 */
#ifndef KVOBJ_GIPE_H
#define KVOBJ_GIPE_H

#include <stdbool.h>
#include <stdint.h>
#include <stddef.h>

enum {
    TIERS = 2, DRAM = 0, NVME = 1,
    BUCKETS = 40, POINTERS = BUCKETS - 1,
    USES = 6, GAPS = 8, HINTS = 6, CLASSES = USES * GAPS * HINTS,
    /* A copy in nvme whose chunk is in dram too is worth less: it is ranked in a class of its own. */
    CELLS = 2 * CLASSES, GROUP = 16, GROUPS = CELLS / GROUP,
    PARTIAL_GAP = 7,
    INDEX_BITS = 26,
};

/* Flags of a block. IN: a tier holds it. HOLDING: it has a record for the tier, since it is in it or a child of it is. LISTED: it is a
 * candidate there. LOGGED: its latest access is still in the log. OLD: it has left the log and a tier holds it. The six bits between are the
 * bucket that a LISTED or OLD one was last counted in. */
enum {
    IN_FLAG = 1, HOLDING_FLAG = 4, LISTED_FLAG = 16, LOGGED = 128, BUCKET_SHIFT = 8, BUCKET_BITS = 63,
    OLD = 1 << 14, FLAG_MASK = OLD | ((1 << BUCKET_SHIFT) - 1),
};

typedef struct {
    uint64_t name[2];
    uint32_t position; /* in the log where LOGGED, among the old ones where OLD */
    uint32_t tick;     /* of the latest access; 16 ms each. Of one long ago: long ago */
    uint32_t held;     /* first holding: dram's, if it has that one; in a free block the next free one */
    uint16_t class_;
    uint16_t flags;    /* and from BUCKET_SHIFT on, the bucket that it is listed under */
} block_t;

typedef struct {
    uint32_t previous, next; /* blocks of the list of candidates */
    uint32_t parent;         /* block, 0: none */
    uint32_t size_bytes;
    uint32_t children;       /* that are in this tier */
    uint32_t sibling;        /* the other tier's holding; in a free one the next free one */
} holding_t;

/* Counts and the index made of them. */
typedef struct {
    uint32_t entered[CLASSES][BUCKETS];
    uint32_t ended[CLASSES][BUCKETS];
    double pool[BUCKETS];
    double by_uses[USES][BUCKETS];
    double worth[CLASSES + USES][BUCKETS]; /* the last ones for classes without counts of their own */
    uint16_t row[CLASSES];                 /* of `worth` */
    double width[BUCKETS];
    double prior_weight, prior_rate;
} rank_t;

/* Candidates of one tier: a list for each class and bucket, and the least index by class and by group of classes. */
typedef struct {
    uint32_t head[CELLS][BUCKETS], tail[CELLS][BUCKETS];
    uint64_t filled[CELLS]; /* a bit for each bucket */
    double least[CELLS];
    uint8_t least_bucket[CELLS];
    double group_least[GROUPS];
    uint64_t filled_groups; /* a bit for each group */
    uint64_t capacity_bytes, used_bytes, count;
} tier_t;

typedef struct {
    uint32_t block, parent;
    bool is_taken, freed_parent;
} undo_t;

typedef struct {
    block_t *blocks;
    holding_t *holdings;
    uint32_t *slots;
    uint32_t blocks_made, blocks_room, blocks_free, blocks_live;
    uint32_t holdings_made, holdings_room, holdings_free, holdings_live;
    uint32_t slots_room;

    uint64_t *log;
    uint32_t log_room, log_start, log_count, log_limit;
    uint64_t *log_listed;       /* a bit an entry: its block is listed */
    uint64_t *log_begins;       /* a bit an entry: of another tick than the one before it */
    uint64_t log_tick;          /* of the last entry */
    uint32_t pointer[POINTERS]; /* entries after log_start that the pointer has passed */
    uint32_t counted[POINTERS]; /* so many of them were counted, at counted_tick */
    uint64_t due[POINTERS];     /* tick before which the pointer passes nothing */
    uint64_t bound[POINTERS];   /* ticks */
    uint64_t counted_tick;
    uint8_t bucket_from[32];    /* bounds up to the power of two */
    uint32_t *old;              /* blocks, looked at in turn; stale where the block's position is another */
    uint32_t old_room, old_start, old_count;

    tier_t tier[TIERS];
    rank_t rank;
    uint64_t tick, base_ms;
    bool has_base;
    double duplicate_factor, write_margin;
    uint32_t refresh_every, since_refresh;
    uint32_t log_factor, log_least, log_most;
    uint64_t accesses;

    undo_t *undo;
    uint32_t undo_count, undo_room;
    uint32_t *scratch;      /* the blocks of the latest look-up's names */
    uint32_t scratch_room, looked_up;
    bool is_out_of_memory;
} gipe_t;

static inline double rank_worth(const rank_t *rank, int class_, int bucket) {
    return rank->worth[rank->row[class_]][bucket];
}

static inline bool block_is(const block_t *block, int flag) { return (block->flags & flag) != 0; }

static inline holding_t *holding_of(const gipe_t *g, uint32_t block, int tier) {
    const block_t *b = &g->blocks[block];
    if (!block_is(b, HOLDING_FLAG << tier)) return NULL;
    holding_t *first = &g->holdings[b->held];
    return tier == NVME && block_is(b, HOLDING_FLAG << DRAM) ? &g->holdings[first->sibling] : first;
}

#endif
