// h4: centred Hadamard transform of each token of a head, 16 Lloyd-Max levels, a corrected norm. One warp codes one head of one block;
// a token's values stand in ROWS lane values, value d in lane d mod 32 of row d / 32. Layout and constants: h4.py.
#ifndef KVOBJ_H4_CUH
#define KVOBJ_H4_CUH

#include "values.cuh"

// Bit d of these is the sign of value d; part of the format.
KV_CONSTANT u32 kv_h4_signs[8] = {
    0xf96746e4u, 0xa4cb8964u, 0xed533567u, 0xe33823f3u, 0xe12a2bb7u, 0x3e2bf722u, 0xacdb634au, 0x68ec9f75u,
};
#define KV_H4_LEVELS 0.128395f, 0.388048f, 0.656759f, 0.942340f, 1.256231f, 1.618046f, 2.069017f, 2.732590f
KV_CONSTANT float kv_h4_levels[32] = {KV_H4_LEVELS, KV_H4_LEVELS, KV_H4_LEVELS, KV_H4_LEVELS}; // lane i has level i mod 8
KV_CONSTANT float kv_h4_thresholds[7] = {0.2582215f, 0.5224035f, 0.7995495f, 1.0992855f, 1.4371385f, 1.8435315f, 2.4008035f};

enum { KV_H4_GREATEST_SCALE = 0x7bff };

KV_FUNCTION LaneU32 kv_h4_sign(u32 row) { return ((LaneU32(kv_h4_signs[row]) >> kv_lane()) & LaneU32(1u)) << 31; }
template <u32 ROWS> KV_FUNCTION float kv_h4_inverse_root() { // 1 / sqrt(32 ROWS), rounded
    const float even = ROWS == 2 ? 0.125f : ROWS == 8 ? 0.0625f : 0.0f;
    const float odd = ROWS == 1 ? 0.1767766952966369f : 0.08838834764831845f;
    return even > 0.0f ? even : odd;
}

template <u32 BITS> KV_FUNCTION LaneF32 kv_h4_stage(LaneF32 v) { // a + b in the lane without the bit, a - b in its partner
    const LaneU32 upper = (kv_lane() & LaneU32(BITS)) * LaneU32(0x80000000u / BITS);
    return kv_from_bits(kv_bits(v) ^ upper) + kv_swap_lanes<BITS>(v);
}
template <u32 ROWS> KV_ROUTINE void kv_h4_transform(LaneF32* v) { // not normalised; stages 1, 2, 4 ...
    KV_UNROLL for (u32 row = 0; row < ROWS; row++) {
        v[row] = kv_h4_stage<16>(kv_h4_stage<8>(kv_h4_stage<4>(kv_h4_stage<2>(kv_h4_stage<1>(v[row])))));
    }
    KV_UNROLL for (u32 apart = 1; apart < ROWS; apart *= 2) {
        KV_UNROLL for (u32 row = 0; row < ROWS; row++) {
            if (row & apart) continue;
            const LaneF32 a = v[row], b = v[row + apart];
            v[row] = a + b;
            v[row + apart] = a - b;
        }
    }
}

// Codes to levels to values; adds the means.
template <u32 ROWS>
KV_ROUTINE void kv_h4_restore(const LaneU32* codes, const LaneF32* levels, u32 scale_word, const LaneF32* means, u32 is_half, LaneU32* words) {
    LaneF32 v[ROWS];
    KV_UNROLL for (u32 row = 0; row < ROWS; row++) {
        v[row] = kv_from_bits(kv_bits(kv_lookup_8(*levels, codes[row] & LaneU32(7u))) | ((codes[row] & LaneU32(8u)) << 28));
    }
    kv_h4_transform<ROWS>(v);
    const LaneF32 scale = kv_value<true>(LaneU32(scale_word)) * LaneF32(kv_h4_inverse_root<ROWS>());
    KV_UNROLL for (u32 row = 0; row < ROWS; row++) {
        words[row] = kv_word(kv_from_bits(kv_bits(v[row] * scale) ^ kv_h4_sign(row)) + means[row], is_half);
    }
}

// Byte j of a token holds the code of value j, and in its upper half that of value j + D / 2.
template <u32 ROWS> KV_FUNCTION void kv_h4_pack(u8* packed, const LaneU32* codes) {
    if constexpr (ROWS == 1) {
        const LaneU32 upper = kv_bits(kv_swap_lanes<16>(kv_from_bits(codes[0])));
        kv_store_u8(packed, codes[0] | (upper << 4), 16u);
    } else {
        KV_UNROLL for (u32 row = 0; row < ROWS / 2; row++) {
            kv_store_u8(packed + row * 32, codes[row] | (codes[row + ROWS / 2] << 4));
        }
    }
}
template <u32 ROWS> KV_FUNCTION void kv_h4_unpack(const u8* packed, LaneU32* codes) {
    if constexpr (ROWS == 1) {
        const LaneU32 both = kv_load_u8(packed, 16u), upper = kv_bits(kv_swap_lanes<16>(kv_from_bits(both))) >> 4;
        codes[0] = kv_select(kv_lane() < LaneU32(16u), both & LaneU32(15u), upper);
    } else {
        KV_UNROLL for (u32 row = 0; row < ROWS / 2; row++) {
            const LaneU32 both = kv_load_u8(packed + row * 32);
            codes[row] = both & LaneU32(15u);
            codes[row + ROWS / 2] = both >> 4;
        }
    }
}

