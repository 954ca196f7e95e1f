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
