"""Counts of who is reading which blob on this node, so that a collector leaves it alone until they are done.

The counts die with the process, as do the readers (`gc-protocol` §2.1, local copies).
"""

from __future__ import annotations

from collections.abc import Iterable

from kvobj.ids import BlobId


class BlobsInUse:
    """A multiset of blob ids held by readers. Event-loop-only."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def hold(self, blob_ids: Iterable[bytes]) -> None:
        """Count one more reader of each id."""
        counts = self._counts
        for blob_id in blob_ids:
            counts[blob_id] = counts.get(blob_id, 0) + 1

    def release(self, blob_ids: Iterable[bytes]) -> None:
        """Count one reader less of each id; every `hold` is matched by one release."""
        counts = self._counts
        for blob_id in blob_ids:
            left = counts[blob_id] - 1
            if left:
                counts[blob_id] = left
            else:
                del counts[blob_id]

    def __contains__(self, blob_id: BlobId) -> bool:
        """Whether anybody reads the blob now."""
        return blob_id in self._counts

    def __len__(self) -> int:
        """How many different blobs are being read."""
        return len(self._counts)
