/* GIPE's decisions: accesses, candidates, admission, victims. Called from one thread. See gipe.h and docs/policy.md. */
#define _GNU_SOURCE /* madvise, mremap */
#include "gipe_index.h"
#include "gipe_rank.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* -- the log: block 26 bits, class 9, tick 29; without a block and of no class: not the latest access of its block any more -- */
#define CLASS_BITS 9
#define TICK_SHIFT (INDEX_BITS + CLASS_BITS)
#define TICK_MASK ((UINT64_C(1) << (64 - TICK_SHIFT)) - 1)
#define NO_CLASS ((1 << CLASS_BITS) - 1)
#define LOG_BLOCK(entry) ((uint32_t)((entry) & ((UINT64_C(1) << INDEX_BITS) - 1)))
#define LOG_CLASS(entry) ((int)((entry) >> INDEX_BITS & NO_CLASS))
#define LOG_TICK(entry) ((entry) >> TICK_SHIFT)
#define LOG_OF_NO_BLOCK(entry) ((entry) >> TICK_SHIFT << TICK_SHIFT | (uint64_t)NO_CLASS << INDEX_BITS)
enum { LOG_ROOM = 4096, LANES = 4 }; /* the room at first, a multiple of a word's bits */
enum { BATCH = 32, MOVES = 64 }; /* so many are fetched beside each other: one by one each would wait for memory */
enum { ANY_IN = IN_FLAG << DRAM | IN_FLAG << NVME, ANY_HOLDING = HOLDING_FLAG << DRAM | HOLDING_FLAG << NVME };
/* Ages in 32 bits come round after 2.2 years: when the tick passes a multiple of TERM, all beyond FAR are set back to that. */
#define FAR (UINT32_C(1) << 30) /* 199 days, beyond every bound */
#define TERM_SHIFT 31
#define OLD_TURNS 2 /* for each entry that leaves the log: one may come, so the queue stays within twice what is held */

static inline uint32_t log_place(const gipe_t *g, uint32_t rank) {
    uint32_t place = g->log_start + rank;
    return place >= g->log_room ? place - g->log_room : place;
}

static inline bool has_bit(const uint64_t *bits, uint32_t at) { return bits[at / 64] >> at % 64 & 1; }
static inline void set_bit(uint64_t *bits, uint32_t at) { bits[at / 64] |= UINT64_C(1) << at % 64; }
static inline void clear_bit(uint64_t *bits, uint32_t at) { bits[at / 64] &= ~(UINT64_C(1) << at % 64); }

/* The first from `from` on that is set, `to`: none before it is. */
static uint32_t find_bit(const uint64_t *bits, uint32_t from, uint32_t to) {
    if (from >= to) return to;
    uint64_t word = bits[from / 64] >> from % 64;
    if (!word) {
        uint32_t at = from / 64 + 1;
        while (at * 64 < to && !bits[at]) at++;
        if (at * 64 >= to) return to;
        from = at * 64;
        word = bits[at];
    }
    from += (uint32_t)__builtin_ctzll(word);
    return from < to ? from : to;
}

/* Of `room` entries and their bits, which lie behind them. */
static inline size_t log_bytes(uint64_t room) { return (room + 2 * (room / 64)) * sizeof(uint64_t); }

/* Memory of zeros becomes the log. */
static void log_take(gipe_t *g, uint64_t *log, uint64_t room) {
    g->log = log;
    g->log_listed = log + room;
    g->log_begins = g->log_listed + room / 64;
    g->log_room = (uint32_t)room;
}

static bool log_grow(gipe_t *g) {
    uint64_t room = (uint64_t)g->log_room * 2, *old = g->log, *old_listed = g->log_listed, *old_begins = g->log_begins;
    uint64_t *grown = room < UINT32_C(1) << 30 ? gipe_zeros(log_bytes(room)) : NULL;
    if (!grown) {
        g->is_out_of_memory = true;
        return false;
    }
    uint32_t old_room = g->log_room, old_start = g->log_start;
    log_take(g, grown, room);
    g->log_start = 0;
    for (uint32_t at = 0, place = old_start; at < g->log_count; at++, place = place + 1 == old_room ? 0 : place + 1) {
        grown[at] = old[place];
        if (has_bit(old_listed, place)) set_bit(g->log_listed, at);
        if (has_bit(old_begins, place)) set_bit(g->log_begins, at);
        if (place != at && LOG_BLOCK(grown[at])) g->blocks[LOG_BLOCK(grown[at])].position = at;
    }
    gipe_free(old, log_bytes(old_room));
    return true;
}

static inline int counted_bucket(const block_t *b) { return b->flags >> BUCKET_SHIFT & BUCKET_BITS; }

/* The bucket of an age: as many bounds as it has reached. The pointers have passed just the entries of those ages. */
static inline int bucket_at(const gipe_t *g, uint32_t age) {
    int bucket = age ? g->bucket_from[31 - __builtin_clz(age)] : 0;
    while (bucket < POINTERS && age >= g->bound[bucket]) bucket++;
    return bucket;
}

static int bucket_of(const gipe_t *g, uint32_t block) {
    const block_t *b = &g->blocks[block];
    return block_is(b, LOGGED) ? bucket_at(g, (uint32_t)g->tick - b->tick) : counted_bucket(b);
}

/* -- counts of what the pointers have passed: one by one they would be most of the work of an access, so they are made when somebody
 * wants them, and before that of an entry that is no more its block's latest. -- */
static void count_passed(gipe_t *g, const block_t *b, int bucket) {
    uint32_t age = (uint32_t)g->tick - b->tick, since = (uint32_t)(g->tick - g->counted_tick);
    int counted = age > since ? bucket_at(g, age - since) : 0;
    while (counted < bucket) rank_entered(&g->rank, b->class_, ++counted);
}

/* How many there are of each class. Neighbours are mostly of one: in a single lane each count would wait for the one before it. */
static void count_classes(const uint64_t *log, uint32_t count, uint32_t passed[LANES][NO_CLASS + 1]) {
    uint32_t at = 0;
    for (; at + LANES <= count; at += LANES)
        for (int lane = 0; lane < LANES; lane++) passed[lane][LOG_CLASS(log[at + lane])]++;
    for (; at < count; at++) passed[0][LOG_CLASS(log[at])]++;
}

