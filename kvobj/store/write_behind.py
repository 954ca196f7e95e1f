"""Write-behind: what is only in memory is written down to the home tier, in commit order.

The queue's content is the catalog's volatile rows, so nothing is forgotten across a crash: a start scans them and
enqueues them again. Entries are taken in order (parents were committed before their children), written a few at a time, and
moved to the durable catalog in one batch. A full or failing home tier delays it; dirty bytes are bounded by `Placement`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import Durability, ObjectRow
from kvobj.clock import Clock
from kvobj.errors import CapacityError, KvobjError, StoreFullError
from kvobj.ids import BlobId
from kvobj.store.placement import Placement
from kvobj.tiers.protocol import BlobNames

BATCH_ROWS: Final = 64
BATCH_BYTES: Final = 256 * 1024 * 1024
CONCURRENT_BLOBS: Final = 4


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits to be written down: objects, bytes, and the age of the oldest in seconds."""

    objects: int
    size_bytes: int
    oldest_seconds: float


@dataclass(frozen=True, slots=True)
class _Entry:
    bucket: str
    key: str
    blob_id: bytes
    size_bytes: int
    since: float


class WriteBehind:
    """One worker over one queue. Event-loop-only."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        placement: Placement,
        clock: Clock,
        make_room: Callable[[int], Awaitable[int]],
        on_written: Callable[[ObjectRow], Awaitable[None]],
        log: logging.Logger,
        retry_seconds: float = 0.2,
    ) -> None:
        self._catalog = catalog
        self._placement = placement
        self._clock = clock
        self._make_room = make_room
        self._on_written = on_written
        self._log = log
        self._retry_seconds = retry_seconds
        self._queue: deque[_Entry] = deque()
        self._queued_bytes = 0
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self.written_objects = 0
        self.written_bytes = 0
        self.failures = 0

    def enqueue(self, row: ObjectRow) -> None:
        """Take a committed row of class `memory` whose digests are known."""
        self._queue.append(_Entry(row.bucket, row.key, row.blobs[0].blob_id, row.size_bytes, self._clock.monotonic()))
        self._queued_bytes += row.size_bytes
        self._idle.clear()
        self._arrived.set()

    @property
    def backlog(self) -> Backlog:
        """What waits now."""
        oldest = self._clock.monotonic() - self._queue[0].since if self._queue else 0.0
        return Backlog(objects=len(self._queue), size_bytes=self._queued_bytes, oldest_seconds=oldest)

    def start(self) -> None:
        """Begin to work off the queue."""
        self._task = asyncio.create_task(self._run(), name="write-behind")

    async def flush(self, *, timeout_seconds: float) -> bool:
        """Wait until everything enqueued so far is written down; False if the deadline came first."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def aclose(self) -> None:
        """Stop at once; what is left stays in the catalog's volatile rows."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            if not batch:
                self._arrived.clear()
                self._idle.set()
                continue
            try:
                await self._write_down(batch)
            except KvobjError as error:
                self.failures += 1
                self._log.warning("write-behind failed, will retry: %s", error)
                if isinstance(error, StoreFullError):
                    await self._make_room(sum(entry.size_bytes for entry in batch))
                await asyncio.sleep(self._retry_seconds)
                continue
            for entry in batch:
                self._queue.popleft()
                self._queued_bytes -= entry.size_bytes

    def _next_batch(self) -> list[_Entry]:
        batch: list[_Entry] = []
        size_bytes = 0
        for entry in self._queue:
            if batch and (len(batch) == BATCH_ROWS or size_bytes + entry.size_bytes > BATCH_BYTES):
                break
            batch.append(entry)
            size_bytes += entry.size_bytes
        return batch

    async def _write_down(self, batch: list[_Entry]) -> None:
        rows = await self._current_rows(batch)
        if not rows:
            return
        slots = asyncio.Semaphore(CONCURRENT_BLOBS)
        async with asyncio.TaskGroup() as group:
            puts = [
                group.create_task(self._put(BlobId(blob.blob_id), BlobNames(row.bucket, row.key), slots))
                for row in rows
                for blob in row.blobs
            ]
        failed = [error for error in (put.result() for put in puts) if error is not None]
        if failed:
            raise failed[0]
        raised = [msgspec.structs.replace(row, durability=Durability.LOCAL) for row in rows]
        results = await self._catalog.raise_durability(raised)
        for row, done in zip(raised, results, strict=True):
            blob_ids = [BlobId(blob.blob_id) for blob in row.blobs]
            if done:
                for blob_id in blob_ids:
                    self._placement.written_down(blob_id)
                await self._on_written(row)
                self.written_objects += 1
                self.written_bytes += row.size_bytes
            else:
                # Deleted or replaced meanwhile: its blobs were queued then, and the reaper may have been at the home
                # tier before our put was.
                await self._placement.discard(blob_ids)

    async def _current_rows(self, batch: list[_Entry]) -> list[ObjectRow]:
        rows: list[ObjectRow] = []
        for entry in batch:
            (row,) = await self._catalog.lookup(entry.bucket, [entry.key])
            if row is not None and row.blobs[0].blob_id == entry.blob_id and row.durability is Durability.MEMORY:
                rows.append(row)
        return rows

    async def _put(self, blob_id: BlobId, names: BlobNames, slots: asyncio.Semaphore) -> KvobjError | None:
        async with slots:
            try:
                if not await self._placement.home.missing([blob_id]):
                    return None
                frame = await self._placement.cache.get(blob_id)
                if frame is None:
                    # Deleted while it waited: raise_durability will say so.
                    return None
                try:
                    await self._placement.home.put(blob_id, frame, names)
                finally:
                    frame.release()
            except CapacityError as error:
                return error
            except KvobjError as error:
                return error
        return None
