// ek: eq's quantiser after a profile's transform of all heads together. Layout of a block and the numbers: ek.py.
//
// The transform and its inverse are products of 16-bit integers summed in 32 bits that wrap: the same in whatever order they are added.
// What is guarded is found by eq's kernels, and its streams are coded by eq's functions, each told by a plan of eq's own shape.
#ifndef KVOBJ_EK_CUH
#define KVOBJ_EK_CUH

#include "eq_measure.cuh"
#include "eq_streams.cuh"

// Words of the plan, in order; after them eight words a block. ek.py writes it.
enum {
    KV_EK_HEADS, KV_EK_DIM, KV_EK_TOKENS, KV_EK_GROUPS, KV_EK_WIDTH, KV_EK_IS_HALF, KV_EK_POSITION, KV_EK_ROPE_AT, KV_EK_GUARD_PLAN_AT,
    KV_EK_STREAM_PLAN_AT, KV_EK_CENTRED_AT, KV_EK_FORTH_AT, KV_EK_BACK_AT, KV_EK_RESTORED_AT, KV_EK_STATUSES_AT, KV_EK_REPORTS_AT,
    KV_EK_LENGTHS_AT, KV_EK_PLAN_WORDS = 20
};
// Of a block: its values, or its encoded bytes; their length; its slot; where what it decodes to goes; the profile's means and basis of
// it; bits of its step; whether it was rotated by position.
enum {
    KV_EK_AT, KV_EK_LENGTH, KV_EK_SLOT, KV_EK_DECODED, KV_EK_MEANS, KV_EK_BASIS, KV_EK_STEP, KV_EK_IS_ROTATED, KV_EK_BLOCK_WORDS
};
enum { KV_EK_TILE = 8, KV_EK_POSITIONS = 1024, KV_EK_BASIS_BITS = 14, KV_EK_STEP_BITS = 4 };
#define KV_EK_GREATEST_NORM ((u64)1 << 33) // of a token's squared: no sum of the transform wraps

struct EkPlace {
    const u64 *plan, *job;
    u32 block, heads, dim, tokens, groups, width, columns;
};
KV_FUNCTION EkPlace kv_ek_place(const u64* plan, u32 block) {
    const u32 heads = (u32)plan[KV_EK_HEADS], dim = (u32)plan[KV_EK_DIM];
    return {plan, plan + KV_EK_PLAN_WORDS + (u64)block * KV_EK_BLOCK_WORDS, block, heads, dim, (u32)plan[KV_EK_TOKENS],
            (u32)plan[KV_EK_GROUPS], (u32)plan[KV_EK_WIDTH], heads * dim};
}
KV_FUNCTION EqPlace kv_ek_guards(const EkPlace& p) { return kv_eq_place((const u64*)p.plan[KV_EK_GUARD_PLAN_AT], p.block, 0); }
KV_FUNCTION EqPlace kv_ek_stream(const EkPlace& p, u32 group) {
    return kv_eq_place((const u64*)p.plan[KV_EK_STREAM_PLAN_AT], p.block, group);
}
KV_FUNCTION u16* kv_ek_centred(const EkPlace& p) { return (u16*)p.plan[KV_EK_CENTRED_AT] + (u64)p.block * p.tokens * p.columns; }
KV_FUNCTION u32* kv_ek_packed(const EkPlace& p, u32 which) { return (u32*)p.plan[which] + (u64)p.block * p.columns * (p.columns / 2); }
KV_FUNCTION u32* kv_ek_restored(const EkPlace& p) { return (u32*)p.plan[KV_EK_RESTORED_AT] + (u64)p.block * p.tokens * p.columns; }
KV_FUNCTION u32* kv_ek_statuses(const EkPlace& p) { return (u32*)p.plan[KV_EK_STATUSES_AT] + (u64)p.block * p.tokens; }
KV_FUNCTION float kv_ek_step(const EkPlace& p) { return kv_from_bits_uniform((u32)p.job[KV_EK_STEP]); }

