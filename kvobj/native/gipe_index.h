/* Blocks by name: open addressing in Robin Hood order. A slot holds the block and how many steps from its home slot it lies, itself
 * counted, so that look-ups compare only names of one home, and removing shifts back without looking at any block. */
#ifndef KVOBJ_GIPE_INDEX_H
#define KVOBJ_GIPE_INDEX_H

#include "gipe.h"
#include "gipe_memory.h"
#include <stdlib.h>
#include <string.h>

#define INDEX_MASK ((UINT32_C(1) << INDEX_BITS) - 1)
#define STEP (UINT32_C(1) << INDEX_BITS)
#define NAMES_AHEAD 32
#define STEPS_MAX ((UINT32_C(1) << (32 - INDEX_BITS)) - 1)

/* Names are hashes, or blob ids, which are not: they are mixed in any case. */
static inline uint32_t home_of(const gipe_t *g, const uint64_t name[2]) {
    uint64_t h = name[0] ^ (name[1] * UINT64_C(0x9E3779B97F4A7C15));
    h ^= h >> 32;
    h *= UINT64_C(0xD6E8FEB86659FD93);
    return (uint32_t)(((h >> 32) * g->slots_room) >> 32);
}

static inline uint32_t after(const gipe_t *g, uint32_t slot) { return slot + 1 == g->slots_room ? 0 : slot + 1; }

static inline bool is_named(const block_t *b, const uint64_t name[2]) { return b->name[0] == name[0] && b->name[1] == name[1]; }

/* The block, or 0 and where it would be put: the slot, and its steps there times STEP, 0: that would be too far from home. */
static inline uint32_t locate(const gipe_t *g, const uint64_t name[2], uint32_t *place, uint32_t *steps) {
    uint32_t slot = home_of(g, name), least = STEP;
    for (; least; least += STEP, slot = after(g, slot)) { /* it overflows behind the last step */
        uint32_t entry = g->slots[slot];
        if (entry < least) break; /* empty, or of a later home */
        if (entry - least >= STEP || !is_named(&g->blocks[entry & INDEX_MASK], name)) continue;
        return entry & INDEX_MASK;
    }
    *place = slot;
    *steps = least;
    return 0;
}

static uint32_t gipe_find(const gipe_t *g, const uint64_t name[2]) {
    uint32_t place = 0, steps = 0;
    return locate(g, name, &place, &steps);
}

PREFETCHING void gipe_prefetch(const gipe_t *g, const uint64_t name[2]) { __builtin_prefetch(&g->slots[home_of(g, name)]); }

/* Fetches the blocks that a look-up will compare, where the slots are there already; the first of them, 0: the name is not here. */
static inline uint32_t gipe_first_of_home(const gipe_t *g, const uint64_t name[2]) {
    uint32_t slot = home_of(g, name), first = 0;
    for (uint32_t least = STEP; least; least += STEP, slot = after(g, slot)) {
        uint32_t entry = g->slots[slot];
        if (entry < least) break;
        if (entry - least >= STEP) continue;
        __builtin_prefetch(&g->blocks[entry & INDEX_MASK]);
        if (!first) first = entry & INDEX_MASK;
    }
    return first;
}

/* Put a block where `locate` said. False: some entry would lie too far from home; the table is as it was. */
static bool put_at(gipe_t *g, uint32_t slot, uint32_t steps, uint32_t block) {
    if (!steps) return false;
    for (uint32_t probe = slot; g->slots[probe] != 0; probe = after(g, probe))
        if (g->slots[probe] >> INDEX_BITS == STEPS_MAX) return false;
    uint32_t moving = block | steps;
    for (;; slot = after(g, slot)) {
        uint32_t other = g->slots[slot];
        g->slots[slot] = moving;
        if (other == 0) return true;
        moving = other + STEP;
    }
}

/* A block whose name is not here. */
static bool insert(gipe_t *g, uint32_t block) {
    uint32_t slot = home_of(g, g->blocks[block].name), steps = STEP;
    for (; steps && g->slots[slot] >= steps; steps += STEP) slot = after(g, slot);
    return put_at(g, slot, steps, block);
}

/* Homes keep their order as the table grows, so only the names of the blocks are all over the place. */
static bool grow_slots(gipe_t *g) {
    uint32_t *old = g->slots, old_room = g->slots_room;
    for (uint64_t room = (uint64_t)old_room + old_room / 2 + 64; room < UINT32_MAX; room += room / 2) {
        uint32_t *slots = gipe_zeros(room * sizeof *slots);
        if (!slots) return false;
        g->slots = slots;
        g->slots_room = (uint32_t)room;
        bool is_whole = true;
        for (uint32_t at = 0; at < old_room && is_whole; at++) {
            if (at + NAMES_AHEAD < old_room) __builtin_prefetch(&g->blocks[old[at + NAMES_AHEAD] & INDEX_MASK]);
            if (old[at]) is_whole = insert(g, old[at] & INDEX_MASK);
        }
        if (is_whole) {
            gipe_free(old, old_room * sizeof *old);
            return true;
        }
        gipe_free(slots, room * sizeof *slots);
        g->slots = old;
        g->slots_room = old_room;
    }
    return false;
}

