// x3: exponents as 3-bit codes below the top of a window of seven, the others beside. The layout of a block is in x3.py.
//
// A head's values are a run of n; a group is 2,048 of them, coded by one warp in steps of 128 values, a value in a byte of a lane
// (packed.h). Eight steps are a field: column c of its rows of bytes has the codes of its values c, 128 + c … 896 + c, so that packing
// is shifts alone.
#ifndef KVOBJ_X3_CUH
#define KVOBJ_X3_CUH

#define KV_X3_GROUP 2048u
#define KV_X3_FIELD 1024u
#define KV_X3_STEPS 8u
#define KV_X3_LEAST_TOP 6u // of a window of seven
#define KV_X3_CHUNK 64u    // rows of which one greatest exponent is taken
#define KV_X3_BF16 0u
#define KV_X3_FP16 1u
#define KV_X3_E4M3 2u
#define KV_X3_E5M2 3u

// Eight values of BITS bits (3 or 4) for each of 128 columns, in BITS rows of bytes: value j in bits BITS · j and up of a column's
// bytes. On a GPU `step` is a constant after unrolling, and rows are registers.
template <u32 BITS> struct X3Field {
    static constexpr u32 rows = BITS;
    LaneU32 row[BITS];
    KV_FUNCTION void put(X3Field& field, u32 step, LaneU32 x) {
        const u32 at = BITS * step & 7, first = BITS * step >> 3;
        if (at + BITS <= 8) {
            field.row[first] |= x << at;
        } else {
            field.row[first] |= (x & kv_packed((1u << (8 - at)) - 1)) << at;
            field.row[first + 1] |= (x >> (8 - at)) & kv_packed((1u << (at + BITS - 8)) - 1);
        }
    }
    KV_FUNCTION LaneU32 get(const X3Field& field, u32 step) {
        const u32 at = BITS * step & 7, first = BITS * step >> 3;
        const LaneU32 x = (field.row[first] >> at) & kv_packed(((1u << BITS) - 1) & (0xffu >> at));
        if (at + BITS <= 8) return x;
        return x | (field.row[first + 1] & kv_packed((1u << (at + BITS - 8)) - 1)) << (8 - at);
    }
    KV_FUNCTION void clear(X3Field& field) { for (u32 at = 0; at < BITS; at++) field.row[at] = kv_u32(0); }
    KV_FUNCTION void load(X3Field& field, const u8* p) {
        for (u32 at = 0; at < BITS; at++) field.row[at] = kv_load_packed(p + at * KV_PACKED);
    }
    KV_FUNCTION void store(const X3Field& field, u8* p) {
        for (u32 at = 0; at < BITS; at++) kv_store_packed(p + at * KV_PACKED, field.row[at]);
    }
};
template <> struct X3Field<0> {
    static constexpr u32 rows = 0;
    KV_FUNCTION void put(X3Field&, u32, LaneU32) {}
    KV_FUNCTION LaneU32 get(const X3Field&, u32) { return kv_u32(0); }
    KV_FUNCTION void clear(X3Field&) {}
    KV_FUNCTION void load(X3Field&, const u8*) {}
    KV_FUNCTION void store(const X3Field&, u8*) {}
};
typedef X3Field<3> X3Codes;