// The basis as products take it, for 32 outputs at a time: a word holds what two neighbouring inputs give to an output.
KV_KERNEL(ek_pack, (const u64* plan, u32 is_encoding), (plan, is_encoding)) {
    const u32 strips = (u32)(plan[KV_EK_HEADS] * plan[KV_EK_DIM]) / KV_LANES, first = warp % strips * KV_LANES;
    const EkPlace p = kv_ek_place(plan, warp / strips);
    const u16* basis = (const u16*)p.job[KV_EK_BASIS]; // [value][coefficient]
    const u64 at = (u64)first * (p.columns / 2);
    u32 *forth = kv_ek_packed(p, KV_EK_FORTH_AT) + at, *back = kv_ek_packed(p, KV_EK_BACK_AT) + at;
    const LaneU32 row = kv_lane() * LaneU32(p.columns / 2);
    for (u32 pair = 0; pair < p.columns / 2; pair++) {
        const u16* two = basis + (u64)(2 * pair) * p.columns + first;
        if (is_encoding) kv_store_u32(forth + pair * KV_LANES, kv_load_u16(two) | (kv_load_u16(two + p.columns) << 16));
        kv_store_u32(back + pair * KV_LANES, kv_gather_u32((const u32*)(basis + (u64)first * p.columns) + pair, row));
    }
}

// TILE tokens by 32 outputs. Inputs are pairs: of `groups` groups of `pairs` each, so many words apart; tokens are `next` words apart.
template <u32 TILE>
KV_FUNCTION void kv_ek_product(const u32* const* tokens, u32 groups, u32 pairs, u64 apart, const u32* packed, LaneI32* sums) {
    KV_UNROLL for (u32 t = 0; t < TILE; t++) sums[t] = LaneI32(0);
    for (u32 group = 0; group < groups; group++) {
        for (u32 pair = 0; pair < pairs; pair++) {
            const LaneU32 column = kv_load_u32(packed);
            packed += KV_LANES;
            KV_UNROLL for (u32 t = 0; t < TILE; t++) sums[t] = kv_dot_i16(sums[t], LaneU32(tokens[t][group * apart + pair]), column);
        }
    }
}

// --- Positions -------------------------------------------------------------------------------------------------------------------------

// Cosine and sine of 32 angles of a position, from those of its last 10 bits and of the rest. Tables: cosines and sines of 1,024 low
// positions, then cosines and sines of as many multiples of 1,024.
struct EkAngle {
    LaneF32 cosine, sine;
};
KV_FUNCTION EkAngle kv_ek_angle(const float* rope, u32 half, u32 position, u32 at) {
    const u64 table = (u64)KV_EK_POSITIONS * half;
    const float* low = rope + (u64)(position % KV_EK_POSITIONS) * half + at;
    const float* high = rope + 2 * table + (u64)(position / KV_EK_POSITIONS) * half + at;
    const LaneF32 a = kv_load_f32(low), b = kv_load_f32(low + table), c = kv_load_f32(high), d = kv_load_f32(high + table);
    return {a * c - b * d, b * c + a * d};
}

// --- Encoding --------------------------------------------------------------------------------------------------------------------------

// Values less their means in sixteenths of a step, and the sum of their squares.
KV_FUNCTION void kv_ek_grid(LaneF32 x, const float* mean, LaneF32 inverse, u16* to, u32 some, LaneI64& squares, LaneU32& greatest) {
    const LaneF32 y = (x - kv_load_f32(mean)) * inverse;
    const LaneI32 sign = kv_as_i32(kv_bits(y)) >> 31;
    LaneU32 size = kv_as_u32(kv_truncate(kv_from_bits(kv_bits(y) & LaneU32(0x7fffffffu)) + LaneF32(0.49999997f)));
    size = kv_select(kv_lane() < LaneU32(some), size, LaneU32(0u));
    greatest = kv_max(greatest, size);
    const LaneI32 kept = kv_as_i32(size & LaneU32(0x7fffu));
    squares += kv_widen(kept * kept);
    kv_store_u16(to, kv_as_u32((kept ^ sign) - sign), some);
}

