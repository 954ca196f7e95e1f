// BLAKE3 (plain hash, https://github.com/BLAKE3-team/BLAKE3-specs) of many inputs of one length: a lane hashes one chunk of 1 KiB, then
// one parent of each level of the tree. So a GPU that encodes needs no host to hash what it holds. Driven by device_blake3.py.
//
// Chaining values of a level stand word by word: word w of node n of an input at [w * nodes + n], so that the root's are its digest.
#ifndef KVOBJ_BLAKE3_CUH
#define KVOBJ_BLAKE3_CUH

enum { KV_BLAKE3_CHUNK = 1024, KV_BLAKE3_BLOCK = 64, KV_BLAKE3_START = 1, KV_BLAKE3_END = 2, KV_BLAKE3_PARENT = 4, KV_BLAKE3_ROOT = 8 };
KV_CONSTANT u32 kv_blake3_start[8] = {
    0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au, 0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u,
};

KV_FUNCTION LaneU32 kv_blake3_turned(LaneU32 x, u32 n) { return (x >> n) | (x << (32u - n)); }
#define KV_BLAKE3_MIX(a, b, c, d, x, y)                                                                                           \
    a = a + b + (x); d = kv_blake3_turned(d ^ a, 16u); c = c + d; b = kv_blake3_turned(b ^ c, 12u);                               \
    a = a + b + (y); d = kv_blake3_turned(d ^ a, 8u); c = c + d; b = kv_blake3_turned(b ^ c, 7u);
#define KV_BLAKE3_ROUND(m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15)                                     \
    KV_BLAKE3_MIX(v0, v4, v8, v12, m[m0], m[m1]) KV_BLAKE3_MIX(v1, v5, v9, v13, m[m2], m[m3])                                     \
    KV_BLAKE3_MIX(v2, v6, v10, v14, m[m4], m[m5]) KV_BLAKE3_MIX(v3, v7, v11, v15, m[m6], m[m7])                                   \
    KV_BLAKE3_MIX(v0, v5, v10, v15, m[m8], m[m9]) KV_BLAKE3_MIX(v1, v6, v11, v12, m[m10], m[m11])                                 \
    KV_BLAKE3_MIX(v2, v7, v8, v13, m[m12], m[m13]) KV_BLAKE3_MIX(v3, v4, v9, v14, m[m14], m[m15])

