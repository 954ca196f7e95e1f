// eq, from integers to streams and back: which table each column takes, and the entropy coder's loops.
#ifndef KVOBJ_EQ_STREAMS_CUH
#define KVOBJ_EQ_STREAMS_CUH

#include "eq_steps.cuh"
#include "rans.cuh"

enum { KV_EQ_ALPHABET = 127, KV_EQ_PAIRS = KV_EQ_SIZES / 2 };

// What |q| costs by each table, in 1/1024 bit: for each two sizes, those of 0 to 127 and of an escape, a row of 64 tables, a size in each
// half of a word. Filled once a process or device.
KV_STORAGE u32 kv_eq_costs[KV_EQ_PAIRS * KV_TABLES];

KV_FUNCTION u32 kv_eq_cost(u32 table, u32 size) { // at most 28 * 1024
    const u32 f = size <= KV_EQ_ALPHABET ? kv_eq_frequencies[table * 128 + size] : 0;
    return kv_cost_of_frequency[f] + (f ? 0 : KV_RAW_COST);
}
// One warp a row.
KV_KERNEL(eq_prepare, (u32 rows), (rows)) {
    if (warp >= rows || warp >= KV_EQ_PAIRS) return;
    for (u32 table = 0; table < KV_TABLES; table++)
        KV_ONCE(kv_eq_costs[warp * KV_TABLES + table] = kv_eq_cost(table, 2 * warp) | kv_eq_cost(table, 2 * warp + 1) << 16);
}

// For each column the cheapest table, the lowest of equal ones: how often each |q| is in it is counted, 32 columns at a time, and what
// they cost is summed, a table a lane.
KV_ROUTINE void kv_eq_choose(const EqPlace& p) {
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
                low += kv_pair_products(kv_load_u32(kv_eq_costs + pair * KV_TABLES), two);
                high += kv_pair_products(kv_load_u32(kv_eq_costs + pair * KV_TABLES + KV_LANES), two);
            }
            const u32 least = kv_least(kv_min(low, high));
            const u32 of_low = kv_ballot(low == LaneU32(least)), of_high = kv_ballot(high == LaneU32(least));
            const u32 id = of_low ? kv_ctz(of_low) : KV_LANES + kv_ctz(of_high);
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

// What becomes of decoded symbols: kept, or made values. The means are those of steps, as ids are.
template <bool HALF, bool SYMBOLS>
KV_ROUTINE bool kv_eq_get(const EqPlace& p, const u16* stream, u32 bytes, float step_of_rung, const u16* means, u8* ids, u16* to) {
    RansReader r = kv_rans_reader(stream, bytes);
    if (r.is_bad) return false;
    kv_rans_get_ids(r, ids, p.dim);
    const u32 values = kv_eq_values(p);
    const LaneF32 step(step_of_rung);
    RansColumns c = kv_columns_from(0, p.dim);
    for (u32 at = 0; at < values; at += KV_LANES) {
        const u32 some = values - at;
        const LaneMask valid = kv_lane() < LaneU32(some);
        const LaneU32 table = kv_load_u8(ids + c.at);
        LaneU32 entry;
        if (some >= KV_LANES && kv_rans_is_far(r)) {
            entry = kv_rans_get_far(r, kv_eq_tables.slots, table);
        } else {
            kv_rans_rest(r);
            entry = kv_rans_get(r, kv_eq_tables.slots, table, valid);
        }
        const LaneU32 symbol = kv_rans_symbol(entry);
        LaneI32 q = kv_as_i32(symbol) - LaneI32(KV_EQ_ALPHABET);
        const LaneMask escaped = kv_and(valid, symbol == LaneU32(KV_ESCAPE));
        if (kv_ballot(escaped)) q = kv_select(escaped, kv_as_i32(kv_rans_escapes(r, escaped) << 16) >> 16, q);
        if (SYMBOLS) kv_store_u16(to + at, kv_as_u32(q), some);
        else kv_store_u16(to + at, kv_eq_decoded<HALF>(q, step, kv_value<false>(kv_load_u16(means + c.at))), some);
        kv_columns_next(c);
        if (r.is_bad) return false;
    }
    return kv_rans_is_whole(r);
}

#endif
