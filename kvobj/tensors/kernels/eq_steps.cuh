// eq, from values to integers and back, and down the ladder: what each step of coding does to a head, and what that costs in error.
#ifndef KVOBJ_EQ_STEPS_CUH
#define KVOBJ_EQ_STEPS_CUH

#include "eq_plan.cuh"

// What integers of a rung decode to: word of q * (3^rung * step) + mean, in this order, each operation rounded.
template <bool HALF> KV_FUNCTION LaneU32 kv_eq_decoded(LaneI32 q, LaneF32 step, LaneF32 mean) {
    return kv_word<HALF>(kv_to_f32(q) * step + mean);
}
KV_FUNCTION float kv_eq_step_of_rung(u32 step, u32 rung) {
    i32 power = 1; // up to 3^15, an exact float
    for (u32 at = 0; at < rung; at++) power *= 3;
    return kv_from_bits_uniform(step << 16) * kv_to_f32_uniform(power);
}
KV_FUNCTION LaneI32 kv_eq_third(LaneI32 q) { // to nearest; nothing lies halfway. For |q| to 32768
    const LaneI32 sign = q >> 31;
    const LaneU32 third = ((kv_as_u32((q ^ sign) - sign) + LaneU32(1u)) * LaneU32(43691u)) >> 17;
    return (kv_as_i32(third) ^ sign) - sign;
}
KV_FUNCTION LaneI32 kv_eq_symbols_at(const u16* symbols, u32 count) {
    return kv_as_i32(kv_load_u16(symbols, count) << 16) >> 16;
}
KV_FUNCTION i32 kv_eq_step_exponent(u32 step) { return step ? (i32)(step >> 7) - 127 : 0; } // what squares are scaled by
KV_FUNCTION void kv_eq_report_step(u32* report, KvMeasured m, i32 exponent) {
    kv_measure_fold(m);
    const u32 greatest = kv_greatest(m.greatest), error = kv_bits_uniform(kv_sum(m.error)), before = kv_bits_uniform(kv_sum(m.before));
    KV_ONCE(report[0] = greatest; report[1] = error; report[2] = before; report[3] = (u32)exponent);
}

// The guarded tokens of a block, and where their rows lie: among the values, or by themselves in an encoded block.
struct EqGuards {
    const u16* tokens;
    u32 count;
    const u16* rows;
    bool is_by_token;
};
KV_FUNCTION const u16* kv_eq_row_of(const EqPlace& p, const EqGuards& g, u32 guard) {
    return g.rows + (g.is_by_token ? ((u64)p.head * p.tokens + g.tokens[guard]) * p.dim : kv_eq_guarded_row(p, guard));
}

// Walks over a head, 32 columns of a row at a time. Steps are counted so that sums are folded at the same places whoever walks.
struct EqWalk {
    u32 guard, next, steps;
};
KV_FUNCTION EqWalk kv_eq_walk(const EqGuards& g) { return {0, g.count ? g.tokens[0] : ~0u, 0}; }
KV_FUNCTION void kv_eq_walked_guard(EqWalk& w, const EqGuards& g) {
    w.guard++;
    w.next = w.guard < g.count ? g.tokens[w.guard] : ~0u;
}
KV_FUNCTION void kv_eq_walked_step(EqWalk& w, KvMeasured& m) {
    if (++w.steps % KV_MEASURED_PART == 0) kv_measure_fold(m);
}

// A guarded row: zeros among the symbols, the values as they are in what is decoded.
template <bool HALF>
KV_FUNCTION void kv_eq_guarded(const EqPlace& p, const u16* row, u16* symbols, u16* decoded, LaneF32 scale, EqWalk& w, KvMeasured& m) {
    for (u32 at = 0; at < p.dim; at += KV_LANES) {
        const LaneU32 word = kv_load_u16(row + at, p.dim - at);
        kv_store_u16(symbols + at, LaneU32(0u), p.dim - at);
        if (decoded) kv_store_u16(decoded + at, word, p.dim - at);
        kv_measure(m, kv_value<HALF>(word), kv_value<HALF>(word), scale);
        kv_eq_walked_step(w, m);
    }
}