// Mean of one row of columns over all tokens, as the words of bf16: fixed point at the head's exponent, so no order of summation shows.
KV_FUNCTION LaneU32 kv_h4_means(const u16* column, u32 tokens, u32 dim, i32 exponent, u32 is_half) {
    const LaneF32 unit(kv_power_of_two(22 - exponent));
    LaneI64 total(0);
    for (u32 first = 0; first < tokens; first += 64) {
        const u32 last = tokens - first < 64 ? tokens : first + 64;
        LaneI32 part(0);
        for (u32 token = first; token < last; token++) {
            part += kv_truncate(kv_value(kv_load_u16(column + (u64)token * dim), is_half) * unit);
        }
        total += kv_widen(part);
    }
    const LaneF32 high = kv_to_f32(kv_narrow(total >> 20)) * LaneF32(1048576.0f);
    const LaneF32 sum = high + kv_to_f32(kv_narrow(total & LaneI64(0xfffff)));
    return kv_bf16_word(sum * LaneF32(kv_reciprocal(kv_to_f32_uniform((i32)tokens))) * LaneF32(kv_power_of_two(exponent - 22)));
}

template <u32 ROWS>
KV_ROUTINE void kv_h4_encode_head(const u16* plain, u16* mean_words, u16* scales, u8* packed, u16* decoded, u32 tokens, u32 is_half,
                                  u32* report) {
    const u32 dim = ROWS * 32, greatest = kv_greatest_word(plain, tokens * dim);
    u32 status = greatest >= kv_first_non_finite(is_half);
    const i32 exponent = kv_head_exponent(greatest, is_half);
    const LaneF32 unit(kv_power_of_two(-exponent)), levels = kv_load_f32(kv_h4_levels);
    const float root = kv_h4_inverse_root<ROWS>();
    LaneF32 means[ROWS];
    for (u32 row = 0; row < ROWS && !status; row++) {
        const LaneU32 word = kv_h4_means(plain + row * 32, tokens, dim, exponent, is_half);
        kv_store_u16(mean_words + row * 32, word);
    }
    kv_sync();
    KV_UNROLL for (u32 row = 0; row < ROWS; row++) means[row] = kv_value<false>(kv_load_u16(mean_words + row * 32));
    KvMeasured measured = kv_measured();
    for (u32 token = 0; token < tokens && !status; token++) {
        const u16* from = plain + (u64)token * dim;
        LaneF32 x[ROWS], v[ROWS];
        LaneU32 codes[ROWS], words[ROWS];
        KV_UNROLL for (u32 row = 0; row < ROWS; row++) {
            x[row] = kv_value(kv_load_u16(from + row * 32), is_half);
            v[row] = kv_from_bits(kv_bits(x[row] - means[row]) ^ kv_h4_sign(row));
        }
        kv_h4_transform<ROWS>(v);
        LaneF32 squares(0.0f);
        KV_UNROLL for (u32 row = 0; row < ROWS; row++) squares += v[row] * v[row];
        const float size = kv_sqrt_uniform(kv_sum(squares) * (1.0f / (ROWS * 32)));
        LaneF32 along(0.0f), level_squares(0.0f);
        KV_UNROLL for (u32 row = 0; row < ROWS; row++) {
            const LaneF32 above = kv_from_bits(kv_bits(v[row]) & LaneU32(0x7fffffffu));
            LaneU32 code(0u);
            KV_UNROLL for (u32 at = 0; at < 7; at++) {
                code = code + kv_select(above > LaneF32(kv_h4_thresholds[at] * size), LaneU32(1u), LaneU32(0u));
            }
            const LaneF32 level = kv_lookup_8(levels, code);
            along += above * level;
            level_squares += level * level;
            codes[row] = code | ((kv_bits(v[row]) >> 31) << 3);
        }
        const float scale = kv_sum(along) * kv_reciprocal(kv_sum(level_squares)) * root;
        const u32 scale_word = kv_broadcast(kv_fp16_word(LaneF32(scale)), 0);
        KV_ONCE(scales[token] = (u16)scale_word);
        kv_h4_pack<ROWS>(packed + (u64)token * (dim / 2), codes);
        kv_h4_restore<ROWS>(codes, &levels, scale_word, means, is_half, words);
        LaneU32 largest(0u);
        KV_UNROLL for (u32 row = 0; row < ROWS; row++) {
            if (decoded) kv_store_u16(decoded + (u64)token * dim + row * 32, words[row]);
            kv_measure(measured, x[row], kv_value(words[row], is_half), unit);
            largest = kv_max(largest, words[row] & LaneU32(0x7fffu));
        }
        if ((token + 1) % (KV_MEASURED_PART / ROWS) == 0) kv_measure_fold(measured);
        status = scale_word > KV_H4_GREATEST_SCALE || kv_greatest(largest) >= kv_first_non_finite(is_half);
    }
    kv_report(report, status, measured, exponent);
}

