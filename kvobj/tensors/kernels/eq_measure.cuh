// eq, what is measured before anything is quantised: sums, norms, guarded tokens, means and the step. All of it integers: x counts as
// trunc(x * 2^(14 - E)), E the exponent of its head's largest value, so below 2^15.
#ifndef KVOBJ_EQ_MEASURE_CUH
#define KVOBJ_EQ_MEASURE_CUH

#include "eq_plan.cuh"

KV_FUNCTION LaneF32 kv_eq_grid(i32 exponent) { return LaneF32(kv_power_of_two(KV_EQ_FRACTION - exponent)); }

// Sums of up to 32 * TILES neighbouring columns, and what they add to each row's sum of squares.
template <bool HALF, int TILES>
KV_FUNCTION void kv_eq_sum_columns(const EqPlace& p, const u16* x, u32 first, LaneF32 grid) {
    i64* rows = kv_eq_rows(p);
    LaneI32 sums[TILES];
    for (int tile = 0; tile < TILES; tile++) sums[tile] = LaneI32(0);
    u32 t = 0;
#if KV_WIDE
    enum { ROWS = 16 / TILES }; // fetched together
    for (; first + TILES * KV_LANES <= p.dim && t + ROWS <= p.tokens; t += ROWS) {
        u32 words[ROWS][TILES];
        KV_UNROLL for (u32 row = 0; row < ROWS; row++)
            KV_UNROLL for (u32 tile = 0; tile < TILES; tile++) words[row][tile] = kv_load_u16(x + (u64)(t + row) * p.dim + first + 32 * tile);
        KV_UNROLL for (u32 row = 0; row < ROWS; row++) {
            u32 squares = 0;
            KV_UNROLL for (u32 tile = 0; tile < TILES; tile++) {
                const i32 v = kv_truncate(kv_value<HALF>(words[row][tile]) * grid);
                sums[tile] += v;
                squares += (u32)(v * v);
            }
            const i64 square = (i64)kv_sum(squares & 0xffffu) + ((i64)kv_sum(squares >> 16) << 16);
            KV_ONCE(rows[t + row] = first ? rows[t + row] + square : square);
        }
    }
#endif
    for (; t < p.tokens; t++) {
        const u16* row = x + (u64)t * p.dim + first;
        LaneU32 squares(0u); // at most 4 of below 2^30
        for (int tile = 0; tile < TILES; tile++) {
            const LaneI32 v = kv_truncate(kv_value<HALF>(kv_load_u16(row + 32 * tile, p.dim - first - 32 * tile)) * grid);
            sums[tile] += v;
            squares += kv_as_u32(v * v);
        }
        const i64 square = (i64)kv_sum(squares & LaneU32(0xffffu)) + ((i64)kv_sum(squares >> 16) << 16);
        KV_ONCE(rows[t] = first ? rows[t] + square : square);
    }
    for (int tile = 0; tile < TILES; tile++) kv_store_u32((u32*)kv_eq_sums(p) + first + 32 * tile, kv_as_u32(sums[tile]));
}
template <bool HALF> KV_FUNCTION void kv_eq_measure_head(const EqPlace& p) {
    const u16* x = kv_eq_values_at(p, p.job[0]);
    const u32 greatest = kv_greatest_word(x, kv_eq_values(p));
    const i32 exponent = greatest ? kv_head_exponent(greatest, HALF) : 0;
    const u32 is_bad = greatest >= kv_first_non_finite(HALF) || exponent < KV_EQ_LEAST_EXPONENT || exponent > KV_EQ_GREATEST_EXPONENT;
    EqHead* head = kv_eq_head(p);
    KV_ONCE(head->status = is_bad; head->greatest = greatest; head->exponent = exponent; head->escapes = 0; head->bytes = 0);
    if (is_bad) return;
    const LaneF32 grid = kv_eq_grid(exponent);
    for (u32 first = 0; first < p.dim; first += 4 * KV_LANES) {
        const u32 left = p.dim - first;
        if (left <= 32) kv_eq_sum_columns<HALF, 1>(p, x, first, grid);
        else if (left <= 64) kv_eq_sum_columns<HALF, 2>(p, x, first, grid);
        else if (left <= 96) kv_eq_sum_columns<HALF, 3>(p, x, first, grid);
        else kv_eq_sum_columns<HALF, 4>(p, x, first, grid);
    }
    for (u32 t = p.tokens; t < kv_eq_padded(p.tokens); t++) KV_ONCE(kv_eq_rows(p)[t] = 0);
}

