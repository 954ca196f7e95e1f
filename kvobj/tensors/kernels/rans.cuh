// The entropy coder that xa, eq and ek share: rANS over static tables, 32 interleaved lanes, 32-bit states, 12-bit frequencies.
//
// A *stream* codes a run of values and the table ids of its columns. Value i is in step i / 32, lane i % 32, column i % D; each column has
// one of 64 tables. To a decoder a stream is
//
//     u16 states[32] (the low halves), u16 states[32] (the high halves), u16 words[]
//
// and decodes in this order: the ids of the columns, 32 a step (id in 0..63 is a symbol of frequency 64 from 64 * id on, in every stream),
// then the values, 32 a step. Lanes beyond the last column, or the last value, do nothing in a step. A step in a lane:
//
//     slot = x % 4096; (symbol, f, c) = table(slot); x = f * (x / 4096) + slot - c
//     if x < 2^16: x = x * 2^16 + the next word        (lanes take consecutive words in lane order)
//     if symbol is the escape: its raw value is the next word (in lane order, after all words of the line above)
//
// **The rest.** Once no word is left, before the next step (or at the end), 2^16 is subtracted from every state, and in the steps that
// remain no lane reads a word. At the end every state is 0 and no word is left: anything else is no stream.
// So an encoder starts from states of 0, puts the last values without a word for as long as no lane needs one (an escape, or
// x + 2^16 >= f * 2^20), and then adds 2^16 to every state: the states' first 16 bits carry values instead of nothing, which saves up to
// 512 bits a stream (0.016 bits a value at 256 x 128) and makes the check at the end complete. An encoder has no choice in this: a
// stream is a function of its values, raw words and ids.
//
// Encoders go backwards and write downwards, so a stream comes to lie in decoding order.
#ifndef KVOBJ_RANS_CUH
#define KVOBJ_RANS_CUH

#define KV_TABLES 64
#define KV_SYMBOLS 256   // of a table, the escape among them
#define KV_ESCAPE 255
#define KV_SLOTS 4096
#define KV_STATE_WORDS 64 // that the states of a stream take
#define KV_STEP_WORDS 96  // that a step may write, those that it leaves undefined below its own among them
#define KV_ESCAPE_COST 12288 // of its symbol, in every table, in 1/1024 bit
#define KV_RAW_COST 16384    // of an escape's word, in 1/1024 bit
#define KV_COST_TOKENS 65535 // tables are chosen by a column's first so many values: the sum of their costs is below 2^32

KV_CONSTANT u16 kv_xa_frequencies[KV_TABLES * 24] = {
#include "tables_xa.cuh"
};
KV_CONSTANT u16 kv_eq_frequencies[KV_TABLES * 128] = {
#include "tables_eq.cuh"
};
KV_CONSTANT u16 kv_cost_of_frequency[KV_SLOTS] = {
#include "tables_cost.cuh"
};

// What is made of them once a process or device, by kv_rans_prepare: of each alphabet
// slots[table][slot]: f | (slot - c) << 12 | symbol << 24;
// puts[table][symbol]: f | c << 16, and the escape's where the symbol has no frequency;
// costs[symbol][table]: 1/1024 bit;
// where KV_WIDE, eighths[table][slot / 8]: symbol of the first of eight slots, and from bit 8 on whether each of the others has the next
// symbol after the one before it. (No symbol in use has one between that has no frequency, but for the escape at the last slot.) With
// `puts` the same as `slots`, in a sixteenth of the room, so that it stays where it is near, and two steps;
// divisors[table][symbol]: the one of `puts`, and 2^32 / f rounded down (2^32 - 1 of 1).
struct RansTables {
    u32 slots[KV_TABLES * KV_SLOTS];
#if KV_WIDE
    u16 eighths[KV_TABLES * KV_SLOTS / 8];
    uint2 divisors[KV_TABLES * KV_SYMBOLS];
#endif
    u32 puts[KV_TABLES * KV_SYMBOLS];
    u32 costs[KV_SYMBOLS * KV_TABLES];
};
KV_STORAGE RansTables kv_xa_tables; // symbol d, 24 to 254 unused
KV_STORAGE RansTables kv_eq_tables; // symbol q + 127
#if KV_WIDE
#define KV_XA_PAIRS 13u // of symbols: 0 to 23, and the escape
KV_STORAGE u32 kv_xa_pair_costs[(KV_XA_PAIRS + 1) * KV_TABLES]; // as kv_rans_cheapest_of_pairs has them
#endif

