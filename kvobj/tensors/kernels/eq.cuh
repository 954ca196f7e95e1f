// eq: the entropy-coded uniform quantiser, with guarded tokens and a ladder of nested steps. One warp codes one head of one block.
// Layout of a block: eq.py.
#ifndef KVOBJ_EQ_CUH
#define KVOBJ_EQ_CUH

#include "eq_measure.cuh"
#include "eq_streams.cuh"

// --- An encoded block ------------------------------------------------------------------------------------------------------------------

// Its parts, in order. All are of u16, but for the ends.
struct EqParts {
    u32* ends;   // of each stream, in bytes from the first's start
    u16* steps;  // bf16, of each head
    u16* means;  // bf16, of each head's columns
    u16* count;  // of guarded tokens
    u16* tokens; // guarded, ascending
    u16* rows;   // theirs: [guard][head][dim]
    u8* streams;
};
KV_FUNCTION u64 kv_eq_fixed_bytes(const EqPlace& p) { return (u64)p.heads * (6 + 2 * (u64)p.dim) + 2; }
KV_FUNCTION u64 kv_eq_guard_bytes(const EqPlace& p) { return 2 + 2 * (u64)p.heads * p.dim; } // of each guarded token
KV_FUNCTION EqParts kv_eq_parts(const EqPlace& p, u64 block, u32 guards) {
    u16* steps = (u16*)(block + 4 * (u64)p.heads);
    u16* means = steps + p.heads;
    u16* count = means + (u64)p.heads * p.dim;
    u16* rows = count + 1 + guards;
    return {(u32*)block, steps, means, count, count + 1, rows, (u8*)(rows + (u64)guards * p.heads * p.dim)};
}

// What of a block concerns one head, none of it believed: `is_good` says whether all is within the block.
struct EqOpened {
    EqParts parts;
    u32 guards, step, bytes;
    const u16* stream;
    bool is_good;
};
KV_FUNCTION EqOpened kv_eq_open(const EqPlace& p) {
    const u64 length = p.job[1];
    EqOpened o = {kv_eq_parts(p, p.job[0], 0), 0, 0, 0, 0, false};
    if (length < kv_eq_fixed_bytes(p)) return o;
    const u32 guards = *o.parts.count;
    const u64 first = kv_eq_fixed_bytes(p) + guards * kv_eq_guard_bytes(p);
    if (guards > p.tokens / KV_EQ_GUARDED_PART || first > length) return o;
    o.guards = guards;
    o.parts = kv_eq_parts(p, p.job[0], guards);
    o.step = o.parts.steps[p.head];
    const u32 start = p.head ? o.parts.ends[p.head - 1] : 0, end = o.parts.ends[p.head];
    const bool is_last = p.head == p.heads - 1;
    if (start > end || end > length - first || (is_last && end != length - first) || (start | end) & 1 || o.step >= 0x7f80) return o;
    o.stream = (const u16*)(o.parts.streams + start);
    o.bytes = end - start;
    o.is_good = true;
    return o;
}
// Guarded tokens must ascend and exist.
KV_FUNCTION bool kv_eq_guards_are_good(const EqPlace& p, const EqOpened& o) {
    u32 next = 0;
    for (u32 guard = 0; guard < o.guards; guard++) {
        const u32 token = o.parts.tokens[guard];
        if (token < next || token >= p.tokens) return false;
        next = token + 1;
    }
    return true;
}

// --- Encoding --------------------------------------------------------------------------------------------------------------------------

// Tables and stream of the symbols that are there.
KV_FUNCTION void kv_eq_coded(const EqPlace& p, u32 bytes) {
    EqHead* head = kv_eq_head(p);
    KV_ONCE(head->bytes = bytes; if (!bytes) head->status = 1);
}
KV_FUNCTION void kv_eq_code_symbols(const EqPlace& p) {
    kv_eq_choose(p);
    kv_eq_coded(p, kv_eq_put(p));
}
template <bool HALF> KV_FUNCTION void kv_eq_code_head(const EqPlace& p) {
    const u16* x = kv_eq_values_at(p, p.job[0]);
    u16* decoded = p.job[3] ? kv_eq_values_at(p, p.job[3]) : 0;
    const u32 rungs = (u32)p.plan[KV_EQ_RUNG];
    kv_eq_centre<HALF>(p, x);
    const EqGuards guards = {kv_eq_guards(p), *kv_eq_guard_count(p), (const u16*)p.job[0], true};
    u32 rung = 0;
    bool fits;
#if KV_WIDE
    const bool is_by_rows = p.dim == 4 * KV_LANES && rungs <= 1;
    if (is_by_rows) {
        rung = rungs;
        fits = rungs ? kv_eq_quantise_rows<HALF, true, 4>(p, x, guards, decoded) : kv_eq_quantise_rows<HALF, false, 4>(p, x, guards, decoded);
    } else
#endif
        fits = kv_eq_quantise<HALF>(p, x, guards, rungs ? 0 : decoded);
    if (!fits) {
        KV_ONCE(kv_eq_head(p)->status = 1);
        return;
    }
#if KV_WIDE
    if (is_by_rows) {
        kv_eq_choose_tiles(p, (const u8*)kv_eq_symbols(p));
        kv_eq_coded(p, kv_eq_put_rows<HALF>(p, x, rungs));
        return;
    }
#endif
    for (; rung < rungs; rung++) kv_eq_divide<HALF>(p, guards, rung, kv_eq_report(p, rung + 1), rung + 1 < rungs ? 0 : decoded);
    kv_eq_code_symbols(p);
}
KV_KERNEL(eq_code, (const u64* plan), (plan)) {
    const EqPlace p = kv_eq_head_place(plan, warp);
    if (kv_eq_head(p)->status) return;
    if (plan[KV_EQ_IS_HALF]) kv_eq_code_head<true>(p);
    else kv_eq_code_head<false>(p);
}