// One warp a token: its centred row; a status of 1 where that is too large.
KV_FUNCTION bool kv_ek_is_guarded(const EqPlace& g, u32 token) {
    const u16* list = kv_eq_guards(g);
    const u32 count = *kv_eq_guard_count(g);
    for (u32 at = 0; at < count; at++)
        if (list[at] == token) return true;
    return false;
}
KV_KERNEL(ek_centre, (const u64* plan), (plan)) {
    const u32 tokens = (u32)plan[KV_EK_TOKENS], token = warp % tokens, is_half = (u32)plan[KV_EK_IS_HALF];
    const EkPlace p = kv_ek_place(plan, warp / tokens);
    const EqPlace g = kv_ek_guards(p);
    u16* row = kv_ek_centred(p) + (u64)token * p.columns;
    u32 status = 0;
    for (u32 head = 0; head < p.heads; head++) status |= kv_eq_head(g)[head].status;
    if (status || kv_ek_is_guarded(g, token)) {
        for (u32 at = 0; at < p.columns; at += KV_LANES) kv_store_u16(row + at, LaneU32(0u));
        KV_ONCE(kv_ek_statuses(p)[token] = status);
        return;
    }
    const float* means = (const float*)p.job[KV_EK_MEANS];
    const float* rope = (const float*)plan[KV_EK_ROPE_AT];
    const LaneF32 inverse(kv_reciprocal(kv_ek_step(p) * (1.0f / (1 << KV_EK_STEP_BITS))));
    const u32 position = (u32)plan[KV_EK_POSITION] + token, half = p.dim / 2;
    LaneI64 squares = kv_i64(0);
    LaneU32 greatest(0u);
    for (u32 head = 0; head < p.heads; head++) {
        const u16* x = (const u16*)p.job[KV_EK_AT] + ((u64)head * tokens + token) * p.dim;
        const u32 first = head * p.dim;
        if (!p.job[KV_EK_IS_ROTATED]) {
            for (u32 at = 0; at < p.dim; at += KV_LANES) {
                const LaneF32 value = kv_value(kv_load_u16(x + at, p.dim - at), is_half);
                kv_ek_grid(value, means + first + at, inverse, row + first + at, p.dim - at, squares, greatest);
            }
            continue;
        }
        for (u32 at = 0; at < half; at += KV_LANES) {
            const u32 some = half - at;
            const EkAngle angle = kv_ek_angle(rope, half, position, at);
            const LaneF32 a = kv_value(kv_load_u16(x + at, some), is_half), b = kv_value(kv_load_u16(x + half + at, some), is_half);
            const LaneF32 c = a * angle.cosine + b * angle.sine, d = b * angle.cosine - a * angle.sine;
            kv_ek_grid(c, means + first + at, inverse, row + first + at, some, squares, greatest);
            kv_ek_grid(d, means + first + half + at, inverse, row + first + half + at, some, squares, greatest);
        }
    }
    status = kv_greatest(greatest) > 0x7fffu || (u64)kv_sum(squares) > KV_EK_GREATEST_NORM;
    KV_ONCE(kv_ek_statuses(p)[token] = status);
}

// One warp eight tokens of 32 coefficients: integers of a step.
KV_KERNEL(ek_transform, (const u64* plan), (plan)) {
    const u32 tiles = ((u32)plan[KV_EK_TOKENS] + KV_EK_TILE - 1) / KV_EK_TILE;
    const u32 strips = (u32)(plan[KV_EK_HEADS] * plan[KV_EK_DIM]) / KV_LANES;
    const EkPlace p = kv_ek_place(plan, warp / (tiles * strips));
    const u32 strip = warp / tiles % strips, token = warp % tiles * KV_EK_TILE, column = strip * KV_LANES;
    const u32* packed = kv_ek_packed(p, KV_EK_FORTH_AT) + (u64)column * (p.columns / 2);
    const u32* rows[KV_EK_TILE];
    KV_UNROLL for (u32 t = 0; t < KV_EK_TILE; t++) {
        rows[t] = (const u32*)kv_ek_centred(p) + (u64)kv_min_uniform(token + t, p.tokens - 1) * (p.columns / 2);
    }
    LaneI32 sums[KV_EK_TILE];
    kv_ek_product<KV_EK_TILE>(rows, 1, p.columns / 2, 0, packed, sums);
    const u32 shift = KV_EK_BASIS_BITS + KV_EK_STEP_BITS;
    u16* to = kv_eq_symbols(kv_ek_stream(p, column / p.width)) + column % p.width;
    KV_UNROLL for (u32 t = 0; t < KV_EK_TILE; t++) {
        if (token + t >= p.tokens) continue;
        const LaneI32 sign = sums[t] >> 31;
        const LaneI32 size = (((sums[t] ^ sign) - sign) + LaneI32(1 << (shift - 1))) >> shift; // below 2^13
        kv_store_u16(to + (u64)(token + t) * p.width, kv_as_u32((size ^ sign) - sign));
    }
}

// One warp a stream.
KV_KERNEL(ek_code, (const u64* plan), (plan)) {
    const u32 groups = (u32)plan[KV_EK_GROUPS];
    const EqPlace s = kv_ek_stream(kv_ek_place(plan, warp / groups), warp % groups);
    kv_eq_choose(s);
    const u32 bytes = kv_eq_put(s);
    KV_ONCE(kv_eq_head(s)->bytes = bytes);
}