KV_FUNCTION u32 kv_table_frequency(u32 is_eq, u32 table, u32 symbol) {
    if (symbol == KV_ESCAPE) return 1;
    if (!is_eq) return symbol < 24 ? kv_xa_frequencies[table * 24 + symbol] : 0;
    return kv_eq_frequencies[table * 128 + (symbol < 127 ? 127 - symbol : symbol - 127)];
}

// A warp a table: 0 to 63 those of xa, 64 to 127 those of eq.
KV_KERNEL(rans_prepare, (u32 unused), (unused)) {
    const u32 is_eq = warp / KV_TABLES, table = warp % KV_TABLES;
    if (is_eq > 1 + unused) return;
    RansTables& to = is_eq ? kv_eq_tables : kv_xa_tables;
    u32 from = 0;
    for (u32 symbol = 0; symbol < KV_SYMBOLS; symbol++) {
        const u32 f = kv_table_frequency(is_eq, table, symbol);
        const u32 put = f ? f | from << 16 : 1u | (KV_SLOTS - 1) << 16;
        const u32 cost = kv_cost_of_frequency[f] + (f == 0 || symbol == KV_ESCAPE ? KV_RAW_COST : 0);
        KV_ONCE(to.puts[table * KV_SYMBOLS + symbol] = put);
#if KV_WIDE
        KV_ONCE(to.divisors[table * KV_SYMBOLS + symbol] = make_uint2(put, f > 1 ? (u32)(0x100000000ull / f) : ~0u));
#endif
        KV_ONCE(to.costs[symbol * KV_TABLES + table] = cost);
        for (u32 at = 0; at < f; at += KV_LANES) {
            const LaneU32 entry = kv_u32(f | symbol << 24) | ((kv_lane() + kv_u32(at)) << 12);
            kv_store_u32(to.slots + table * KV_SLOTS + from + at, entry, f - at);
        }
        from += f;
    }
#if KV_WIDE
    kv_sync();
    const u32* slots = to.slots + table * KV_SLOTS;
    for (u32 at = kv_lane(); at < KV_SLOTS / 8; at += KV_LANES) {
        u32 entry = slots[8 * at] >> 24;
        for (u32 slot = 1; slot < 8; slot++) entry |= (slots[8 * at + slot] >> 24 != slots[8 * at + slot - 1] >> 24 ? 128u : 0u) << slot;
        to.eighths[table * (KV_SLOTS / 8) + at] = (u16)entry;
    }
    if (is_eq) return;
    for (u32 pair = kv_lane(); pair < KV_XA_PAIRS; pair += KV_LANES) {
        const bool is_last = pair == KV_XA_PAIRS - 1;
        const u32 first = to.costs[(is_last ? (u32)KV_ESCAPE : 2 * pair) * KV_TABLES + table];
        kv_xa_pair_costs[pair * KV_TABLES + table] = kv_cost_bytes(first, is_last ? 0u : to.costs[(2 * pair + 1) * KV_TABLES + table]);
    }
#endif
}

// --- Columns ---------------------------------------------------------------------------------------------------------------------------

// Table ids of a stream are kept so that the 32 of any step are consecutive: for D columns D + 32 bytes, id j % D at place j.
KV_FUNCTION u32 kv_columns_bytes(u32 columns) { return columns + KV_LANES; }

// The first D places are filled: fill the others.
KV_FUNCTION void kv_columns_wrap(u8* ids, u32 columns) {
    kv_sync();
    if (columns >= KV_LANES) {
        kv_store_u8(ids + columns, kv_load_u8(ids));
        kv_sync();
        return;
    }
    for (u32 at = 0; at < KV_LANES; at++) {
        const u8 id = ids[at % columns];
        kv_sync();
        KV_ONCE(ids[columns + at] = id);
    }
    kv_sync();
}

