/* CRCs by carry-less multiplication: what crcs.c has for other sources. */
#ifndef KVOBJ_CRCS_H
#define KVOBJ_CRCS_H

#include <stdint.h>

/* The bytes of the widest vectors that this CPU multiplies: 64, 32 or 16; 0 where it has none, and CRCs must be made elsewhere. */
uint32_t kvobj_crc_width(void);

/* The CRC-32C of the bytes, going on from `previous`, that of the bytes before them. */
uint32_t kvobj_crc32c(const unsigned char *at, uint64_t size, uint32_t previous);

#endif
