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
};
struct XaDtype {
    static constexpr u32 streams = 1;
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

template <class F>
KV_FUNCTION void kv_xa_encode_head(const F& f, const u8* values, u8* block, u32 head, u32 heads, u32 head_values, u32 columns,
                                   u8* work, u16* slot, u32 slot_words, u64* stream, u32* length) {
    const XaShape s = kv_xa_shape(f, heads, head_values, columns);
    const XaRoom room = kv_xa_room(work, s);
    values += (u64)head * head_values * f.bytes;
    const u32 largest = kv_xa_largest(f, values, s);
    KV_ONCE(block[4 * heads + head] = (u8)largest);
    kv_xa_split(f, values, s, largest, block + s.low_offset + head * s.low_bytes, room);
    for (u32 column = 0; column < columns; column++) {
        const u16* counts = room.counts + column * KV_XA_COUNTS;
        const u32 id = kv_rans_cheapest(kv_xa_tables.costs, counts, 0, KV_XA_SYMBOLS, counts[KV_XA_SYMBOLS]);
        KV_ONCE(room.ids[column] = (u8)id);
    }
    kv_columns_wrap(room.ids, columns);

    RansWriter w = kv_rans_writer(slot, slot + slot_words);
    RansColumns c = kv_columns_from(s.steps - 1, columns);
    for (u32 step = s.steps; step-- > 0 && !w.is_full;) {
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
    KV_XA_CALL(dtype, kv_xa_encode_head, (const u8*)blocks[2 * block], (u8*)blocks[2 * block + 1], head, heads, values, columns,
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
    kv_copy_u16((u16*)(block + streams_offset + start), (const u16*)streams[warp], lengths[warp] / 2);
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
    RansColumns c = kv_columns_from(0, s.columns);
    u32 step = 0;
    for (; step < s.values / KV_LANES; step++) {
        bool are_far = true;
        for (u32 i = 0; i < STREAMS; i++) are_far = are_far && kv_rans_is_far(r[i]);
        if (!are_far) break;
        LaneU32 symbols[STREAMS];
        for (u32 i = 0; i < STREAMS; i++)
            symbols[i] = kv_rans_symbol(kv_rans_get_far(r[i], kv_xa_tables.slots, kv_load_u8(ids_of[i] + c.at)));
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
            const LaneU32 entry = kv_rans_get(r[i], kv_xa_tables.slots, kv_load_u8(ids_of[i] + at.at), valid);
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
    KV_XA_CALL(dtype, kv_xa_decode_some, (const u8*)block[0], block[2], (u8*)block[1], warp % heads, heads, values, columns,
               ids + (u64)warp * kv_xa_up(kv_columns_bytes(columns)), status + warp);
}

#endif