// Walks along the columns of the steps of a stream, forwards or backwards.
struct RansColumns {
    u32 at, columns, advance;
};
KV_FUNCTION RansColumns kv_columns_from(u32 step, u32 columns) {
    return {(u32)((u64)step * KV_LANES % columns), columns, KV_LANES % columns};
}
KV_FUNCTION void kv_columns_next(RansColumns& c) {
    c.at += c.advance;
    if (c.at >= c.columns) c.at -= c.columns;
}
KV_FUNCTION void kv_columns_back(RansColumns& c) {
    c.at += c.at < c.advance ? c.columns - c.advance : 0u - c.advance;
}

// The columns of a step's lanes, for c.at + lane up to c.columns + 31.
KV_FUNCTION LaneU32 kv_columns_of(const RansColumns& c) {
    LaneU32 column = kv_lane() + kv_u32(c.at);
    for (u32 last = c.at + KV_LANES - 1; last >= c.columns; last -= c.columns)
        column = kv_select(column >= kv_u32(c.columns), column - kv_u32(c.columns), column);
    return column;
}

// --- Encoding --------------------------------------------------------------------------------------------------------------------------

struct RansWriter {
    u16* at;      // the next words go below
    u16* floor;   // and none below this
    LaneU32 x;
    bool is_rest; // no word yet, and 2^16 not yet added
    bool is_full; // the stream did not fit; nothing is written any more
};

// `floor` to `end`: room for the stream, which will end at `end`.
KV_FUNCTION RansWriter kv_rans_writer(u16* floor, u16* end) { return {end, floor, kv_u32(0), true, false}; }

// One step of at most 32 values; steps come last first. `put` is f | c << 16 of each lane; lanes of `valid` alone have a value, and
// those of `escaped` (all valid) the word `raw` with it.
KV_FUNCTION void kv_rans_put(RansWriter& w, LaneU32 put, LaneMask valid, LaneMask escaped, LaneU32 raw) {
    const LaneU32 f = put & kv_u32(0xffff), limit = f << 20;
    const u32 escapes = kv_ballot(escaped);
    if (w.is_rest) {
        const LaneMask over = kv_and(valid, w.x + kv_u32(65536) >= limit);
        if (escapes || kv_ballot(over)) {
            w.is_rest = false;
            w.x += kv_u32(65536);
        }
    }
    if (!w.is_rest) {
        const LaneMask over = kv_and(valid, w.x >= limit);
        w.is_full = w.is_full || w.at - w.floor < KV_STEP_WORDS;
        if (w.is_full) return;
        if (escapes) w.at -= kv_push_u16(w.at, raw, escaped);
        w.at -= kv_push_u16(w.at, w.x, over);
        w.x = kv_select(over, w.x >> 16, w.x);
    }
    const LaneU32 quotient = kv_quotient(w.x, f);
    const LaneU32 x = (quotient << 12) + (w.x - quotient * f) + (put >> 16);
    w.x = kv_select(valid, x, w.x);
}

#if KV_WIDE
// Whether sixteen steps, of which each writes words, fit for certain.
KV_FUNCTION bool kv_rans_has_room(const RansWriter& w) { return !w.is_rest && w.at - w.floor >= 16 * KV_STEP_WORDS; }
// A full step without escapes where that is so: words go below at[left]. The quotient by way of the divisor's inverse is right or one
// less.
KV_FUNCTION void kv_rans_put_far(u32& x, u16* at, u32& left, uint2 divisor) {
    const u32 f = divisor.x & 0xffffu;
    const bool is_over = x >= divisor.x << 20; // of f alone
    const u32 ballot = kv_ballot(is_over);
    left -= (u32)__popc(ballot);
    if (is_over) at[left + kv_rank(ballot)] = (u16)x;
    x = is_over ? x >> 16 : x;
    u32 quotient = __umulhi(x, divisor.y);
    if (x - quotient * f >= f) quotient++;
    x += quotient * (KV_SLOTS - f) + (divisor.x >> 16);
}
#endif

// Of a `put`: whether the symbol has no frequency of its own in its table.
KV_FUNCTION LaneMask kv_rans_is_escape(LaneU32 put) { return (put >> 16) == kv_u32(KV_SLOTS - 1); }

