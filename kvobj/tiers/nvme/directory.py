"""Rows of the nvme directory in LMDB: where each blob lies, and small frames themselves.

Pure encoding, plus the tables' declarations that whoever opens the database passes on. A blob has exactly one row in
`BLOBS`; a small one has its frame in `INLINE` too, in the encoding of its record-log entry, so that a compaction of the log
copies values and encodes nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Self

import msgspec

from kvobj.database import Table
from kvobj.errors import CorruptionError
from kvobj.tiers.nvme.record import RECORD_BYTES

BLOBS: Final = Table("nvme_blobs", volatile=False)
INLINE: Final = Table("nvme_inline", volatile=False)
NVME_TABLES: Final = (BLOBS, INLINE)

# Larger values fragment LMDB and cost overflow pages; smaller ones would waste a record page and a device write each.
INLINE_BYTES_MAX: Final = 64 * 1024

_ROW: Final = struct.Struct("<BIQQ")
_INLINE_FLAG: Final = 1


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a blob of `frame_bytes` is: at `offset` (its record page) of segment number `segment`, or `inline` in LMDB."""

    segment: int
    offset: int
    frame_bytes: int
    inline: bool = False

    @classmethod
    def in_database(cls, frame_bytes: int) -> Self:
        """The place of a small frame."""
        return cls(segment=0, offset=0, frame_bytes=frame_bytes, inline=True)

    @property
    def extent_bytes(self) -> int:
        """Room taken: record page and padded frame in a segment, the frame alone in LMDB."""
        return self.frame_bytes if self.inline else extent_bytes(self.frame_bytes)

    def encode(self) -> bytes:
        """The directory row."""
        return _ROW.pack(_INLINE_FLAG if self.inline else 0, self.segment, self.offset, self.frame_bytes)

    @classmethod
    def decode(cls, row: bytes) -> Self:
        """Read a directory row back. `CorruptionError` for anything else."""
        if len(row) != _ROW.size or row[0] > _INLINE_FLAG:
            raise CorruptionError("nvme directory row is not one", row=row.hex())
        flags, segment, offset, frame_bytes = _ROW.unpack(row)
        return cls(segment=segment, offset=offset, frame_bytes=frame_bytes, inline=flags == _INLINE_FLAG)

    @classmethod
    def decode_many(cls, rows: Sequence[bytes]) -> list[Self]:
        """`decode` of each, at a quarter of its cost."""
        encoded = b"".join(rows)
        if len(encoded) != len(rows) * _ROW.size or any(len(row) != _ROW.size or row[0] > _INLINE_FLAG for row in rows):
            return [cls.decode(row) for row in rows]
        unpacked = _ROW.iter_unpack(encoded)
        return [
            cls(segment, offset, frame_bytes, flags == _INLINE_FLAG) for flags, segment, offset, frame_bytes in unpacked
        ]


def padded(length: int) -> int:
    """`length` rounded up to what O_DIRECT transfers: a multiple of 4096."""
    return -(-length // RECORD_BYTES) * RECORD_BYTES


def extent_bytes(frame_bytes: int) -> int:
    """Bytes that a frame takes in a segment, with its record page and padding."""
    return RECORD_BYTES + padded(frame_bytes)
