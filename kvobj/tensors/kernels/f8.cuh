// f8: e4m3 with a scale for each head. One warp codes one head of one block. Layout: f8.py.
#ifndef KVOBJ_F8_CUH
#define KVOBJ_F8_CUH

#include "values.cuh"

enum { KV_F8_LARGEST = 0x7e, KV_F8_BLOCK_WORDS = 3 };

// Finite x to e4m3: to nearest, ties to even, saturating at 448.
KV_FUNCTION LaneU32 kv_to_e4m3(LaneF32 x) {
    const LaneU32 bits = kv_bits(x), sign = (bits >> 24) & LaneU32(0x80u), size = bits & LaneU32(0x7fffffffu);
    const LaneU32 normal = ((size + LaneU32(0x7ffffu) + ((size >> 20) & LaneU32(1u))) >> 20) - LaneU32(120u << 3);
    const LaneU32 small = kv_bits(kv_from_bits(size) + LaneF32(16384.0f)) - LaneU32(0x46800000u); // the sum rounds to 2^-9
    return kv_min(kv_select(size < LaneU32(0x3c800000u), small, normal), LaneU32(KV_F8_LARGEST)) | sign;
}
KV_FUNCTION LaneF32 kv_from_e4m3(LaneU32 code) { // 0x7f and 0xff are no numbers and do not occur
    const LaneU32 size = code & LaneU32(0x7fu), sign = (code & LaneU32(0x80u)) << 24;
    const LaneF32 small = kv_to_f32(kv_as_i32(size)) * LaneF32(0.001953125f);
    return kv_from_bits(kv_select(size < LaneU32(8u), kv_bits(small), (size << 20) + LaneU32(120u << 23)) | sign);
}

template <bool HALF>
KV_FUNCTION void kv_f8_encode_head(const u16* plain, float* scale_at, u8* codes, u16* decoded, u32 count, u32* report) {
    const u32 greatest = kv_greatest_word(plain, count);
    if (greatest >= kv_first_non_finite(HALF)) {
        KV_ONCE(report[0] = 1u);
        return;
    }
    const float largest = kv_from_bits_uniform(kv_broadcast(kv_bits(kv_value<HALF>(LaneU32(greatest))), 0));
    const float wanted = largest * 0.002232142857142857f; // 1 / 448
    const float scale = wanted < 7.52316384526264e-37f ? 7.52316384526264e-37f : wanted; // 2^-120
    const LaneF32 inverse(kv_reciprocal(scale)), forth(scale);
    KV_ONCE(*scale_at = scale);
    const i32 exponent = kv_head_exponent(greatest, HALF);
    const LaneF32 unit(kv_power_of_two(-exponent));
    KvMeasured measured = kv_measured();
    for (u32 at = 0, step = 0; at < count; at += KV_LANES, step++) {
        const u32 some = count - at;
        const LaneF32 x = kv_value<HALF>(kv_load_u16(plain + at, some));
        const LaneU32 code = kv_to_e4m3(x * inverse);
        kv_store_u8(codes + at, code, some);
        const LaneU32 word = kv_word<HALF>(kv_from_e4m3(code) * forth);
        if (decoded) kv_store_u16(decoded + at, word, some);
        kv_measure(measured, x, kv_value<HALF>(word), unit);
        if (step % KV_MEASURED_PART == KV_MEASURED_PART - 1) kv_measure_fold(measured);
    }
    kv_report(report, 0u, measured, exponent);
}

// blocks: plain, slot and decoded (or 0) of each.
KV_KERNEL(f8_encode, (const u64* blocks, u32 heads, u32 count, u32 head_bytes, u32 is_half, u32* reports),
          (blocks, heads, count, head_bytes, is_half, reports)) {
    const u64* block = blocks + (u64)(warp / heads) * KV_F8_BLOCK_WORDS;
    const u32 head = warp % heads;
    const u16* plain = (const u16*)block[0] + (u64)head * count;
    u16* decoded = block[2] ? (u16*)block[2] + (u64)head * count : 0;
    float* scale = (float*)block[1] + head;
    u8* codes = (u8*)block[1] + head_bytes + (u64)head * count;
    u32* report = reports + (u64)warp * KV_REPORT_WORDS;
    if (is_half) kv_f8_encode_head<true>(plain, scale, codes, decoded, count, report);
    else kv_f8_encode_head<false>(plain, scale, codes, decoded, count, report);
}

template <bool HALF> KV_FUNCTION u32 kv_f8_decode_head(float scale, const u8* codes, u16* plain, u32 count) {
    const LaneF32 forth(scale);
    LaneU32 least(0xffu); // of the distance to a NaN's code
    for (u32 at = 0; at < count; at += KV_LANES) {
        const u32 some = count - at;
        const LaneU32 code = kv_load_u8(codes + at, some);
        least = kv_min(least, (code & LaneU32(0x7fu)) ^ LaneU32(0x7fu));
        kv_store_u16(plain + at, kv_word<HALF>(kv_from_e4m3(code) * forth), some);
    }
    return kv_least(least) == 0;
}

// blocks: encoded and plain of each; the container has compared the lengths.
KV_KERNEL(f8_decode, (const u64* blocks, u32 heads, u32 count, u32 head_bytes, u32 is_half, u32* statuses),
          (blocks, heads, count, head_bytes, is_half, statuses)) {
    const u64* block = blocks + (u64)(warp / heads) * 2;
    const u32 head = warp % heads;
    const float scale = ((const float*)block[0])[head];
    const u8* codes = (const u8*)block[0] + head_bytes + (u64)head * count;
    u16* plain = (u16*)block[1] + (u64)head * count;
    u32 status = !(scale >= 7.52316384526264e-37f && scale <= 7.6e35f); // of no bf16; NaNs neither
    if (!status) status = is_half ? kv_f8_decode_head<true>(scale, codes, plain, count) : kv_f8_decode_head<false>(scale, codes, plain, count);
    KV_ONCE(statuses[warp] = status);
}

#endif