#if KV_WIDE
// Puts the last of `steps` full steps of a stream whose columns come again every four, eight at a time: until one has an escape, or few
// are left, or little room; returns how many are left. `steps` is a multiple of 8. A byte a value in `symbols`, its symbol. Symbols are
// fetched sixteen steps before they are put, and what of the tables they mean eight.
KV_FUNCTION u32 kv_rans_put_run(RansWriter& w, const uint2* divisors, const u8* ids, u32 columns, const u8* symbols, u32 steps) {
    enum { STEPS = 8 };
    if (steps < 3 * STEPS || steps % STEPS || !kv_rans_has_room(w)) return steps;
    u32 tables[4];
    KV_UNROLL for (u32 at = 0; at < 4; at++) tables[at] = kv_load_u8(ids + (3 - at) * KV_LANES % columns) * KV_SYMBOLS;
    const u8* from = symbols + (u64)steps * KV_LANES + kv_lane(); // those that come next end here
    u32 coming[STEPS]; // words: bytes would be packed together, and so waited for, as soon as they are fetched
    uint2 next[4];
    KV_UNROLL for (u32 at = 0; at < STEPS; at++) coming[at] = from[-(i32)((at + 1) * KV_LANES)];
    KV_UNROLL for (u32 at = 0; at < 4; at++) next[at] = divisors[tables[at] + coming[at]];
    u16* const floor = KV_GLOBAL(w.floor);
    u32 x = w.x, left = (u32)(w.at - w.floor), half = 0;
    for (; steps >= 2 * STEPS && left >= 16 * KV_STEP_WORDS; steps -= STEPS) {
        from -= STEPS * KV_LANES;
        u32 own[4];
        KV_UNROLL for (u32 at = 0; at < 4; at++) own[at] = coming[4 + at];
        KV_UNROLL for (u32 at = 0; at < STEPS; at++) coming[at] = from[-(i32)((at + 1) * KV_LANES)];
        KV_UNROLL for (half = 0; half < 2; half++) {
            uint2 put[4];
            KV_UNROLL for (u32 at = 0; at < 4; at++) {
                put[at] = next[at];
                next[at] = divisors[tables[at] + (half ? coming[at] : own[at])];
            }
            if (kv_ballot(kv_rans_is_escape(kv_max(kv_max(put[0].x, put[1].x), kv_max(put[2].x, put[3].x))))) goto escaped;
            KV_UNROLL for (u32 at = 0; at < 4; at++) kv_rans_put_far(x, floor, left, put[at]);
        }
    }
    half = 0;
escaped:
    w.x = x;
    w.at = w.floor + left;
    return steps - 4 * half;
}
#endif

// After all values: the ids of the columns.
KV_FUNCTION void kv_rans_put_ids(RansWriter& w, const u8* ids, u32 columns) {
    for (u32 step = (columns + KV_LANES - 1) / KV_LANES; step-- > 0;) {
        const LaneU32 id = kv_load_u8(ids + step * KV_LANES, columns - step * KV_LANES);
        kv_rans_put(w, kv_u32(64) | (id << 22), kv_lane() < kv_u32(columns - step * KV_LANES), kv_mask(false), kv_u32(0));
    }
}

// Where the stream begins, or 0 if it did not fit.
KV_FUNCTION u16* kv_rans_finish(RansWriter& w) {
    if (w.is_full || w.at - w.floor < KV_STATE_WORDS) return 0;
    if (w.is_rest) w.x += kv_u32(65536);
    w.at -= KV_STATE_WORDS;
    kv_store_u16(w.at, w.x & kv_u32(0xffff));
    kv_store_u16(w.at + KV_LANES, w.x >> 16);
    return w.at;
}

// --- Decoding --------------------------------------------------------------------------------------------------------------------------

#if KV_WIDE
#define KV_RANS_TABLE_AT(table) ((table) << 9) // what kv_rans_get_far takes for a table
// The words left begin `used` after `at`; 96 from there on are in registers (what is beyond the end is 0), of which the last 32 are not
// asked for before the first 32 are used up: memory has that long to bring them.
struct RansReader {
    const u16* at;
    u32 left, used; // words
    LaneU32 words[3];
    LaneU32 x;
    bool is_rest; // 2^16 subtracted: no word is read any more
    bool is_bad;  // no stream: what is decoded means nothing
};

