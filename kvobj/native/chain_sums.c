/* Chain sums: see kvobj/ids/chain_sums.py, whose pure functions give the same bytes.
 *
 * Lanes are little-endian u64 whatever the machine; memcpy keeps unaligned input legal, and compilers turn it into loads.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))
#define LANE_BYTES 8
#define NAME_BYTES 16
#define ID_BYTES 32

static uint64_t load(const unsigned char *from) {
    uint64_t value;
    memcpy(&value, from, sizeof value);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static void store(unsigned char *to, uint64_t value) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    memcpy(to, &value, sizeof value);
}

/* sums: count * 16 bytes; the i-th is sum over j <= i of (j + 1) * lanes[j], each lane for itself, modulo 2^64. */
EXPORTED void kvobj_running_sums(const unsigned char *lanes, size_t count, unsigned char *sums) {
    uint64_t first = 0, second = 0;
    for (size_t i = 0; i < count; i++) {
        const unsigned char *at = lanes + i * NAME_BYTES;
        first += (uint64_t)(i + 1) * load(at);
        second += (uint64_t)(i + 1) * load(at + LANE_BYTES);
        store(sums + i * NAME_BYTES, first);
        store(sums + i * NAME_BYTES + LANE_BYTES, second);
    }
}

/* lanes: count * 16 bytes, the first half of each 32-byte id. */
EXPORTED void kvobj_id_lanes(const unsigned char *ids, size_t count, unsigned char *lanes) {
    for (size_t i = 0; i < count; i++)
        memcpy(lanes + i * NAME_BYTES, ids + i * ID_BYTES, NAME_BYTES);
}