// How each dtype's bits divide into an exponent, a byte that is kept (`low`), and a field of the few bits that are left (`rest`).
// `first` and `second` are a value's low and high byte, `first` alone where it has one.
struct X3Bf16 {
    typedef X3Field<0> Rest;
    static constexpr u32 bytes = 2, lows = 1, mantissa = 7;
    KV_FUNCTION void split(LaneU32 first, LaneU32 second, LaneU32& exponent, LaneU32& low, LaneU32&) {
        exponent = ((second & kv_packed(0x7f)) << 1) | ((first >> 7) & kv_packed(1));
        low = (second & kv_packed(0x80)) | (first & kv_packed(0x7f));
    }
    KV_FUNCTION void join(LaneU32 exponent, LaneU32 low, LaneU32, LaneU32& first, LaneU32& second) {
        first = ((exponent & kv_packed(1)) << 7) | (low & kv_packed(0x7f));
        second = (low & kv_packed(0x80)) | ((exponent >> 1) & kv_packed(0x7f));
    }
};
struct X3Fp16 {
    typedef X3Field<3> Rest;
    static constexpr u32 bytes = 2, lows = 1, mantissa = 10;
    KV_FUNCTION void split(LaneU32 first, LaneU32 second, LaneU32& exponent, LaneU32& low, LaneU32& rest) {
        exponent = (second >> 2) & kv_packed(31);
        low = first;
        rest = ((second >> 5) & kv_packed(4)) | (second & kv_packed(3));
    }
    KV_FUNCTION void join(LaneU32 exponent, LaneU32 low, LaneU32 rest, LaneU32& first, LaneU32& second) {
        first = low;
        second = ((rest & kv_packed(4)) << 5) | ((exponent & kv_packed(31)) << 2) | (rest & kv_packed(3));
    }
};
struct X3E4m3 {
    typedef X3Field<4> Rest;
    static constexpr u32 bytes = 1, lows = 0, mantissa = 3;
    KV_FUNCTION void split(LaneU32 first, LaneU32, LaneU32& exponent, LaneU32&, LaneU32& rest) {
        exponent = (first >> 3) & kv_packed(15);
        rest = ((first >> 4) & kv_packed(8)) | (first & kv_packed(7));
    }
    KV_FUNCTION void join(LaneU32 exponent, LaneU32, LaneU32 rest, LaneU32& first, LaneU32&) {
        first = ((rest & kv_packed(8)) << 4) | ((exponent & kv_packed(15)) << 3) | (rest & kv_packed(7));
    }
};
struct X3E5m2 {
    typedef X3Field<3> Rest;
    static constexpr u32 bytes = 1, lows = 0, mantissa = 2;
    KV_FUNCTION void split(LaneU32 first, LaneU32, LaneU32& exponent, LaneU32&, LaneU32& rest) {
        exponent = (first >> 2) & kv_packed(31);
        rest = ((first >> 5) & kv_packed(4)) | (first & kv_packed(3));
    }
    KV_FUNCTION void join(LaneU32 exponent, LaneU32, LaneU32 rest, LaneU32& first, LaneU32&) {
        first = ((rest & kv_packed(4)) << 5) | ((exponent & kv_packed(31)) << 2) | (rest & kv_packed(3));
    }
};

// Where a block's parts begin; heads and n are such that a block stays below 2^31 bytes.
struct X3Parts { u32 groups, fields, low_run, ends, before, codes, lows, rests, escapes; };
template <class Split> KV_FUNCTION X3Parts x3_parts(u32 heads, u32 n, u32 dim) {
    X3Parts parts;
    parts.groups = (n + KV_X3_GROUP - 1) / KV_X3_GROUP;
    parts.fields = (n + KV_X3_FIELD - 1) / KV_X3_FIELD;
    parts.low_run = Split::lows * ((n + 3) & ~3u);
    parts.ends = (heads * dim + 3) & ~3u;
    parts.before = parts.ends + 4 * heads;
    parts.codes = (parts.before + 2 * heads * parts.groups + 15) & ~15u;
    parts.lows = parts.codes + heads * parts.fields * X3Codes::rows * KV_PACKED;
    parts.rests = parts.lows + heads * parts.low_run;
    parts.escapes = parts.rests + heads * parts.fields * Split::Rest::rows * KV_PACKED;
    return parts;
}

template <class Split> KV_FUNCTION void x3_load_values(const u8* p, u32 count, LaneU32& first, LaneU32& second) {
    if constexpr (Split::bytes == 2) kv_load_pairs((const u16*)p, count, first, second);
    else first = kv_load_packed(p, count);
}

// The tops of a run's columns, so that those of any 128 neighbouring values lie together: of value i on from i mod dim. Either they do
// so in the block (dim a multiple of 128), or there is a copy of each head's, repeated to dim + 128 and more bytes.
struct X3Tops {
    const u8* at;
    u32 dim, place, stride; // place: of the next step
};
KV_FUNCTION X3Tops x3_tops(const u8* in_block, const u8* spread, u32 pitch, u32 run, u32 head, u32 dim, u32 first) {
    const u32 stride = dim > KV_PACKED ? KV_PACKED : dim == KV_PACKED ? 0 : KV_PACKED % dim;
    return {spread ? spread + (u64)run * pitch : in_block + (u64)head * dim, dim, stride ? first % dim : 0, stride};
}
KV_FUNCTION LaneU32 x3_next_tops(X3Tops& tops) {
    const LaneU32 found = kv_load_packed(tops.at + tops.place);
    // After a step of 128 the place is 128 further, modulo dim. Where dim is above 128 it is `stride` = 128 further.
    tops.place += tops.stride;
    if (tops.place >= tops.dim) tops.place -= tops.dim;
    return found;
}