// A stream of so many bytes. Nothing outside is ever read.
KV_FUNCTION RansReader kv_rans_reader(const u16* stream, u32 bytes) {
    if (bytes < 2 * KV_STATE_WORDS || bytes % 2) return {stream, 0, 0, {0, 0, 0}, 0, false, true};
    const LaneU32 x = kv_load_u16(stream) | (kv_load_u16(stream + KV_LANES) << 16);
    const u16* at = stream + KV_STATE_WORDS;
    const i32 left = (i32)(bytes / 2 - KV_STATE_WORDS);
    RansReader r = {at, (u32)left, 0, {0, 0, 0}, x, false, false};
    if (64u * kv_lane() < r.left) KV_FETCH(at + 64 * kv_lane());
    KV_UNROLL for (i32 part = 0; part < 3; part++)
        if ((i32)kv_lane() < left - 32 * part) r.words[part] = at[32 * part + (i32)kv_lane()];
    return r;
}
KV_FUNCTION void kv_rans_rest(RansReader& r) { // call before each step
    if (r.left == 0 && !r.is_rest) {
        r.x -= kv_u32(65536);
        r.is_rest = true;
    }
}
// The next words, of which there are enough, for the lanes of the ballot; other lanes get anything.
KV_FUNCTION LaneU32 kv_rans_take(RansReader& r, u32 ballot) {
    const u32 place = r.used + kv_rank(ballot), count = kv_popc(ballot);
    const u32 first = __shfl_sync(0xffffffffu, r.words[0], (int)(place & 31u)), second = __shfl_sync(0xffffffffu, r.words[1], (int)(place & 31u));
    r.used += count;
    r.left -= count;
    if (r.used >= KV_LANES) {
        r.used -= KV_LANES;
        r.at += KV_LANES;
        r.words[0] = r.words[1];
        r.words[1] = r.words[2];
        if (1024 < r.left) KV_FETCH(r.at + 1024);
        r.words[2] = 2 * KV_LANES + kv_lane() < r.used + r.left ? (u32)r.at[2 * KV_LANES + kv_lane()] : 0u;
    }
    return place < KV_LANES ? first : second;
}
// Words for the lanes of the mask.
KV_FUNCTION LaneU32 kv_rans_words(RansReader& r, LaneMask m) {
    const u32 ballot = kv_ballot(m);
    if (kv_popc(ballot) > r.left) {
        r.is_bad = true;
        return 0;
    }
    return kv_rans_take(r, ballot);
}
// `table_at` is 512 times each lane's table.
KV_FUNCTION LaneU32 kv_rans_entry(RansReader& r, const RansTables& tables, LaneU32 table_at, LaneU32& x) {
    const u32 slot = r.x & (KV_SLOTS - 1), eighth = tables.eighths[table_at | slot >> 3];
    const u32 near = (eighth & 255u) + __popc((eighth >> 8) & ((1u << (slot & 7u)) - 1u));
    const u32 symbol = slot == KV_SLOTS - 1 ? KV_ESCAPE : near;
    const u32 put = tables.puts[table_at >> 1 | symbol];
    x = (put & 0xffffu) * (r.x >> 12) + slot - (put >> 16);
    return symbol << 24;
}
// One step in the lanes of `valid`: gives symbol << 24. `table` is each lane's.
KV_FUNCTION LaneU32 kv_rans_get(RansReader& r, const RansTables& tables, LaneU32 table, LaneMask valid) {
    LaneU32 x;
    const LaneU32 entry = kv_rans_entry(r, tables, table << 9, x);
    if (!r.is_rest) {
        const LaneMask low = valid && x < 65536u;
        const u32 word = kv_rans_words(r, low);
        x = low ? x << 16 | word : x;
    }
    r.x = valid ? x : r.x;
    return entry;
}
// The same for a full step far from the end of the words, which is most of them.
KV_FUNCTION bool kv_rans_is_far(const RansReader& r) { return r.left >= KV_LANES && !r.is_bad; }
KV_FUNCTION LaneU32 kv_rans_get_far(RansReader& r, const RansTables& tables, LaneU32 table_at) {
    LaneU32 x;
    const LaneU32 entry = kv_rans_entry(r, tables, table_at, x);
    const LaneMask low = x < 65536u;
    const u32 word = kv_rans_take(r, kv_ballot(low));
    r.x = low ? x << 16 | word : x;
    return entry;
}
#else
#define KV_RANS_TABLE_AT(table) (table)
struct RansReader {
    const u16 *at, *end; // of the words left
    LaneU32 x;
    bool is_rest;  // 2^16 subtracted: no word is read any more
    bool is_bad;   // no stream: what is decoded means nothing
};

