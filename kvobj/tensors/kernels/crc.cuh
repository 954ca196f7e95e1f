// CRC-32C (RFC 3720, Castagnoli) of frames' blocks, for the host alone.
#ifndef KVOBJ_CRC_CUH
#define KVOBJ_CRC_CUH
#if !defined(__CUDACC_RTC__) && !defined(__CUDACC__)

struct KvCrcTables {
    u32 bytes[8][256]; // by the place of a byte in a word of eight
    u32 shift_far[4][256], shift_near[4][256]; // what so many zero bytes make of a value, by its bytes
};

#define KV_CRC_FAR 4096u
#define KV_CRC_NEAR 256u

static constexpr u32 kv_crc_apply(const u32* matrix, u32 x) {
    u32 r = 0;
    for (int bit = 0; x; bit++, x >>= 1) r ^= x & 1 ? matrix[bit] : 0;
    return r;
}

static constexpr void kv_crc_shift_table(u32 (&table)[4][256], u32 zero_bytes) {
    u32 matrix[32] = {}, square[32] = {};
    matrix[0] = 0x82f63b78u; // one zero bit
    for (int bit = 1; bit < 32; bit++) matrix[bit] = 1u << (bit - 1);
    for (u32 bits = 1; bits < 8 * zero_bytes; bits *= 2) {
        for (int bit = 0; bit < 32; bit++) square[bit] = kv_crc_apply(matrix, matrix[bit]);
        for (int bit = 0; bit < 32; bit++) matrix[bit] = square[bit];
    }
    for (u32 place = 0; place < 4; place++)
        for (u32 byte = 0; byte < 256; byte++) table[place][byte] = kv_crc_apply(matrix, byte << (8 * place));
}

static constexpr KvCrcTables kv_crc_made() {
    KvCrcTables t = {};
    for (u32 byte = 0; byte < 256; byte++) {
        u32 x = byte;
        for (int bit = 0; bit < 8; bit++) x = x & 1 ? x >> 1 ^ 0x82f63b78u : x >> 1;
        t.bytes[0][byte] = x;
    }
    for (u32 byte = 0; byte < 256; byte++)
        for (int place = 1; place < 8; place++)
            t.bytes[place][byte] = t.bytes[place - 1][byte] >> 8 ^ t.bytes[0][t.bytes[place - 1][byte] & 255];
    kv_crc_shift_table(t.shift_far, KV_CRC_FAR);
    kv_crc_shift_table(t.shift_near, KV_CRC_NEAR);
    return t;
}
static constexpr KvCrcTables kv_crc_tables = kv_crc_made();

KV_FUNCTION u64 kv_crc_word(const u8* p) { u64 x; __builtin_memcpy(&x, p, 8); return x; }
#if defined(__SSE4_2__) && defined(__x86_64__)
#define KV_CRC_INSTRUCTION 1
KV_FUNCTION u64 kv_crc_8(u64 crc, u64 x) { return __builtin_ia32_crc32di(crc, x); }
#elif defined(__ARM_FEATURE_CRC32)
#define KV_CRC_INSTRUCTION 1
KV_FUNCTION u64 kv_crc_8(u64 crc, u64 x) { return __builtin_aarch64_crc32cx((u32)crc, x); }
#else
KV_FUNCTION u64 kv_crc_8(u64 crc, u64 x) { // little-endian, as all that kvobj runs on
    x ^= crc;
    u32 r = 0;
    for (int place = 0; place < 8; place++) r ^= kv_crc_tables.bytes[7 - place][x >> (8 * place) & 255];
    return r;
}
#endif

KV_FUNCTION u64 kv_crc_shifted(const u32 (&table)[4][256], u64 crc) {
    return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^ table[3][crc >> 24 & 255];
}

// The instruction takes three times as long to give its result as to be started, so three neighbouring parts are done together and
// joined by what the length of a part makes of a value.
#ifdef KV_CRC_INSTRUCTION
template <u32 PART> KV_FUNCTION u64 kv_crc_parts(const u32 (&shift)[4][256], u64 crc, const u8*& p, u64& left) {
    while (left >= 3 * PART) {
        u64 second = 0, third = 0;
        for (u32 at = 0; at < PART; at += 8) {
            crc = kv_crc_8(crc, kv_crc_word(p + at));
            second = kv_crc_8(second, kv_crc_word(p + PART + at));
            third = kv_crc_8(third, kv_crc_word(p + 2 * PART + at));
        }
        crc = kv_crc_shifted(shift, kv_crc_shifted(shift, crc) ^ second) ^ third;
        p += 3 * PART;
        left -= 3 * PART;
    }
    return crc;
}
#endif

// CRC-32C of `left` bytes, going on from `previous`, the value for the bytes before them.
extern "C" __attribute__((visibility("default"))) u32 kv_crc32c(const u8* p, u64 left, u32 previous) {
    u64 crc = ~previous;
#ifdef KV_CRC_INSTRUCTION
    crc = kv_crc_parts<KV_CRC_FAR>(kv_crc_tables.shift_far, crc, p, left);
    crc = kv_crc_parts<KV_CRC_NEAR>(kv_crc_tables.shift_near, crc, p, left);
#endif
    for (; left >= 8; left -= 8, p += 8) crc = kv_crc_8(crc, kv_crc_word(p));
    for (; left; left--, p++) crc = kv_crc_tables.bytes[0][(crc ^ *p) & 255] ^ crc >> 8;
    return ~(u32)crc;
}

#endif
#endif