#if KV_WIDE
KV_WARP_MEMORY(x3_encode, 1024) // the exponents of a field
KV_WARP_MEMORY(x3_decode, 1024)
// Whether the steps of a field, and their tops, are whole and aligned: then it is coded at once.
KV_FUNCTION bool x3_is_wide(const u8* values, const u8* lows, u32 count, const X3Tops& tops, u32 bytes) {
    return count == KV_X3_FIELD && !(((u64)values & (4 * bytes - 1)) | (((u64)lows | (u64)tops.at | tops.place | tops.dim) & 3));
}
// Those of a field, the same for every step where dim divides 128.
KV_FUNCTION void x3_field_tops(X3Tops& tops, LaneU32 (&of)[KV_X3_STEPS]) {
    if (!tops.stride) {
        const LaneU32 all = kv_load_packed_aligned(tops.at + tops.place);
        KV_UNROLL for (u32 step = 0; step < KV_X3_STEPS; step++) of[step] = all;
        return;
    }
    KV_UNROLL for (u32 step = 0; step < KV_X3_STEPS; step++) {
        of[step] = kv_load_packed_aligned(tops.at + tops.place);
        tops.place += tops.stride;
        if (tops.place >= tops.dim) tops.place -= tops.dim;
    }
}
#endif

// One warp a head of a block (or of an encoded one): its tops to `pitch` bytes of `spread`.
KV_KERNEL(x3_spread_tops, (const u64* blocks, u8* spread, u32 pitch, u32 heads, u32 dim), (blocks, spread, pitch, heads, dim)) {
    const u8* tops = (const u8*)blocks[warp / heads] + (u64)(warp % heads) * dim;
    u8* to = spread + (u64)warp * pitch;
    for (u32 at = 0; at < pitch; at += dim) kv_copy(to + at, tops, kv_min_uniform(dim, pitch - at));
}

// ---- The windows ----

// Rows of up to 128 columns; several tokens a row where dim divides 128.
struct X3Rows { u32 width, copies, count, stride, chunks; };
KV_FUNCTION X3Rows x3_rows(u32 tokens, u32 dim, u32 tile) {
    X3Rows rows;
    if (dim < KV_PACKED && KV_PACKED % dim == 0) {
        rows.width = dim;
        rows.copies = KV_PACKED / dim;
        rows.count = (tokens + rows.copies - 1) / rows.copies;
        rows.stride = KV_PACKED;
    } else {
        rows.width = kv_min_uniform(dim - tile * KV_PACKED, KV_PACKED);
        rows.copies = 1;
        rows.count = tokens;
        rows.stride = dim;
    }
    rows.chunks = rows.count < KV_X3_CHUNK ? 1 : (rows.count + KV_X3_CHUNK / 2) / KV_X3_CHUNK;
    return rows;
}

#if KV_WIDE
#define KV_X3_ROWS 16u // fetched at once
// The greatest exponents of 128 columns over rows from `row` to `whole`, all there and aligned; leaves `row` at those that are left.
// Values of one dtype, signs aside, are ordered as their words are.
template <class Split> KV_FUNCTION LaneU32 x3_greatest_of_rows(const u8* values, u32 stride, u32& row, u32 whole) {
    u32 first = 0, second = 0;
    for (; row + KV_X3_ROWS <= whole; row += KV_X3_ROWS) {
        if constexpr (Split::bytes == 2) {
            uint2 x[KV_X3_ROWS];
            KV_UNROLL for (u32 at = 0; at < KV_X3_ROWS; at++) x[at] = kv_load_pairs_aligned(values + (u64)(row + at) * stride * 2);
            KV_UNROLL for (u32 at = 0; at < KV_X3_ROWS; at++) {
                first = __vmaxu2(first, x[at].x & 0x7fff7fffu);
                second = __vmaxu2(second, x[at].y & 0x7fff7fffu);
            }
        } else {
            u32 x[KV_X3_ROWS];
            KV_UNROLL for (u32 at = 0; at < KV_X3_ROWS; at++) x[at] = kv_load_packed_aligned(values + (u64)(row + at) * stride);
            KV_UNROLL for (u32 at = 0; at < KV_X3_ROWS; at++) first = __vmaxu4(first, x[at] & 0x7f7f7f7fu);
        }
    }
    if constexpr (Split::bytes == 2) {
        const u32 exponents = (0x7fffu >> Split::mantissa) * 0x00010001u;
        return __byte_perm((first >> Split::mantissa) & exponents, (second >> Split::mantissa) & exponents, 0x6420);
    }
    return (first >> Split::mantissa) & kv_packed(0x7fu >> Split::mantissa);
}
#endif

