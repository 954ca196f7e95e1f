"""Ids of blobs whose bytes were found corrupt in a tier: what tells a lost chunk from one that a failing medium hides.

Bounded and in memory only: forgetting an id costs one more read that finds the same.
"""

from __future__ import annotations

from typing import Final

from kvobj.ids import BlobId

REMEMBERED_MAX: Final = 65_536


class CorruptBlobs:
    """A bounded set, oldest out first. Event-loop-only."""

    __slots__ = ("_ids", "found")

    def __init__(self) -> None:
        self._ids: dict[bytes, None] = {}
        self.found = 0

    def note(self, blob_id: BlobId) -> None:
        """A copy of the blob did not check out."""
        if blob_id not in self._ids:
            self.found += 1
        self._ids[blob_id] = None
        if len(self._ids) > REMEMBERED_MAX:
            del self._ids[next(iter(self._ids))]

    def forget(self, blob_id: BlobId) -> None:
        """The blob was repaired or deleted."""
        self._ids.pop(blob_id, None)

    def __contains__(self, blob_id: bytes) -> bool:
        """Whether a copy of the blob is known to be corrupt."""
        return blob_id in self._ids