// A stream of so many bytes. Nothing outside is ever read.
KV_FUNCTION RansReader kv_rans_reader(const u16* stream, u32 bytes) {
    if (bytes < 2 * KV_STATE_WORDS || bytes % 2) return {stream, stream, kv_u32(0), false, true};
    const LaneU32 x = kv_load_u16(stream) | (kv_load_u16(stream + KV_LANES) << 16);
    return {stream + KV_STATE_WORDS, stream + bytes / 2, x, false, false};
}
KV_FUNCTION void kv_rans_rest(RansReader& r) { // call before each step
    if (r.at == r.end && !r.is_rest) {
        r.x -= kv_u32(65536);
        r.is_rest = true;
    }
}
// Words for the lanes of the mask.
KV_FUNCTION LaneU32 kv_rans_words(RansReader& r, LaneMask m) {
    const u32 count = kv_popc(kv_ballot(m)), left = (u32)(r.end - r.at);
    if (count > left) {
        r.is_bad = true;
        return kv_u32(0);
    }
    const LaneU32 words = left >= KV_LANES ? kv_expand_u16_near(r.at, m) : kv_expand_u16(r.at, m);
    r.at += count;
    return words;
}
// One step in the lanes of `valid`: gives f | (slot - c) << 12 | symbol << 24. `table` is each lane's.
KV_FUNCTION LaneU32 kv_rans_get(RansReader& r, const RansTables& tables, LaneU32 table, LaneMask valid) {
    const LaneU32 entry = kv_gather_u32(tables.slots, (table << 12) | (r.x & kv_u32(KV_SLOTS - 1)));
    LaneU32 x = (entry & kv_u32(0xfff)) * (r.x >> 12) + ((entry >> 12) & kv_u32(0xfff));
    if (!r.is_rest) {
        const LaneMask low = kv_and(valid, x < kv_u32(65536));
        x = kv_select(low, (x << 16) | kv_rans_words(r, low), x);
    }
    r.x = kv_select(valid, x, r.x);
    return entry;
}
// The same for a full step far from the end of the words, which is most of them.
KV_FUNCTION bool kv_rans_is_far(const RansReader& r) { return r.end - r.at >= 2 * KV_LANES && !r.is_bad; }
KV_FUNCTION LaneU32 kv_rans_get_far(RansReader& r, const RansTables& tables, LaneU32 table) {
    const LaneU32 entry = kv_gather_u32(tables.slots, (table << 12) | (r.x & kv_u32(KV_SLOTS - 1)));
    const LaneU32 x = (entry & kv_u32(0xfff)) * (r.x >> 12) + ((entry >> 12) & kv_u32(0xfff));
    const LaneMask low = x < kv_u32(65536);
    r.x = kv_select(low, (x << 16) | kv_expand_u16_near(r.at, low), x);
    r.at += kv_popc(kv_ballot(low));
    return entry;
}
#endif
// Of what kv_rans_get gave.
KV_FUNCTION LaneU32 kv_rans_symbol(LaneU32 entry) { return entry >> 24; }

// The words of the step's escaped lanes.
KV_FUNCTION LaneU32 kv_rans_escapes(RansReader& r, LaneMask escaped) { return kv_rans_words(r, escaped); }

// First of all: the ids, into kv_columns_bytes(columns) bytes, ready to walk along.
KV_FUNCTION void kv_rans_get_ids(RansReader& r, u8* ids, u32 columns) {
    for (u32 at = 0; at < columns; at += KV_LANES) {
        kv_rans_rest(r);
        const LaneMask valid = kv_lane() < kv_u32(columns - at);
        const LaneU32 slot = r.x & kv_u32(KV_SLOTS - 1);
        LaneU32 x = ((r.x >> 12) << 6) + (slot & kv_u32(63));
        if (!r.is_rest) {
            const LaneMask low = kv_and(valid, x < kv_u32(65536));
            x = kv_select(low, (x << 16) | kv_rans_words(r, low), x);
        }
        r.x = kv_select(valid, x, r.x);
        kv_store_u8(ids + at, slot >> 6, columns - at);
    }
    kv_columns_wrap(ids, columns);
}

