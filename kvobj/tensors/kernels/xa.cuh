// xa: exponents by rANS, everything else as it is. The layout of a block stands in kvobj/tensors/xa.py.
#ifndef KVOBJ_XA_CUH
#define KVOBJ_XA_CUH

#define KV_XA_SYMBOLS 24 // distances from the head's largest exponent; what is farther is escaped
#define KV_XA_COUNTS 32  // counters of a column, a power of two

// A float dtype: bytes of a value, bits of exponent and mantissa, and the largest exponent that finite values have. The *low part* of a
// value is its mantissa with the sign above it: `planes` whole bytes, and `bits` above them.
struct XaBf16 {
#ifdef KV_AVX512
    static constexpr u32 streams = 2; // decoded at once: while one waits for its table the CPU does the other's step
#else
    static constexpr u32 streams = 1;
#endif
    static constexpr u32 bytes = 2, exponent = 8, mantissa = 7, largest = 254, planes = 1, bits = 0;
    static constexpr bool is_of_bytes = true; // low parts are a byte each
};
struct XaDtype {
    static constexpr u32 streams = 1;
    static constexpr bool is_of_bytes = false;
    u32 bytes, exponent, mantissa, largest, planes, bits;
};
KV_FUNCTION XaDtype kv_xa_dtype(u32 number) { // the numbers are xa.py's
    if (number == 1) return {2, 5, 10, 30, 1, 3}; // fp16
    if (number == 2) return {1, 4, 3, 15, 0, 4};  // fp8_e4m3, of which the largest exponent is not that of NaN alone
    if (number == 3) return {1, 5, 2, 30, 0, 3};  // fp8_e5m2
    return {4, 8, 23, 254, 3, 0};                 // fp32
}
// Calls a template with the dtype of this number. bf16 is compiled by itself.
#define KV_XA_CALL(number, function, ...)                                                                                              \
    do {                                                                                                                               \
        if (number == 0) function(XaBf16(), __VA_ARGS__);                                                                              \
        else function(kv_xa_dtype(number), __VA_ARGS__);                                                                               \
    } while (0)
template <class F> KV_FUNCTION u32 kv_xa_exponents(const F& f) { return (1u << f.exponent) - 1; } // masks
template <class F> KV_FUNCTION u32 kv_xa_mantissas(const F& f) { return (1u << f.mantissa) - 1; }

// What all blocks of a launch share.
struct XaShape {
    u32 heads, values, columns, steps; // values of a head; steps of 32 of them
    u32 low_offset, low_bytes;         // of the low parts in a block; of those of a head
    u32 streams_offset;                // in a block
};
template <class F> KV_FUNCTION XaShape kv_xa_shape(const F& f, u32 heads, u32 values, u32 columns) {
    const u32 steps = values / KV_LANES + (values % KV_LANES ? 1 : 0), low_offset = (5 * heads + 15) / 16 * 16;
    const u32 low_bytes = (steps * f.bits * 4 + values * f.planes + 3) / 4 * 4;
    return {heads, values, columns, steps, low_offset, low_bytes, low_offset + heads * low_bytes};
}
KV_FUNCTION u32 kv_xa_count(const XaShape& s, u32 step) { // values of a step
    const u32 left = s.values - step * KV_LANES;
    return left < KV_LANES ? left : KV_LANES;
}
KV_FUNCTION u32 kv_xa_up(u32 bytes) { return (bytes + 63) / 64 * 64; }

template <class F> KV_FUNCTION LaneU32 kv_xa_load(const F& f, const u8* values, u32 step, u32 count) {
    if (f.bytes == 1) return kv_load_u8(values + step * KV_LANES, count);
    if (f.bytes == 2) return kv_load_u16((const u16*)values + step * KV_LANES, count);
    return kv_load_u32((const u32*)values + step * KV_LANES, count);
}
template <class F> KV_FUNCTION void kv_xa_store(const F& f, u8* values, u32 step, LaneU32 x, u32 count) {
    if (f.bytes == 1) kv_store_u8(values + step * KV_LANES, x, count);
    else if (f.bytes == 2) kv_store_u16((u16*)values + step * KV_LANES, x, count);
    else kv_store_u32((u32*)values + step * KV_LANES, x, count);
}
template <class F> KV_FUNCTION LaneU32 kv_xa_exponent(const F& f, LaneU32 x) {
    return (x >> f.mantissa) & kv_u32(kv_xa_exponents(f));
}

