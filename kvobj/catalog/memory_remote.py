"""The outbox and the remote queue of the reference driver: a dict each, every verb read off the protocol's text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from kvobj.catalog.log_entries import BucketRemoved, LogEntry, NamespaceRemoved, RowRemoved, encode_entry
from kvobj.catalog.remote_protocol import (
    OutboxEntry,
    QueuedUpload,
    QueueReason,
    QueueTotals,
    first_blob,
    outbox_full,
    queue_name,
)
from kvobj.catalog.remote_rows import reason_to_queue
from kvobj.catalog.rows import BucketRow, Durability, ObjectRow, ObjectState
from kvobj.clock import SystemClock
from kvobj.database.outbox import ENTRY_BYTES


class MemoryOutbox:
    """See `Outbox`. `state` gives what a snapshot tells."""

    def __init__(self, state: Callable[[], Iterable[LogEntry]], *, has_remote: bool) -> None:
        self._state = state
        self._has_remote = has_remote
        self._entries: dict[int, OutboxEntry] = {}
        self._removals: dict[str, int] = {}
        self._limit_bytes: int | None = None
        self.position = 0
        self.snapshot_due = has_remote
        self.on_published: Callable[[], None] = _nothing

    def publish(self, entry: LogEntry) -> None:
        """Tell of a change."""
        if self._has_remote:
            self.position += 1
            content = encode_entry(entry)
            match entry:
                case BucketRemoved(name=bucket) | RowRemoved(bucket=bucket) | NamespaceRemoved(bucket=bucket):
                    self._removals[bucket] = self.position
                case ObjectRow(bucket=bucket) if entry.state is not ObjectState.LIVE:
                    self._removals[bucket] = self.position
            self._entries[self.position] = OutboxEntry(self.position, content, SystemClock().now_ms())
            self.on_published()

    def publish_row(self, before: ObjectRow | None, after: ObjectRow | None) -> None:
        """Tell of a change of a durable row."""
        if after is not None and after is not before and after.durability is Durability.SHARED:
            self.publish(after)
        elif before is not None and before is not after and before.durability is Durability.SHARED:
            self.publish(RowRemoved(before.bucket, before.key))

    def removals_of(self, bucket: str) -> int:
        """See `Outbox.removals_of`."""
        return self._removals.get(bucket, 0)

    @property
    def size_bytes(self) -> int:
        """See `Outbox.size_bytes`."""
        return sum(len(entry.content) + ENTRY_BYTES for entry in self._entries.values())

    def bound(self, limit_bytes: int) -> None:
        """See `Outbox.bound`."""
        self._limit_bytes = limit_bytes

    @property
    def is_full(self) -> bool:
        """See `Outbox.is_full`."""
        return self._limit_bytes is not None and self.size_bytes >= self._limit_bytes

    def require_room(self) -> None:
        """See `Outbox.require_room`."""
        if self.is_full:
            raise outbox_full(self.pending, self.size_bytes)

    @property
    def pending(self) -> int:
        """See `Outbox.pending`."""
        return len(self._entries)

    @property
    def oldest_ms(self) -> int | None:
        """See `Outbox.oldest_ms`."""
        return next((entry.since_ms for entry in self._entries.values()), None)

    def entries(self, after: int = 0, *, limit: int = 1000) -> list[OutboxEntry]:
        """See `Outbox.entries`."""
        return [entry for position, entry in self._entries.items() if position > after][:limit]

    async def discard(self, upto: int) -> None:
        """See `Outbox.discard`."""
        self._entries = {position: entry for position, entry in self._entries.items() if position > upto}

    async def snapshot(self) -> AsyncIterator[bytes]:
        """See `Outbox.snapshot`."""
        for entry in list(self._state()):
            yield encode_entry(entry)

    async def snapshot_told(self) -> None:
        """See `Outbox.snapshot_told`."""
        self.snapshot_due = False


class MemoryRemoteQueue:
    """See `RemoteQueue`. `live` finds the live row of a bucket and key."""

    def __init__(
        self, live: Callable[[str, str], ObjectRow | None], allocate: Callable[[], int], *, has_remote: bool
    ) -> None:
        self._live = live
        self._allocate = allocate
        self._has_remote = has_remote
        self._entries: dict[int, QueuedUpload] = {}
        self.on_queued: Callable[[], None] = _nothing
        self.on_shorter: Callable[[], None] = _nothing

    def put(self, row: ObjectRow, reason: QueueReason, now_ms: int) -> None:
        """Queue a row, unless it waits already."""
        if self._has_remote and self.find(row) is None:
            at = self._allocate()
            self._entries[at] = QueuedUpload(
                at, row.bucket, row.key, first_blob(row), row.size_bytes, now_ms, reason, row.sequence
            )
            self.on_queued()

    def put_by_rule(self, bucket: BucketRow, row: ObjectRow, now_ms: int, *, asked: bool = False) -> None:
        """Queue a row that has just become durable, where it is to go to the remote."""
        reason = reason_to_queue(bucket, row, asked=asked)
        if reason is not None:
            self.put(row, reason, now_ms)

    def raised(self, row: ObjectRow) -> None:
        """The row is SHARED."""
        self._take([at for at, entry in self._entries.items() if entry.is_of(row)])

    def overtaken(self, before: ObjectRow | None, after: ObjectRow | None) -> None:
        """A durable row gives way to another, or to none."""
        if before is not None and (after is None or queue_name(after) != queue_name(before)):
            self.raised(before)

    def _take(self, positions: Sequence[int]) -> None:
        taken = [self._entries.pop(position, None) for position in positions]
        if any(entry is not None for entry in taken):
            self.on_shorter()

    @property
    def totals(self) -> QueueTotals:
        """See `RemoteQueue.totals`."""
        waiting = list(self._entries.values())
        oldest = waiting[0].since_ms if waiting else None
        return QueueTotals(len(waiting), sum(entry.size_bytes for entry in waiting), oldest)

    async def add(self, rows: Sequence[ObjectRow], reason: QueueReason, *, now_ms: int | None = None) -> list[bool]:
        """See `RemoteQueue.add`."""
        added = []
        for row in rows:
            live = self._live(row.bucket, row.key)
            fits = live is not None and live.durability is Durability.LOCAL and _is_same(live, row)
            if live is not None and fits:
                self.put(live, reason, SystemClock().now_ms() if now_ms is None else now_ms)
            added.append(fits and self._has_remote)
        return added

    def entries(self, after: int = 0, *, limit: int = 1000) -> list[QueuedUpload]:
        """See `RemoteQueue.entries`."""
        return [entry for position, entry in self._entries.items() if position > after][:limit]

    def find(self, row: ObjectRow) -> QueuedUpload | None:
        """See `RemoteQueue.find`."""
        return next((entry for entry in self._entries.values() if entry.is_of(row)), None)

    async def remove(self, positions: Sequence[int]) -> None:
        """See `RemoteQueue.remove`."""
        self._take(positions)


def _is_same(one: ObjectRow, other: ObjectRow) -> bool:
    if not one.blobs and not other.blobs:
        return one.sequence == other.sequence
    return [blob.blob_id for blob in one.blobs] == [blob.blob_id for blob in other.blobs]


def _nothing() -> None:
    """Nobody waits."""