// The greatest exponents of each column's chunks, 128 a chunk.
template <class Split> KV_ROUTINE void x3_find_maxima(const u8* values, u32 n, const X3Rows& rows, u8* maxima) {
    for (u32 chunk = 0; chunk < rows.chunks; chunk++) {
        const u32 last = kv_min_uniform((chunk + 1) * KV_X3_CHUNK, rows.count);
        LaneU32 most = kv_u32(0);
        u32 row = chunk * KV_X3_CHUNK;
#if KV_WIDE
        const u32 whole = rows.copies == 1 ? last : kv_min_uniform(last, n / KV_PACKED);
        if ((rows.copies > 1 || rows.width == KV_PACKED) && !(((u64)values | rows.stride * Split::bytes) & (4 * Split::bytes - 1)))
            most = x3_greatest_of_rows<Split>(values, rows.stride, row, whole);
#endif
        for (; row < last; row++) {
            const u32 count = rows.copies == 1 ? rows.width : kv_min_uniform(n - row * KV_PACKED, KV_PACKED);
            LaneU32 first = kv_u32(0), second = kv_u32(0), exponent, low, rest;
            x3_load_values<Split>(values + (u64)row * rows.stride * Split::bytes, count, first, second);
            Split::split(first, second, exponent, low, rest);
            most = kv_packed_max(most, exponent);
        }
        kv_store_packed(maxima + (u64)chunk * KV_PACKED, most);
    }
}

// One warp 128 columns of a head: their tops to their places in the slot. `maxima` has `room` bytes a warp, 128 a chunk.
KV_KERNEL(x3_choose_tops,
          (const u64* plains, const u64* slots, u8* maxima, u32 room, u32 heads, u32 tokens, u32 dim, u32 split),
          (plains, slots, maxima, room, heads, tokens, dim, split)) {
    const u32 tiles = (dim + KV_PACKED - 1) / KV_PACKED, block = warp / (heads * tiles);
    const u32 head = warp / tiles % heads, tile = warp % tiles, n = tokens * dim;
    const X3Rows rows = x3_rows(tokens, dim, tile);
    const u64 first = (u64)head * n + tile * KV_PACKED;
    const u8* values = KV_GLOBAL((const u8*)plains[block]) + first * (split <= KV_X3_FP16 ? 2 : 1);
    maxima += (u64)warp * room;
    if (split == KV_X3_BF16) x3_find_maxima<X3Bf16>(values, n, rows, maxima);
    else if (split == KV_X3_FP16) x3_find_maxima<X3Fp16>(values, n, rows, maxima);
    else if (split == KV_X3_E4M3) x3_find_maxima<X3E4m3>(values, n, rows, maxima);
    else x3_find_maxima<X3E5m2>(values, n, rows, maxima);
    kv_sync();
    const u32 found = rows.chunks * rows.copies;
    u8* tops = (u8*)slots[block] + (u64)head * dim + tile * KV_PACKED;
    for (u32 at = 0; at < rows.width; at += KV_LANES) {
        const u32 count = kv_min_uniform(rows.width - at, KV_LANES);
        LaneU32 zeros = kv_u32(0), median = kv_u32(0);
        for (u32 chunk = 0; chunk < rows.chunks; chunk++)
            for (u32 copy = 0; copy < rows.copies; copy++) {
                const u8* p = maxima + (u64)chunk * KV_PACKED + copy * dim + at;
                zeros += kv_select(kv_load_u8(p, count) == kv_u32(0), kv_u32(1), kv_u32(0));
            }
        // The lower median of the others, bit by bit: the greatest number that at most `middle` of all are below.
        const LaneU32 middle = zeros + ((kv_u32(found + 1) - zeros) >> 1) - kv_u32(1);
        for (u32 bit = 128; bit; bit >>= 1) {
            const LaneU32 higher = median | kv_u32(bit);
            LaneU32 below = kv_u32(0);
            for (u32 chunk = 0; chunk < rows.chunks; chunk++)
                for (u32 copy = 0; copy < rows.copies; copy++) {
                    const u8* p = maxima + (u64)chunk * KV_PACKED + copy * dim + at;
                    below += kv_select(kv_load_u8(p, count) < higher, kv_u32(1), kv_u32(0));
                }
            median = kv_select(below <= middle, higher, median);
        }
        kv_store_u8(tops + at, kv_max(median, kv_u32(KV_X3_LEAST_TOP)), count);
    }
}