// Whether it was a stream, after its last step.
KV_FUNCTION bool kv_rans_is_whole(RansReader& r) {
    kv_rans_rest(r);
    return !r.is_bad && r.is_rest && kv_ballot(r.x != kv_u32(0)) == 0;
}

// --- Choice of tables ------------------------------------------------------------------------------------------------------------------

// The table with the least of these costs, of tables 0 to 31 and 32 to 63; the lowest id of equal ones.
KV_FUNCTION u32 kv_rans_least(LaneU32 low, LaneU32 high) {
    const u32 least = kv_least(kv_min(low, high));
    const u32 of_low = kv_ballot(low == kv_u32(least)), of_high = kv_ballot(high == kv_u32(least));
    return of_low ? kv_ctz(of_low) : KV_LANES + kv_ctz(of_high);
}

// The cheapest of the 64 tables for a column that has `counts[i]` of each symbol first + i, i < symbols, and so many escapes; the lowest
// id of equal ones. Counts sum to at most KV_COST_TOKENS.
KV_FUNCTION u32 kv_rans_cheapest(const u32* costs, const u16* counts, u32 first, u32 symbols, u32 escapes) {
    LaneU32 low = kv_u32(escapes * (KV_ESCAPE_COST + KV_RAW_COST)), high = low;
    for (u32 at = 0; at < symbols; at++) {
        const u32 count = counts[at];
        if (count == 0) continue;
        low += kv_load_u32(costs + (first + at) * KV_TABLES) * kv_u32(count);
        high += kv_load_u32(costs + (first + at) * KV_TABLES + KV_LANES) * kv_u32(count);
    }
    return kv_rans_least(low, high);
}

#if KV_WIDE
// As kv_rans_cheapest, for eight columns at once: row p of `counters`, of `row` words, has how often each column has symbols 2p and
// 2p + 1, a half of a word each; row p of `costs` what those cost, kv_cost_bytes of each table. There is a row of costs beyond the last.
KV_FUNCTION void kv_rans_cheapest_of_pairs(const u32* costs, const u32* counters, u32 row, u32 pairs, u32 (&ids)[8]) {
    u32 low[8], low_above[8], high[8], high_above[8]; // sums of low bytes, and of those above, of tables 0 to 31 and of the others
    KV_UNROLL for (u32 at = 0; at < 8; at++) low[at] = low_above[at] = high[at] = high_above[at] = 0;
    costs += kv_lane();
    u32 next_of_low = costs[0], next_of_high = costs[KV_LANES]; // fetched a row before their turn
    for (u32 pair = 0; pair < pairs; pair++, counters += row) {
        const u32 of_low = next_of_low, of_high = next_of_high;
        costs += KV_TABLES;
        next_of_low = costs[0];
        next_of_high = costs[KV_LANES];
        const uint4 first = ((const uint4*)counters)[0], second = ((const uint4*)counters)[1];
        const u32 counts[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
        if (!(first.x | first.y | first.z | first.w | second.x | second.y | second.z | second.w)) continue;
        KV_UNROLL for (u32 at = 0; at < 8; at++) {
            low[at] = kv_low_costs(low[at], counts[at], of_low);
            low_above[at] = kv_high_costs(low_above[at], counts[at], of_low);
            high[at] = kv_low_costs(high[at], counts[at], of_high);
            high_above[at] = kv_high_costs(high_above[at], counts[at], of_high);
        }
    }
    KV_UNROLL for (u32 at = 0; at < 8; at++) ids[at] = kv_rans_least(low[at] + (low_above[at] << 8), high[at] + (high_above[at] << 8));
}
#endif

// --- Moving --------------------------------------------------------------------------------------------------------------------------

KV_FUNCTION void kv_copy_u16(u16* to, const u16* from, u32 count) {
    for (u32 at = 0; at < count; at += KV_LANES) kv_store_u16(to + at, kv_load_u16(from + at, count - at), count - at);
}

#endif