static void count_all_passed(gipe_t *g) {
    for (int j = 0; j < POINTERS; j++) {
        uint32_t left = g->pointer[j] - g->counted[j], place = log_place(g, g->counted[j]);
        if (!left) continue;
        uint32_t straight = left < g->log_room - place ? left : g->log_room - place, passed[LANES][NO_CLASS + 1] = {{0}};
        count_classes(g->log + place, straight, passed);
        count_classes(g->log, left - straight, passed);
        for (int c = 0; c < CLASSES; c++) {
            uint32_t all = passed[0][c] + passed[1][c] + passed[2][c] + passed[3][c];
            if (all && (g->rank.entered[c][j + 1] += all) >= COUNT_MAX) halve(&g->rank);
        }
        g->counted[j] = g->pointer[j];
    }
    g->counted_tick = g->tick;
}

/* -- lists of candidates -- */
static inline int cell_of(const block_t *b, int tier) {
    return b->class_ + (tier == NVME && block_is(b, IN_FLAG << DRAM) ? CLASSES : 0);
}

static inline double cell_worth(gipe_t *g, int cell, int bucket) {
    return cell < CLASSES ? rank_worth(&g->rank, cell, bucket)
                          : rank_worth(&g->rank, cell - CLASSES, bucket) * g->duplicate_factor;
}

static void find_group_least(tier_t *t, int cell) {
    int first = cell / GROUP * GROUP;
    double least = INFINITY;
    for (int c = first; c < first + GROUP; c++)
        if (t->least[c] < least) least = t->least[c];
    t->group_least[cell / GROUP] = least;
    uint64_t bit = UINT64_C(1) << (cell / GROUP);
    t->filled_groups = least == INFINITY ? t->filled_groups & ~bit : t->filled_groups | bit;
}

static void find_least(gipe_t *g, tier_t *t, int cell) {
    double least = INFINITY;
    for (uint64_t rest = t->filled[cell]; rest; rest &= rest - 1) {
        int bucket = __builtin_ctzll(rest);
        double worth = cell_worth(g, cell, bucket);
        if (worth < least) {
            least = worth;
            t->least_bucket[cell] = (uint8_t)bucket;
        }
    }
    t->least[cell] = least;
}

static void list(gipe_t *g, uint32_t block, int tier, int bucket, bool is_young) {
    tier_t *t = &g->tier[tier];
    block_t *b = &g->blocks[block];
    holding_t *h = holding_of(g, block, tier);
    int cell = cell_of(b, tier);
    uint32_t *head = &t->head[cell][bucket], *tail = &t->tail[cell][bucket];
    if (*head == 0) {
        h->previous = h->next = 0;
        *head = *tail = block;
        t->filled[cell] |= UINT64_C(1) << bucket;
        double worth = cell_worth(g, cell, bucket);
        if (worth < t->least[cell] || (worth == t->least[cell] && bucket < t->least_bucket[cell])) {
            t->least[cell] = worth;
            t->least_bucket[cell] = (uint8_t)bucket;
            if (worth < t->group_least[cell / GROUP]) t->group_least[cell / GROUP] = worth;
            t->filled_groups |= UINT64_C(1) << (cell / GROUP);
        }
    } else if (is_young) {
        h->previous = *tail;
        h->next = 0;
        holding_of(g, *tail, tier)->next = block;
        *tail = block;
    } else {
        h->previous = 0;
        h->next = *head;
        holding_of(g, *head, tier)->previous = block;
        *head = block;
    }
    b->flags = (uint16_t)((b->flags & FLAG_MASK) | LISTED_FLAG << tier | bucket << BUCKET_SHIFT);
    if (block_is(b, LOGGED)) set_bit(g->log_listed, b->position);
}

static void unlist(gipe_t *g, uint32_t block, int tier) {
    block_t *b = &g->blocks[block];
    if (!block_is(b, LISTED_FLAG << tier)) return;
    tier_t *t = &g->tier[tier];
    holding_t *h = holding_of(g, block, tier);
    int cell = cell_of(b, tier), bucket = counted_bucket(b);
    if (h->previous) holding_of(g, h->previous, tier)->next = h->next;
    else t->head[cell][bucket] = h->next;
    if (h->next) holding_of(g, h->next, tier)->previous = h->previous;
    else t->tail[cell][bucket] = h->previous;
    if (t->head[cell][bucket] == 0) {
        t->filled[cell] &= ~(UINT64_C(1) << bucket);
        if (t->least_bucket[cell] == bucket) {
            double old = t->least[cell];
            find_least(g, t, cell);
            if (old <= t->group_least[cell / GROUP]) find_group_least(t, cell);
        }
    }
    b->flags &= (uint16_t)~(LISTED_FLAG << tier);
    if (block_is(b, LOGGED) && !(b->flags & (LISTED_FLAG << DRAM | LISTED_FLAG << NVME))) clear_bit(g->log_listed, b->position);
}

static inline uint32_t children_in(const gipe_t *g, uint32_t block, int tier) {
    const holding_t *h = holding_of(g, block, tier);
    return h ? h->children : 0;
}

static bool is_candidate(const gipe_t *g, uint32_t block, int tier) {
    const block_t *b = &g->blocks[block];
    if (!block_is(b, IN_FLAG << tier) || children_in(g, block, tier)) return false;
    /* The only copy of a chunk whose children are in dram: without it they could not be reached. */
    return tier == DRAM || block_is(b, IN_FLAG << DRAM) || children_in(g, block, DRAM) == 0;
}

static void reconsider(gipe_t *g, uint32_t block, int tier, bool is_young) {
    const block_t *b = &g->blocks[block];
    bool is_listed = block_is(b, LISTED_FLAG << tier);
    if (is_candidate(g, block, tier)) {
        if (!is_listed) list(g, block, tier, bucket_of(g, block), is_young);
    } else if (is_listed) {
        unlist(g, block, tier);
    }
}

static uint32_t first_victim(const tier_t *t) {
    int group = 0;
    double least = INFINITY;
    for (uint64_t rest = t->filled_groups; rest; rest &= rest - 1) {
        int at = __builtin_ctzll(rest);
        if (t->group_least[at] < least) {
            least = t->group_least[at];
            group = at;
        }
    }
    if (least == INFINITY) return 0;
    int cell = group * GROUP;
    while (t->least[cell] != least) cell++;
    return t->head[cell][t->least_bucket[cell]];
}