// The low parts of a step: one u32 for each of the bits above the bytes, and the bytes, each plane by itself.
template <class F> KV_FUNCTION void kv_xa_store_low(const F& f, u8* low, const XaShape& s, u32 step, LaneU32 x, u32 count) {
    const LaneU32 part = ((x >> (f.mantissa + f.exponent)) << f.mantissa) | (x & kv_u32(kv_xa_mantissas(f)));
    for (u32 bit = 0; bit < f.bits; bit++) {
        const u32 plane = kv_ballot((part & kv_u32(1u << (8 * f.planes + bit))) != kv_u32(0)); // lanes without a value have 0
        KV_ONCE(((u32*)low)[step * f.bits + bit] = plane);
    }
    u8* bytes = low + s.steps * f.bits * 4 + step * KV_LANES;
    for (u32 plane = 0; plane < f.planes; plane++, bytes += s.values) kv_store_u8(bytes, (part >> (8 * plane)) & kv_u32(255), count);
}
template <class F> // with 0 for exponents
KV_FUNCTION LaneU32 kv_xa_load_low(const F& f, const u8* low, const XaShape& s, u32 step, u32 count) {
    LaneU32 part = kv_u32(0);
    for (u32 bit = 0; bit < f.bits; bit++) {
        const u32 plane = ((const u32*)low)[step * f.bits + bit];
        part |= kv_select(kv_lanes_of(plane), kv_u32(1u << (8 * f.planes + bit)), kv_u32(0));
    }
    const u8* bytes = low + s.steps * f.bits * 4 + step * KV_LANES;
    for (u32 plane = 0; plane < f.planes; plane++, bytes += s.values) part |= kv_load_u8(bytes, count) << (8 * plane);
    return ((part >> f.mantissa) << (f.mantissa + f.exponent)) | (part & kv_u32(kv_xa_mantissas(f)));
}

// --- Encoding --------------------------------------------------------------------------------------------------------------------------

// Working memory of a warp: a symbol a value, counters, table ids.
struct XaRoom {
    u8* symbols;
    u16* counts;
    u8* ids;
};
KV_FUNCTION XaRoom kv_xa_room(u8* at, const XaShape& s) {
    u8* counts = at + kv_xa_up(s.steps * KV_LANES);
    return {at, (u16*)counts, counts + kv_xa_up(s.columns * KV_XA_COUNTS * 2)};
}

template <class F> KV_FUNCTION u32 kv_xa_largest(const F& f, const u8* values, const XaShape& s) {
    LaneU32 largest = kv_u32(0);
    for (u32 step = 0; step < s.steps; step++) {
        const LaneU32 e = kv_xa_exponent(f, kv_xa_load(f, values, step, kv_xa_count(s, step)));
        largest = kv_max(largest, kv_select(e > kv_u32(f.largest), kv_u32(0), e));
    }
    return kv_greatest(largest);
}

// Low parts to their places, symbols into the room, and of each column how often each comes.
template <class F>
KV_FUNCTION void kv_xa_split(const F& f, const u8* values, const XaShape& s, u32 largest, u8* low, const XaRoom& room) {
    for (u32 at = 0; at < s.columns * KV_XA_COUNTS; at += KV_LANES) kv_store_u16(room.counts + at, kv_u32(0));
    kv_sync();
    const u64 counted = (u64)s.columns * KV_COST_TOKENS / KV_LANES; // steps: no counter overflows
    RansColumns c = kv_columns_from(0, s.columns);
    for (u32 step = 0; step < s.steps; step++) {
        const u32 count = kv_xa_count(s, step);
        const LaneU32 x = kv_xa_load(f, values, step, count);
        kv_xa_store_low(f, low, s, step, x, count);
        const LaneU32 d = kv_min(kv_u32(largest) - kv_xa_exponent(f, x), kv_u32(KV_XA_SYMBOLS)); // a larger one is far away too
        kv_store_u8(room.symbols + step * KV_LANES, kv_select(d == kv_u32(KV_XA_SYMBOLS), kv_u32(KV_ESCAPE), d));
        if (step < counted) kv_count_u16(room.counts, kv_columns_of(c) * kv_u32(KV_XA_COUNTS) + d, count);
        kv_columns_next(c);
    }
    for (u32 at = s.steps * f.bits * 4 + s.values * f.planes; at < s.low_bytes; at++) KV_ONCE(low[at] = 0);
    kv_sync();
}