// --- Back to values --------------------------------------------------------------------------------------------------------------------

// One warp eight tokens of 32 values: sums over all coefficients.
KV_KERNEL(ek_restore, (const u64* plan), (plan)) {
    const u32 tiles = ((u32)plan[KV_EK_TOKENS] + KV_EK_TILE - 1) / KV_EK_TILE;
    const u32 strips = (u32)(plan[KV_EK_HEADS] * plan[KV_EK_DIM]) / KV_LANES;
    const EkPlace p = kv_ek_place(plan, warp / (tiles * strips));
    const u32 column = warp / tiles % strips * KV_LANES, token = warp % tiles * KV_EK_TILE;
    const u32* packed = kv_ek_packed(p, KV_EK_BACK_AT) + (u64)column * (p.columns / 2);
    const EqPlace s = kv_ek_stream(p, 0);
    const u32* rows[KV_EK_TILE];
    KV_UNROLL for (u32 t = 0; t < KV_EK_TILE; t++) {
        rows[t] = (const u32*)kv_eq_symbols(s) + (u64)kv_min_uniform(token + t, p.tokens - 1) * (p.width / 2);
    }
    LaneI32 sums[KV_EK_TILE];
    kv_ek_product<KV_EK_TILE>(rows, p.groups, p.width / 2, kv_eq_padded(kv_eq_values(s)) / 2, packed, sums);
    u32* to = kv_ek_restored(p) + (u64)token * p.columns + column;
    KV_UNROLL for (u32 t = 0; t < KV_EK_TILE; t++) {
        if (token + t < p.tokens) kv_store_u32(to + (u64)t * p.columns, kv_as_u32(sums[t]));
    }
}

// Values of a head: decoded words to `to` (or nowhere), what that did to `before` (or nothing) into `m`. Guarded rows come from `rows`.
struct EkGuards {
    const u16 *tokens, *rows;
    u32 count;
};
KV_FUNCTION void kv_ek_keep(LaneF32 value, const u16* before, u16* to, u32 some, u32 is_half, LaneF32 unit, KvMeasured& m, LaneU32& largest) {
    const LaneU32 word = kv_select(kv_lane() < LaneU32(some), kv_word(value, is_half), LaneU32(0u));
    largest = kv_max(largest, word & LaneU32(0x7fffu));
    if (to) kv_store_u16(to, word, some);
    if (before) kv_measure(m, kv_value(kv_load_u16(before, some), is_half), kv_value(word, is_half), unit);
}
KV_FUNCTION u32 kv_ek_values(const EkPlace& p, u32 head, const EkGuards& g, const u16* before, u16* to, LaneF32 unit, KvMeasured& m) {
    const u32 is_half = (u32)p.plan[KV_EK_IS_HALF], half = p.dim / 2;
    const float* means = (const float*)p.job[KV_EK_MEANS] + (u64)head * p.dim;
    const float* rope = (const float*)p.plan[KV_EK_ROPE_AT];
    const LaneF32 scale(kv_ek_step(p) * (1.0f / (1 << KV_EK_BASIS_BITS)));
    LaneU32 largest(0u);
    u32 guard = 0;
    for (u32 token = 0; token < p.tokens; token++) {
        const u64 row = (u64)token * p.dim;
        const u16* was = before ? before + row : 0;
        u16* put = to ? to + row : 0;
        if (guard < g.count && g.tokens[guard] == token) {
            const u16* from = g.rows ? g.rows + ((u64)guard * p.heads + head) * p.dim : was;
            guard++;
            for (u32 at = 0; at < p.dim; at += KV_LANES) {
                const LaneF32 value = kv_value(kv_load_u16(from + at, p.dim - at), is_half);
                if (put) kv_store_u16(put + at, kv_load_u16(from + at, p.dim - at), p.dim - at);
                if (was) kv_measure(m, value, value, unit);
            }
            kv_measure_fold(m);
            continue;
        }
        const u32* sums = kv_ek_restored(p) + (u64)token * p.columns + (u64)head * p.dim;
        if (!p.job[KV_EK_IS_ROTATED]) {
            for (u32 at = 0; at < p.dim; at += KV_LANES) {
                const u32 some = p.dim - at;
                const LaneF32 value = kv_to_f32(kv_as_i32(kv_load_u32(sums + at, some))) * scale + kv_load_f32(means + at);
                kv_ek_keep(value, was ? was + at : 0, put ? put + at : 0, some, is_half, unit, m, largest);
            }
        } else {
            for (u32 at = 0; at < half; at += KV_LANES) {
                const u32 some = half - at;
                const EkAngle angle = kv_ek_angle(rope, half, (u32)p.plan[KV_EK_POSITION] + token, at);
                const LaneF32 a = kv_to_f32(kv_as_i32(kv_load_u32(sums + at, some))) * scale + kv_load_f32(means + at);
                const LaneF32 b = kv_to_f32(kv_as_i32(kv_load_u32(sums + half + at, some))) * scale + kv_load_f32(means + half + at);
                const LaneF32 c = a * angle.cosine - b * angle.sine, d = b * angle.cosine + a * angle.sine;
                kv_ek_keep(c, was ? was + at : 0, put ? put + at : 0, some, is_half, unit, m, largest);
                kv_ek_keep(d, was ? was + half + at : 0, put ? put + half + at : 0, some, is_half, unit, m, largest);
            }
        }
        kv_measure_fold(m);
    }
    return kv_greatest(largest) >= kv_first_non_finite(is_half);
}

