/* GIPE's decisions: accesses, candidates, admission, victims. Called from one thread. See gipe.h and docs/policy.md. */
#define _DEFAULT_SOURCE /* madvise */
#include "gipe_index.h"
#include "gipe_rank.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* -- the log: block 26 bits, class 9, whether the block is listed 1, tick 28; 0: not the latest access of its block any more -- */
#define TICK_BITS 28
#define TICK_MASK ((UINT64_C(1) << TICK_BITS) - 1)
#define LOG_LISTED (UINT64_C(1) << 35)
#define LOG_BLOCK(entry) ((uint32_t)((entry) & ((UINT64_C(1) << INDEX_BITS) - 1)))
#define LOG_CLASS(entry) ((int)((entry) >> INDEX_BITS & 511))
#define LOG_TICK(entry) ((entry) >> 36)
#define LINE_BYTES 64
#define LINES_AHEAD 5
enum { BATCH = 32, MOVES = 64 }; /* so many are fetched beside each other: one by one each would wait for memory */
enum { ANY_IN = IN_FLAG << DRAM | IN_FLAG << NVME, ANY_HOLDING = HOLDING_FLAG << DRAM | HOLDING_FLAG << NVME };
#define OLD_TURNS 2 /* for each entry that leaves the log: one may come, so the queue stays within twice what is held */

static inline uint32_t log_place(const gipe_t *g, uint32_t rank) {
    uint32_t place = g->log_start + rank;
    return place >= g->log_room ? place - g->log_room : place;
}

static inline uint32_t log_rank(const gipe_t *g, uint32_t place) {
    return place >= g->log_start ? place - g->log_start : place + g->log_room - g->log_start;
}

static bool log_grow(gipe_t *g) {
    uint64_t room = (uint64_t)g->log_room * 2;
    uint64_t *grown = room < UINT32_C(1) << 30 ? gipe_regrow(NULL, 0, room * sizeof *grown) : NULL;
    if (!grown) {
        g->is_out_of_memory = true;
        return false;
    }
    for (uint32_t at = 0; at < g->log_count; at++) {
        grown[at] = g->log[log_place(g, at)];
        if (grown[at]) g->blocks[LOG_BLOCK(grown[at])].position = at;
    }
    free(g->log);
    g->log = grown;
    g->log_room = (uint32_t)room;
    g->log_start = 0;
    return true;
}

static inline int counted_bucket(const block_t *b) { return b->flags >> BUCKET_SHIFT & BUCKET_BITS; }

static int bucket_of(const gipe_t *g, uint32_t block) {
    const block_t *b = &g->blocks[block];
    if (!block_is(b, LOGGED)) return counted_bucket(b);
    int low = 0, high = POINTERS; /* as the pointers say, which never go forward as j grows */
    uint32_t rank = log_rank(g, b->position);
    while (low < high) {
        int middle = (low + high) / 2;
        if (g->pointer[middle] > rank) low = middle + 1;
        else high = middle;
    }
    return low;
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
    if (block_is(b, LOGGED)) g->log[b->position] |= LOG_LISTED;
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
    if (block_is(b, LOGGED) && !(b->flags & (LISTED_FLAG << DRAM | LISTED_FLAG << NVME))) g->log[b->position] &= ~LOG_LISTED;
}

static inline uint32_t children_in(const gipe_t *g, uint32_t block, int tier) {
    const holding_t *h = holding_of(g, block, tier);
    return h ? h->children : 0;
}

