"""What a catalog keeps for a node with a remote tier: which rows are still to go there, and what has to be told of those that went.

Both are written in the transactions that they follow from, so that no crash separates them: a row that shall go to the remote has
its entry in the queue as soon as it is there, and a row that says SHARED, or does not any more, has its entry in the outbox. Of a
node without a remote both are empty for ever.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from kvobj.catalog.rows import ObjectRow
from kvobj.errors import BusyError


class QueueReason(StrEnum):
    """Why a row is to go to the remote: its class was asked for (by the writer or as its bucket's default), or its bucket's
    rule says so (`setting_rows.RemoteRule`)."""

    SHARED = "shared"
    ALWAYS = "always"
    REUSED = "reused"
    EVICTED = "evicted"


class OutboxEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One published change of a row. Positions ascend for ever, one store's over all its rebuilds; of two entries about one subject
    the one with the higher position counts. `content` is `log_entries.encode_entry` of an ObjectRow, RowRemoved, BucketRow,
    BucketRemoved, GoneBuckets (one subject), NamespaceRow, NamespaceRemoved, UserRow (with its secret) or UserRemoved. `since_ms`:
    wall time, for people."""

    position: int
    content: bytes
    since_ms: int


class Outbox(Protocol):
    """Published changes that wait to be told. Event loop only. What is read here survives power loss."""

    @property
    def position(self) -> int:
        """The highest position given out so far; what a returned verb has published is at or below it. 0: none ever."""
        ...

    def removals_of(self, bucket: str) -> int:
        """The position of the last entry, or a later one, that takes away the bucket or something in it: a row, a namespace. What
        was published before this start counts as such while it waits. 0: there is none. ~0.2 µs."""
        ...

    @property
    def pending(self) -> int:
        """How many entries wait."""
        ...

    @property
    def size_bytes(self) -> int:
        """What they take, with a little for each."""
        ...

    @property
    def oldest_ms(self) -> int | None:
        """`since_ms` of the first of them."""
        ...

    @property
    def snapshot_due(self) -> bool:
        """Whether changes were not published (before there was an outbox, or after a rebuild): only a snapshot tells of them."""
        ...

    on_published: Callable[[], None]
    """Called, on the event loop, when entries have been added. Must not raise."""

    def bound(self, limit_bytes: int) -> None:
        """From here on `require_room` refuses where entries take so much or more. Without: never."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether entries take as much as they may."""
        ...

    def require_room(self) -> None:
        """`BusyError` where entries take as much as they may. Asked by every verb whose publications nothing else bounds, before it
        changes anything: those that make or change a bucket, a namespace, a user, or the settings of a SHARED row. What takes
        something away is never refused: each thing goes once."""
        ...

    def entries(self, after: int = 0, *, limit: int = 1000) -> list[OutboxEntry]:
        """Entries with positions above `after`, ascending; fewer than `limit` also where they are long (8 MiB together)."""
        ...

    async def discard(self, upto: int) -> None:
        """Forget entries up to and with this position, which are told. They may come back after power loss."""
        ...

    def snapshot(self) -> AsyncIterator[bytes]:
        """Contents that tell everything that is to be told: users, buckets, their namespaces, and every row of class SHARED. Read
        page by page, beside commits: together with all entries published after `position` as it was before the first
        page, they give the state whatever was committed meanwhile. Once it has ended, power loss takes none of it back."""
        ...

    async def snapshot_told(self) -> None:
        """A snapshot that was begun after `snapshot_due` was seen is durable: it is due no more."""
        ...


def outbox_full(entries: int, size_bytes: int) -> BusyError:
    """What `Outbox.require_room` raises."""
    return BusyError("too many changes wait for the remote to be told of them", entries=entries, size_bytes=size_bytes)


class QueuedUpload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One row that is to go to the remote, as it was when it was queued: where its first blob is another by now, of an object
    without bytes (`blob_id` b"") its sequence, or the row is gone or hidden, the entry is stale. `size_bytes` are plain bytes;
    `since_ms` is wall time."""

    position: int
    bucket: str
    key: str
    blob_id: bytes
    size_bytes: int
    since_ms: int
    reason: QueueReason
    sequence: int = 0

    def is_of(self, row: ObjectRow) -> bool:
        """Whether the entry is for this very row."""
        return (self.bucket, self.key) == (row.bucket, row.key) and queue_name(self) == queue_name(row)


def queue_name(of: ObjectRow | QueuedUpload) -> bytes:
    """What a row is known by while it waits: its first blob; of an object without bytes, the commit that made it."""
    return (of.blob_id if isinstance(of, QueuedUpload) else first_blob(of)) or of.sequence.to_bytes(8, "big")


def first_blob(row: ObjectRow) -> bytes:
    """The row's first blob, b"" of an object without bytes."""
    return bytes(row.blobs[0].blob_id) if row.blobs else b""


class QueueTotals(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How much waits in the queue; `oldest_ms`: since when, None where nothing waits."""

    objects: int
    size_bytes: int
    oldest_ms: int | None


class RemoteQueue(Protocol):
    """Rows of class LOCAL that are to become SHARED, in the order in which they were queued. Durable. Event loop only.

    Entries come with commits (`Catalog.commit`, `raise_durability`) and with `add`; they go with `raise_durability` to SHARED, with
    whatever replaces or removes the row, and with `remove`.
    """

    @property
    def totals(self) -> QueueTotals:
        """What waits now; ~5 µs."""
        ...

    on_queued: Callable[[], None]
    """Called, on the event loop, when entries have been added. Must not raise."""

    on_shorter: Callable[[], None]
    """Called, on the event loop, when entries have gone. Must not raise."""

    async def add(self, rows: Sequence[ObjectRow], reason: QueueReason, *, now_ms: int | None = None) -> list[bool]:
        """Queue rows in one durable step; True: it waits in the queue (perhaps did before). False where the live row is another by
        now, is not LOCAL, or there is no remote. `now_ms` None: the machine's clock."""
        ...

    def entries(self, after: int = 0, *, limit: int = 1000) -> list[QueuedUpload]:
        """Entries with positions above `after`, ascending; who reads on from the last one misses nothing."""
        ...

    def find(self, row: ObjectRow) -> QueuedUpload | None:
        """The entry of this very row."""
        ...

    async def remove(self, positions: Sequence[int]) -> None:
        """Forget entries that are stale (of hidden rows), or cannot be done. Idempotent. They may come back after power loss."""
        ...
