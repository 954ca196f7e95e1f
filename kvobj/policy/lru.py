"""Least recently used: the baseline that every other policy is measured against.

An `OrderedDict` and not a plain dict: to pop from the front of a dict that is re-ordered by delete and insert walks
over the deleted slots, which is quadratic under churn. A touch is 0.1 µs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from kvobj.ids import BlobId

SCAN_MAX: Final = 10_000
"""How many blobs one call of `victims` looks at: about 1 ms when all are ineligible."""


class LruPolicy:
    """See `EvictionPolicy`. Every operation but `victims` is O(1)."""

    __slots__ = ("_scan_max", "_size_bytes", "_sizes")

    def __init__(self, *, scan_max: int = SCAN_MAX) -> None:
        self._sizes: OrderedDict[BlobId, int] = OrderedDict()
        self._size_bytes = 0
        self._scan_max = scan_max

    @property
    def size_bytes(self) -> int:
        """See `EvictionPolicy.size_bytes`."""
        return self._size_bytes

    def insert(self, blob_id: BlobId, size_bytes: int) -> None:
        """See `EvictionPolicy.insert`."""
        self._size_bytes += size_bytes - self._sizes.get(blob_id, 0)
        self._sizes[blob_id] = size_bytes
        self._sizes.move_to_end(blob_id)

    def insert_many(self, blobs: Sequence[tuple[BlobId, int]]) -> None:
        """See `EvictionPolicy.insert_many`."""
        for blob_id, size_bytes in blobs:
            self.insert(blob_id, size_bytes)

    def touch(self, blob_id: BlobId) -> None:
        """See `EvictionPolicy.touch`."""
        if blob_id in self._sizes:
            self._sizes.move_to_end(blob_id)

    def discard(self, blob_id: BlobId) -> None:
        """See `EvictionPolicy.discard`."""
        self._size_bytes -= self._sizes.pop(blob_id, 0)

    def discard_many(self, blob_ids: Sequence[BlobId]) -> None:
        """See `EvictionPolicy.discard_many`."""
        for blob_id in blob_ids:
            self.discard(blob_id)

    def victims(self, bytes_needed: int, eligible: Callable[[BlobId], bool]) -> list[BlobId]:
        """See `EvictionPolicy.victims`. Least recently used first.

        Ineligible blobs at the front are looked at again by each call. The tier keeps them few: dirty blobs are at
        most half of it, and whatever readers pin was touched a moment ago.
        """
        chosen: list[BlobId] = []
        found_bytes = 0
        for looked_at, (blob_id, size_bytes) in enumerate(self._sizes.items()):
            if found_bytes >= bytes_needed or looked_at >= self._scan_max:
                break
            if eligible(blob_id):
                chosen.append(blob_id)
                found_bytes += size_bytes
        return chosen

    def __len__(self) -> int:
        """See `EvictionPolicy.__len__`."""
        return len(self._sizes)

    def __contains__(self, blob_id: object, /) -> bool:
        """See `EvictionPolicy.__contains__`."""
        return blob_id in self._sizes