#if KV_WIDE
#define KV_XA_ROWS 8u // fetched together
#define KV_THREADS_OF_xa_encode ~, 768
KV_WARP_MEMORY(xa_encode, 6656) // counters of 128 columns, a word two symbols; or of 32, and three times eight rows of them

// As kv_xa_largest, of bf16, a multiple of 1,024 values.
KV_FUNCTION u32 kv_xa_largest_wide(const u16* values, u32 count) {
    const uint4* from = (const uint4*)values + kv_lane();
    u32 most = 0;
    for (u32 at = 0; at < count / 8; at += 128) {
        uint4 x[4];
        KV_UNROLL for (u32 part = 0; part < 4; part++) x[part] = from[at + 32 * part];
        KV_UNROLL for (u32 part = 0; part < 4; part++) {
            most = __vmaxu2(most, x[part].x & 0x7fff7fffu);
            most = __vmaxu2(most, x[part].y & 0x7fff7fffu);
            most = __vmaxu2(most, x[part].z & 0x7fff7fffu);
            most = __vmaxu2(most, x[part].w & 0x7fff7fffu);
        }
    }
    return kv_greatest(most >> 16 > (most & 0xffffu) ? most >> 16 : most & 0xffffu) >> 7;
}

KV_FUNCTION void kv_xa_split_one(u32 x, u32 at, u32 largest, u8* low, u8* symbols, u32* counters) {
    const u32 far = largest - (x >> 7 & 255u), d = far < KV_XA_SYMBOLS ? far : KV_XA_SYMBOLS;
    low[at] = (u8)((x >> 8 & 128u) | (x & 127u));
    symbols[at] = (u8)(d == KV_XA_SYMBOLS ? KV_ESCAPE : d);
    counters[(d >> 1) * KV_LANES] += 1u << (16 * (d & 1));
}
// As kv_xa_split, and the tables of all columns: 32 columns at a time, a column a lane, so that each counts by itself.
KV_FUNCTION void kv_xa_split_wide(const u16* values, const XaShape& s, u32 largest, u8* low, const XaRoom& room) {
    const u32 columns = s.columns, tokens = s.values / columns, lane = kv_lane();
    u32* counters = KV_WARP_MEMORY_AT(kv_bytes_of_xa_encode);
    for (u32 tile = 0; tile < columns; tile += KV_LANES) {
        kv_sync();
        KV_UNROLL for (u32 pair = 0; pair < KV_XA_PAIRS; pair++) counters[pair * KV_LANES + lane] = 0;
        // Eight rows at a time come by way of the warp's own memory, two times before they are used: a quarter of a row a lane.
        const u32 whole = tokens / KV_XA_ROWS;
        u32* near = counters + KV_XA_PAIRS * KV_LANES;
        const u16* from = values + (lane >> 2) * columns + tile + 8 * (lane & 3);
        u32 t = 0;
        for (u32 next = 0; next < whole + 2; next++) {
            if (next < whole) KV_COPY_16(near + next % 3 * 128 + 4 * lane, from + next * KV_XA_ROWS * columns);
            KV_COPIES_END();
            if (next < 2) continue;
            KV_WAIT_FOR_COPIES(2);
            kv_sync();
            const u16* here = (const u16*)(near + (next - 2) % 3 * 128) + lane;
            const u32 first = t * columns + tile + lane;
            u32 x[KV_XA_ROWS]; // before counters are written, which might lie there for all that a compiler knows
            KV_UNROLL for (u32 row = 0; row < KV_XA_ROWS; row++) x[row] = here[row * KV_LANES];
            KV_UNROLL for (u32 row = 0; row < KV_XA_ROWS; row++)
                kv_xa_split_one(x[row], first + row * columns, largest, low, room.symbols, counters + lane);
            t += KV_XA_ROWS;
            kv_sync();
        }
        for (; t < tokens; t++) {
            const u32 at = t * columns + tile + lane;
            kv_xa_split_one(values[at], at, largest, low, room.symbols, counters + lane);
        }
        kv_sync();
        u32 mine = 0;
        for (u32 column = 0; column < KV_LANES; column += 8) {
            u32 ids[8];
            kv_rans_cheapest_of_pairs(kv_xa_pair_costs, counters + column, KV_LANES, KV_XA_PAIRS, ids);
            KV_UNROLL for (u32 at = 0; at < 8; at++) mine = lane == column + at ? ids[at] : mine;
        }
        room.ids[tile + lane] = (u8)mine;
    }
    for (u32 at = s.values; at < s.low_bytes; at++) KV_ONCE(low[at] = 0);
    kv_sync();
}

