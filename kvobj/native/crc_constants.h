/* The constants of the CRCs that crcs.c makes, by tools/make_crc_constants.py, which says how: not changed by hand. */

static const struct crc crcs[] = {
    [CRC32] = {
        .ones = 0xffffffff,
        .polynomial = 0x00000000edb88320,
        .inverse = 0xb4e5b025f7011641,
        .over_16 = {0x00000000ae689191, 0x00000000ccaa009e},
        .over_32 = {0x00000000f1da05aa, 0x0000000081256527},
        .over_64 = {0x000000008f352d95, 0x000000001d9513d7},
        .over_128 = {0x0000000033fff533, 0x00000000910eeec1},
        .over_256 = {0x00000000ce3371cb, 0x00000000e95c1271},
        .nibbles = {
            0x0, 0x1db71064, 0x3b6e20c8, 0x26d930ac,
            0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
            0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
            0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
        },
    },
    [CRC32C] = {
        .ones = 0xffffffff,
        .polynomial = 0x0000000082f63b78,
        .inverse = 0x4869ec38dea713f1,
        .over_16 = {0x00000000f20c0dfe, 0x00000000493c7d27},
        .over_32 = {0x000000003da6d0cb, 0x00000000ba4fc28e},
        .over_64 = {0x00000000740eef02, 0x000000009e4addf8},
        .over_128 = {0x000000006992cea2, 0x000000000d3b6092},
        .over_256 = {0x00000000dcb17aa4, 0x00000000b9e02b86},
        .nibbles = {
            0x0, 0x105ec76f, 0x20bd8ede, 0x30e349b1,
            0x417b1dbc, 0x5125dad3, 0x61c69362, 0x7198540d,
            0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9,
            0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
        },
    },
    [CRC64NVME] = {
        .ones = 0xffffffffffffffff,
        .polynomial = 0x9a6c9329ac4bc9b5,
        .inverse = 0x27ecfa329aef9f77,
        .over_16 = {0xeadc41fd2ba3d420, 0x21e9761e252621ac},
        .over_32 = {0xb0bc2e589204f500, 0xe1e0bb9d45d7a44c},
        .over_64 = {0x0c32cdb31e18a84a, 0x62242240ace5045a},
        .over_128 = {0xa1ca681e733f9c40, 0x5f852fb61e8d92dc},
        .over_256 = {0x37ccd3e14069cabc, 0xa043808c0f782663},
        .nibbles = {
            0x0, 0x78e0ff3b88be6f81, 0xf1c1fe77117cdf02, 0x8921014c99c2b083,
            0xd75adabd7a6e2d6f, 0xafba2586f2d042ee, 0x269b24ca6b12f26d, 0x5e7bdbf1e3ac9dec,
            0x9a6c9329ac4bc9b5, 0xe28c6c1224f5a634, 0x6bad6d5ebd3716b7, 0x134d926535897936,
            0x4d364994d625e4da, 0x35d6b6af5e9b8b5b, 0xbcf7b7e3c7593bd8, 0xc41748d84fe75459,
        },
    },
};

static const struct streams streams[] = {
    {
        .bytes = 36864,
        .over_three = {0x00000000a32e4caf, 0x000000007dc994be},
        .over_two = 0x0000000052d667eb,
        .over_one = 0x00000000766bda8e,
    },
    {
        .bytes = 4096,
        .over_three = {0x00000000e1e5a161, 0x00000000c1f19ee1},
        .over_two = 0x0000000032e9638c,
        .over_one = 0x00000000f90d0213,
    },
};