/* -- time, and what it does to ages -- */
static void refresh(gipe_t *g) {
    count_all_passed(g);
    rank_refresh(&g->rank);
    g->since_refresh = 0;
    uint64_t blocks = 0;
    for (int tier = 0; tier < TIERS; tier++) {
        tier_t *t = &g->tier[tier];
        for (int cell = 0; cell < CELLS; cell++)
            if (t->filled[cell]) find_least(g, t, cell);
        for (int group = 0; group < GROUPS; group++) find_group_least(t, group * GROUP);
        uint64_t mean = t->count ? t->used_bytes / t->count : 0;
        if (mean) blocks += t->capacity_bytes / mean;
    }
    uint64_t limit = blocks < g->log_most ? blocks * g->log_factor : g->log_most;
    if (limit > g->log_most) limit = g->log_most;
    if (limit < g->log_least) limit = g->log_least;
    if (blocks) g->log_limit = (uint32_t)limit;
}

static void move_on(gipe_t *g, uint32_t block, int bucket) {
    bool was_listed[TIERS];
    for (int tier = 0; tier < TIERS; tier++) {
        was_listed[tier] = block_is(&g->blocks[block], LISTED_FLAG << tier);
        if (was_listed[tier]) unlist(g, block, tier);
    }
    for (int tier = 0; tier < TIERS; tier++)
        if (was_listed[tier]) list(g, block, tier, bucket, true);
}

/* What lies around a candidate in its list and is touched when it is taken off: fetched beside that of others, in three steps, since
 * each needs what the one before it fetched. */
PREFETCHING void prefetch_holding(const gipe_t *g, uint32_t block, int tier) {
    const holding_t *h = block ? holding_of(g, block, tier) : NULL;
    if (h) __builtin_prefetch(h, 1);
}

PREFETCHING void prefetch_neighbours(const gipe_t *g, uint32_t block, int tier) {
    const holding_t *h = holding_of(g, block, tier);
    if (!h) return;
    __builtin_prefetch(&g->blocks[h->previous]);
    __builtin_prefetch(&g->blocks[h->next]);
}

PREFETCHING void prefetch_neighbour_holdings(const gipe_t *g, uint32_t block, int tier) {
    const holding_t *h = holding_of(g, block, tier);
    if (!h) return;
    prefetch_holding(g, h->previous, tier);
    prefetch_holding(g, h->next, tier);
}

typedef struct { uint32_t place, block, bucket; } move_t; /* at first the place in the log of the block's entry */

static void move_all(gipe_t *g, move_t *moves, int count) {
    for (int at = 0; at < count; at++) {
        moves[at].block = LOG_BLOCK(g->log[moves[at].place]);
        __builtin_prefetch(&g->blocks[moves[at].block]);
    }
    for (int tier = 0; tier < TIERS; tier++) {
        if (!g->tier[tier].count) continue;
        for (int at = 0; at < count; at++) prefetch_holding(g, moves[at].block, tier);
        for (int at = 0; at < count; at++) prefetch_neighbours(g, moves[at].block, tier);
        for (int at = 0; at < count; at++) prefetch_neighbour_holdings(g, moves[at].block, tier);
    }
    for (int at = 0; at < count; at++) move_on(g, moves[at].block, (int)moves[at].bucket);
}

/* The rank of the first entry after that of `rank` that is of a later tick; the log's end: there is none. */
static uint32_t next_begin(const gipe_t *g, uint32_t rank) {
    if (rank >= g->log_count) return g->log_count;
    uint32_t left = g->log_count - rank, place = log_place(g, rank), straight = left < g->log_room - place ? left : g->log_room - place;
    uint32_t found = find_bit(g->log_begins, place + 1, place + straight);
    if (found < place + straight || straight == left) return rank + found - place;
    return rank + straight + find_bit(g->log_begins, 0, left - straight);
}

/* Candidates whose entries lie at these places move on to the bucket, at the latest when all that go there have been named. */
static int move_listed(gipe_t *g, uint32_t from, uint32_t to, int bucket, move_t moves[MOVES], int count) {
    for (uint32_t at = find_bit(g->log_listed, from, to); at < to; at = find_bit(g->log_listed, at + 1, to)) {
        if (count == MOVES) {
            move_all(g, moves, count);
            count = 0;
        }
        moves[count++] = (move_t){.place = at, .bucket = (uint32_t)bucket};
        __builtin_prefetch(&g->log[at]);
    }
    return count;
}

/* `gone`: so many ticks ago the ages were right. */
static void hold_ages(gipe_t *g, uint64_t gone) {
    count_all_passed(g); /* what is counted later is told from what was by the ages of now */
    uint32_t before = (uint32_t)(g->tick - gone);
    for (uint32_t at = 1; at < g->blocks_made; at++) {
        uint32_t age = before - g->blocks[at].tick;
        if (age + gone > FAR) g->blocks[at].tick = (uint32_t)g->tick - FAR;
    }
}

static void advance(gipe_t *g, int64_t now_ms) {
    if (!g->has_base) {
        g->has_base = true;
        g->base_ms = (uint64_t)now_ms;
    }
    uint64_t tick = (uint64_t)now_ms > g->base_ms ? ((uint64_t)now_ms - g->base_ms) >> 4 : 0;
    if (tick <= g->tick) return;
    uint64_t gone = tick - g->tick; /* no entry is younger */
    g->tick = tick;
    move_t moves[MOVES];
    int count = 0;
    uint32_t stop[POINTERS];
    for (int j = 0; j < POINTERS; j++) {
        if (tick < g->due[j]) continue;
        stop[j] = next_begin(g, g->pointer[j]);
        __builtin_prefetch(&g->log[log_place(g, stop[j])]);
    }
    for (int j = 0; j < POINTERS; j++) {
        if (tick < g->due[j]) continue;
        uint32_t from = g->pointer[j], to = from;
        for (uint32_t next = stop[j];; next = next_begin(g, to)) {
            uint64_t age = to < g->log_count ? (tick - LOG_TICK(g->log[log_place(g, to)])) & TICK_MASK : 0;
            if (to < g->log_count && age < gone) age = gone; /* the entry's tick has come round */
            if (age < g->bound[j]) {
                g->due[j] = tick + g->bound[j] - age;
                break;
            }
            to = next;
        }
        g->pointer[j] = to;
        uint32_t place = log_place(g, from), straight = to - from < g->log_room - place ? to - from : g->log_room - place;
        count = move_listed(g, place, place + straight, j + 1, moves, count);
        count = move_listed(g, 0, to - from - straight, j + 1, moves, count);
    }
    move_all(g, moves, count);
    if (tick >> TERM_SHIFT != (tick - gone) >> TERM_SHIFT) hold_ages(g, gone);
}

