// eq, from integers to streams and back: which table each column takes, and the entropy coder's loops.
#ifndef KVOBJ_EQ_STREAMS_CUH
#define KVOBJ_EQ_STREAMS_CUH

#include "eq_steps.cuh"
#include "rans.cuh"

enum { KV_EQ_ALPHABET = 127, KV_EQ_PAIRS = KV_EQ_SIZES / 2 };

// What |q| costs by each table, in 1/1024 bit: for each two sizes, those of 0 to 127 and of an escape, a row of 64 tables, a size in each
// half of a word (where KV_WIDE as kv_rans_cheapest_of_pairs has them, and a row beyond). Filled once a process or device.
KV_STORAGE u32 kv_eq_costs[(KV_EQ_PAIRS + KV_WIDE) * KV_TABLES];

KV_FUNCTION u32 kv_eq_cost(u32 table, u32 size) { // at most 28 * 1024
    const u32 f = size <= KV_EQ_ALPHABET ? kv_eq_frequencies[table * 128 + size] : 0;
    return kv_cost_of_frequency[f] + (f ? 0 : KV_RAW_COST);
}
KV_FUNCTION LaneU32 kv_eq_cost_of(LaneU32 costs, u32 counts) { // of two sizes
#if KV_WIDE
    return kv_low_costs(0, counts, costs) + (kv_high_costs(0, counts, costs) << 8);
#else
    return kv_pair_products(costs, counts);
#endif
}
// One warp a row.
KV_KERNEL(eq_prepare, (u32 rows), (rows)) {
    if (warp >= rows || warp >= KV_EQ_PAIRS) return;
    for (u32 table = 0; table < KV_TABLES; table++) {
        const u32 first = kv_eq_cost(table, 2 * warp), second = kv_eq_cost(table, 2 * warp + 1);
#if KV_WIDE
        KV_ONCE(kv_eq_costs[warp * KV_TABLES + table] = kv_cost_bytes(first, second));
#else
        KV_ONCE(kv_eq_costs[warp * KV_TABLES + table] = first | second << 16);
#endif
    }
}

#if KV_WIDE
enum { KV_EQ_ROWS = 8 }; // fetched together

// |q| of a symbol as it lies, 16 bits or a byte (kv_eq_quantise_rows), or KV_EQ_ALPHABET + 1.
KV_FUNCTION u32 kv_eq_size(u16 symbol) {
    const i32 q = (i16)symbol;
    return kv_min((u32)(q < 0 ? -q : q), KV_EQ_ALPHABET + 1u);
}
KV_FUNCTION u32 kv_eq_size(u8 symbol) {
    const i32 q = (i32)symbol - KV_EQ_ALPHABET;
    return (u32)(q < 0 ? -q : q);
}
KV_FUNCTION void kv_eq_count(u32 size, u32* counters, u32& seen) {
    seen = kv_max(seen, size);
    counters[(size >> 1) * KV_LANES] += 1u << (16 * (size & 1));
}
// As kv_eq_choose where there are whole tiles of 32 columns: each lane counts one by itself.
template <class Symbol> KV_FUNCTION void kv_eq_choose_tiles(const EqPlace& p, const Symbol* symbols) {
    u32* counters = KV_WARP_MEMORY_AT(KV_EQ_MEMORY);
    const u32 lane = kv_lane();
    for (u32 first = 0; first < p.dim; first += KV_LANES) {
        kv_sync();
        KV_UNROLL for (u32 pair = 0; pair < KV_EQ_PAIRS; pair++) counters[pair * KV_LANES + lane] = 0;
        const Symbol* from = symbols + first + lane;
        u32 seen = 0, t = 0;
        u32 coming[KV_EQ_ROWS];
        KV_UNROLL for (u32 row = 0; row < KV_EQ_ROWS; row++) coming[row] = row < p.tokens ? (u32)from[row * p.dim] : 0u;
        for (; t + 2 * KV_EQ_ROWS <= p.tokens; t += KV_EQ_ROWS) {
            u32 here[KV_EQ_ROWS];
            from += KV_EQ_ROWS * p.dim;
            KV_UNROLL for (u32 row = 0; row < KV_EQ_ROWS; row++) here[row] = coming[row];
            KV_UNROLL for (u32 row = 0; row < KV_EQ_ROWS; row++) coming[row] = from[row * p.dim];
            KV_UNROLL for (u32 row = 0; row < KV_EQ_ROWS; row++) kv_eq_count(kv_eq_size((Symbol)here[row]), counters + lane, seen);
        }
        KV_UNROLL for (u32 row = 0; row < KV_EQ_ROWS; row++)
            if (t + row < p.tokens) kv_eq_count(kv_eq_size((Symbol)coming[row]), counters + lane, seen);
        for (t += KV_EQ_ROWS; t < p.tokens; t++) kv_eq_count(kv_eq_size(symbols[t * p.dim + first + lane]), counters + lane, seen);
        const u32 pairs = kv_greatest(seen) / 2 + 1;
        kv_sync();
        u32 mine = 0;
        for (u32 column = 0; column < KV_LANES; column += 8) {
            u32 ids[8];
            kv_rans_cheapest_of_pairs(kv_eq_costs, counters + column, KV_LANES, pairs, ids);
            KV_UNROLL for (u32 at = 0; at < 8; at++) mine = lane == column + at ? ids[at] : mine;
        }
        kv_eq_ids(p)[first + lane] = (u8)mine;
    }
    kv_columns_wrap(kv_eq_ids(p), p.dim);
}
#endif

