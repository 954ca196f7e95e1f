// What the lossy codecs share: values from their 16-bit words and back, and what coding did to them.
#ifndef KVOBJ_VALUES_CUH
#define KVOBJ_VALUES_CUH

// Values of bf16 and fp16 words (HALF) as floats, exact.
template <bool HALF> KV_FUNCTION LaneF32 kv_value(LaneU32 word) {
    if (!HALF) return kv_from_bits(word << 16);
    const LaneU32 size = word & LaneU32(0x7fffu), sign = (word & LaneU32(0x8000u)) << 16;
    const LaneF32 small = kv_to_f32(kv_as_i32(size)) * LaneF32(5.9604644775390625e-8f); // 2^-24
    const LaneU32 large = (size << 13) + LaneU32(112u << 23);
    return kv_from_bits(kv_select(size < LaneU32(0x400u), kv_bits(small), large) | sign);
}

KV_FUNCTION LaneU32 kv_bf16_word(LaneF32 x) { // of a finite x: to nearest, ties to even
    const LaneU32 bits = kv_bits(x);
    return (bits + LaneU32(0x7fffu) + ((bits >> 16) & LaneU32(1u))) >> 16;
}

KV_FUNCTION LaneU32 kv_fp16_word(LaneF32 x) { // to nearest, ties to even; infinity from 65520 on and of a NaN
    const LaneU32 bits = kv_bits(x), sign = (bits >> 16) & LaneU32(0x8000u), size = bits & LaneU32(0x7fffffffu);
    const LaneU32 large = ((size + LaneU32(0xfffu) + ((size >> 13) & LaneU32(1u))) >> 13) - LaneU32(112u << 10);
    const LaneU32 small = kv_bits(kv_from_bits(size) + LaneF32(0.5f)) - LaneU32(0x3f000000u); // the sum rounds to 2^-24
    const LaneU32 word = kv_select(size < LaneU32(0x38800000u), small, large);
    return kv_select(size >= LaneU32(0x477ff000u), LaneU32(0x7c00u), word) | sign;
}

template <bool HALF> KV_FUNCTION LaneU32 kv_word(LaneF32 x) { return HALF ? kv_fp16_word(x) : kv_bf16_word(x); }

// The same where the dtype is a value, for long loops that are not made twice.
KV_FUNCTION LaneF32 kv_value(LaneU32 word, u32 is_half) { return is_half ? kv_value<true>(word) : kv_value<false>(word); }
KV_FUNCTION LaneU32 kv_word(LaneF32 x, u32 is_half) { return is_half ? kv_word<true>(x) : kv_word<false>(x); }
KV_FUNCTION u32 kv_first_non_finite(u32 is_half) { return is_half ? 0x7c00u : 0x7f80u; } // of words without their signs

// The largest word of consecutive values, signs aside: at least kv_first_non_finite if one is no number.
KV_FUNCTION u32 kv_greatest_word(const u16* values, u32 count) {
    LaneU32 greatest(0u);
    u32 at = 0;
#if KV_WIDE
    if (!((u64)values & 15)) {
        const uint4* from = (const uint4*)values + kv_lane();
        u32 two = 0;
        for (; at + 1024 <= count; at += 1024, from += 128) { // fetched together
            uint4 x[4];
            KV_UNROLL for (u32 part = 0; part < 4; part++) x[part] = from[32 * part];
            KV_UNROLL for (u32 part = 0; part < 4; part++) {
                two = __vmaxu2(__vmaxu2(two, x[part].x & 0x7fff7fffu), x[part].y & 0x7fff7fffu);
                two = __vmaxu2(__vmaxu2(two, x[part].z & 0x7fff7fffu), x[part].w & 0x7fff7fffu);
            }
        }
        greatest = two >> 16 > (two & 0xffffu) ? two >> 16 : two & 0xffffu;
    }
#endif
    for (; at + KV_LANES <= count; at += KV_LANES) greatest = kv_max(greatest, kv_load_u16(values + at) & LaneU32(0x7fffu));
    if (at < count) greatest = kv_max(greatest, kv_load_u16(values + at, count - at) & LaneU32(0x7fffu));
    return kv_greatest(greatest);
}

// The exponent of the largest value of a head, within -100..126, so that its power and the inverse are normal floats.
KV_FUNCTION i32 kv_head_exponent(u32 greatest_word, u32 is_half) {
    const LaneF32 value = kv_value(LaneU32(greatest_word), is_half);
    const i32 exponent = (i32)(kv_broadcast(kv_bits(value), 0) >> 23) - 127;
    return exponent < -100 ? -100 : exponent > 126 ? 126 : exponent;
}
KV_FUNCTION float kv_power_of_two(i32 exponent) { return kv_from_bits_uniform((u32)(exponent + 127) << 23); } // -126..127

// What coding did to the values of one head. Squares are summed as floats in a fixed order, scaled by the head's exponent so that none
// overflows; parts of 64 steps keep what is lost to rounding below 2^-17.
struct KvMeasured {
    LaneU32 greatest; // bits of the largest |x - decoded|
    LaneF32 error, before, error_part, before_part;
};
enum { KV_MEASURED_PART = 64, KV_REPORT_WORDS = 8 };

KV_FUNCTION KvMeasured kv_measured() {
    return {LaneU32(0u), LaneF32(0.0f), LaneF32(0.0f), LaneF32(0.0f), LaneF32(0.0f)};
}
KV_FUNCTION void kv_measure(KvMeasured& m, LaneF32 x, LaneF32 decoded, LaneF32 scale) {
    const LaneF32 difference = x - decoded;
    m.greatest = kv_max(m.greatest, kv_bits(difference) & LaneU32(0x7fffffffu));
    const LaneF32 scaled = difference * scale, before = x * scale;
    m.error_part += scaled * scaled;
    m.before_part += before * before;
}
KV_FUNCTION void kv_measure_fold(KvMeasured& m) {
    m.error += m.error_part;
    m.before += m.before_part;
    m.error_part = m.before_part = LaneF32(0.0f);
}
// Report of a head: status (0: encoded), bits of the largest error, bits of the two sums over 4^exponent, the exponent.
KV_FUNCTION void kv_report(u32* report, u32 status, KvMeasured m, i32 exponent) {
    kv_measure_fold(m);
    const u32 greatest = kv_greatest(m.greatest), error = kv_bits_uniform(kv_sum(m.error)), before = kv_bits_uniform(kv_sum(m.before));
    KV_ONCE(report[0] = status; report[1] = greatest; report[2] = error; report[3] = before; report[4] = (u32)exponent);
}

#endif