// Values to base symbols: q = sign(y) floor(|y| + 1/2), y = (x - mean) * (1 / step). False where one is beyond 16 bits.
// (Adding the float below 1/2 rounds half away from zero, exactly: with 1/2 itself the sum of the two would become 1.)
template <bool HALF> KV_ROUTINE bool kv_eq_quantise(const EqPlace& p, const u16* x, const EqGuards& g, u16* decoded) {
    EqHead* head = kv_eq_head(p);
    const float base = kv_eq_step_of_rung(head->step, 0);
    const LaneF32 step(base), inverse(head->step ? kv_reciprocal(base) : 0.0f);
    const i32 exponent = kv_eq_step_exponent(head->step);
    const LaneF32 scale(kv_power_of_two(-exponent));
    const u16* means = kv_eq_means(p);
    u16* symbols = kv_eq_symbols(p);
    KvMeasured m = kv_measured();
    EqWalk w = kv_eq_walk(g);
    LaneU32 escapes(0u), greatest(0u);
    for (u32 t = 0; t < p.tokens; t++) {
        const u64 row = (u64)t * p.dim;
        if (t == w.next) {
            kv_eq_guarded<HALF>(p, x + row, symbols + row, decoded ? decoded + row : 0, scale, w, m);
            kv_eq_walked_guard(w, g);
            continue;
        }
        for (u32 at = 0; at < p.dim; at += KV_LANES) {
            const u32 some = p.dim - at;
            const LaneF32 value = kv_value<HALF>(kv_load_u16(x + row + at, some)), mean = kv_value<false>(kv_load_u16(means + at, some));
            const LaneF32 y = (value - mean) * inverse;
            const LaneI32 sign = kv_as_i32(kv_bits(y)) >> 31;
            const LaneU32 size = kv_as_u32(kv_truncate(kv_from_bits(kv_bits(y) & LaneU32(0x7fffffffu)) + LaneF32(0.49999997f)));
            const LaneI32 q = (kv_as_i32(size) ^ sign) - sign;
            escapes += kv_min(size >> 7, LaneU32(1u)); // below 2^25
            greatest = kv_max(greatest, size);
            kv_store_u16(symbols + row + at, kv_as_u32(q), some);
            const LaneU32 word = kv_eq_decoded<HALF>(q, step, mean);
            if (decoded) kv_store_u16(decoded + row + at, word, some);
            kv_measure(m, value, kv_value<HALF>(word), scale);
            kv_eq_walked_step(w, m);
        }
    }
    const u32 escaped = kv_sum(escapes);
    KV_ONCE(head->escapes = escaped);
    kv_eq_report_step(kv_eq_report(p, 0), m, exponent);
    kv_sync();
    return kv_greatest(greatest) <= KV_EQ_LARGEST;
}

#if KV_WIDE
enum { KV_EQ_BYTE_ZERO = 127 }; // a symbol as a byte
KV_FUNCTION float kv_eq_inverse(u32 step) { return step ? kv_reciprocal(kv_eq_step_of_rung(step, 0)) : 0.0f; }
// q of a value, as kv_eq_quantise has it: where it takes the sign from the size, here the half has the sign.
KV_FUNCTION i32 kv_eq_integer(float value, float mean, float inverse) {
    const float y = (value - mean) * inverse;
    return kv_truncate(y + kv_from_bits((kv_bits(y) & 0x80000000u) | 0x3effffffu));
}
// Quantises one value, and with RUNG divides it: the base symbol is not kept then. Returns that.
template <bool HALF, bool RUNG>
KV_FUNCTION i32 kv_eq_quantise_one(u32 word, float mean, float inverse, float step, float coarse, float scale, u8* symbol, u16* decoded,
                                   KvMeasured& m, KvMeasured& of_rung) {
    const float value = kv_value<HALF>(word);
    const i32 q = kv_eq_integer(value, mean, inverse), kept = RUNG ? kv_eq_third(q) : q;
    const u32 before = kv_eq_decoded<HALF>(q, step, mean);
    u32 after = before;
    kv_measure(m, value, kv_value<HALF>(before), scale);
    if (RUNG) {
        after = kv_eq_decoded<HALF>(kept, coarse, mean);
        kv_measure(of_rung, kv_value<HALF>(before), kv_value<HALF>(after), scale);
    }
    *symbol = (u8)kv_min((u32)(kept + KV_EQ_BYTE_ZERO), 255u);
    if (decoded) *decoded = (u16)after;
    return q;
}
// As kv_eq_quantise and, with RUNG, the first kv_eq_divide in one walk, where a row is TILES times 32 columns, but symbols are bytes:
// that of 0 is 127, and 255 stands for all beyond. The same sums in the same order.
template <bool HALF, bool RUNG, u32 TILES> KV_FUNCTION bool kv_eq_quantise_rows(const EqPlace& p, const u16* x, const EqGuards& g, u16* decoded) {
    const u32 lane = kv_lane();
    EqHead* head = kv_eq_head(p);
    const float step = kv_eq_step_of_rung(head->step, 0), coarse = kv_eq_step_of_rung(head->step, 1);
    const float inverse = kv_eq_inverse(head->step);
    const i32 exponent = kv_eq_step_exponent(head->step);
    const float scale = kv_power_of_two(-exponent);
    u8* symbols = (u8*)kv_eq_symbols(p) + lane;
    float means[TILES];
    KV_UNROLL for (u32 tile = 0; tile < TILES; tile++) means[tile] = kv_value<false>(kv_load_u16(kv_eq_means(p) + tile * KV_LANES));
    if (decoded) decoded += lane;
    KvMeasured m = kv_measured(), of_rung = kv_measured();
    EqWalk w = kv_eq_walk(g);
    u32 escapes = 0, greatest = 0;
    // 512 bytes at a time come by way of the warp's own memory, two times before they are used: 16 a lane.
    enum { ROWS = 8 / TILES, PART = KV_MEASURED_PART / TILES };
    u32* near = KV_WARP_MEMORY_AT(KV_EQ_MEMORY);
    const u16* from = x + 8 * lane;
    const u32 stretches = (p.tokens + ROWS - 1) / ROWS;
    kv_sync();
    for (u32 next = 0; next < stretches + 2; next++) {
        if (next * ROWS + lane / (4 * TILES) < p.tokens) KV_COPY_16(near + next % 3 * 128 + 4 * lane, from + next * (8 * KV_LANES));
        KV_COPIES_END();
        if (next < 2) continue;
        KV_WAIT_FOR_COPIES(2);
        kv_sync();
        const u16* here = (const u16*)(near + (next - 2) % 3 * 128) + lane;
        KV_UNROLL for (u32 row = 0; row < ROWS; row++) {
            const u32 t = (next - 2) * ROWS + row;
            if (t >= p.tokens) break;
            u32 words[TILES];
            KV_UNROLL for (u32 tile = 0; tile < TILES; tile++) words[tile] = here[(row * TILES + tile) * KV_LANES];
            if (t == w.next) {
                KV_UNROLL for (u32 tile = 0; tile < TILES; tile++) {
                    const float value = kv_value<HALF>(words[tile]);
                    symbols[tile * KV_LANES] = KV_EQ_BYTE_ZERO;
                    if (decoded) decoded[tile * KV_LANES] = (u16)words[tile];
                    kv_measure(m, value, value, scale);
                    if (RUNG) kv_measure(of_rung, value, value, scale);
                }
                kv_eq_walked_guard(w, g);
            } else {
                i32 q[TILES];
                u32 most = 0;
                KV_UNROLL for (u32 tile = 0; tile < TILES; tile++) {
                    q[tile] = kv_eq_quantise_one<HALF, RUNG>(words[tile], means[tile], inverse, step, coarse, scale, symbols + tile * KV_LANES,
                                                             decoded ? decoded + tile * KV_LANES : 0, m, of_rung);
                    most = kv_max(most, (u32)(q[tile] + KV_EQ_BYTE_ZERO));
                }
                if (most > 2 * KV_EQ_BYTE_ZERO) { // rare
                    KV_UNROLL for (u32 tile = 0; tile < TILES; tile++) {
                        const u32 size = q[tile] < 0 ? 0u - (u32)q[tile] : (u32)q[tile];
                        escapes += size > KV_EQ_BYTE_ZERO ? 1u : 0u;
                        greatest = kv_max(greatest, size);
                    }
                }
            }
            if ((t + 1) % PART == 0) {
                kv_measure_fold(m);
                if (RUNG) kv_measure_fold(of_rung);
            }
            symbols += TILES * KV_LANES;
            if (decoded) decoded += TILES * KV_LANES;
        }
        kv_sync();
    }
    const u32 escaped = kv_sum(escapes);
    KV_ONCE(head->escapes = escaped);
    kv_eq_report_step(kv_eq_report(p, 0), m, exponent);
    if (RUNG) kv_eq_report_step(kv_eq_report(p, 1), of_rung, exponent);
    kv_sync();
    return kv_greatest(greatest) <= KV_EQ_LARGEST;
}
#endif