// The same of 128 columns, aligned, none of whose values is beyond `largest`: a row at a time, four columns a lane. Column 4 · lane + i
// is counted at place 32 · i + lane.
KV_FUNCTION void kv_xa_split_rows(const u16* values, const XaShape& s, u32 largest, u8* low, const XaRoom& room) {
    enum { ROWS = 4 }; // fetched together
    const u32 tokens = s.values / KV_PACKED, lane = kv_lane();
    u32* counters = KV_WARP_MEMORY_AT(kv_bytes_of_xa_encode);
    kv_sync();
    KV_UNROLL for (u32 at = 0; at < 4 * KV_XA_PAIRS; at++) counters[at * KV_LANES + lane] = 0;
    const uint2* from = (const uint2*)values + lane;
    u32 *lows = (u32*)low + lane, *symbols = (u32*)room.symbols + lane;
    uint2 coming[ROWS];
    KV_UNROLL for (u32 row = 0; row < ROWS; row++) coming[row] = row < tokens ? from[row * KV_LANES] : make_uint2(0, 0);
    for (u32 t = 0; t < tokens; t += ROWS) {
        uint2 x[ROWS];
        from += ROWS * KV_LANES;
        KV_UNROLL for (u32 row = 0; row < ROWS; row++) x[row] = coming[row];
        KV_UNROLL for (u32 row = 0; row < ROWS; row++)
            if (t + ROWS + row < tokens) coming[row] = from[row * KV_LANES];
        KV_UNROLL for (u32 row = 0; row < ROWS; row++) {
            if (t + row >= tokens) break;
            const u32 first = __byte_perm(x[row].x, x[row].y, 0x6420), second = __byte_perm(x[row].x, x[row].y, 0x7531);
            const u32 exponent = ((second & kv_packed(0x7f)) << 1) | ((first >> 7) & kv_packed(1));
            *lows = (second & kv_packed(0x80)) | (first & kv_packed(0x7f));
            const u32 far = kv_packed_minus(kv_packed(largest), exponent);
            const u32 escaped = ((((far & kv_packed(0x7f)) + kv_packed(0x80 - KV_XA_SYMBOLS)) | far) >> 7 & kv_packed(1)) * 255u;
            *symbols = far | escaped;
            const u32 d = (far & ~escaped) | (kv_packed(KV_XA_SYMBOLS) & escaped), odd = d & kv_packed(1);
            KV_UNROLL for (u32 at = 0; at < 4; at++)
                counters[(d >> (8 * at + 1) & 15u) * KV_PACKED + at * KV_LANES + lane] += 1u << (at ? odd >> (8 * at - 4) & 16u : odd << 4 & 16u);
            lows += KV_LANES;
            symbols += KV_LANES;
        }
    }
    kv_sync();
    u32 mine = 0;
    for (u32 place = 0; place < KV_PACKED; place += 8) {
        u32 ids[8];
        kv_rans_cheapest_of_pairs(kv_xa_pair_costs, counters + place, KV_PACKED, KV_XA_PAIRS, ids);
        KV_UNROLL for (u32 at = 0; at < 8; at++) mine |= lane == (place + at) % KV_LANES ? ids[at] << (place / KV_LANES * 8) : 0u;
    }
    ((u32*)room.ids)[lane] = mine;
    for (u32 at = s.values; at < s.low_bytes; at++) KV_ONCE(low[at] = 0);
    kv_sync();
}
#endif