// ---- Encoding ----

template <class Split> struct X3Encoder {
    const u8* values;
    u8* lows;
    u8* escapes;
    u32 count, escaped; // values of the field, escapes of the group so far
    X3Tops tops;
    X3Codes codes;
    typename Split::Rest rests;
};

template <class Split> KV_ROUTINE void x3_encode_step(X3Encoder<Split>& c, u32 step) {
    const u32 here = kv_min_uniform(c.count - step * KV_PACKED, KV_PACKED);
    LaneU32 first = kv_u32(0), second = kv_u32(0), exponent, low = kv_u32(0), rest = kv_u32(0);
    x3_load_values<Split>(c.values + step * KV_PACKED * Split::bytes, here, first, second);
    Split::split(first, second, exponent, low, rest);
    LaneU32 code = kv_packed_minus(x3_next_tops(c.tops), exponent);
    LaneU32 flags = (((code & kv_packed(0x7f)) + kv_packed(0x79)) | code) & kv_packed(0x80); // 7 and above
    code = (code & kv_packed(7)) | (flags >> 7) | (flags >> 6) | (flags >> 5);
    if (here < KV_PACKED) {
        flags &= kv_packed_below(here);
        code &= kv_packed_below(here);
    }
    c.escaped += kv_compress_packed(c.escapes + c.escaped, exponent, flags);
    X3Codes::put(c.codes, step, code);
    Split::Rest::put(c.rests, step, rest);
    if constexpr (Split::lows != 0) kv_store_packed(c.lows + step * KV_PACKED, low, (here + 3) & ~3u);
}

#if KV_WIDE
template <class Split> KV_FUNCTION void x3_encode_field(X3Encoder<Split>& c) {
    uint2 x[KV_X3_STEPS];
    LaneU32 tops[KV_X3_STEPS], exponents[KV_X3_STEPS];
    KV_UNROLL for (u32 step = 0; step < KV_X3_STEPS; step++) {
        const u8* at = c.values + step * KV_PACKED * Split::bytes;
        if constexpr (Split::bytes == 2) x[step] = kv_load_pairs_aligned(at);
        else x[step].x = kv_load_packed_aligned(at);
    }
    x3_field_tops(c.tops, tops);
    u32 bits = 0;
    KV_UNROLL for (u32 step = 0; step < KV_X3_STEPS; step++) {
        LaneU32 first = x[step].x, second = 0, low = 0, rest = 0;
        if constexpr (Split::bytes == 2) {
            first = __byte_perm(x[step].x, x[step].y, 0x6420);
            second = __byte_perm(x[step].x, x[step].y, 0x7531);
        }
        Split::split(first, second, exponents[step], low, rest);
        const LaneU32 code = kv_packed_minus(tops[step], exponents[step]);
        const LaneU32 flags = (((code & kv_packed(0x7f)) + kv_packed(0x79)) | code) & kv_packed(0x80);
        X3Codes::put(c.codes, step, (code & kv_packed(7)) | (flags >> 7) | (flags >> 6) | (flags >> 5));
        Split::Rest::put(c.rests, step, rest);
        if constexpr (Split::lows != 0) kv_store_packed_aligned(c.lows + step * KV_PACKED, low);
        bits |= kv_flag_bits(flags, step);
    }
    c.escaped += kv_compress_field(c.escapes + c.escaped, exponents, bits, KV_WARP_MEMORY_AT(kv_bytes_of_x3_encode) + kv_lane());
}
#endif

struct X3Spread { const u8* tops; u32 pitch; };