static void forget_if_dead(gipe_t *g, uint32_t block) {
    if (!(g->blocks[block].flags & (LOGGED | ANY_HOLDING))) gipe_remove(g, block);
}

/* -- chunks that a tier holds and that the log has forgotten: a queue in which each comes up in turn and is counted on -- */
static void old_push(gipe_t *g, uint32_t block) {
    if (g->old_count == g->old_room) {
        uint32_t room = g->old_room * 2 + 1024;
        uint32_t *grown = gipe_zeros(room * sizeof *grown);
        if (!grown) {
            g->is_out_of_memory = true;
            return;
        }
        for (uint32_t at = 0; at < g->old_count; at++) {
            uint32_t from = (uint32_t)(((uint64_t)g->old_start + at) % g->old_room);
            block_t *b = &g->blocks[g->old[from]];
            grown[at] = g->old[from];
            if (!block_is(b, OLD) || b->position != from) grown[at] = 0;
        }
        for (uint32_t at = 0; at < g->old_count; at++)
            if (grown[at]) g->blocks[grown[at]].position = at;
        gipe_free(g->old, g->old_room * sizeof *g->old);
        g->old = grown;
        g->old_room = room;
        g->old_start = 0;
    }
    uint32_t place = g->old_start + g->old_count;
    if (place >= g->old_room) place -= g->old_room;
    g->old_count++;
    g->old[place] = block;
    g->blocks[block].position = place;
}

static void count_on(gipe_t *g, uint32_t block) {
    block_t *b = &g->blocks[block];
    uint64_t age = (uint32_t)g->tick - b->tick;
    int bucket = counted_bucket(b), was = bucket;
    while (bucket < POINTERS && age >= g->bound[bucket]) rank_entered(&g->rank, b->class_, ++bucket);
    if (bucket == was) return;
    move_on(g, block, bucket);
    b->flags = (uint16_t)((b->flags & FLAG_MASK) | bucket << BUCKET_SHIFT);
}

static void old_turn(gipe_t *g) {
    if (!g->old_count) return;
    uint32_t place = g->old_start, block = g->old[place];
    if (++g->old_start == g->old_room) g->old_start = 0;
    g->old_count--;
    if (!block || !block_is(&g->blocks[block], OLD) || g->blocks[block].position != place) return;
    count_on(g, block);
    old_push(g, block);
}

/* The blocks of entries that leave the log and those of the old ones whose turn it is, then the slots of those to be forgotten. */
PREFETCHING void prefetch_leaving(const gipe_t *g, uint32_t first, uint32_t stop) {
    for (uint32_t at = first; at < stop; at++) {
        uint64_t entry = g->log[log_place(g, at)];
        if (LOG_BLOCK(entry)) __builtin_prefetch(&g->blocks[LOG_BLOCK(entry)], 1);
    }
    uint32_t turns = OLD_TURNS * (stop - first) < g->old_count ? OLD_TURNS * (stop - first) : g->old_count, place = g->old_start;
    for (; turns; turns--, place = place + 1 == g->old_room ? 0 : place + 1) __builtin_prefetch(&g->blocks[g->old[place]]);
    for (uint32_t at = first; at < stop; at++) {
        uint64_t entry = g->log[log_place(g, at)];
        if (LOG_BLOCK(entry) && !(g->blocks[LOG_BLOCK(entry)].flags & ANY_HOLDING)) gipe_prefetch(g, g->blocks[LOG_BLOCK(entry)].name);
    }
}

static void leave_log(gipe_t *g, uint32_t place) {
    uint32_t block = LOG_BLOCK(g->log[place]);
    if (block) {
        block_t *b = &g->blocks[block];
        int bucket = bucket_of(g, block);
        count_passed(g, b, bucket);
        b->flags &= (uint16_t)~LOGGED;
        if (b->flags & ANY_IN) {
            b->flags = (uint16_t)((b->flags & FLAG_MASK) | OLD | bucket << BUCKET_SHIFT);
            old_push(g, block);
        } else {
            forget_if_dead(g, block);
        }
    }
    for (int turn = 0; turn < OLD_TURNS; turn++) old_turn(g);
}

/* What goes over the log's limit leaves it. A chunk that no tier holds is forgotten with its last entry. */
static void trim(gipe_t *g) {
    if (g->log_count <= g->log_limit) return;
    uint32_t excess = g->log_count - g->log_limit;
    for (uint32_t first = 0; first < excess; first += BATCH) {
        uint32_t stop = first + BATCH < excess ? first + BATCH : excess;
        prefetch_leaving(g, first, stop);
        for (uint32_t at = first; at < stop; at++) leave_log(g, log_place(g, at));
    }
    g->log_start = log_place(g, excess);
    g->log_count -= excess;
    for (int j = 0; j < POINTERS; j++) {
        g->pointer[j] = g->pointer[j] > excess ? g->pointer[j] - excess : 0;
        g->counted[j] = g->counted[j] > excess ? g->counted[j] - excess : 0;
    }
}

static void finish(gipe_t *g) {
    if (g->since_refresh >= g->refresh_every) refresh(g);
    trim(g);
}

/* -- accesses -- */
static inline bool is_known(const block_t *b) { return (b->flags & (ANY_IN | LOGGED)) != 0; }

static int gap_of(const gipe_t *g, const block_t *b) {
    static const uint32_t most[] = {250, 1000, 4000, 16000, 64000}; /* 4, 16, 64, 256, 1024 s */
    uint32_t gap = (uint32_t)g->tick - b->tick;
    int q = 1;
    while (q < 6 && gap >= most[q - 1]) q++;
    return q;
}