// Puts all symbols, the last first.
template <class F> KV_FUNCTION void kv_xa_put(const F& f, RansWriter& w, const u8* values, const XaShape& s, const XaRoom& room) {
    RansColumns c = kv_columns_from(s.steps - 1, s.columns);
    for (u32 step = s.steps; step-- > 0 && !w.is_full;) {
#if KV_WIDE
        if (step % 8 == 7 && 128 % s.columns == 0 && s.columns >= KV_LANES) {
            step = kv_rans_put_run(w, kv_xa_tables.divisors, room.ids, s.columns, room.symbols, step + 1) - 1;
            c = kv_columns_from(step, s.columns);
        }
#endif
        const u32 count = kv_xa_count(s, step);
        const LaneU32 symbol = kv_load_u8(room.symbols + step * KV_LANES);
        const LaneU32 put = kv_gather_u32(kv_xa_tables.puts, (kv_load_u8(room.ids + c.at) << 8) | symbol);
        const LaneMask valid = count == KV_LANES ? kv_mask(true) : kv_lane() < kv_u32(count);
        const LaneMask escaped = kv_and(valid, kv_rans_is_escape(put));
        LaneU32 raw = kv_u32(0);
        if (kv_ballot(escaped)) raw = kv_xa_exponent(f, kv_xa_load(f, values, step, count));
        kv_rans_put(w, put, valid, escaped, raw);
        kv_columns_back(c);
    }
}

template <class F>
KV_FUNCTION void kv_xa_encode_head(const F& f, const u8* values, u8* block, u32 head, u32 heads, u32 head_values, u32 columns,
                                   u8* work, u16* slot, u32 slot_words, u64* stream, u32* length) {
    const XaShape s = kv_xa_shape(f, heads, head_values, columns);
    const XaRoom room = kv_xa_room(work, s);
    values += (u64)head * head_values * f.bytes;
    u32 largest = 0;
    bool is_split = false;
    u8* low = block + s.low_offset + head * s.low_bytes;
#if KV_WIDE
    if constexpr (F::is_of_bytes) {
        const bool is_even = head_values % 1024 == 0 && !((u64)values & 15);
        if (is_even) largest = kv_xa_largest_wide((const u16*)values, head_values);
        const bool is_plain = is_even && largest != 255;
        if (!is_plain) largest = kv_xa_largest(f, values, s);
        is_split = columns % KV_LANES == 0 && head_values / columns <= KV_COST_TOKENS;
        if (is_split && columns == KV_PACKED && is_plain && !(((u64)low | (u64)work) & 3))
            kv_xa_split_rows((const u16*)values, s, largest, low, room);
        else if (is_split) kv_xa_split_wide((const u16*)values, s, largest, low, room);
    } else
#endif
        largest = kv_xa_largest(f, values, s);
    KV_ONCE(block[4 * heads + head] = (u8)largest);
    if (!is_split) {
        kv_xa_split(f, values, s, largest, low, room);
        for (u32 column = 0; column < columns; column++) {
            const u16* counts = room.counts + column * KV_XA_COUNTS;
            const u32 id = kv_rans_cheapest(kv_xa_tables.costs, counts, 0, KV_XA_SYMBOLS, counts[KV_XA_SYMBOLS]);
            KV_ONCE(room.ids[column] = (u8)id);
        }
    }
    kv_columns_wrap(room.ids, columns);

    RansWriter w = kv_rans_writer(slot, slot + slot_words);
    kv_xa_put(f, w, values, s, room);
    kv_rans_put_ids(w, room.ids, columns);
    const u16* found = kv_rans_finish(w);
    KV_ONCE(*stream = (u64)found);
    KV_ONCE(*length = found ? (u32)(slot + slot_words - found) * 2 : 0);
}

// A warp a head of a block. blocks[b]: the addresses of the values, [head][token][dim], and of the encoded block, of which everything
// but the streams and their ends is written. `work`: rooms × room_bytes, warp w uses number w % rooms; `slots`: slot_words a warp.
// streams[w], lengths[w] say where the stream is until xa_place moves it; a length of 0: it did not fit.
KV_KERNEL(xa_encode,
          (const u64* blocks, u32 dtype, u32 heads, u32 values, u32 columns, u8* work, u32 rooms, u32 room_bytes, u16* slots,
           u32 slot_words, u64* streams, u32* lengths),
          (blocks, dtype, heads, values, columns, work, rooms, room_bytes, slots, slot_words, streams, lengths)) {
    const u32 block = warp / heads, head = warp % heads;
    KV_XA_CALL(dtype, kv_xa_encode_head, KV_GLOBAL((const u8*)blocks[2 * block]), KV_GLOBAL((u8*)blocks[2 * block + 1]), head, heads, values, columns,
               work + (u64)(warp % rooms) * room_bytes, slots + (u64)warp * slot_words, slot_words, streams + warp, lengths + warp);
}