static bool is_candidate(const gipe_t *g, uint32_t block, int tier) {
    const block_t *b = &g->blocks[block];
    if (!block_is(b, IN_FLAG << tier) || block_is(b, PINNED) || children_in(g, block, tier)) return false;
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

typedef struct { uint32_t block, bucket; } move_t;

static void move_all(gipe_t *g, const move_t *moves, int count) {
    for (int at = 0; at < count; at++) __builtin_prefetch(&g->blocks[moves[at].block]);
    for (int tier = 0; tier < TIERS; tier++) {
        if (!g->tier[tier].count) continue;
        for (int at = 0; at < count; at++) prefetch_holding(g, moves[at].block, tier);
        for (int at = 0; at < count; at++) prefetch_neighbours(g, moves[at].block, tier);
        for (int at = 0; at < count; at++) prefetch_neighbour_holdings(g, moves[at].block, tier);
    }
    for (int at = 0; at < count; at++) move_on(g, moves[at].block, (int)moves[at].bucket);
}

static void advance(gipe_t *g, int64_t now_ms) {
    if (!g->has_base) {
        g->has_base = true;
        g->base_ms = (uint64_t)now_ms;
    }
    uint64_t tick = (uint64_t)now_ms > g->base_ms ? ((uint64_t)now_ms - g->base_ms) >> 4 : 0;
    if (tick <= g->tick) return;
    g->tick = tick;
    move_t moves[MOVES];
    int count = 0;
    for (int j = 0; j < POINTERS && g->pointer[j]; j++) {
        uintptr_t entry = (uintptr_t)&g->log[log_place(g, g->pointer[j])]; /* no pointer: it may go past the end */
        for (int line = 0; line < LINES_AHEAD; line++) __builtin_prefetch((const void *)(entry + (uintptr_t)line * LINE_BYTES));
    }
    for (int j = 0; j < POINTERS; j++) {
        uint32_t at = g->pointer[j], place = log_place(g, at);
        for (; at < g->log_count; at++, place = place + 1 == g->log_room ? 0 : place + 1) {
            uint64_t entry = g->log[place];
            if (!entry) continue;
            if (((tick - LOG_TICK(entry)) & TICK_MASK) < g->bound[j]) break;
            rank_entered(&g->rank, LOG_CLASS(entry), j + 1);
            if (!(entry & LOG_LISTED)) continue;
            if (count == MOVES) {
                move_all(g, moves, count);
                count = 0;
            }
            moves[count++] = (move_t){LOG_BLOCK(entry), (uint32_t)j + 1};
        }
        g->pointer[j] = at;
    }
    move_all(g, moves, count);
}

static void forget_if_dead(gipe_t *g, uint32_t block) {
    if (!(g->blocks[block].flags & (LOGGED | ANY_HOLDING))) gipe_remove(g, block);
}

/* -- chunks that a tier holds and that the log has forgotten: a queue in which each comes up in turn and is counted on -- */
static void old_push(gipe_t *g, uint32_t block) {
    if (g->old_count == g->old_room) {
        uint32_t room = g->old_room * 2 + 1024;
        uint32_t *grown = gipe_regrow(NULL, 0, room * sizeof *grown);
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
        free(g->old);
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
        if (entry) __builtin_prefetch(&g->blocks[LOG_BLOCK(entry)], 1);
    }
    uint32_t turns = OLD_TURNS * (stop - first) < g->old_count ? OLD_TURNS * (stop - first) : g->old_count, place = g->old_start;
    for (; turns; turns--, place = place + 1 == g->old_room ? 0 : place + 1) __builtin_prefetch(&g->blocks[g->old[place]]);
    for (uint32_t at = first; at < stop; at++) {
        uint64_t entry = g->log[log_place(g, at)];
        if (entry && !(g->blocks[LOG_BLOCK(entry)].flags & ANY_HOLDING)) gipe_prefetch(g, g->blocks[LOG_BLOCK(entry)].name);
    }
}

static void leave_log(gipe_t *g, uint32_t place) {
    uint64_t entry = g->log[place];
    if (entry) {
        uint32_t block = LOG_BLOCK(entry);
        block_t *b = &g->blocks[block];
        int bucket = bucket_of(g, block);
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
    for (int j = 0; j < POINTERS; j++) g->pointer[j] = g->pointer[j] > excess ? g->pointer[j] - excess : 0;
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

static void touch(gipe_t *g, uint32_t block, int gap, int hint) {
    block_t *b = &g->blocks[block];
    bool was_known = is_known(b);
    if (g->log_count == g->log_room && !log_grow(g)) return;
    if (block_is(b, OLD)) count_on(g, block);
    if (block_is(b, LOGGED) || block_is(b, OLD)) rank_ended(&g->rank, b->class_, bucket_of(g, block));
    unlist(g, block, DRAM);
    unlist(g, block, NVME);
    if (block_is(b, LOGGED)) g->log[b->position] = 0;
    int uses = was_known ? b->class_ % USES + 1 : 0;
    if (uses >= USES) uses = USES - 1;
    b->class_ = (uint16_t)((hint * GAPS + gap) * USES + uses);
    b->tick = (uint32_t)g->tick;
    b->position = log_place(g, g->log_count++);
    b->flags = (uint16_t)((b->flags & ~OLD) | LOGGED);
    g->log[b->position] = block | (uint64_t)b->class_ << INDEX_BITS | (g->tick & TICK_MASK) << 36;
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

EXPORT int32_t kvobj_gipe_request(gipe_t *g, const char *names, uint32_t count, int64_t now_ms, int is_partial_last, int hint) {
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

/* Blocks whose holdings will be asked for soon; 0: there is none. */
typedef struct { uint32_t grandparent, next; } coming_t;

/* The next victim is likely the parent, and then its parent, or else the next of its list, beside which the parent is put in any case.
 * Their holdings come later (`prefetch_holding`), when their blocks are there. */
PREFETCHING coming_t prefetch_coming(const gipe_t *g, uint32_t block, int tier) {
    const holding_t *h = holding_of(g, block, tier);
    if (!h) return (coming_t){0, 0};
    coming_t coming = {0, h->next};
    __builtin_prefetch(&g->blocks[h->next]);
    if (!h->parent || (h = holding_of(g, h->parent, tier)) == NULL || !h->parent) return coming;
    __builtin_prefetch(&g->blocks[h->parent]);
    coming.grandparent = h->parent;
    return coming;
}

EXPORT void kvobj_gipe_dropped(gipe_t *g, const char *raw, int tier) {
    uint64_t name[2];
    uint32_t block = gipe_find(g, name_at(raw, 0, name));
    if (block) take_out(g, block, tier);
}

EXPORT void kvobj_gipe_dropped_many(gipe_t *g, const char *raw, uint32_t count, int tier) {
    for (uint32_t at = 0; at < count; at++) kvobj_gipe_dropped(g, raw + (size_t)at * 16, tier);
}

EXPORT void kvobj_gipe_set_pinned(gipe_t *g, const char *raw, int is_pinned) {
    uint64_t name[2];
    uint32_t block = gipe_find(g, name_at(raw, 0, name));
    if (!block) return;
    if (is_pinned) g->blocks[block].flags |= PINNED;
    else g->blocks[block].flags &= (uint16_t)~PINNED;
    for (int tier = 0; tier < TIERS; tier++) reconsider(g, block, tier, false);
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

/* Whether what would have to go is worth less, each of it. The victims taken are then in `undo`, until walk_end. */
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
    for (int looks = 0; looks < ADMISSION_LOOKS && found < excess; looks++) {
        uint32_t victim = walk_next(g, tier);
        if (!victim) return false;
        if (victim == keep) continue;
        if (!(worth > price_of(g, victim, tier))) return false;
        found += holding_of(g, victim, tier)->size_bytes;
        walk_take(g, tier);
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

/* Store a chain's chunks from `first` on, as admits, victims, dropped and stored would one by one. Names of victims go to `gone`.
 * Returns how many were taken before the first refusal. */
EXPORT int32_t kvobj_gipe_offer(gipe_t *g, const char *names, uint32_t count, uint32_t first, int tier, uint32_t size_bytes,
                                int64_t now_ms, char *gone, uint32_t gone_room, uint32_t *gone_count) {
    uint64_t name[2], parent_name[2];
    advance(g, now_ms);
    *gone_count = 0;
    uint32_t at = first, before = at ? gipe_find(g, name_at(names, at - 1, name)) : 0, block = 0;
    coming_t coming = {0, 0};
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
            if (!is_taken || *gone_count + found > gone_room) break;
            for (uint32_t u = 0; u < found; u++) {
                memcpy(gone + (size_t)(*gone_count)++ * 16, g->blocks[victims[u]].name, 16);
                coming = prefetch_coming(g, victims[u], tier);
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
        unlisted = block;
        prefetch_holding(g, coming.grandparent, tier);
        prefetch_holding(g, coming.next, tier);
    }
    if (unlisted) reconsider(g, unlisted, tier, true);
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
    free(g->blocks);
    free(g->holdings);
    free(g->slots);
    free(g->log);
    free(g->old);
    free(g->undo);
    free(g->scratch);
    free(g);
}

EXPORT gipe_t *kvobj_gipe_open(const uint64_t capacities[TIERS], const uint64_t bound[POINTERS], double duplicate_factor, double write_margin,
                               double prior_weight, double prior_rate, uint32_t refresh_every, uint32_t log_factor,
                               uint32_t log_least, uint32_t log_most) {
    gipe_t *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->log_room = 4096;
    g->log = malloc(g->log_room * sizeof *g->log);
    if (!g->log || !gipe_index_open(g)) {
        kvobj_gipe_close(g);
        return NULL;
    }
    memcpy(g->bound, bound, sizeof g->bound);
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
                (uint64_t)g->slots_room * sizeof *g->slots + (uint64_t)g->log_room * sizeof *g->log + (uint64_t)g->old_room * sizeof *g->old +
                (uint64_t)g->undo_room * sizeof *g->undo + (uint64_t)g->scratch_room * sizeof *g->scratch;
    totals[9] = g->accesses;
}

EXPORT void kvobj_gipe_counts(const gipe_t *g, uint32_t *entered, uint32_t *ended) {
    memcpy(entered, g->rank.entered, sizeof g->rank.entered);
    memcpy(ended, g->rank.ended, sizeof g->rank.ended);
}

EXPORT void kvobj_gipe_set_counts(gipe_t *g, const uint32_t *entered, const uint32_t *ended) {
    memcpy(g->rank.entered, entered, sizeof g->rank.entered);
    memcpy(g->rank.ended, ended, sizeof g->rank.ended);
    refresh(g);
}