static inline void log_append(gipe_t *g, uint32_t block) {
    block_t *b = &g->blocks[block];
    uint32_t place = log_place(g, g->log_count);
    if (!g->log_count || g->log_tick != g->tick) set_bit(g->log_begins, place);
    else clear_bit(g->log_begins, place);
    clear_bit(g->log_listed, place);
    g->log[place] = block | (uint64_t)b->class_ << INDEX_BITS | (g->tick & TICK_MASK) << TICK_SHIFT;
    g->log_tick = g->tick;
    g->log_count++;
    b->position = place;
}

static void touch(gipe_t *g, uint32_t block, int gap, int hint) {
    block_t *b = &g->blocks[block];
    bool was_known = is_known(b);
    if (g->log_count == g->log_room && !log_grow(g)) return;
    if (block_is(b, OLD)) count_on(g, block);
    int bucket = bucket_of(g, block);
    if (block_is(b, LOGGED) || block_is(b, OLD)) rank_ended(&g->rank, b->class_, bucket);
    unlist(g, block, DRAM);
    unlist(g, block, NVME);
    if (block_is(b, LOGGED)) {
        count_passed(g, b, bucket);
        g->log[b->position] = LOG_OF_NO_BLOCK(g->log[b->position]);
    }
    int uses = was_known ? b->class_ % USES + 1 : 0;
    if (uses >= USES) uses = USES - 1;
    b->class_ = (uint16_t)((hint * GAPS + gap) * USES + uses);
    b->tick = (uint32_t)g->tick;
    log_append(g, block);
    b->flags = (uint16_t)((b->flags & ~OLD) | LOGGED);
    if (g->rank.entered[b->class_][0] == COUNT_MAX - 1) count_all_passed(g); /* all are halved */
    rank_entered(&g->rank, b->class_, 0);
    g->since_refresh++;
    g->accesses++;
    reconsider(g, block, DRAM, true);
    reconsider(g, block, NVME, true);
}

static bool have_scratch(gipe_t *g, uint32_t count) {
    if (count <= g->scratch_room) return true;
    uint32_t *grown = realloc(g->scratch, count * sizeof *grown);
    if (!grown) {
        g->is_out_of_memory = true;
        return false;
    }
    g->scratch = grown;
    g->scratch_room = count;
    return true;
}

static const uint64_t *name_at(const char *names, uint32_t index, uint64_t name[2]) {
    memcpy(name, names + (size_t)index * 16, 16);
    return name;
}

static void look_up(gipe_t *g, const char *names, uint32_t count) {
    uint64_t name[2];
    for (uint32_t first = 0; first < count; first += BATCH) { /* the slots, then the blocks in them, then all are there */
        uint32_t stop = first + BATCH < count ? first + BATCH : count;
        for (uint32_t at = first; at < stop; at++) gipe_prefetch(g, name_at(names, at, name));
        for (uint32_t at = first; at < stop; at++) g->scratch[at] = gipe_first_of_home(g, name_at(names, at, name));
        for (uint32_t at = first; at < stop; at++) {
            uint32_t block = g->scratch[at];
            if (!block) continue;
            name_at(names, at, name);
            if (!is_named(&g->blocks[block], name)) block = g->scratch[at] = gipe_find(g, name);
            if (!block) continue;
            const block_t *b = &g->blocks[block];
            if (block_is(b, LOGGED)) __builtin_prefetch(&g->log[b->position], 1);
            if (b->flags & ANY_HOLDING) __builtin_prefetch(&g->holdings[b->held]);
        }
    }
    g->looked_up = count;
}

/* What is offered was mostly asked for just before: the block is then where that look-up left it. */
static inline uint32_t find_again(const gipe_t *g, const uint64_t name[2], uint32_t at) {
    uint32_t block = at < g->looked_up ? g->scratch[at] : 0;
    const block_t *b = &g->blocks[block];
    return block && is_named(b, name) && (b->flags & (LOGGED | ANY_HOLDING)) ? block : gipe_find(g, name);
}

EXPORT int32_t kvobj_gipe_request(const char *names, int64_t now_ms, gipe_t *g, uint32_t count, int is_partial_last, int hint) {
    advance(g, now_ms);
    if (!count || !have_scratch(g, count)) return 0;
    look_up(g, names, count);
    uint32_t known = 0;
    while (known < count && g->scratch[known] && is_known(&g->blocks[g->scratch[known]])) known++;
    int gap = known < 2 ? 0 : gap_of(g, &g->blocks[g->scratch[known - 1]]);
    uint64_t name[2];
    for (uint32_t at = count; at-- > 0;) { /* tail first, so that a chain's end is forgotten before its beginning */
        if (!g->scratch[at]) g->scratch[at] = gipe_find_or_add(g, name_at(names, at, name));
        uint32_t block = g->scratch[at];
        if (block) touch(g, block, is_partial_last && at == count - 1 ? PARTIAL_GAP : gap, hint);
    }
    finish(g);
    return (int32_t)known;
}

/* Within the first bucket it is one use with what came before: a request that told of the chunk, then the chunk itself. */
static void access_one(gipe_t *g, uint32_t block) {
    const block_t *b = &g->blocks[block];
    if (!is_known(b)) touch(g, block, 0, 0);
    else if ((uint32_t)g->tick - b->tick >= g->bound[0]) touch(g, block, gap_of(g, b), 0);
}

EXPORT void kvobj_gipe_access(gipe_t *g, const char *raw, int64_t now_ms) {
    uint64_t name[2];
    advance(g, now_ms);
    uint32_t block = gipe_find_or_add(g, name_at(raw, 0, name));
    if (block) access_one(g, block);
    finish(g);
}

/* -- what tiers hold -- */
static void lose_child(gipe_t *g, uint32_t parent, int tier) {
    holding_t *h = holding_of(g, parent, tier);
    if (--h->children == 0) {
        if (!block_is(&g->blocks[parent], IN_FLAG << tier)) gipe_let_go(g, parent, tier);
        for (int at = tier; at < TIERS; at++) reconsider(g, parent, at, false);
        forget_if_dead(g, parent);
    }
}