// A warp a head of a block, after xa_encode: its stream to its place. block_bytes[block]: how long the block is; 0 if a stream did not
// fit or all together are not below `limit`, and then nothing is moved.
KV_KERNEL(xa_place,
          (const u64* blocks, u32 heads, u32 low_offset, u32 streams_offset, u32 limit, const u64* streams, const u32* lengths,
           u32* block_bytes),
          (blocks, heads, low_offset, streams_offset, limit, streams, lengths, block_bytes)) {
    const u32 head = warp % heads;
    u8* block = (u8*)blocks[2 * (warp / heads) + 1];
    LaneI64 before = kv_i64(0), all = kv_i64(0);
    u32 misfits = 0;
    for (u32 at = 0; at < heads; at += KV_LANES) {
        const LaneU32 other = kv_lane() + kv_u32(at), length = kv_load_u32(lengths + (warp - head) + at, heads - at);
        before += kv_widen(kv_as_i32(kv_select(other < kv_u32(head), length, kv_u32(0))));
        all += kv_widen(kv_as_i32(length));
        misfits |= kv_ballot(kv_and(length == kv_u32(0), other < kv_u32(heads)));
    }
    const u64 start = (u64)kv_sum(before), end = streams_offset + (u64)kv_sum(all);
    const bool fits = !misfits && end < limit;
    if (head == 0) {
        KV_ONCE(block_bytes[warp / heads] = fits ? (u32)end : 0);
        for (u32 at = 5 * heads; at < low_offset; at++) KV_ONCE(block[at] = 0);
    }
    if (!fits) return;
    KV_ONCE(((u32*)block)[head] = (u32)start + lengths[warp]);
    kv_copy(block + streams_offset + start, (const u8*)streams[warp], lengths[warp]);
}

// --- Decoding --------------------------------------------------------------------------------------------------------------------------

// Where a head's stream is, or a stream that is none.
KV_FUNCTION RansReader kv_xa_reader(const u8* block, u32 length, u32 head, const XaShape& s) {
    const u32* ends = (const u32*)block;
    const u32 from = head ? ends[head - 1] : 0, to = ends[head], all = length - s.streams_offset;
    const bool is_bad = from > to || to > all || from % 2 || (head == s.heads - 1 && to != all);
    return kv_rans_reader((const u16*)(block + s.streams_offset + (is_bad ? 0 : from)), is_bad ? 0 : to - from);
}

// The values of a step whose symbols are known.
template <class F>
KV_FUNCTION void kv_xa_join(const F& f, RansReader& r, LaneU32 symbol, LaneMask valid, u32 largest, const u8* low, const XaShape& s,
                            u32 step, u32 count, u8* values) {
    LaneU32 e = kv_u32(largest) - symbol;
    const LaneMask escaped = kv_and(valid, symbol == kv_u32(KV_ESCAPE));
    if (kv_ballot(escaped)) {
        const LaneU32 raw = kv_rans_escapes(r, escaped);
        if (kv_ballot(kv_and(escaped, raw > kv_u32(kv_xa_exponents(f))))) r.is_bad = true;
        e = kv_select(escaped, raw, e);
    }
    e = (e & kv_u32(kv_xa_exponents(f))) << f.mantissa;
    kv_xa_store(f, values, step, e | kv_xa_load_low(f, low, s, step, count), count);
}