// One warp a head, after an encoder's ek_restore: a report.
KV_KERNEL(ek_measure, (const u64* plan), (plan)) {
    const u32 heads = (u32)plan[KV_EK_HEADS], head = warp % heads;
    const EkPlace p = kv_ek_place(plan, warp / heads);
    const EqPlace g = kv_ek_guards(p);
    u32* report = (u32*)plan[KV_EK_REPORTS_AT] + (u64)warp * KV_REPORT_WORDS;
    const EqHead* measured = kv_eq_head(g) + head;
    if (measured->status) {
        KV_ONCE(report[0] = 1u);
        return;
    }
    const u64 first = (u64)head * p.tokens * p.dim;
    const EkGuards guards = {kv_eq_guards(g), 0, *kv_eq_guard_count(g)};
    KvMeasured m = kv_measured();
    u16* to = p.job[KV_EK_DECODED] ? (u16*)p.job[KV_EK_DECODED] + first : 0;
    const LaneF32 unit(kv_power_of_two(-measured->exponent));
    const u32 status = kv_ek_values(p, head, guards, (const u16*)p.job[KV_EK_AT] + first, to, unit, m);
    kv_report(report, status, m, measured->exponent);
}

// --- An encoded block ------------------------------------------------------------------------------------------------------------------

KV_FUNCTION u64 kv_ek_head_bytes(const EkPlace& p, u32 guards) {
    return 4 * (u64)p.groups + 2 + (u64)guards * (2 + 2 * (u64)p.columns);
}
struct EkParts {
    u32* ends;                   // of each stream, in bytes from the first's start
    u16 *count, *tokens, *rows;  // guarded
    u8* streams;
};
KV_FUNCTION EkParts kv_ek_parts(const EkPlace& p, u64 block, u32 guards) {
    u16* count = (u16*)(block + 4 * (u64)p.groups);
    return {(u32*)block, count, count + 1, count + 1 + guards, (u8*)block + kv_ek_head_bytes(p, guards)};
}

// One warp a block: whether it is coded, its length, and all of it but the streams.
KV_KERNEL(ek_place, (const u64* plan), (plan)) {
    const EkPlace p = kv_ek_place(plan, warp);
    const EqPlace g = kv_ek_guards(p);
    const u32 guards = *kv_eq_guard_count(g);
    const u32* statuses = kv_ek_statuses(p);
    u32* length = (u32*)plan[KV_EK_LENGTHS_AT] + warp;
    u32 status = 0;
    for (u32 token = 0; token < p.tokens; token++) status |= statuses[token];
    for (u32 head = 0; head < p.heads; head++) status |= ((const u32*)plan[KV_EK_REPORTS_AT])[((u64)warp * p.heads + head) * KV_REPORT_WORDS];
    u64 bytes = 0;
    for (u32 group = 0; group < p.groups; group++) {
        const u32 of_stream = kv_eq_head(kv_ek_stream(p, group))->bytes;
        bytes += of_stream;
        status |= of_stream == 0;
    }
    const u64 total = kv_ek_head_bytes(p, guards) + bytes;
    if (status || total >= 2 * (u64)p.tokens * p.columns) {
        KV_ONCE(*length = 0);
        return;
    }
    const EkParts parts = kv_ek_parts(p, p.job[KV_EK_SLOT], guards);
    u32 end = 0;
    for (u32 group = 0; group < p.groups; group++) {
        end += kv_eq_head(kv_ek_stream(p, group))->bytes;
        KV_ONCE(parts.ends[group] = end);
    }
    KV_ONCE(*parts.count = (u16)guards);
    kv_copy_u16(parts.tokens, kv_eq_guards(g), guards);
    for (u32 guard = 0; guard < guards; guard++) {
        for (u32 head = 0; head < p.heads; head++) {
            const u16* row = (const u16*)p.job[KV_EK_AT] + ((u64)head * p.tokens + kv_eq_guards(g)[guard]) * p.dim;
            kv_copy_u16(parts.rows + ((u64)guard * p.heads + head) * p.dim, row, p.dim);
        }
    }
    KV_ONCE(*length = (u32)total);
}