static void put_in(gipe_t *g, uint32_t block, uint32_t parent, int tier, uint32_t size_bytes, bool is_listed_later) {
    tier_t *t = &g->tier[tier];
    holding_t *h = gipe_hold(g, block, tier);
    if (!h || (parent && !gipe_hold(g, parent, tier))) {
        if (h && h->children == 0) gipe_let_go(g, block, tier);
        return;
    }
    h = holding_of(g, block, tier); /* the parent's may have moved them */
    if (tier == DRAM) unlist(g, block, NVME);
    g->blocks[block].flags |= IN_FLAG << tier;
    h->size_bytes = size_bytes;
    h->parent = parent;
    t->used_bytes += size_bytes;
    t->count++;
    if (parent) {
        holding_of(g, parent, tier)->children++;
        for (int at = tier; at < TIERS; at++) reconsider(g, parent, at, false);
    }
    if (!is_listed_later) reconsider(g, block, tier, true);
    if (tier == DRAM) reconsider(g, block, NVME, false);
}

/* Nobody asked for it before it was stored: it is of its parent's request. */
static void touch_stored(gipe_t *g, uint32_t block, uint32_t parent) {
    if (is_known(&g->blocks[block])) return;
    int kind = parent ? g->blocks[parent].class_ / USES : 0;
    touch(g, block, kind % GAPS == PARTIAL_GAP ? 0 : kind % GAPS, kind / GAPS);
}

EXPORT int kvobj_gipe_stored(gipe_t *g, const char *raw, int tier, const char *raw_parent, uint32_t size_bytes, int64_t now_ms) {
    uint64_t name[2], parent_name[2];
    g->is_out_of_memory = false;
    advance(g, now_ms);
    uint32_t block = gipe_find_or_add(g, name_at(raw, 0, name));
    if (!block) return -1;
    if (block_is(&g->blocks[block], IN_FLAG << tier)) {
        holding_t *h = holding_of(g, block, tier);
        g->tier[tier].used_bytes += (uint64_t)size_bytes - h->size_bytes;
        h->size_bytes = size_bytes;
        return 0;
    }
    uint32_t parent = raw_parent && memcmp(raw, raw_parent, 16) ? gipe_find_or_add(g, name_at(raw_parent, 0, parent_name)) : 0;
    touch_stored(g, block, parent);
    put_in(g, block, parent, tier, size_bytes, false);
    finish(g);
    return g->is_out_of_memory ? -1 : 0;
}

static void take_out(gipe_t *g, uint32_t block, int tier) {
    if (!block_is(&g->blocks[block], IN_FLAG << tier)) return;
    holding_t *h = holding_of(g, block, tier);
    uint32_t parent = h->parent;
    g->tier[tier].used_bytes -= h->size_bytes;
    g->tier[tier].count--;
    unlist(g, block, tier);
    if (tier == DRAM) unlist(g, block, NVME);
    g->blocks[block].flags &= (uint16_t)~(IN_FLAG << tier);
    h->parent = 0;
    if (!(g->blocks[block].flags & ANY_IN)) g->blocks[block].flags &= (uint16_t)~OLD;
    if (h->children == 0) gipe_let_go(g, block, tier);
    if (tier == DRAM) reconsider(g, block, NVME, false);
    if (parent) lose_child(g, parent, tier);
    forget_if_dead(g, block);
}

/* The chunk whose entry came so many after the block's: a request's chunks stand in the log, and among the old, from its end to its
 * beginning, so that these are its parent, the parent of that, and so on; or else any block, so it is only good for a guess. */
enum { NEAR_KIN = 2, FAR_KIN = 5 };

static inline uint32_t kin(const gipe_t *g, uint32_t block, uint32_t steps) {
    const block_t *b = &g->blocks[block];
    bool is_old = block_is(b, OLD);
    uint32_t place = b->position + steps, room = is_old ? g->old_room : g->log_room;
    if (place >= room) place -= room;
    if (place >= room) return 0; /* where there was no memory to put it there */
    return is_old ? g->old[place] : LOG_BLOCK(g->log[place]);
}

/* The next victim is likely the parent, and then its parent, or else the next of its list, beside which the parent is put in any case:
 * that one is returned, since its holding can be fetched when its block is there. */
PREFETCHING uint32_t prefetch_coming(const gipe_t *g, uint32_t victim, bool is_another_chain, int tier) {
    for (uint32_t steps = is_another_chain ? 1 : FAR_KIN; steps <= FAR_KIN; steps++) __builtin_prefetch(&g->blocks[kin(g, victim, steps)]);
    if (!is_another_chain) prefetch_holding(g, kin(g, victim, NEAR_KIN), tier);
    const holding_t *h = holding_of(g, victim, tier);
    if (!h) return 0;
    __builtin_prefetch(&g->blocks[h->next]);
    return h->next;
}

EXPORT void kvobj_gipe_dropped(gipe_t *g, const char *raw, int tier) {
    uint64_t name[2];
    uint32_t block = gipe_find(g, name_at(raw, 0, name));
    if (block) take_out(g, block, tier);
}

EXPORT void kvobj_gipe_dropped_many(gipe_t *g, const char *raw, uint32_t count, int tier) {
    for (uint32_t at = 0; at < count; at++) kvobj_gipe_dropped(g, raw + (size_t)at * 16, tier);
}

/* -- victims: taken off the lists one by one as if they went, and all put back at the end -- */
static bool have_undo(gipe_t *g) {
    if (g->undo_count < g->undo_room) return true;
    uint32_t room = g->undo_room * 2 + 64;
    undo_t *grown = realloc(g->undo, room * sizeof *grown);
    if (!grown) {
        g->is_out_of_memory = true;
        return false;
    }
    g->undo = grown;
    g->undo_room = room;
    return true;
}

static void walk_take(gipe_t *g, int tier) {
    undo_t *u = &g->undo[g->undo_count - 1];
    u->is_taken = true;
    u->parent = holding_of(g, u->block, tier)->parent;
    if (u->parent && --holding_of(g, u->parent, tier)->children == 0) {
        reconsider(g, u->parent, tier, false);
        u->freed_parent = block_is(&g->blocks[u->parent], LISTED_FLAG << tier);
    }
}

static uint32_t walk_next(gipe_t *g, int tier) {
    uint32_t block = first_victim(&g->tier[tier]);
    if (!block || !have_undo(g)) return 0;
    unlist(g, block, tier);
    g->undo[g->undo_count++] = (undo_t){.block = block};
    return block;
}

static void walk_end(gipe_t *g, int tier) {
    while (g->undo_count) {
        undo_t *u = &g->undo[--g->undo_count];
        if (u->freed_parent) unlist(g, u->parent, tier);
        if (u->is_taken && u->parent) holding_of(g, u->parent, tier)->children++;
        list(g, u->block, tier, counted_bucket(&g->blocks[u->block]), false);
    }
}

