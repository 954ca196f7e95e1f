"""What an eviction policy is. It ranks the blobs of one cache tier and answers which go next; the tier does the rest.

Guarantees of every policy: pure (no clock, no I/O), deterministic, bounded work a call. Asking for victims changes
nothing, so the same ones are named until they are discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvobj.ids import BlobId


class EvictionPolicy(Protocol):
    """Called from one thread, the event loop's."""

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of the blobs known."""
        ...

    def insert(self, blob_id: BlobId, size_bytes: int) -> None:
        """Know a blob from now on; of one known already, take the new size and count it as used now."""
        ...

    def insert_many(self, blobs: Sequence[tuple[BlobId, int]]) -> None:
        """`insert` of each, in this order."""
        ...

    def touch(self, blob_id: BlobId) -> None:
        """Count the blob as used now; an unknown one is ignored (it was evicted while being read)."""
        ...

    def discard(self, blob_id: BlobId) -> None:
        """Forget the blob; an unknown one is ignored."""
        ...

    def discard_many(self, blob_ids: Sequence[BlobId]) -> None:
        """`discard` of each, in this order."""
        ...

    def victims(self, bytes_needed: int, eligible: Callable[[BlobId], bool]) -> list[BlobId]:
        """Blobs to evict, first to go first, whose sizes sum to `bytes_needed` or more.

        Only blobs that `eligible` accepts are named; it must not call the policy. Fewer bytes than needed come back
        where the eligible ones do not suffice or the bound on the blobs looked at is reached: ask again once these
        are discarded.
        """
        ...

    def __len__(self) -> int:
        """How many blobs are known."""
        ...

    def __contains__(self, blob_id: object, /) -> bool:
        """Whether the blob is known."""
        ...