// One warp a head: whether the head can be coded, its exponent, sums of columns, sums of squares of rows.
KV_KERNEL(eq_measure, (const u64* plan), (plan)) {
    const EqPlace p = kv_eq_head_place(plan, warp);
    if (plan[KV_EQ_IS_HALF]) kv_eq_measure_head<true>(p);
    else kv_eq_measure_head<false>(p);
}

// Numbers of up to 60 bits as two words.
enum { KV_EQ_LOW_BITS = 28 };
KV_FUNCTION LaneMask kv_eq_below(LaneU32 high, LaneU32 low, u64 bound) {
    const LaneU32 bound_high((u32)(bound >> KV_EQ_LOW_BITS)), bound_low((u32)bound & ((1u << KV_EQ_LOW_BITS) - 1));
    return kv_or(high < bound_high, kv_and(high == bound_high, low < bound_low));
}
KV_FUNCTION u32 kv_eq_count_below(const u32* high, const u32* low, u32 count, u64 bound) {
    u32 found = 0;
    for (u32 at = 0; at < count; at += KV_LANES)
        found += kv_popc(kv_ballot(kv_eq_below(kv_load_u32(high + at), kv_load_u32(low + at), bound)));
    return found; // places beyond the last token hold the largest number
}

// One warp a block: the guarded tokens. A token's squared norm is that of its rows in all heads, in units of the largest exponent; it is
// guarded below 0.3 or above 3 times the lower median norm, and no token is if more than 1 of 16 would be.
KV_KERNEL(eq_guard, (const u64* plan), (plan)) {
    const EqPlace p = kv_eq_place(plan, warp, 0);
    const EqHead* heads = kv_eq_head(p);
    KV_ONCE(*kv_eq_guard_count(p) = 0);
    i32 exponent = KV_EQ_LEAST_EXPONENT;
    for (u32 head = 0; head < p.heads; head++) {
        if (heads[head].status) return;
        if (heads[head].greatest && heads[head].exponent > exponent) exponent = heads[head].exponent;
    }
    const u64 padded = kv_eq_padded(p.tokens);
    u32 *high = kv_eq_norms(p), *low = high + padded;
    const i64* rows = kv_eq_rows(p);
    for (u32 at = 0; at < p.tokens; at += KV_LANES) {
        LaneI64 norm = kv_i64(0);
        for (u32 head = 0; head < p.heads; head++) {
            const u32 shift = heads[head].greatest ? 2u * (u32)(exponent - heads[head].exponent) : 0u;
            if (shift < 63) norm += kv_load_i64(rows + head * padded + at) >> (int)shift;
        }
        const LaneMask is_token = kv_lane() < LaneU32(p.tokens - at);
        kv_store_u32(high + at, kv_select(is_token, kv_as_u32(kv_narrow(norm >> (int)KV_EQ_LOW_BITS)), LaneU32(~0u)));
        kv_store_u32(low + at, kv_as_u32(kv_narrow(norm)) & LaneU32((1u << KV_EQ_LOW_BITS) - 1));
    }
    kv_sync();
    u64 median = 0; // the largest number that at most (tokens - 1) / 2 norms are below: the one with that many before it
    for (int bit = 2 * KV_EQ_LOW_BITS - 1; bit >= 0; bit--) {
        const u64 bound = median | (u64)1 << bit;
        if (kv_eq_count_below(high, low, p.tokens, bound) <= (p.tokens - 1) / 2) median = bound;
    }
    const u64 least = (9 * median + 99) / 100, greatest = 9 * median + 1; // on squares: 0.09 and 9; a constant divides
    const u32 guards = kv_eq_count_below(high, low, p.tokens, least) + p.tokens - kv_eq_count_below(high, low, p.tokens, greatest);
    if (guards > p.tokens / KV_EQ_GUARDED_PART) return;
    u16* list = kv_eq_guards(p);
    u32 found = 0;
    for (u32 at = 0; guards && at < p.tokens; at += KV_LANES) {
        const LaneU32 h = kv_load_u32(high + at), l = kv_load_u32(low + at);
        const LaneMask is_guarded = kv_and(kv_or(kv_eq_below(h, l, least), kv_not(kv_eq_below(h, l, greatest))),
                                           kv_lane() < LaneU32(p.tokens - at));
        found += kv_compress_u16(list + found, kv_lane() + LaneU32(at), is_guarded);
    }
    KV_ONCE(*kv_eq_guard_count(p) = found);
}