// A block is coded if the widest table's cost of its base symbols shows that it will shrink, at every rung of the ladder alike: no
// symbol costs more than 12 bits by it, an escape 17 more, and no rung has more escapes than the base.
KV_FUNCTION bool kv_eq_shrinks(const EqPlace& p, u32 guards, u64 escapes) {
    const u64 values = (u64)p.heads * kv_eq_values(p), columns = (u64)p.heads * p.dim;
    const u64 most = kv_eq_fixed_bytes(p) + guards * kv_eq_guard_bytes(p) + 192 * (u64)p.heads + columns;
    return most + (12 * values + 17 * escapes + 7) / 8 < 2 * values;
}

// One warp a block: whether it is coded, its length, and its parts up to the means.
KV_KERNEL(eq_place, (const u64* plan), (plan)) {
    const EqPlace p = kv_eq_place(plan, warp, 0);
    const EqHead* heads = kv_eq_head(p);
    u32* length = (u32*)plan[KV_EQ_LENGTHS_AT] + warp;
    const u32 guards = *kv_eq_guard_count(p);
    u64 escapes = 0;
    u32 status = 0;
    for (u32 head = 0; head < p.heads; head++) {
        status |= heads[head].status;
        escapes += heads[head].escapes;
    }
    if (status || !kv_eq_shrinks(p, guards, escapes)) {
        KV_ONCE(*length = 0);
        return;
    }
    u64 bytes = 0;
    for (u32 head = 0; head < p.heads; head++) bytes += heads[head].bytes;
    const EqParts parts = kv_eq_parts(p, p.job[2], guards);
    const u64 total = (u64)(parts.streams - (u8*)p.job[2]) + bytes;
    if (total >= 2 * (u64)p.heads * kv_eq_values(p)) { // of symbols that no encoder wrote
        KV_ONCE(*length = 0);
        return;
    }
    u32 end = 0;
    for (u32 head = 0; head < p.heads; head++) {
        end += heads[head].bytes;
        KV_ONCE(parts.ends[head] = end; parts.steps[head] = (u16)heads[head].step);
    }
    KV_ONCE(*parts.count = (u16)guards);
    kv_copy((u8*)parts.tokens, (const u8*)kv_eq_guards(p), 2 * (u64)guards);
    KV_ONCE(*length = (u32)total);
}

// One warp a head: its means, its guarded rows and its stream to their places. After eq_place.
KV_FUNCTION void kv_eq_move_head(const EqPlace& p, const EqGuards& guards) {
    if (!((const u32*)p.plan[KV_EQ_LENGTHS_AT])[p.block]) return;
    const EqParts parts = kv_eq_parts(p, p.job[2], guards.count);
    const u32 bytes = kv_eq_head(p)->bytes;
    kv_copy((u8*)(parts.means + (u64)p.head * p.dim), (const u8*)kv_eq_means(p), 2 * (u64)p.dim);
    for (u32 guard = 0; guard < guards.count; guard++)
        kv_copy((u8*)(parts.rows + kv_eq_guarded_row(p, guard)), (const u8*)kv_eq_row_of(p, guards, guard), 2 * (u64)p.dim);
    kv_copy(parts.streams + parts.ends[p.head] - bytes, kv_eq_stream(p) + p.plan[KV_EQ_SLOT_BYTES] - bytes, bytes);
}
KV_KERNEL(eq_move, (const u64* plan), (plan)) {
    const EqPlace p = kv_eq_head_place(plan, warp);
    kv_eq_move_head(p, {kv_eq_guards(p), *kv_eq_guard_count(p), (const u16*)p.job[0], true});
}

// --- Decoding --------------------------------------------------------------------------------------------------------------------------

