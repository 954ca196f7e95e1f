"""The outbox and the remote queue of the LMDB catalog: `remote_protocol` over the tables that its changes write.

Guarantees: only what has settled is shown, so that who reads on from the last position misses nothing, and nothing that
is shown of the outbox is taken back by power loss. Event loop only; reads are inline (a page of 1,000 entries takes about a
millisecond), but for those of a snapshot, which run on the given pool. Does not own the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, TypeVar

from kvobj.catalog.catalog_rows import CatalogRows, bucket_of, newest_gone
from kvobj.catalog.encoding import BUCKETS, USERS, decode_object, decode_user
from kvobj.catalog.log_entries import GoneBuckets, encode_entry, encode_object_value
from kvobj.catalog.namespace_changes import stored_namespaces
from kvobj.catalog.object_changes import same_blobs
from kvobj.catalog.object_rows import ObjectRows
from kvobj.catalog.remote_protocol import OutboxEntry, QueuedUpload, QueueReason, QueueTotals, outbox_full
from kvobj.catalog.remote_rows import RemoteRows
from kvobj.catalog.rows import Durability, ObjectRow, ObjectState
from kvobj.clock import SystemClock
from kvobj.database import Database, ReadView, WriteView
from kvobj.database.outbox import OUTBOX, close_gap, forget_entries, has_gap, stored_bytes, stored_entries

T = TypeVar("T")

_STEP: Final = 1000
_PAGE_BYTES: Final = 8 * 1024 * 1024
"""A row of an object in 10,000 parts takes a megabyte."""
_NOTHING_WAITS: Final = QueueTotals(0, 0, None)


class LmdbOutbox:
    """See the module's text and `Outbox`."""

    def __init__(self, database: Database, objects: ObjectRows, *, executor: Executor) -> None:
        self._database = database
        self._objects = objects
        self._executor = executor
        self._told = database.published
        self._limit_bytes: int | None = None
        self.on_published: Callable[[], None] = _nothing
        if database.has_outbox:
            database.watch_groups(started=_nothing, settled=self._on_settled)

    def _on_settled(self) -> None:
        if self._database.published != self._told:
            self._told = self._database.published
            self.on_published()

    @property
    def position(self) -> int:
        """See `Outbox.position`."""
        return self._database.published

    def removals_of(self, bucket: str) -> int:
        """See `Outbox.removals_of`."""
        return self._database.published_of(bucket)

    @property
    def size_bytes(self) -> int:
        """See `Outbox.size_bytes`."""
        if not self._database.has_outbox:
            return 0
        with self._database.read() as view:
            return stored_bytes(view)

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
        if not self._database.has_outbox:
            return 0
        with self._database.read() as view:
            return view.count(OUTBOX)

    @property
    def oldest_ms(self) -> int | None:
        """See `Outbox.oldest_ms`."""
        first = self.entries(limit=1)
        return first[0].since_ms if first else None

    @property
    def snapshot_due(self) -> bool:
        """See `Outbox.snapshot_due`."""
        if not self._database.has_outbox:
            return False
        with self._database.read() as view:
            return has_gap(view)

    def entries(self, after: int = 0, *, limit: int = 1000) -> list[OutboxEntry]:
        """See `Outbox.entries`."""
        if not self._database.has_outbox:
            return []
        entries: list[OutboxEntry] = []
        size_bytes = 0
        with self._database.read() as view:
            for position, since_ms, content in islice(stored_entries(view, after=after, upto=self.position), limit):
                entries.append(OutboxEntry(position, content, since_ms))
                size_bytes += len(content)
                if size_bytes >= _PAGE_BYTES:
                    break
        return entries

    async def discard(self, upto: int) -> None:
        """See `Outbox.discard`."""
        while told := [entry.position for entry in self.entries(limit=_STEP) if entry.position <= upto]:
            await self._database.write(partial(_forget, told), synced=False)

    async def snapshot(self) -> AsyncIterator[bytes]:
        """See `Outbox.snapshot`."""
        for content in await self._on_thread(self._users):
            yield content
        for bucket in await self._on_thread(self._buckets):
            for content in await self._on_thread(self._bucket_and_namespaces, bucket):
                yield content
            start: bytes | None = b""
            while start is not None:
                page, start = await self._on_thread(self._shared_rows, bucket, start)
                for content in page:
                    yield content
        # Last: of a bucket that is in no page above, because it was removed beside this, the time is known here.
        for content in await self._on_thread(self._gone_buckets):
            yield content
        # Pages show what is committed, also while it is being flushed. A snapshot that told of what power loss then takes
        # back would never be put right: a row that was not SHARED after all goes without a word.
        await self._database.write(_wait_for_flush)

    async def snapshot_told(self) -> None:
        """See `Outbox.snapshot_told`."""
        await self._database.write(close_gap)

    async def _on_thread(self, read: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, read, *arguments)

    def _users(self) -> list[bytes]:
        with self._database.read() as view:
            return [encode_entry(decode_user(value)) for _, value in view.range(USERS)]

    def _bucket_and_namespaces(self, name: str) -> list[bytes]:
        with self._database.read() as view:
            bucket = bucket_of(view, name)
            if bucket is None:
                return []
            return [encode_entry(bucket.row), *map(encode_entry, stored_namespaces(view, bucket.root))]

    def _gone_buckets(self) -> list[bytes]:
        with self._database.read() as view:
            gone = newest_gone(view)
        return [] if gone is None else [encode_entry(GoneBuckets(gone))]

    def _buckets(self) -> list[str]:
        with self._database.read() as view:
            return [name.decode() for name, _ in view.range(BUCKETS)]

    def _shared_rows(self, bucket: str, start: bytes) -> tuple[list[bytes], bytes | None]:
        with self._database.read() as view:
            stored = bucket_of(view, bucket)
            if stored is None:
                return [], None
            page = list(islice(self._objects.durable.items(view, stored.root, start), _STEP))
        found = [
            encode_object_value(value) for _, value in page if decode_object(value).durability is Durability.SHARED
        ]
        return found, page[-1][0] + b"\0" if len(page) == _STEP else None