template <class Split>
KV_FUNCTION u32 x3_encode_group(const u8* plain, u8* slot, u8* escapes, X3Spread spread, u32 block, u32 heads, u32 n, u32 dim, u32 place) {
    const X3Parts parts = x3_parts<Split>(heads, n, dim);
    const u32 head = place / parts.groups, first = place % parts.groups * KV_X3_GROUP;
    X3Encoder<Split> coder;
    coder.escapes = escapes;
    coder.escaped = 0;
    coder.tops = x3_tops(slot, spread.tops, spread.pitch, block * heads + head, head, dim, first);
    for (u32 at = first; at < n && at < first + KV_X3_GROUP; at += KV_X3_FIELD) {
        coder.values = plain + ((u64)head * n + at) * Split::bytes;
        coder.lows = slot + parts.lows + (u64)head * parts.low_run + at;
        coder.count = kv_min_uniform(n - at, KV_X3_FIELD);
        X3Codes::clear(coder.codes);
        Split::Rest::clear(coder.rests);
#if KV_WIDE
        if (x3_is_wide(coder.values, coder.lows, coder.count, coder.tops, Split::bytes)) x3_encode_field<Split>(coder);
        else
#endif
        KV_UNROLL for (u32 step = 0; step < KV_X3_STEPS; step++)
            if (step * KV_PACKED < coder.count) x3_encode_step<Split>(coder, step);
        const u64 field = (u64)head * parts.fields + at / KV_X3_FIELD;
        X3Codes::store(coder.codes, slot + parts.codes + field * X3Codes::rows * KV_PACKED);
        Split::Rest::store(coder.rests, slot + parts.rests + field * Split::Rest::rows * KV_PACKED);
    }
    return coder.escaped;
}

// One warp a group: everything of it to its place, but its escapes to the 2,048 bytes of the warp in `escapes`, their number to `counts`.
// `spread` may be 0 where dim is a multiple of 128.
KV_KERNEL(x3_encode,
          (const u64* plains, const u64* slots, const u8* spread, u32 pitch, u8* escapes, u32* counts, u32 heads, u32 n, u32 dim,
           u32 split),
          (plains, slots, spread, pitch, escapes, counts, heads, n, dim, split)) {
    const u32 groups = (n + KV_X3_GROUP - 1) / KV_X3_GROUP, block = warp / (heads * groups), place = warp % (heads * groups);
    const u8* plain = KV_GLOBAL((const u8*)plains[block]);
    u8* slot = KV_GLOBAL((u8*)slots[block]);
    u8* mine = escapes + (u64)warp * KV_X3_GROUP;
    const X3Spread tops = {spread, pitch};
    u32 count;
    if (split == KV_X3_BF16) count = x3_encode_group<X3Bf16>(plain, slot, mine, tops, block, heads, n, dim, place);
    else if (split == KV_X3_FP16) count = x3_encode_group<X3Fp16>(plain, slot, mine, tops, block, heads, n, dim, place);
    else if (split == KV_X3_E4M3) count = x3_encode_group<X3E4m3>(plain, slot, mine, tops, block, heads, n, dim, place);
    else count = x3_encode_group<X3E5m2>(plain, slot, mine, tops, block, heads, n, dim, place);
    KV_ONCE(counts[warp] = count);
}

KV_FUNCTION X3Parts x3_parts_of(u32 heads, u32 n, u32 dim, u32 split) {
    if (split == KV_X3_BF16) return x3_parts<X3Bf16>(heads, n, dim);
    if (split == KV_X3_FP16) return x3_parts<X3Fp16>(heads, n, dim);
    if (split == KV_X3_E4M3) return x3_parts<X3E4m3>(heads, n, dim);
    return x3_parts<X3E5m2>(heads, n, dim);
}

// One warp a block: its head but for the tops, and its length; 0 where a count does not fit or the block does not shrink.
KV_KERNEL(x3_place, (const u64* slots, u32* lengths, const u32* counts, u32 heads, u32 n, u32 dim, u32 split),
          (slots, lengths, counts, heads, n, dim, split)) {
    const X3Parts parts = x3_parts_of(heads, n, dim, split);
    u8* slot = (u8*)slots[warp];
    u16* before = (u16*)(slot + parts.before);
    u32* ends = (u32*)(slot + parts.ends);
    counts += (u64)warp * heads * parts.groups;
    u32 end = 0, most = 0;
    for (u32 head = 0; head < heads; head++) {
        u32 run = 0;
        for (u32 at = 0; at < parts.groups; at += KV_LANES) {
            const u32 some = kv_min_uniform(parts.groups - at, KV_LANES);
            const LaneU32 count = kv_load_u32(counts + head * parts.groups + at, some);
            const LaneU32 earlier = kv_u32(run) + kv_prefix_sums(count);
            kv_store_u16(before + head * parts.groups + at, earlier, some);
            most = most > kv_broadcast(earlier, some - 1) ? most : kv_broadcast(earlier, some - 1);
            run += kv_sum(count);
        }
        end += run;
        KV_ONCE(ends[head] = end);
    }
    kv_store_u8(slot + heads * dim, kv_u32(0), parts.ends - heads * dim);
    kv_store_u8(slot + parts.before + 2 * heads * parts.groups, kv_u32(0), parts.codes - parts.before - 2 * heads * parts.groups);
    const u64 length = (u64)parts.escapes + end, plain = (u64)heads * n * (split <= KV_X3_FP16 ? 2 : 1);
    KV_ONCE(lengths[warp] = most > 0xffffu || length >= plain ? 0u : (u32)length);
}