#if KV_WIDE
// As many full steps, eight at a time, as are far from the end of a stream of bf16 whose columns come again every four steps: returns how
// many. A lane fetches the low parts of eight neighbouring values at once, and others get theirs from it.
KV_FUNCTION u32 kv_xa_decode_regular(RansReader& r, u32 largest, const u8* low, const XaShape& s, const u8* ids, u16* to) {
    LaneU32 tables[4];
    KV_UNROLL for (u32 at = 0; at < 4; at++) tables[at] = KV_RANS_TABLE_AT(kv_load_u8(ids + at * KV_LANES % s.columns));
    const u32 lane = kv_lane(), blocks = s.values / (8 * KV_LANES), chosen = lane & 7u;
    const uint2* from = (const uint2*)low + lane;
    uint2 coming = blocks ? from[0] : make_uint2(0, 0);
    to += lane;
    for (u32 block = 0; block < blocks; block++, to += 8 * KV_LANES) {
        const uint2 bytes = coming;
        if (block + 1 < blocks) coming = from[(block + 1) * KV_LANES];
        KV_UNROLL for (u32 at = 0; at < 8; at++) {
            if (!kv_rans_is_far(r)) return 8 * block + at;
            const u32 symbol = kv_rans_symbol(kv_rans_get_far(r, kv_xa_tables, tables[at % 4]));
            const int holder = (int)(4 * at + (lane >> 3));
            const u32 first = __shfl_sync(0xffffffffu, bytes.x, holder), second = __shfl_sync(0xffffffffu, bytes.y, holder);
            const u32 byte = __byte_perm(first, second, chosen);
            u32 e = largest - symbol;
            const bool is_escaped = symbol == KV_ESCAPE;
            if (kv_ballot(is_escaped)) {
                const u32 raw = kv_rans_escapes(r, is_escaped);
                if (kv_ballot(is_escaped && raw > 255u)) r.is_bad = true;
                e = is_escaped ? raw : e;
            }
            to[at * KV_LANES] = (u16)((byte << 8 & 0x8000u) | (e & 255u) << 7 | (byte & 127u));
        }
    }
    return 8 * blocks;
}
// The values of a stream of bf16 from `step` on.
KV_FUNCTION void kv_xa_decode_bytes(RansReader& r, u32 largest, const u8* low, const XaShape& s, const u8* ids, u16* to, u32 step) {
    RansColumns c = kv_columns_from(step, s.columns);
    LaneU32 table = kv_load_u8(ids + c.at);
    LaneU32 byte = kv_load_u8(low + step * KV_LANES, step < s.steps ? s.values - step * KV_LANES : 0u);
    for (; step < s.steps && !r.is_bad; step++) {
        const u32 from = step * KV_LANES, left = s.values - from;
        const LaneU32 own = table, mine = byte;
        kv_columns_next(c);
        table = kv_load_u8(ids + c.at);
        byte = left > KV_LANES ? kv_load_u8(low + from + KV_LANES, left - KV_LANES) : 0u;
        LaneU32 entry;
        if (left >= KV_LANES && kv_rans_is_far(r)) {
            entry = kv_rans_get_far(r, kv_xa_tables, KV_RANS_TABLE_AT(own));
        } else {
            kv_rans_rest(r);
            entry = kv_rans_get(r, kv_xa_tables, own, kv_lane() < left);
        }
        const LaneU32 symbol = kv_rans_symbol(entry);
        LaneU32 e = largest - symbol;
        const LaneMask escaped = symbol == KV_ESCAPE && kv_lane() < left;
        if (kv_ballot(escaped)) {
            const LaneU32 raw = kv_rans_escapes(r, escaped);
            if (kv_ballot(escaped && raw > 255u)) r.is_bad = true;
            e = escaped ? raw : e;
        }
        if (kv_lane() < left) to[from + kv_lane()] = (u16)((mine >> 7 << 15) | (e & 255u) << 7 | (mine & 127u));
    }
}
#endif