// Symbols of a rung to those of the next, in place.
template <bool HALF> KV_ROUTINE void kv_eq_divide(const EqPlace& p, const EqGuards& g, u32 rung, u32* report, u16* decoded) {
    const u32 base = kv_eq_head(p)->step;
    const LaneF32 fine(kv_eq_step_of_rung(base, rung)), coarse(kv_eq_step_of_rung(base, rung + 1));
    const i32 exponent = kv_eq_step_exponent(base);
    const LaneF32 scale(kv_power_of_two(-exponent));
    const u16* means = kv_eq_means(p);
    u16* symbols = kv_eq_symbols(p);
    KvMeasured m = kv_measured();
    EqWalk w = kv_eq_walk(g);
    for (u32 t = 0; t < p.tokens; t++) {
        const u64 row = (u64)t * p.dim;
        if (t == w.next) {
            kv_eq_guarded<HALF>(p, kv_eq_row_of(p, g, w.guard), symbols + row, decoded ? decoded + row : 0, scale, w, m);
            kv_eq_walked_guard(w, g);
            continue;
        }
        for (u32 at = 0; at < p.dim; at += KV_LANES) {
            const u32 some = p.dim - at;
            const LaneF32 mean = kv_value<false>(kv_load_u16(means + at, some));
            const LaneI32 q = kv_eq_symbols_at(symbols + row + at, some), third = kv_eq_third(q);
            kv_store_u16(symbols + row + at, kv_as_u32(third), some);
            const LaneU32 before = kv_eq_decoded<HALF>(q, fine, mean), after = kv_eq_decoded<HALF>(third, coarse, mean);
            if (decoded) kv_store_u16(decoded + row + at, after, some);
            kv_measure(m, kv_value<HALF>(before), kv_value<HALF>(after), scale);
            kv_eq_walked_step(w, m);
        }
    }
    kv_eq_report_step(report, m, exponent);
    kv_sync();
}

#endif