// One warp a group: its escapes behind the others.
KV_KERNEL(x3_gather,
          (const u64* slots, const u32* lengths, const u8* escapes, const u32* counts, u32 heads, u32 n, u32 dim, u32 split),
          (slots, lengths, escapes, counts, heads, n, dim, split)) {
    const X3Parts parts = x3_parts_of(heads, n, dim, split);
    const u32 block = warp / (heads * parts.groups), place = warp % (heads * parts.groups), head = place / parts.groups;
    if (!lengths[block]) return;
    u8* slot = (u8*)slots[block];
    const u32 earlier = head ? ((const u32*)(slot + parts.ends))[head - 1] : 0u;
    kv_copy_few(slot + parts.escapes + earlier + ((const u16*)(slot + parts.before))[place], escapes + (u64)warp * KV_X3_GROUP,
                counts[warp]);
}

// ---- Decoding ----

template <class Split> struct X3Decoder {
    u8* values;
    const u8* lows;
    const u8* escapes;
    u32 count, left; // values of the field, escapes that the group still has
    X3Tops tops;
    X3Codes codes;
    typename Split::Rest rests;
};

// Whether there were as many escapes as the codes ask for.
template <class Split> KV_ROUTINE bool x3_decode_step(X3Decoder<Split>& c, u32 step) {
    const u32 here = kv_min_uniform(c.count - step * KV_PACKED, KV_PACKED);
    LaneU32 code = X3Codes::get(c.codes, step), low = kv_u32(0), first, second;
    if (here < KV_PACKED) code &= kv_packed_below(here);
    LaneU32 exponent = kv_packed_minus(x3_next_tops(c.tops), code);
    const u32 found = kv_expand_packed(c.escapes, c.left, exponent, (code + kv_packed(0x79)) & kv_packed(0x80));
    if (found > c.left) return false;
    c.escapes += found;
    c.left -= found;
    if constexpr (Split::lows != 0) low = kv_load_packed(c.lows + step * KV_PACKED, here);
    Split::join(exponent, low, Split::Rest::get(c.rests, step), first, second);
    u8* values = c.values + step * KV_PACKED * Split::bytes;
    if constexpr (Split::bytes == 2) kv_store_pairs((u16*)values, first, second, here);
    else kv_store_packed(values, first, here);
    return true;
}

#if KV_WIDE
// As x3_decode_step does, of a whole field. `near`: the first bytes of the escapes that are left.
template <class Split> KV_FUNCTION bool x3_decode_field(X3Decoder<Split>& c, LaneU32 near) {
    LaneU32 lows[KV_X3_STEPS], exponents[KV_X3_STEPS];
    if constexpr (Split::lows != 0) {
        KV_UNROLL for (u32 step = 0; step < KV_X3_STEPS; step++) lows[step] = kv_load_packed_aligned(c.lows + step * KV_PACKED);
    }
    x3_field_tops(c.tops, exponents);
    u32 bits = 0;
    KV_UNROLL for (u32 step = 0; step < KV_X3_STEPS; step++) {
        const LaneU32 code = X3Codes::get(c.codes, step);
        exponents[step] = kv_packed_minus(exponents[step], code);
        bits |= kv_flag_bits((code + kv_packed(0x79)) & kv_packed(0x80), step);
    }
    const u32 found = kv_expand_field(c.escapes, c.left, near, exponents, bits, KV_WARP_MEMORY_AT(kv_bytes_of_x3_decode) + kv_lane());
    if (found > c.left) return false;
    c.escapes += found;
    c.left -= found;
    KV_UNROLL for (u32 step = 0; step < KV_X3_STEPS; step++) {
        LaneU32 low = 0, first, second;
        if constexpr (Split::lows != 0) low = lows[step];
        Split::join(exponents[step], low, Split::Rest::get(c.rests, step), first, second);
        u8* values = c.values + step * KV_PACKED * Split::bytes;
        if constexpr (Split::bytes == 2) kv_store_pairs_aligned(values, first, second);
        else kv_store_packed_aligned(values, first);
    }
    return true;
}
#endif