// One warp a stream, after ek_place.
KV_KERNEL(ek_move, (const u64* plan), (plan)) {
    const u32 groups = (u32)plan[KV_EK_GROUPS], group = warp % groups;
    const EkPlace p = kv_ek_place(plan, warp / groups);
    if (!((const u32*)plan[KV_EK_LENGTHS_AT])[p.block]) return;
    const EqPlace s = kv_ek_stream(p, group);
    const u32 bytes = kv_eq_head(s)->bytes;
    const EkParts parts = kv_ek_parts(p, p.job[KV_EK_SLOT], *kv_eq_guard_count(kv_ek_guards(p)));
    const u8* from = kv_eq_stream(s) + s.plan[KV_EQ_SLOT_BYTES] - bytes;
    kv_copy_u16((u16*)(parts.streams + parts.ends[group] - bytes), (const u16*)from, bytes / 2);
}

// --- Decoding --------------------------------------------------------------------------------------------------------------------------

// Its guarded tokens, none of it believed: false where the head is not within the block or tokens do not ascend.
KV_FUNCTION bool kv_ek_open(const EkPlace& p, EkGuards& guards) {
    const u64 length = p.job[KV_EK_LENGTH];
    guards = {0, 0, 0};
    if (length < kv_ek_head_bytes(p, 0)) return false;
    const u32 count = *kv_ek_parts(p, p.job[KV_EK_AT], 0).count;
    if (count > p.tokens / KV_EQ_GUARDED_PART || kv_ek_head_bytes(p, count) > length) return false;
    const EkParts parts = kv_ek_parts(p, p.job[KV_EK_AT], count);
    u32 next = 0;
    for (u32 guard = 0; guard < count; guard++) {
        const u32 token = parts.tokens[guard];
        if (token < next || token >= p.tokens) return false;
        next = token + 1;
    }
    guards = {parts.tokens, parts.rows, count};
    return true;
}
KV_FUNCTION bool kv_ek_get(const EkPlace& p, u32 group) {
    EkGuards guards;
    if (!kv_ek_open(p, guards)) return false;
    const EkParts parts = kv_ek_parts(p, p.job[KV_EK_AT], guards.count);
    const u64 room = p.job[KV_EK_LENGTH] - kv_ek_head_bytes(p, guards.count);
    const u32 start = group ? parts.ends[group - 1] : 0, end = parts.ends[group];
    if (start > end || end > room || ((start | end) & 1) || (group == p.groups - 1 && end != room)) return false;
    const EqPlace s = kv_ek_stream(p, group);
    return kv_eq_get<false, true>(s, (const u16*)(parts.streams + start), end - start, 0.0f, kv_eq_means(s), kv_eq_ids(s), kv_eq_symbols(s));
}
// One warp a stream: its integers, and a status each.
KV_KERNEL(ek_get, (const u64* plan), (plan)) {
    const u32 groups = (u32)plan[KV_EK_GROUPS];
    const u32 status = !kv_ek_get(kv_ek_place(plan, warp / groups), warp % groups);
    KV_ONCE(((u32*)plan[KV_EK_LENGTHS_AT])[warp] = status);
}
// One warp a head: its values. Blocks whose streams were none have undefined ones.
KV_KERNEL(ek_decode, (const u64* plan), (plan)) {
    const u32 heads = (u32)plan[KV_EK_HEADS], head = warp % heads;
    const EkPlace p = kv_ek_place(plan, warp / heads);
    EkGuards guards;
    kv_ek_open(p, guards);
    KvMeasured m = kv_measured();
    kv_ek_values(p, head, guards, 0, (u16*)p.job[KV_EK_DECODED] + (u64)head * p.tokens * p.dim, LaneF32(1.0f), m);
}

#endif