// For each column the cheapest table, the lowest of equal ones: how often each |q| is in it is counted, 32 columns at a time, and what
// they cost is summed, a table a lane.
KV_ROUTINE void kv_eq_choose(const EqPlace& p) {
#if KV_WIDE
    if (p.dim % KV_LANES == 0) {
        kv_eq_choose_tiles(p, (const u16*)kv_eq_symbols(p));
        return;
    }
#endif
    const u16* symbols = kv_eq_symbols(p);
    u16* counts = kv_eq_counts(p);
    u8* ids = kv_eq_ids(p);
    const LaneU32 counters = kv_lane() * LaneU32((u32)KV_EQ_SIZES);
    for (u32 first = 0; first < p.dim; first += KV_LANES) {
        const u32 columns = kv_min_uniform(p.dim - first, KV_LANES);
        for (u32 at = 0; at < KV_EQ_SIZES; at++) kv_store_u16(counts + at * KV_LANES, LaneU32(0u));
        kv_sync();
        LaneU32 seen(0u);
        for (u32 t = 0; t < p.tokens; t++) {
            const LaneI32 q = kv_eq_symbols_at(symbols + (u64)t * p.dim + first, columns), sign = q >> 31;
            const LaneU32 size = kv_min(kv_as_u32((q ^ sign) - sign), LaneU32(KV_EQ_ALPHABET + 1u));
            seen = kv_max(seen, size);
            kv_count_u16(counts, counters + size, columns);
        }
        kv_sync();
        const u32 pairs = kv_greatest(seen) / 2 + 1;
        for (u32 column = 0; column < columns; column++) {
            const u32* found = (const u32*)(counts + column * KV_EQ_SIZES);
            LaneU32 low(0u), high(0u);
            for (u32 pair = 0; pair < pairs; pair++) {
                const u32 two = found[pair];
                if (!two) continue;
                low += kv_eq_cost_of(kv_load_u32(kv_eq_costs + pair * KV_TABLES), two);
                high += kv_eq_cost_of(kv_load_u32(kv_eq_costs + pair * KV_TABLES + KV_LANES), two);
            }
            const u32 id = kv_rans_least(low, high);
            KV_ONCE(ids[first + column] = (u8)id);
        }
        kv_sync();
    }
    kv_columns_wrap(ids, p.dim);
}