// Whether the group was one.
template <class Split>
KV_FUNCTION bool x3_decode_group(const u8* block, u32 length, u8* plain, X3Spread spread, u32 number, u32 heads, u32 n, u32 dim,
                                 u32 place) {
    const X3Parts parts = x3_parts<Split>(heads, n, dim);
    if (length < parts.escapes) return false;
    const u32 head = place / parts.groups, group = place % parts.groups, first = group * KV_X3_GROUP;
#if KV_WIDE
    if (first + KV_X3_GROUP <= n) { // what comes by whole fields, beside what says where the escapes are
        const u8* codes = block + parts.codes + ((u64)head * parts.fields + first / KV_X3_FIELD) * X3Codes::rows * KV_PACKED;
        const u8* lows = block + parts.lows + (u64)head * parts.low_run + first;
        if (kv_lane() < 2 * X3Codes::rows * KV_PACKED / 32) KV_FETCH(codes + 32 * kv_lane());
        if constexpr (Split::lows != 0) {
            KV_FETCH(lows + 32 * kv_lane());
            KV_FETCH(lows + 32 * (KV_LANES + kv_lane()));
        }
    }
#endif
    const u32* ends = (const u32*)(block + parts.ends);
    const u16* before = (const u16*)(block + parts.before);
    const u32 all = length - parts.escapes, start = head ? ends[head - 1] : 0u, end = ends[head];
    if (start > end || end > all || (head == heads - 1 && end != all)) return false;
    const u32 from = before[place], to = group + 1 < parts.groups ? before[place + 1] : end - start;
    if (from > to || to > end - start || (group == 0 && from)) return false;
    X3Decoder<Split> coder;
    coder.escapes = block + parts.escapes + start + from;
    coder.left = to - from;
    coder.tops = x3_tops(block, spread.tops, spread.pitch, number * heads + head, head, dim, first);
    for (u32 at = first; at < n && at < first + KV_X3_GROUP; at += KV_X3_FIELD) {
        coder.values = plain + ((u64)head * n + at) * Split::bytes;
        coder.lows = block + parts.lows + (u64)head * parts.low_run + at;
        coder.count = kv_min_uniform(n - at, KV_X3_FIELD);
        const u64 field = (u64)head * parts.fields + at / KV_X3_FIELD;
        X3Codes::load(coder.codes, block + parts.codes + field * X3Codes::rows * KV_PACKED);
        Split::Rest::load(coder.rests, block + parts.rests + field * Split::Rest::rows * KV_PACKED);
#if KV_WIDE
        if (x3_is_wide(coder.values, coder.lows, coder.count, coder.tops, Split::bytes)) {
            if (!x3_decode_field<Split>(coder, kv_load_u8(coder.escapes, coder.left))) return false;
            continue;
        }
#endif
        KV_UNROLL for (u32 step = 0; step < KV_X3_STEPS; step++)
            if (step * KV_PACKED < coder.count && !x3_decode_step<Split>(coder, step)) return false;
    }
    return !coder.left;
}

// One warp a group: its values to their places. statuses[block] becomes 1 where it is no group; the caller has set it to 0.
// `spread` as of `x3_encode`; then no length is below that of a block without escapes.
KV_KERNEL(x3_decode,
          (const u64* blocks, const u32* lengths, const u64* plains, const u8* spread, u32 pitch, u32* statuses, u32 heads, u32 n,
           u32 dim, u32 split),
          (blocks, lengths, plains, spread, pitch, statuses, heads, n, dim, split)) {
    const u32 groups = (n + KV_X3_GROUP - 1) / KV_X3_GROUP, block = warp / (heads * groups), place = warp % (heads * groups);
    const u8* encoded = KV_GLOBAL((const u8*)blocks[block]);
    u8* plain = KV_GLOBAL((u8*)plains[block]);
    const X3Spread tops = {spread, pitch};
    bool is_good;
    if (split == KV_X3_BF16) is_good = x3_decode_group<X3Bf16>(encoded, lengths[block], plain, tops, block, heads, n, dim, place);
    else if (split == KV_X3_FP16) is_good = x3_decode_group<X3Fp16>(encoded, lengths[block], plain, tops, block, heads, n, dim, place);
    else if (split == KV_X3_E4M3) is_good = x3_decode_group<X3E4m3>(encoded, lengths[block], plain, tops, block, heads, n, dim, place);
    else is_good = x3_decode_group<X3E5m2>(encoded, lengths[block], plain, tops, block, heads, n, dim, place);
    if (!is_good) KV_ONCE(statuses[block] = 1);
}

#endif