template <u32 ROWS>
KV_ROUTINE u32 kv_h4_decode_head(const u16* mean_words, const u16* scales, const u8* packed, u16* plain, u32 tokens, u32 is_half) {
    const u32 dim = ROWS * 32;
    const LaneF32 levels = kv_load_f32(kv_h4_levels);
    LaneF32 means[ROWS];
    LaneU32 largest(0u);
    u32 greatest_scale = 0;
    KV_UNROLL for (u32 row = 0; row < ROWS; row++) {
        const LaneU32 word = kv_load_u16(mean_words + row * 32);
        largest = kv_max(largest, word & LaneU32(0x7fffu));
        means[row] = kv_value<false>(word);
    }
    for (u32 token = 0; token < tokens; token++) {
        LaneU32 codes[ROWS], words[ROWS];
        const u32 scale_word = scales[token];
        greatest_scale = scale_word > greatest_scale ? scale_word : greatest_scale;
        kv_h4_unpack<ROWS>(packed + (u64)token * (dim / 2), codes);
        kv_h4_restore<ROWS>(codes, &levels, scale_word, means, is_half, words);
        KV_UNROLL for (u32 row = 0; row < ROWS; row++) kv_store_u16(plain + (u64)token * dim + row * 32, words[row]);
    }
    return greatest_scale > KV_H4_GREATEST_SCALE || kv_greatest(largest) >= kv_first_non_finite(0u);
}

#define KV_H4_EACH_DIM(CALL)                                                                                                      \
    if (dim == 32) { CALL(1) } else if (dim == 64) { CALL(2) } else if (dim == 128) { CALL(4) }                                   \
    else if (dim == 256) { CALL(8) }

// blocks: plain, slot and decoded (or 0) of each.
KV_KERNEL(h4_encode, (const u64* blocks, u32 heads, u32 tokens, u32 dim, u32 scales_at, u32 codes_at, u32 is_half, u32* reports),
          (blocks, heads, tokens, dim, scales_at, codes_at, is_half, reports)) {
    const u64* block = blocks + (u64)(warp / heads) * 3;
    const u32 head = warp % heads;
    const u64 first = (u64)head * tokens * dim;
    const u16* plain = (const u16*)block[0] + first;
    u16* decoded = block[2] ? (u16*)block[2] + first : 0;
    u16* means = (u16*)block[1] + (u64)head * dim;
    u16* scales = (u16*)(block[1] + scales_at) + (u64)head * tokens;
    u8* codes = (u8*)(block[1] + codes_at) + first / 2;
    u32* report = reports + (u64)warp * KV_REPORT_WORDS;
#define KV_H4_CALL(ROWS)                                                                                                          \
    kv_h4_encode_head<ROWS>(plain, means, scales, codes, decoded, tokens, is_half, report);
    KV_H4_EACH_DIM(KV_H4_CALL)
#undef KV_H4_CALL
}

// blocks: encoded and plain of each, whose lengths have been compared.
KV_KERNEL(h4_decode, (const u64* blocks, u32 heads, u32 tokens, u32 dim, u32 scales_at, u32 codes_at, u32 is_half, u32* statuses),
          (blocks, heads, tokens, dim, scales_at, codes_at, is_half, statuses)) {
    const u64* block = blocks + (u64)(warp / heads) * 2;
    const u32 head = warp % heads;
    const u64 first = (u64)head * tokens * dim;
    const u16* means = (const u16*)block[0] + (u64)head * dim;
    const u16* scales = (const u16*)(block[0] + scales_at) + (u64)head * tokens;
    const u8* codes = (const u8*)(block[0] + codes_at) + first / 2;
    u16* plain = (u16*)block[1] + first;
    u32 status = 1u;
#define KV_H4_CALL(ROWS)                                                                                                          \
    status = kv_h4_decode_head<ROWS>(means, scales, codes, plain, tokens, is_half);
    KV_H4_EACH_DIM(KV_H4_CALL)
#undef KV_H4_CALL
    KV_ONCE(statuses[warp] = status);
}

#endif
