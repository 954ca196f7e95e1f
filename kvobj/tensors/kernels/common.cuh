// What the codecs share: streams of unknown length brought to their places, and the search for values that are not finite.
#ifndef KVOBJ_COMMON_CUH
#define KVOBJ_COMMON_CUH

// Per block (one warp each): where each of its streams begins if they lie one after the other, and how long all are together.
KV_KERNEL(place_streams, (u32* offsets, u32* totals, const u32* lengths, u32 streams), (offsets, totals, lengths, streams)) {
    const u64 first = (u64)warp * streams;
    u32 total = 0;
    for (u32 at = 0; at < streams; at += KV_LANES) {
        const u32 count = kv_min_uniform(streams - at, KV_LANES);
        const LaneU32 length = kv_load_u32(lengths + first + at, count);
        kv_store_u32(offsets + first + at, kv_u32(total) + kv_prefix_sums(length), count);
        total += kv_sum(length);
    }
    KV_ONCE(totals[warp] = total);
}

// One warp a stream: from its scratch slot to the place that `place_streams` gave it in its block, `skip` bytes after the address in
// `blocks`. A slot is `slot_bytes` long and holds its stream at the end where `is_at_end`, else at the start. A block whose address is
// 0 is left out.
KV_KERNEL(move_streams,
          (const u64* blocks, u32 skip, const u8* slots, u32 slot_bytes, u32 is_at_end, const u32* offsets, const u32* lengths,
           u32 streams),
          (blocks, skip, slots, slot_bytes, is_at_end, offsets, lengths, streams)) {
    u8* block = (u8*)blocks[warp / streams];
    const u32 length = lengths[warp];
    if (!block || length > slot_bytes) return;
    kv_copy(block + skip + offsets[warp], slots + (u64)warp * slot_bytes + (is_at_end ? slot_bytes - length : 0u), length);
}

// One warp a share of a block, `shares` a block: found[block] becomes 1 where a value of 16 bits has all the bits of `exponent_bits`
// set (0x7f80: bf16, 0x7c00: fp16), so is infinite or no number. The caller has set it to 0.
KV_KERNEL(find_nonfinite, (u32* found, const u64* blocks, u32 values, u32 shares, u32 exponent_bits),
          (found, blocks, values, shares, exponent_bits)) {
    const u16* block = (const u16*)blocks[warp / shares];
    const u64 steps = ((u64)values + KV_LANES - 1) / KV_LANES, share = (steps + shares - 1) / shares;
    const u64 last = (warp % shares + 1) * share < steps ? (warp % shares + 1) * share : steps;
    const LaneU32 special = kv_u32(exponent_bits);
    LaneU32 seen = kv_u32(0);
    for (u64 step = warp % shares * share; step < last; step++) {
        const u64 left = values - step * KV_LANES;
        const LaneU32 x = left < KV_LANES ? kv_load_u16(block + step * KV_LANES, (u32)left) : kv_load_u16(block + step * KV_LANES);
        seen |= kv_select((x & special) == special, kv_u32(1), kv_u32(0));
    }
    if (kv_ballot(seen != kv_u32(0))) KV_ONCE(found[warp / shares] = 1);
}

#endif