static bool gipe_index_open(gipe_t *g) {
    g->slots_room = 1024;
    g->slots = calloc(g->slots_room, sizeof *g->slots);
    g->blocks_made = g->holdings_made = 1;
    return g->slots != NULL;
}

static bool make_room(void **array, uint32_t *room, uint32_t made, size_t size) {
    if (made < *room) return true;
    uint64_t wanted = (uint64_t)*room + *room / 2 + 1024;
    if (wanted > INDEX_MASK) wanted = INDEX_MASK;
    if (made >= wanted) return false;
    void *grown = gipe_grow(*array, *room * size, wanted * size);
    if (!grown) return false;
    *array = grown;
    *room = (uint32_t)wanted;
    return true;
}

static uint32_t gipe_find_or_add(gipe_t *g, const uint64_t name[2]) {
    uint32_t place = 0, steps = 0, block = locate(g, name, &place, &steps);
    if (block) return block;
    if ((uint64_t)(g->blocks_live + 1) * 10 > (uint64_t)g->slots_room * 7) {
        if (!grow_slots(g)) goto failed;
        locate(g, name, &place, &steps);
    }
    if (g->blocks_free) {
        block = g->blocks_free;
        g->blocks_free = g->blocks[block].held;
    } else {
        if (!make_room((void **)&g->blocks, &g->blocks_room, g->blocks_made, sizeof *g->blocks)) goto failed;
        block = g->blocks_made++;
    }
    block_t *b = &g->blocks[block];
    memset(b, 0, sizeof *b);
    b->name[0] = name[0];
    b->name[1] = name[1];
    for (bool is_in = put_at(g, place, steps, block); !is_in; is_in = insert(g, block))
        if (!grow_slots(g)) {
            b->held = g->blocks_free;
            g->blocks_free = block;
            goto failed;
        }
    g->blocks_live++;
    return block;
failed:
    g->is_out_of_memory = true;
    return 0;
}

static void gipe_remove(gipe_t *g, uint32_t block) {
    uint32_t slot = home_of(g, g->blocks[block].name), steps = STEP;
    for (; g->slots[slot] != (block | steps); slot = after(g, slot), steps += STEP)
        if (g->slots[slot] < steps || !steps) return;
    for (;;) {
        uint32_t next = after(g, slot), entry = g->slots[next];
        if (entry < 2 * STEP) break; /* empty, or at home */
        g->slots[slot] = entry - STEP;
        slot = next;
    }
    g->slots[slot] = 0;
    g->blocks[block].flags = 0;
    g->blocks[block].held = g->blocks_free;
    g->blocks_free = block;
    g->blocks_live--;
}

static holding_t *gipe_hold(gipe_t *g, uint32_t block, int tier) {
    holding_t *have = holding_of(g, block, tier);
    if (have) return have;
    uint32_t made;
    if (g->holdings_free) {
        made = g->holdings_free;
        g->holdings_free = g->holdings[made].sibling;
    } else {
        if (!make_room((void **)&g->holdings, &g->holdings_room, g->holdings_made, sizeof *g->holdings)) {
            g->is_out_of_memory = true;
            return NULL;
        }
        made = g->holdings_made++;
    }
    g->holdings_live++;
    block_t *b = &g->blocks[block];
    holding_t *h = &g->holdings[made];
    memset(h, 0, sizeof *h);
    if (tier == DRAM) { /* dram's comes first */
        h->sibling = block_is(b, HOLDING_FLAG << NVME) ? b->held : 0;
        b->held = made;
    } else if (block_is(b, HOLDING_FLAG << DRAM)) {
        g->holdings[b->held].sibling = made;
    } else {
        b->held = made;
    }
    b->flags |= HOLDING_FLAG << tier;
    return h;
}

static void gipe_let_go(gipe_t *g, uint32_t block, int tier) {
    block_t *b = &g->blocks[block];
    if (!block_is(b, HOLDING_FLAG << tier)) return;
    uint32_t gone = b->held;
    if (tier == DRAM) {
        b->held = g->holdings[gone].sibling;
    } else if (block_is(b, HOLDING_FLAG << DRAM)) {
        gone = g->holdings[b->held].sibling;
        g->holdings[b->held].sibling = 0;
    } else {
        b->held = 0;
    }
    b->flags &= (uint16_t)~(HOLDING_FLAG << tier);
    g->holdings[gone].sibling = g->holdings_free;
    g->holdings_free = gone;
    g->holdings_live--;
}

#endif