class LmdbRemoteQueue:
    """See the module's text and `RemoteQueue`."""

    def __init__(self, database: Database, tables: CatalogRows) -> None:
        self._database = database
        self._tables = tables
        self._rows = tables.remote
        self._has_added = self._has_removed = False
        self.on_queued: Callable[[], None] = _nothing
        self.on_shorter: Callable[[], None] = _nothing
        if self._rows is not None:
            self._rows.on_added = self._on_added
            self._rows.on_removed = self._on_removed
            database.watch_groups(started=_nothing, settled=self._on_settled)

    def _on_added(self) -> None:
        self._has_added = True

    def _on_removed(self) -> None:
        self._has_removed = True

    def _on_settled(self) -> None:
        if self._has_added:
            self._has_added = False
            self.on_queued()
        if self._has_removed:
            self._has_removed = False
            self.on_shorter()

    @property
    def totals(self) -> QueueTotals:
        """See `RemoteQueue.totals`."""
        if self._rows is None:
            return _NOTHING_WAITS
        with self._database.read() as view:
            return self._rows.totals(view)

    async def add(self, rows: Sequence[ObjectRow], reason: QueueReason, *, now_ms: int | None = None) -> list[bool]:
        """See `RemoteQueue.add`."""
        if self._rows is None:
            return [False] * len(rows)
        now = SystemClock().now_ms() if now_ms is None else now_ms
        return await self._database.write(AddToQueue(self._tables, self._rows, rows, reason, now))

    def entries(self, after: int = 0, *, limit: int = 1000) -> list[QueuedUpload]:
        """See `RemoteQueue.entries`."""
        if self._rows is None:
            return []
        with self._database.read() as view:
            return list(islice(self._rows.entries(view, after), limit))

    def find(self, row: ObjectRow) -> QueuedUpload | None:
        """See `RemoteQueue.find`."""
        if self._rows is None:
            return None
        with self._database.read() as view:
            return self._rows.find(view, row)

    async def remove(self, positions: Sequence[int]) -> None:
        """See `RemoteQueue.remove`."""
        if self._rows is not None and positions:
            await self._database.write(partial(_remove, self._rows, list(positions)), synced=False)


@dataclass(frozen=True, slots=True)
class AddToQueue:
    """`RemoteQueue.add` as a change."""

    tables: CatalogRows
    queue: RemoteRows
    rows: Sequence[ObjectRow]
    reason: QueueReason
    now_ms: int

    def __call__(self, view: WriteView) -> list[bool]:
        """Run it."""
        return [self._add(view, row) for row in self.rows]

    def _add(self, view: WriteView, row: ObjectRow) -> bool:
        live = self._live(view, row)
        if live is None or live.durability is not Durability.LOCAL or not same_blobs(live, row):
            return False
        self.queue.add(view, live, self.reason, now_ms=self.now_ms)
        return True

    def _live(self, view: ReadView, row: ObjectRow) -> ObjectRow | None:
        bucket = bucket_of(view, row.bucket)
        found = None if bucket is None else self.tables.objects.any(view, bucket.root, row.key.encode())
        return found if found is not None and found.state is ObjectState.LIVE else None


def _wait_for_flush(_: WriteView) -> None:
    """Groups are flushed in order: who waits for this one waits for those before it."""


def _forget(positions: list[int], view: WriteView) -> None:
    forget_entries(view, positions)


def _remove(rows: RemoteRows, positions: list[int], view: WriteView) -> None:
    rows.remove(view, positions)


def _nothing() -> None:
    """Nobody waits."""