EXPORT void kvobj_gipe_walk_begin(gipe_t *g, int64_t now_ms) { advance(g, now_ms); }

/* The next that should go, its name and size; `take`: the one named before goes. 0: none. */
EXPORT int kvobj_gipe_walk_next(gipe_t *g, int tier, int take, char *name, uint32_t *size_bytes) {
    if (take && g->undo_count) walk_take(g, tier);
    uint32_t block = walk_next(g, tier);
    if (!block) return 0;
    memcpy(name, g->blocks[block].name, 16);
    *size_bytes = holding_of(g, block, tier)->size_bytes;
    return 1;
}

/* `walk_next` up to `most` times, each taken as the next is named, until their sizes sum to `bytes_needed`. How many; the names end to
 * end and the sum of their sizes. */
EXPORT uint32_t kvobj_gipe_walk_some(gipe_t *g, int tier, int take, uint64_t bytes_needed, uint32_t most, char *names, uint64_t *bytes) {
    uint32_t count = 0;
    for (*bytes = 0; count < most && *bytes < bytes_needed; count++) {
        if ((take || count) && g->undo_count) walk_take(g, tier);
        uint32_t block = walk_next(g, tier);
        if (!block) break;
        memcpy(names + (size_t)count * 16, g->blocks[block].name, 16);
        *bytes += holding_of(g, block, tier)->size_bytes;
    }
    return count;
}

EXPORT void kvobj_gipe_walk_end(gipe_t *g, int tier) { walk_end(g, tier); }

/* Whether what would have to go is worth less, each of it: so many at most. The victims taken are then in `undo`, until walk_end. */
enum { ADMISSION_LOOKS = 64 };

static double price_of(gipe_t *g, uint32_t victim, int tier) {
    const block_t *b = &g->blocks[victim];
    double least = cell_worth(g, cell_of(b, tier), counted_bucket(b));
    return tier == NVME ? least * g->write_margin : least;
}

/* The usual case, one block for another, decided without taking anything off its list: 1 or 0; -1: it takes a walk. */
static int is_first_worth_less(gipe_t *g, double worth, uint32_t keep, int tier, uint64_t excess) {
    uint32_t victim = first_victim(&g->tier[tier]);
    if (!victim) return 0;
    if (victim == keep) return -1;
    if (!(worth > price_of(g, victim, tier))) return 0;
    return holding_of(g, victim, tier)->size_bytes >= excess ? 1 : -1;
}

static bool is_worth_it(gipe_t *g, double worth, uint32_t keep, int tier, uint64_t excess) {
    uint64_t found = 0;
    int taken = 0;
    while (taken < ADMISSION_LOOKS && found < excess) {
        uint32_t victim = walk_next(g, tier);
        if (!victim) return false;
        if (victim == keep) continue; /* no look: where an offer has just stored it, it is not even listed */
        if (!(worth > price_of(g, victim, tier))) return false;
        found += holding_of(g, victim, tier)->size_bytes;
        walk_take(g, tier);
        taken++;
    }
    return found >= excess;
}

static double worth_of(gipe_t *g, uint32_t block) {
    if (!block || !is_known(&g->blocks[block])) return rank_worth(&g->rank, 0, 0);
    return rank_worth(&g->rank, g->blocks[block].class_, bucket_of(g, block));
}

static uint64_t excess_of(const tier_t *t, uint32_t size_bytes) {
    uint64_t wanted = t->used_bytes + size_bytes;
    return wanted > t->capacity_bytes ? wanted - t->capacity_bytes : 0;
}

EXPORT int kvobj_gipe_admits(gipe_t *g, const char *raw, int tier, uint32_t size_bytes, const char *raw_parent, int64_t now_ms) {
    uint64_t name[2];
    advance(g, now_ms);
    uint64_t excess = excess_of(&g->tier[tier], size_bytes);
    if (!excess) return 1;
    if (size_bytes > g->tier[tier].capacity_bytes) return 0;
    uint32_t keep = raw_parent ? gipe_find(g, name_at(raw_parent, 0, name)) : 0;
    double worth = worth_of(g, gipe_find(g, name_at(raw, 0, name)));
    int answer = is_first_worth_less(g, worth, keep, tier, excess);
    if (answer < 0) {
        answer = is_worth_it(g, worth, keep, tier, excess);
        walk_end(g, tier);
    }
    return answer;
}

/* Store a chain's chunks from `first` on, as admits, victims, dropped and stored would one by one. Names of victims go to `gone`, which
 * has room for ADMISSION_LOOKS at the least. Returns how many were taken before the first refusal; their complement (so less than 0)
 * where `gone` has no room for the next one's victims, and the rest is to be offered in another call at the same time. */
