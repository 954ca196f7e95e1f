// What the kernels of eq are told: one table for a call, and where each head's working memory is. Layout of a block: eq.py.
#ifndef KVOBJ_EQ_PLAN_CUH
#define KVOBJ_EQ_PLAN_CUH

#include "values.cuh"

// Words of the plan, in order; after them four words a block: where it is (its values, or encoded), its encoded length, its slot, and
// where what it decodes to goes (or 0). eq.py writes it.
enum {
    KV_EQ_HEADS, KV_EQ_TOKENS, KV_EQ_DIM, KV_EQ_IS_HALF, KV_EQ_STEP, KV_EQ_RUNG_FROM, KV_EQ_RUNG, KV_EQ_SLOT_BYTES,
    KV_EQ_HEAD_AT, KV_EQ_SUMS_AT, KV_EQ_ROWS_AT, KV_EQ_NORMS_AT, KV_EQ_GUARDS_AT, KV_EQ_MEANS_AT, KV_EQ_IDS_AT, KV_EQ_SYMBOLS_AT,
    KV_EQ_STREAMS_AT, KV_EQ_COUNTS_AT, KV_EQ_LENGTHS_AT, KV_EQ_REPORTS_AT, KV_EQ_PLAN_WORDS = 20
};
enum { KV_EQ_BLOCK_WORDS = 4, KV_EQ_HEAD_WORDS = 8, KV_EQ_GUARDED_PART = 16, KV_EQ_LARGEST = 32767 };
enum { KV_EQ_SIZES = 130 }; // counters of a column: for each |q| to 127, an escape, and one that makes them even
enum { KV_EQ_MEMORY = KV_EQ_SIZES / 2 * KV_LANES * 4 }; // bytes of the counters of 32 columns, where a warp has memory of its own
KV_WARP_MEMORY(eq_code, 8320)
#define KV_THREADS_OF_eq_code ~, 768
#define KV_THREADS_OF_eq_demote ~, 768
KV_WARP_MEMORY(eq_demote, 8320)
enum { KV_EQ_FRACTION = 14 }; // a head's largest value has this exponent as an integer
enum { KV_EQ_LEAST_EXPONENT = -64, KV_EQ_GREATEST_EXPONENT = 63 }; // of a head's largest value

// What the stages know of a head.
struct EqHead {
    u32 status;   // 0, or why the block stays RAW
    u32 greatest; // its largest word
    i32 exponent; // of that
    u32 step;     // bf16
    u32 escapes;  // base symbols outside of -127..127
    u32 bytes;    // of its stream
    u32 unused[2];
};

// One head of one block, from the number of a warp; `block` alone, of its head 0, where warps are blocks.
struct EqPlace {
    const u64* plan;
    const u64* job;
    u32 block, head, heads, tokens, dim;
    u64 at; // number of the head among all
};
KV_FUNCTION EqPlace kv_eq_place(const u64* plan, u32 block, u32 head) {
    const u32 heads = (u32)plan[KV_EQ_HEADS];
    return {plan, plan + KV_EQ_PLAN_WORDS + (u64)block * KV_EQ_BLOCK_WORDS, block, head, heads, (u32)plan[KV_EQ_TOKENS],
            (u32)plan[KV_EQ_DIM], (u64)block * heads + head};
}
KV_FUNCTION EqPlace kv_eq_head_place(const u64* plan, u32 warp) {
    const u32 heads = (u32)plan[KV_EQ_HEADS];
    return kv_eq_place(plan, warp / heads, warp % heads);
}
KV_FUNCTION u64 kv_eq_padded(u64 count) { return (count + KV_LANES - 1) / KV_LANES * KV_LANES; }
KV_FUNCTION u32 kv_eq_values(const EqPlace& p) { return p.tokens * p.dim; } // of a head
KV_FUNCTION u64 kv_eq_columns(const EqPlace& p) { return kv_eq_padded(p.dim) + KV_LANES; } // room, so that steps may read across the end
KV_FUNCTION EqHead* kv_eq_head(const EqPlace& p) { return (EqHead*)p.plan[KV_EQ_HEAD_AT] + p.at; }
KV_FUNCTION i32* kv_eq_sums(const EqPlace& p) { return (i32*)p.plan[KV_EQ_SUMS_AT] + p.at * kv_eq_columns(p); }
KV_FUNCTION i64* kv_eq_rows(const EqPlace& p) { return (i64*)p.plan[KV_EQ_ROWS_AT] + p.at * kv_eq_padded(p.tokens); }
KV_FUNCTION u16* kv_eq_means(const EqPlace& p) { return (u16*)p.plan[KV_EQ_MEANS_AT] + p.at * kv_eq_columns(p); }
KV_FUNCTION u8* kv_eq_ids(const EqPlace& p) { return (u8*)p.plan[KV_EQ_IDS_AT] + p.at * kv_eq_columns(p); }
KV_FUNCTION u16* kv_eq_symbols(const EqPlace& p) { return KV_GLOBAL((u16*)p.plan[KV_EQ_SYMBOLS_AT]) + p.at * kv_eq_padded(kv_eq_values(p)); }
KV_FUNCTION u8* kv_eq_stream(const EqPlace& p) { return KV_GLOBAL((u8*)p.plan[KV_EQ_STREAMS_AT]) + p.at * p.plan[KV_EQ_SLOT_BYTES]; }
KV_FUNCTION u16* kv_eq_counts(const EqPlace& p) { return (u16*)p.plan[KV_EQ_COUNTS_AT] + p.at * KV_EQ_SIZES * KV_LANES; }
KV_FUNCTION u32* kv_eq_norms(const EqPlace& p) { return (u32*)p.plan[KV_EQ_NORMS_AT] + (u64)p.block * 2 * kv_eq_padded(p.tokens); }
// Of a block: how many tokens are guarded, and which, in order.
KV_FUNCTION u32* kv_eq_guard_count(const EqPlace& p) {
    return (u32*)((u16*)p.plan[KV_EQ_GUARDS_AT] + (u64)p.block * (kv_eq_padded(p.tokens) + KV_LANES));
}
KV_FUNCTION u16* kv_eq_guards(const EqPlace& p) { return (u16*)(kv_eq_guard_count(p) + 1); }
KV_FUNCTION u32* kv_eq_report(const EqPlace& p, u32 rung) {
    const u32 rungs = (u32)(p.plan[KV_EQ_RUNG] - p.plan[KV_EQ_RUNG_FROM]) + 1;
    return (u32*)p.plan[KV_EQ_REPORTS_AT] + (p.at * rungs + rung) * 4;
}
KV_FUNCTION u64 kv_eq_guarded_row(const EqPlace& p, u32 guard) { return ((u64)guard * p.heads + p.head) * p.dim; } // among a block's

// The head's values among those at `block` in [head][token][dim] order.
KV_FUNCTION u16* kv_eq_values_at(const EqPlace& p, u64 block) { return KV_GLOBAL((u16*)block) + (u64)p.head * kv_eq_values(p); }

#endif