// STREAMS heads from `head` on. Sets the status of each.
template <class F, u32 STREAMS>
KV_FUNCTION void kv_xa_decode_heads(const F& f, const u8* block, u32 length, u8* values, u32 head, const XaShape& s, u8* ids,
                                    u32* status) {
    RansReader r[STREAMS];
    u8 *ids_of[STREAMS], *to[STREAMS];
    const u8* low[STREAMS];
    u32 largest[STREAMS];
    for (u32 i = 0; i < STREAMS; i++) {
        r[i] = kv_xa_reader(block, length, head + i, s);
        ids_of[i] = ids + i * kv_xa_up(kv_columns_bytes(s.columns));
        low[i] = block + s.low_offset + (head + i) * s.low_bytes;
        largest[i] = block[4 * s.heads + head + i];
        to[i] = values + (u64)(head + i) * s.values * f.bytes;
        kv_rans_get_ids(r[i], ids_of[i], s.columns);
    }
#if KV_WIDE
    if constexpr (F::is_of_bytes) {
        u32 done = 0;
        if (128 % s.columns == 0 && s.columns >= KV_LANES && !((u64)low[0] & 7))
            done = kv_xa_decode_regular(r[0], largest[0], low[0], s, ids_of[0], (u16*)to[0]);
        kv_xa_decode_bytes(r[0], largest[0], low[0], s, ids_of[0], (u16*)to[0], done);
        const u32 is_bad = kv_rans_is_whole(r[0]) ? 0 : 1;
        KV_ONCE(status[0] = is_bad);
        return;
    }
#endif
    RansColumns c = kv_columns_from(0, s.columns);
    u32 step = 0;
    for (; step < s.values / KV_LANES; step++) {
        bool are_far = true;
        for (u32 i = 0; i < STREAMS; i++) are_far = are_far && kv_rans_is_far(r[i]);
        if (!are_far) break;
        LaneU32 symbols[STREAMS];
        for (u32 i = 0; i < STREAMS; i++)
            symbols[i] = kv_rans_symbol(kv_rans_get_far(r[i], kv_xa_tables, KV_RANS_TABLE_AT(kv_load_u8(ids_of[i] + c.at))));
        for (u32 i = 0; i < STREAMS; i++)
            kv_xa_join(f, r[i], symbols[i], kv_mask(true), largest[i], low[i], s, step, KV_LANES, to[i]);
        kv_columns_next(c);
    }
    for (u32 i = 0; i < STREAMS; i++) { // each to its end by itself
        RansColumns at = c;
        for (u32 last = step; last < s.steps && !r[i].is_bad; last++) {
            const u32 count = kv_xa_count(s, last);
            const LaneMask valid = count == KV_LANES ? kv_mask(true) : kv_lane() < kv_u32(count);
            kv_rans_rest(r[i]);
            const LaneU32 entry = kv_rans_get(r[i], kv_xa_tables, kv_load_u8(ids_of[i] + at.at), valid);
            kv_xa_join(f, r[i], kv_rans_symbol(entry), valid, largest[i], low[i], s, last, count, to[i]);
            kv_columns_next(at);
        }
        const u32 is_bad = kv_rans_is_whole(r[i]) ? 0 : 1;
        KV_ONCE(status[i] = is_bad);
    }
}

template <class F>
KV_FUNCTION void kv_xa_decode_some(const F& f, const u8* block, u64 length, u8* values, u32 head, u32 heads, u32 head_values,
                                   u32 columns, u8* ids, u32* status) {
    const XaShape s = kv_xa_shape(f, heads, head_values, columns);
    const u32 count = heads - head < F::streams ? heads - head : F::streams;
    if (head % F::streams) return;
    if (length < s.streams_offset) {
        for (u32 i = 0; i < count; i++) KV_ONCE(status[i] = 1);
    } else if (count == F::streams) {
        kv_xa_decode_heads<F, F::streams>(f, block, (u32)length, values, head, s, ids, status);
    } else {
        kv_xa_decode_heads<F, 1>(f, block, (u32)length, values, head, s, ids, status);
    }
}

// A warp a head of a block (of which one may do the next ones' work). blocks[b]: the addresses of the encoded block and of
// the values, and the block's bytes. `ids`: columns + 32, rounded up to 64, a warp. status[w]: 0, or 1 where it is no block.
KV_KERNEL(xa_decode, (const u64* blocks, u32 dtype, u32 heads, u32 values, u32 columns, u8* ids, u32* status),
          (blocks, dtype, heads, values, columns, ids, status)) {
    const u64* block = blocks + 3 * (u64)(warp / heads);
    KV_XA_CALL(dtype, kv_xa_decode_some, KV_GLOBAL((const u8*)block[0]), block[2], KV_GLOBAL((u8*)block[1]), warp % heads, heads, values, columns,
               ids + (u64)warp * kv_xa_up(kv_columns_bytes(columns)), status + warp);
}

#endif