EXPORT int32_t kvobj_gipe_offer(const char *names, int64_t now_ms, gipe_t *g, uint32_t count, uint32_t first, int tier,
                                uint32_t size_bytes, char *gone, uint32_t gone_room, uint32_t *gone_count) {
    uint64_t name[2], parent_name[2];
    *gone_count = 0;
    if (tier < 0 || tier >= TIERS) return 0; /* nothing has looked at its type */
    g->is_out_of_memory = false;
    advance(g, now_ms);
    uint32_t at = first, before = at ? gipe_find(g, name_at(names, at - 1, name)) : 0, block = 0;
    uint32_t coming = 0, following = 0;
    bool is_full = false;
    uint32_t unlisted = 0; /* stored last: no candidate, since its child comes next, until it turns out that none does */
    for (; at < count; at++, before = block) {
        name_at(names, at, name);
        if (at) name_at(names, at - 1, parent_name);
        block = find_again(g, name, at);
        if (block && block_is(&g->blocks[block], IN_FLAG << tier)) {
            if (unlisted) reconsider(g, unlisted, tier, true);
            unlisted = 0;
            continue;
        }
        uint64_t excess = excess_of(&g->tier[tier], size_bytes);
        if (excess) {
            uint32_t keep = before, live = g->blocks_live;
            double worth = worth_of(g, block);
            uint32_t victims[ADMISSION_LOOKS], found = 0;
            int is_taken = size_bytes > g->tier[tier].capacity_bytes ? 0 : is_first_worth_less(g, worth, keep, tier, excess);
            if (is_taken > 0) {
                victims[found++] = first_victim(&g->tier[tier]);
            } else if (is_taken < 0) {
                is_taken = is_worth_it(g, worth, keep, tier, excess);
                for (uint32_t u = 0; is_taken && u < g->undo_count; u++)
                    if (g->undo[u].is_taken) victims[found++] = g->undo[u].block;
                walk_end(g, tier);
            }
            is_full = is_taken && *gone_count + found > gone_room;
            if (!is_taken || is_full) break;
            for (uint32_t u = 0; u < found; u++) {
                memcpy(gone + (size_t)(*gone_count)++ * 16, g->blocks[victims[u]].name, 16);
                coming = prefetch_coming(g, victims[u], victims[u] != following, tier);
                const holding_t *h = holding_of(g, victims[u], tier);
                following = h->parent;
                take_out(g, victims[u], tier);
            }
            if (live != g->blocks_live) { /* the last child of a chunk that nobody holds has taken that one with it */
                block = gipe_find(g, name);
                before = at ? gipe_find(g, parent_name) : 0;
            }
        }
        if (!block) block = gipe_find_or_add(g, name);
        uint32_t parent = at && memcmp(name, parent_name, 16) ? before : 0;
        if (at && !parent && memcmp(name, parent_name, 16)) parent = gipe_find_or_add(g, parent_name);
        if (!block || g->is_out_of_memory) break;
        touch_stored(g, block, parent);
        put_in(g, block, parent, tier, size_bytes, true);
        if (!block_is(&g->blocks[block], IN_FLAG << tier)) break; /* there was no memory to hold it */
        unlisted = block;
        prefetch_holding(g, coming, tier);
    }
    if (unlisted) reconsider(g, unlisted, tier, true);
    if (is_full) return ~(int32_t)(at - first);
    finish(g);
    return (int32_t)(at - first);
}

/* Which tiers hold each chunk: a byte each, bit 0 dram, bit 1 nvme. */
EXPORT void kvobj_gipe_locate(gipe_t *g, const char *names, uint32_t count, uint8_t *tiers) {
    if (!have_scratch(g, count)) return;
    look_up(g, names, count);
    for (uint32_t at = 0; at < count; at++) {
        uint32_t block = g->scratch[at];
        tiers[at] = block ? g->blocks[block].flags & ANY_IN : 0;
    }
}

/* -- the whole -- */
EXPORT void kvobj_gipe_close(gipe_t *g) {
    if (!g) return;
    gipe_free(g->blocks, g->blocks_room * sizeof *g->blocks);
    gipe_free(g->holdings, g->holdings_room * sizeof *g->holdings);
    gipe_free(g->slots, g->slots_room * sizeof *g->slots);
    gipe_free(g->log, log_bytes(g->log_room));
    gipe_free(g->old, g->old_room * sizeof *g->old);
    free(g->undo);
    free(g->scratch);
    free(g);
}

EXPORT gipe_t *kvobj_gipe_open(const uint64_t capacities[TIERS], const uint64_t bound[POINTERS], double duplicate_factor, double write_margin,
                               double prior_weight, double prior_rate, uint32_t refresh_every, uint32_t log_factor,
                               uint32_t log_least, uint32_t log_most) {
    gipe_t *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    uint64_t *log = gipe_zeros(log_bytes(LOG_ROOM));
    if (log) log_take(g, log, LOG_ROOM);
    if (!log || !gipe_index_open(g)) {
        kvobj_gipe_close(g);
        return NULL;
    }
    memcpy(g->bound, bound, sizeof g->bound);
    for (int bit = 0; bit < 32; bit++)
        while (g->bucket_from[bit] < POINTERS && UINT32_C(1) << bit >= bound[g->bucket_from[bit]]) g->bucket_from[bit]++;
    rank_open(&g->rank, bound, prior_weight, prior_rate);
    for (int tier = 0; tier < TIERS; tier++) {
        g->tier[tier].capacity_bytes = capacities[tier];
        for (int cell = 0; cell < CELLS; cell++) g->tier[tier].least[cell] = INFINITY;
        for (int group = 0; group < GROUPS; group++) g->tier[tier].group_least[group] = INFINITY;
    }
    g->duplicate_factor = duplicate_factor;
    g->write_margin = write_margin;
    g->refresh_every = refresh_every;
    g->log_factor = log_factor;
    g->log_least = g->log_limit = log_least;
    g->log_most = log_most;
    return g;
}

EXPORT void kvobj_gipe_set_capacity(gipe_t *g, int tier, uint64_t capacity_bytes) { g->tier[tier].capacity_bytes = capacity_bytes; }

/* used, count of dram, of nvme; blocks known, holdings, log entries, log limit, bytes allocated, accesses */
EXPORT void kvobj_gipe_totals(const gipe_t *g, uint64_t totals[10]) {
    for (int tier = 0; tier < TIERS; tier++) {
        totals[2 * tier] = g->tier[tier].used_bytes;
        totals[2 * tier + 1] = g->tier[tier].count;
    }
    totals[4] = g->blocks_live;
    totals[5] = g->holdings_live;
    totals[6] = g->log_count;
    totals[7] = g->log_limit;
    totals[8] = sizeof *g + (uint64_t)g->blocks_room * sizeof *g->blocks + (uint64_t)g->holdings_room * sizeof *g->holdings +
                (uint64_t)g->slots_room * sizeof *g->slots + log_bytes(g->log_room) + (uint64_t)g->old_room * sizeof *g->old +
                (uint64_t)g->undo_room * sizeof *g->undo + (uint64_t)g->scratch_room * sizeof *g->scratch;
    totals[9] = g->accesses;
}

EXPORT void kvobj_gipe_counts(gipe_t *g, uint32_t *entered, uint32_t *ended) {
    count_all_passed(g);
    memcpy(entered, g->rank.entered, sizeof g->rank.entered);
    memcpy(ended, g->rank.ended, sizeof g->rank.ended);
}

EXPORT void kvobj_gipe_set_counts(gipe_t *g, const uint32_t *entered, const uint32_t *ended) {
    count_all_passed(g);
    memcpy(g->rank.entered, entered, sizeof g->rank.entered);
    memcpy(g->rank.ended, ended, sizeof g->rank.ended);
    refresh(g);
}