// --- Means and the step ----------------------------------------------------------------------------------------------------------------

KV_FUNCTION u32 kv_bf16_word_uniform(float x) {
    const u32 bits = kv_bits_uniform(x);
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// bf16(s * root mean square of what is left after the means), given the sum of squares over so many values on the head's grid: at least
// a unit of the grid, so that whatever is finer there still is quantised.
KV_FUNCTION u32 kv_eq_step(u64 squares, u32 count, float s, i32 exponent) {
    const i32 bits = 64 - kv_clz64(squares);
    const i32 shift = bits > 24 ? (bits - 23) / 2 * 2 : 0;
    const float variance = kv_to_f32_uniform((i32)(squares >> shift)) * kv_reciprocal(kv_to_f32_uniform((i32)count));
    const float root = kv_sqrt_uniform(variance) * kv_power_of_two(shift / 2);
    return kv_bf16_word_uniform(s * (root < 1.0f ? 1.0f : root) * kv_power_of_two(exponent - KV_EQ_FRACTION));
}

// Means of the columns over tokens that are not guarded, and the step, from what eq_measure and eq_guard found.
template <bool HALF> KV_ROUTINE void kv_eq_centre(const EqPlace& p, const u16* x) {
    EqHead* head = kv_eq_head(p);
    const i32 exponent = head->exponent;
    const u32 guards = *kv_eq_guard_count(p);
    const u16* list = kv_eq_guards(p);
    const LaneF32 grid = kv_eq_grid(exponent), unit(kv_power_of_two(exponent - KV_EQ_FRACTION));
    const i64 tokens = (i64)(p.tokens - guards);
    const LaneF32 share(kv_reciprocal(kv_to_f32_uniform((i32)tokens)));
    u16* means = kv_eq_means(p);
    LaneI64 squares = kv_i64(0);
    for (u32 at = 0; at < p.dim; at += KV_LANES) {
        LaneI32 sum = kv_as_i32(kv_load_u32((const u32*)kv_eq_sums(p) + at));
        for (u32 guard = 0; guard < guards; guard++) {
            const u16* row = x + (u64)list[guard] * p.dim + at;
            sum = sum - kv_truncate(kv_value<HALF>(kv_load_u16(row, p.dim - at)) * grid);
        }
        const LaneU32 mean = kv_bf16_word(kv_to_f32(sum) * share * unit);
        kv_store_u16(means + at, mean);
        const LaneI64 m = kv_widen(kv_truncate(kv_value<false>(mean) * grid));
        squares += m * (m * kv_i64(tokens) - kv_widen(sum) * kv_i64(2)); // (x - m)^2 = x^2 + m (m - 2 x)
    }
    for (u32 at = 0; at < p.tokens; at += KV_LANES) squares += kv_load_i64(kv_eq_rows(p) + at);
    u64 total = (u64)kv_sum(squares);
    for (u32 guard = 0; guard < guards; guard++) total -= (u64)kv_eq_rows(p)[list[guard]];
    const u32 step = head->greatest ? kv_eq_step(total, (u32)tokens * p.dim, kv_from_bits_uniform((u32)p.plan[KV_EQ_STEP]), exponent) : 0u;
    KV_ONCE(head->step = step);
    kv_sync();
}

#endif