// The head's means into its working memory, so that steps may read across the end.
KV_FUNCTION void kv_eq_take_means(const EqPlace& p, const u16* from) {
    u16* means = kv_eq_means(p);
    for (u32 at = 0; at < p.dim; at += KV_LANES) kv_store_u16(means + at, kv_load_u16(from + at, p.dim - at), p.dim - at);
    kv_sync();
    if (p.dim >= KV_LANES) kv_store_u16(means + p.dim, kv_load_u16(means));
    for (u32 at = 0; p.dim < KV_LANES && at < KV_LANES; at++) {
        const u16 mean = means[at % p.dim];
        kv_sync();
        KV_ONCE(means[p.dim + at] = mean);
    }
    kv_sync();
}
template <bool HALF> KV_FUNCTION bool kv_eq_decode_head(const EqPlace& p) {
    const EqOpened o = kv_eq_open(p);
    if (!o.is_good || !kv_eq_guards_are_good(p, o)) return false;
    kv_eq_take_means(p, o.parts.means + (u64)p.head * p.dim);
    u16* to = kv_eq_values_at(p, p.job[3]);
    const float step = kv_eq_step_of_rung(o.step, (u32)p.plan[KV_EQ_RUNG]);
    if (!kv_eq_get<HALF, false>(p, o.stream, o.bytes, step, kv_eq_means(p), kv_eq_ids(p), to)) return false;
    kv_sync();
    for (u32 guard = 0; guard < o.guards; guard++) {
        const u16* row = o.parts.rows + kv_eq_guarded_row(p, guard);
        kv_copy((u8*)(to + (u64)o.parts.tokens[guard] * p.dim), (const u8*)row, 2 * (u64)p.dim);
    }
    return true;
}
// One warp a head: values, and a status for each head.
KV_KERNEL(eq_decode, (const u64* plan), (plan)) {
    const EqPlace p = kv_eq_head_place(plan, warp);
    const u32 status = !(plan[KV_EQ_IS_HALF] ? kv_eq_decode_head<true>(p) : kv_eq_decode_head<false>(p));
    KV_ONCE(((u32*)plan[KV_EQ_LENGTHS_AT])[warp] = status);
}

// --- Demotion --------------------------------------------------------------------------------------------------------------------------

// One warp a head: symbols of the finer rung from its block, divided, coded anew. `eq_place_demoted` and `eq_move_demoted` follow.
template <bool HALF> KV_FUNCTION bool kv_eq_demote_head(const EqPlace& p) {
    const EqOpened o = kv_eq_open(p);
    if (!o.is_good || !kv_eq_guards_are_good(p, o)) return false;
    EqHead* head = kv_eq_head(p);
    KV_ONCE(head->status = 0; head->step = o.step; head->escapes = 0; head->bytes = 0);
    kv_eq_take_means(p, o.parts.means + (u64)p.head * p.dim);
    if (!kv_eq_get<HALF, true>(p, o.stream, o.bytes, 0.0f, kv_eq_means(p), kv_eq_ids(p), kv_eq_symbols(p))) return false;
    kv_sync();
    const EqGuards guards = {o.parts.tokens, o.guards, o.parts.rows, false};
    const u32 from = (u32)p.plan[KV_EQ_RUNG_FROM], to = (u32)p.plan[KV_EQ_RUNG];
    u16* decoded = kv_eq_values_at(p, p.job[3]);
    for (u32 rung = from; rung < to; rung++)
        kv_eq_divide<HALF>(p, guards, rung, kv_eq_report(p, rung - from), rung + 1 < to ? 0 : decoded);
    kv_eq_code_symbols(p);
    return true;
}
KV_KERNEL(eq_demote, (const u64* plan), (plan)) {
    const EqPlace p = kv_eq_head_place(plan, warp);
    if (plan[KV_EQ_IS_HALF] ? kv_eq_demote_head<true>(p) : kv_eq_demote_head<false>(p)) return;
    KV_ONCE(kv_eq_head(p)->status = 1);
}
// One warp a block: the guarded tokens into working memory, then as eq_place; length 0 where the bytes are no block.
KV_KERNEL(eq_place_demoted, (const u64* plan), (plan)) {
    const EqPlace p = kv_eq_place(plan, warp, 0);
    const EqOpened o = kv_eq_open(p);
    KV_ONCE(*kv_eq_guard_count(p) = o.guards);
    kv_copy((u8*)kv_eq_guards(p), (const u8*)o.parts.tokens, 2 * (u64)o.guards);
    kv_sync();
    eq_place_warp(warp, plan);
}
KV_KERNEL(eq_move_demoted, (const u64* plan), (plan)) {
    const EqPlace p = kv_eq_head_place(plan, warp);
    if (!((const u32*)plan[KV_EQ_LENGTHS_AT])[p.block]) return;
    const EqOpened o = kv_eq_open(p);
    kv_eq_move_head(p, {o.parts.tokens, o.guards, o.parts.rows, false});
}

#endif
