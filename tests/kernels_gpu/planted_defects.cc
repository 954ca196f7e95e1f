// Kernels that are wrong, each in one way that a CPU forgives: what the emulation has to notice. `right` is none of them.
#include "emulated_warp.h"
#include "lanes.h"

#undef KV_KERNEL__
#define KV_KERNEL__ KV_EMULATED_KERNEL

KV_KERNEL(right, (u32* memory), (memory)) {
    KV_ONCE(memory[32 * warp] = warp);
    kv_sync();
    const u32 first = memory[32 * warp];
    kv_sync();
    kv_store_u32(memory + 32 * warp, kv_u32(first) + kv_lane());
}
KV_KERNEL(reads_too_early, (u32* memory), (memory)) {
    KV_ONCE(memory[32 * warp] = 5);
    kv_store_u32(memory + 32 * warp + 8, kv_u32(memory[32 * warp]), 8);
}
KV_KERNEL(writes_too_early, (u32* memory), (memory)) {
    const u32 before = memory[32 * warp];
    if (kv_ballot(kv_mask(before == 5))) KV_ONCE(memory[32 * warp] = 6); // a ballot does not order memory
}
KV_KERNEL(warps_share, (u32* memory), (memory)) { KV_ONCE(memory[0] += warp); }
KV_KERNEL(warps_differ, (u32* memory), (memory)) { KV_ONCE(memory[0] = warp); }
KV_KERNEL(meets_elsewhere, (u32* memory), (memory)) {
    if ((kv_lane() & 1u) == 0) kv_sync();
    else kv_store_u32(memory, kv_u32(kv_ballot(kv_mask(true))), 0);
}
KV_KERNEL(ends_early, (u32* memory), (memory)) {
    if (kv_lane() == 31 + memory[0] * 0) return;
    kv_sync();
}
KV_KERNEL(loads_unaligned, (u8* memory), (memory)) { kv_store_u32((u32*)(memory + 1 + 256 * warp), kv_u32(1)); }
KV_KERNEL(writes_beyond, (u8* memory), (memory)) { kv_store_u8(memory + 4096 - 31 + warp, kv_u32(1)); }
KV_KERNEL(shifts_all_out, (u32* memory), (memory)) { kv_store_u32(memory + 32 * warp, kv_u32(1) << (kv_lane() + kv_u32(1))); }
