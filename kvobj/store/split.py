"""How an object's bytes are cut into blobs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BLOB_BYTES_MAX: Final = 128 * 1024 * 1024
# Room for the frame's header and directory (6 KiB at 128 MiB) and for rounding, so that two frames of the
# largest blob fit a region of 256 MiB exactly.
FRAME_HEAD_ROOM_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class BlobSplit:
    """Cuts bodies into blobs of at most `blob_plain_bytes_max` plain bytes."""

    blob_plain_bytes_max: int

    @classmethod
    def for_tiers(cls, *, arena_bytes: int, region_bytes: int, segment_bytes: int) -> BlobSplit:
        """The largest blobs that leave room for several writers: half a region, an eighth of the arena, a segment, 128 MiB."""
        frame_bytes = min(BLOB_BYTES_MAX, region_bytes // 2, arena_bytes // 8, segment_bytes)
        return cls(max(frame_bytes - FRAME_HEAD_ROOM_BYTES, FRAME_HEAD_ROOM_BYTES))

    def sizes(self, size_bytes: int) -> list[int]:
        """Plain sizes of an object's blobs in order; an empty object has one empty blob."""
        largest = self.blob_plain_bytes_max
        if size_bytes <= largest:
            return [size_bytes]
        whole, rest = divmod(size_bytes, largest)
        return [largest] * whole + ([rest] if rest else [])