// The stream of the head's symbols, at the end of its slot: length, or 0 if it does not fit.
KV_ROUTINE u32 kv_eq_put(const EqPlace& p) {
    const u32 values = kv_eq_values(p), slot_bytes = (u32)p.plan[KV_EQ_SLOT_BYTES];
    const u16* symbols = kv_eq_symbols(p);
    const u8* ids = kv_eq_ids(p);
    u16* end = (u16*)(kv_eq_stream(p) + slot_bytes);
    RansWriter w = kv_rans_writer((u16*)kv_eq_stream(p), end);
    u32 step = (values + KV_LANES - 1) / KV_LANES;
    RansColumns c = kv_columns_from(step - 1, p.dim);
    const LaneU32 escape_put(1u | (KV_SLOTS - 1) << 16);
    while (step-- > 0) {
        const u32 at = step * KV_LANES, some = values - at;
        const LaneI32 q = kv_eq_symbols_at(symbols + at, some);
        const LaneU32 place = kv_min(kv_as_u32(q + LaneI32(KV_EQ_ALPHABET)), LaneU32(KV_ESCAPE));
        const LaneU32 put = kv_gather_u32(kv_eq_tables.puts, (kv_load_u8(ids + c.at) << 8) | place);
        const LaneMask valid = kv_lane() < LaneU32(some);
        kv_rans_put(w, put, valid, kv_and(valid, put == escape_put), kv_as_u32(q));
        kv_columns_back(c);
    }
    kv_rans_put_ids(w, ids, p.dim);
    const u16* start = kv_rans_finish(w);
    return start ? (u32)((u8*)end - (u8*)start) : 0;
}

#if KV_WIDE
// As kv_eq_put, of 128 columns whose symbols kv_eq_quantise_rows has left. `x`: the values.
template <bool HALF> KV_FUNCTION u32 kv_eq_put_rows(const EqPlace& p, const u16* x, u32 rung) {
    const u32 slot_bytes = (u32)p.plan[KV_EQ_SLOT_BYTES], lane = kv_lane(), columns = 4 * KV_LANES;
    const float inverse = kv_eq_inverse(kv_eq_head(p)->step);
    const u8 *symbols = (const u8*)kv_eq_symbols(p), *ids = kv_eq_ids(p);
    u16* end = (u16*)(kv_eq_stream(p) + slot_bytes);
    RansWriter w = kv_rans_writer((u16*)kv_eq_stream(p), end);
    for (u32 step = 4 * p.tokens; step-- > 0;) {
        if (step % 8 == 7) step = kv_rans_put_run(w, kv_eq_tables.divisors, ids, columns, symbols, step + 1) - 1;
        const u32 column = step * KV_LANES % columns + lane, place = symbols[step * KV_LANES + lane];
        const u32 put = kv_eq_tables.puts[(u32)ids[column] << 8 | place];
        const bool is_escaped = kv_rans_is_escape(put);
        u32 raw = place - KV_EQ_ALPHABET;
        if (is_escaped && place == KV_ESCAPE) {
            const i32 q = kv_eq_integer(kv_value<HALF>(x[step * KV_LANES + lane]), kv_value<false>(kv_eq_means(p)[column]), inverse);
            raw = (u32)(rung ? kv_eq_third(q) : q);
        }
        kv_rans_put(w, put, true, is_escaped, raw);
    }
    kv_rans_put_ids(w, ids, columns);
    const u16* start = kv_rans_finish(w);
    return start ? (u32)((u8*)end - (u8*)start) : 0;
}

