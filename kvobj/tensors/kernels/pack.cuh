// Values between an order of axes and dense runs. A block's values are `outer` × `rows` × `row` elements of 1, 2 or 4 bytes, dense in
// that order on one side, with strides (in elements) on the other. One warp moves 64 rows.
#ifndef KVOBJ_PACK_CUH
#define KVOBJ_PACK_CUH

#define KV_ROWS_A_WARP 64u

// One axis at a time is walked by lanes. Rows that are dense on both sides are copied; rows that lie dense *across* (the row axis
// strided, the next one dense, as of keys held transposed) are walked that way, so that a GPU reads and writes whole sectors.
template <bool PACKS>
KV_FUNCTION void kv_move_rows(const u8* from, u8* to, u32 element_bytes, u32 first, u32 count, u32 rows, u32 row, u32 outer_stride,
                              u32 rows_stride, u32 row_stride) {
    u32 outer_at = first / rows, row_at = first % rows;
    while (count) {
        const u32 some = kv_min_uniform(count, rows - row_at); // of one outer
        const u64 apart = ((u64)outer_at * outer_stride + (u64)row_at * rows_stride) * element_bytes;
        const u64 dense = ((u64)outer_at * rows + row_at) * row * element_bytes;
        const u8* source = from + (PACKS ? apart : dense);
        u8* target = to + (PACKS ? dense : apart);
        if (row_stride == 1) {
            if (rows_stride == row) {
                kv_copy(target, source, (u64)some * row * element_bytes);
            } else {
                for (u32 at = 0; at < some; at++) {
                    const u64 strided = (u64)at * rows_stride * element_bytes, packed = (u64)at * row * element_bytes;
                    kv_copy(target + (PACKS ? packed : strided), source + (PACKS ? strided : packed), (u64)row * element_bytes);
                }
            }
        } else {
            for (u32 at = 0; at < row; at++) {
                const u64 strided = (u64)at * row_stride * element_bytes, packed = (u64)at * element_bytes;
                kv_copy_strided(target + (PACKS ? packed : strided), PACKS ? row : rows_stride,
                                source + (PACKS ? strided : packed), PACKS ? rows_stride : row, some, element_bytes);
            }
        }
        count -= some;
        row_at = 0;
        outer_at++;
    }
}

// To dense runs at `to`, from a block whose first value is at `from`. Nothing of `to` overlaps `from`.
KV_KERNEL(pack_block,
          (const u8* from, u8* to, u32 element_bytes, u32 outer, u32 rows, u32 row, u32 outer_stride, u32 rows_stride,
           u32 row_stride),
          (from, to, element_bytes, outer, rows, row, outer_stride, rows_stride, row_stride)) {
    const u64 all = (u64)outer * rows, first = (u64)warp * KV_ROWS_A_WARP;
    if (first >= all) return;
    const u32 count = all - first < KV_ROWS_A_WARP ? (u32)(all - first) : KV_ROWS_A_WARP;
    kv_move_rows<true>(from, to, element_bytes, (u32)first, count, rows, row, outer_stride, rows_stride, row_stride);
}

// From dense runs at `from`, to a block whose first value is at `to`.
KV_KERNEL(unpack_block,
          (const u8* from, u8* to, u32 element_bytes, u32 outer, u32 rows, u32 row, u32 outer_stride, u32 rows_stride,
           u32 row_stride),
          (from, to, element_bytes, outer, rows, row, outer_stride, rows_stride, row_stride)) {
    const u64 all = (u64)outer * rows, first = (u64)warp * KV_ROWS_A_WARP;
    if (first >= all) return;
    const u32 count = all - first < KV_ROWS_A_WARP ? (u32)(all - first) : KV_ROWS_A_WARP;
    kv_move_rows<false>(from, to, element_bytes, (u32)first, count, rows, row, outer_stride, rows_stride, row_stride);
}

#endif
