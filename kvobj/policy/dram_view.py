"""A chunk policy as the dram tier sees it: blob ids instead of names, and blobs of which nobody said that they are chunks.

A chunk's uses are told to the policy by whoever serves it (`request`, `access`), so the tier's own touches count only for the rest:
blobs of ordinary buckets and parts, which are ranked by their blob id, without a parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from kvobj.ids import BlobId
from kvobj.policy.chunk_policy import CacheTier, ChunkPolicy

NOTES_MAX: Final = 100_000
"""How many blobs may be noted that the tier has not named yet; beyond, the oldest note is forgotten."""
VICTIMS_MAX: Final = 10_000


class DramView:
    """See `EvictionPolicy`. `now_ms` is the clock of the policy's other callers."""

    __slots__ = ("_blobs", "_names", "_notes", "_now_ms", "_policy")

    def __init__(self, policy: ChunkPolicy, *, now_ms: Callable[[], int]) -> None:
        self._policy = policy
        self._now_ms = now_ms
        self._notes: OrderedDict[BlobId, tuple[bytes, bytes | None]] = OrderedDict()
        self._names: dict[BlobId, bytes] = {}
        self._blobs: dict[bytes, BlobId] = {}

    def note(self, blob_id: BlobId, name: bytes, parent: bytes | None) -> None:
        """The blob is the chunk of this name. Told when the chunk is committed, or brought up from another tier; before or after
        the tier has inserted the blob."""
        old = self._names.get(blob_id)
        if old is None:
            self._notes[blob_id] = (name, parent)
            self._notes.move_to_end(blob_id)
            if len(self._notes) > NOTES_MAX:
                self._notes.popitem(last=False)
        elif old != name:
            size_bytes = self._size_dropped(blob_id)
            self._take(blob_id, name, parent, size_bytes)

    @property
    def size_bytes(self) -> int:
        """See `EvictionPolicy.size_bytes`."""
        return self._policy.size_bytes(CacheTier.DRAM)

    def insert(self, blob_id: BlobId, size_bytes: int) -> None:
        """See `EvictionPolicy.insert`."""
        name = self._names.get(blob_id)
        if name is not None:
            self._policy.stored(name, CacheTier.DRAM, parent=None, size_bytes=size_bytes, now_ms=self._now_ms())
            self.touch(blob_id)
            return
        noted_name, parent = self._notes.pop(blob_id, (bytes(blob_id), None))
        self._take(blob_id, noted_name, parent, size_bytes)

    def insert_many(self, blobs: Sequence[tuple[BlobId, int]]) -> None:
        """See `EvictionPolicy.insert_many`: of blobs that nothing is known about, as at a start, a third of the time."""
        names, by_name, notes = self._names, self._blobs, self._notes
        fresh: list[tuple[bytes, int]] = []
        for blob_id, size_bytes in blobs:
            if blob_id in names or blob_id in notes or blob_id in by_name:
                self._store_many(fresh)
                fresh = []
                self.insert(blob_id, size_bytes)
                continue
            name = names[blob_id] = bytes(blob_id)
            by_name[name] = blob_id
            fresh.append((name, size_bytes))
        self._store_many(fresh)

    def _store_many(self, chunks: Sequence[tuple[bytes, int]]) -> None:
        if chunks:
            self._policy.stored_many(chunks, CacheTier.DRAM, now_ms=self._now_ms())

    def _take(self, blob_id: BlobId, name: bytes, parent: bytes | None, size_bytes: int) -> None:
        earlier = self._blobs.get(name)
        if earlier is not None:  # a chunk stored anew while the bytes of its last life are still here
            self._take(earlier, bytes(earlier), None, self._size_dropped(earlier))
        self._names[blob_id] = name
        self._blobs[name] = blob_id
        self._policy.stored(name, CacheTier.DRAM, parent=parent, size_bytes=size_bytes, now_ms=self._now_ms())

    def _drop(self, blob_id: BlobId) -> None:
        name = self._names.pop(blob_id)
        del self._blobs[name]
        self._policy.dropped(name, CacheTier.DRAM)

    def _size_dropped(self, blob_id: BlobId) -> int:
        before = self._policy.size_bytes(CacheTier.DRAM)
        self._drop(blob_id)
        return before - self._policy.size_bytes(CacheTier.DRAM)

    def touch(self, blob_id: BlobId) -> None:
        """See `EvictionPolicy.touch`: of a chunk it says nothing new."""
        name = self._names.get(blob_id)
        if name == blob_id:
            self._policy.access(name, now_ms=self._now_ms())

    def discard(self, blob_id: BlobId) -> None:
        """See `EvictionPolicy.discard`. A note of a blob that was not inserted stays: the tier discards what is not yet clean."""
        if blob_id in self._names:
            self._drop(blob_id)

    def discard_many(self, blob_ids: Sequence[BlobId]) -> None:
        """See `EvictionPolicy.discard_many`."""
        names = [name for blob_id in blob_ids if (name := self._names.pop(blob_id, None)) is not None]
        for name in names:
            del self._blobs[name]
        if names:
            self._policy.dropped_many(names, CacheTier.DRAM)

    def victims(self, bytes_needed: int, eligible: Callable[[BlobId], bool]) -> list[BlobId]:
        """See `EvictionPolicy.victims`: the least worth first, children before their parents."""
        blobs = self._blobs
        names = self._policy.victims(
            CacheTier.DRAM,
            bytes_needed,
            now_ms=self._now_ms(),
            eligible=lambda name: name in blobs and eligible(blobs[name]),
            limit=VICTIMS_MAX,
        )
        return [blobs[name] for name in names]

    def __len__(self) -> int:
        """See `EvictionPolicy.__len__`."""
        return len(self._names)

    def __contains__(self, blob_id: object, /) -> bool:
        """See `EvictionPolicy.__contains__`."""
        return blob_id in self._names