// As many full steps, four at a time, as are far from the end of a stream whose columns come again every four steps; returns how many.
template <bool HALF, bool SYMBOLS>
KV_FUNCTION u32 kv_eq_get_regular(RansReader& r, u32 columns, u32 steps, float step_of_rung, const u16* means, const u8* ids, u16* to) {
    LaneU32 tables[4];
    LaneF32 mean[4];
    KV_UNROLL for (u32 at = 0; at < 4; at++) {
        tables[at] = KV_RANS_TABLE_AT(kv_load_u8(ids + at * KV_LANES % columns));
        mean[at] = SYMBOLS ? 0.0f : kv_value<false>(kv_load_u16(means + at * KV_LANES % columns));
    }
    to += kv_lane();
    for (u32 done = 0; done + 4 <= steps; done += 4, to += 4 * KV_LANES) {
        KV_UNROLL for (u32 at = 0; at < 4; at++) {
            if (!kv_rans_is_far(r)) return done + at;
            const u32 symbol = kv_rans_symbol(kv_rans_get_far(r, kv_eq_tables, tables[at]));
            i32 q = (i32)symbol - KV_EQ_ALPHABET;
            const bool is_escaped = symbol == KV_ESCAPE;
            if (kv_ballot(is_escaped)) {
                const u32 raw = kv_rans_escapes(r, is_escaped);
                q = is_escaped ? (i32)(raw << 16) >> 16 : q;
            }
            to[at * KV_LANES] = SYMBOLS ? (u16)q : (u16)kv_eq_decoded<HALF>(q, step_of_rung, mean[at]);
        }
    }
    return steps / 4 * 4;
}
#endif

// What becomes of decoded symbols: kept, or made values. The means are those of steps, as ids are.
template <bool HALF, bool SYMBOLS>
KV_ROUTINE bool kv_eq_get(const EqPlace& p, const u16* stream, u32 bytes, float step_of_rung, const u16* means, u8* ids, u16* to) {
    RansReader r = kv_rans_reader(stream, bytes);
    if (r.is_bad) return false;
    kv_rans_get_ids(r, ids, p.dim);
    const u32 values = kv_eq_values(p);
    const LaneF32 step(step_of_rung);
    u32 done = 0;
#if KV_WIDE
    if (128 % p.dim == 0 && p.dim >= KV_LANES)
        done = kv_eq_get_regular<HALF, SYMBOLS>(r, p.dim, values / KV_LANES, step_of_rung, means, ids, to);
#endif
    if (r.is_bad) return false;
    RansColumns c = kv_columns_from(done, p.dim);
    LaneU32 next_table = kv_load_u8(ids + c.at);
    for (u32 at = done * KV_LANES; at < values; at += KV_LANES) {
        const u32 some = values - at, here = c.at;
        const LaneMask valid = kv_lane() < LaneU32(some);
        const LaneU32 table = next_table;
        kv_columns_next(c);
        next_table = kv_load_u8(ids + c.at); // there beyond the last step too
        LaneU32 mean(0u), entry;
        if (!SYMBOLS) mean = kv_load_u16(means + here);
        if (some >= KV_LANES && kv_rans_is_far(r)) {
            entry = kv_rans_get_far(r, kv_eq_tables, KV_RANS_TABLE_AT(table));
        } else {
            kv_rans_rest(r);
            entry = kv_rans_get(r, kv_eq_tables, table, valid);
        }
        const LaneU32 symbol = kv_rans_symbol(entry);
        LaneI32 q = kv_as_i32(symbol) - LaneI32(KV_EQ_ALPHABET);
        const LaneMask escaped = kv_and(valid, symbol == LaneU32(KV_ESCAPE));
        if (kv_ballot(escaped)) q = kv_select(escaped, kv_as_i32(kv_rans_escapes(r, escaped) << 16) >> 16, q);
        if (SYMBOLS) kv_store_u16(to + at, kv_as_u32(q), some);
        else kv_store_u16(to + at, kv_eq_decoded<HALF>(q, step, kv_value<false>(mean)), some);
        if (r.is_bad) return false;
    }
    return kv_rans_is_whole(r);
}

#endif