// The first eight words of the compression function; the counter is a lane's own, below 2^32.
KV_ROUTINE void kv_blake3_compress(LaneU32* value, const LaneU32* m, const LaneU32* counter, const LaneU32* size, const LaneU32* flags) {
    LaneU32 v0 = value[0], v1 = value[1], v2 = value[2], v3 = value[3], v4 = value[4], v5 = value[5], v6 = value[6], v7 = value[7];
    LaneU32 v8(0x6a09e667u), v9(0xbb67ae85u), v10(0x3c6ef372u), v11(0xa54ff53au), v12 = *counter, v13(0u), v14 = *size, v15 = *flags;
    KV_BLAKE3_ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    KV_BLAKE3_ROUND(2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
    KV_BLAKE3_ROUND(3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1)
    KV_BLAKE3_ROUND(10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6)
    KV_BLAKE3_ROUND(12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4)
    KV_BLAKE3_ROUND(9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7)
    KV_BLAKE3_ROUND(11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13)
    value[0] = v0 ^ v8; value[1] = v1 ^ v9; value[2] = v2 ^ v10; value[3] = v3 ^ v11;
    value[4] = v4 ^ v12; value[5] = v5 ^ v13; value[6] = v6 ^ v14; value[7] = v7 ^ v15;
}

// inputs: the addresses, multiples of 4; each of `length` bytes (above 0, below 2^42) in `chunks` chunks. A warp: 32 chunks of one input.
KV_KERNEL(blake3_chunks, (const u64* inputs, u32 chunks, u32 last_size, u32* values), (inputs, chunks, last_size, values)) {
    const u32 warps_each = (chunks + 31) / 32, first = warp % warps_each * 32, input = warp / warps_each;
    const u32 count = chunks - first < 32 ? chunks - first : 32;
    const u8* bytes = (const u8*)inputs[input] + (u64)first * KV_BLAKE3_CHUNK;
    const u32* words = (const u32*)bytes;
    const LaneU32 lane = kv_lane();
    const LaneU32 own_size = kv_select(LaneU32(first) + lane == LaneU32(chunks - 1), LaneU32(last_size), LaneU32(KV_BLAKE3_CHUNK));
    const LaneU32 size = kv_select(lane < LaneU32(count), own_size, LaneU32(0u)), counter = LaneU32(first) + lane;
    const u32 root = chunks == 1 ? KV_BLAKE3_ROOT : 0;
    // Lanes beyond the last chunk read their last word: every index is within the input.
    const u32 bytes_here = first + count == chunks ? (count - 1) * KV_BLAKE3_CHUNK + last_size : count * KV_BLAKE3_CHUNK;
    const u32 whole_words = bytes_here / 4, left = bytes_here % 4;
    LaneU32 value[8], m[16];
    KV_UNROLL for (u32 at = 0; at < 8; at++) value[at] = LaneU32(kv_blake3_start[at]);
    for (u32 block = 0; block < KV_BLAKE3_CHUNK / KV_BLAKE3_BLOCK; block++) {
        const LaneU32 before(block * KV_BLAKE3_BLOCK);
        const LaneMask is_in = kv_or(before < size, kv_and(LaneMask(kv_mask(block == 0)), size == LaneU32(0u)));
        KV_UNROLL for (u32 at = 0; at < 16; at++) {
            const LaneU32 index = lane * LaneU32(KV_BLAKE3_CHUNK / 4) + LaneU32(block * 16 + at);
            const LaneMask is_whole = index < LaneU32(whole_words);
            LaneU32 word(0u);
            if (whole_words) word = kv_select(is_whole, kv_gather_u32(words, kv_select(is_whole, index, LaneU32(0u))), LaneU32(0u));
            if (left) { // the input's last bytes, zeros after them
                u32 tail = 0;
                for (u32 byte = 0; byte < left; byte++) tail |= (u32)bytes[(u64)whole_words * 4 + byte] << (8 * byte);
                word = kv_select(index == LaneU32(whole_words), LaneU32(tail), word);
            }
            m[at] = word;
        }
        const LaneU32 rest = size - before;
        const LaneU32 block_size = kv_select(is_in, kv_min(rest, LaneU32(KV_BLAKE3_BLOCK)), LaneU32(0u));
        const LaneMask is_last = rest <= LaneU32(KV_BLAKE3_BLOCK);
        const LaneU32 flags = LaneU32(block == 0 ? KV_BLAKE3_START : 0) | kv_select(is_last, LaneU32(KV_BLAKE3_END | root), LaneU32(0u));
        LaneU32 next[8];
        KV_UNROLL for (u32 at = 0; at < 8; at++) next[at] = value[at];
        kv_blake3_compress(next, m, &counter, &block_size, &flags);
        KV_UNROLL for (u32 at = 0; at < 8; at++) value[at] = kv_select(is_in, next[at], value[at]);
    }
    u32* out = values + (u64)input * 8 * chunks + first;
    KV_UNROLL for (u32 at = 0; at < 8; at++) kv_store_u32(out + (u64)at * chunks, value[at], count);
}

// One level of the tree of each input: `nodes` values, at least 2, become (nodes + 1) / 2; an odd last one goes up as it is.
KV_KERNEL(blake3_parents, (const u32* values, u32 nodes, u32* parents), (values, nodes, parents)) {
    const u32 above = (nodes + 1) / 2, warps_each = (above + 31) / 32, first = warp % warps_each * 32, input = warp / warps_each;
    const u32 count = above - first < 32 ? above - first : 32, last = nodes - 1 - 2 * first;
    const u32* from = values + (u64)input * 8 * nodes + 2 * first;
    const LaneU32 left = kv_min(kv_lane() * LaneU32(2u), LaneU32(last)), right = kv_min(left + LaneU32(1u), LaneU32(last));
    const LaneMask is_pair = left != right;
    const LaneU32 counter(0u), size((u32)KV_BLAKE3_BLOCK), flags((u32)(KV_BLAKE3_PARENT | (above == 1 ? KV_BLAKE3_ROOT : 0)));
    LaneU32 value[8], m[16];
    KV_UNROLL for (u32 at = 0; at < 8; at++) {
        value[at] = LaneU32(kv_blake3_start[at]);
        m[at] = kv_gather_u32(from + (u64)at * nodes, left);
        m[at + 8] = kv_gather_u32(from + (u64)at * nodes, right);
    }
    kv_blake3_compress(value, m, &counter, &size, &flags);
    u32* out = parents + (u64)input * 8 * above + first;
    KV_UNROLL for (u32 at = 0; at < 8; at++) kv_store_u32(out + (u64)at * above, kv_select(is_pair, value[at], m[at]), count);
}

#endif
