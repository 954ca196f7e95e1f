"""Write-behind: what is only in memory is written down to the home tier, in commit order.

The queue's content is the catalog's volatile rows, so nothing is forgotten across a crash: a start scans them and
enqueues them again. Entries are taken in order (parents were committed before their children), written a few at a time, and
moved to the durable catalog in one batch. A full or failing home tier delays it; dirty bytes are bounded by `Placement`. Chunks at
home give way to what waits here only where that tier is above its watermark, or somebody waits for room in memory: on a disk that
is full before the tier is, they would go for others that memory holds as well.

An object is left alone until it is `delay_seconds` old, unless dirty bytes press: a burst of chunks is then written in few
large batches, after the burst and not beside it, and a chunk that is deleted at once is never written.

A chunk that policy does not want in the home tier (`admits`) stays dirty, and its descendants with it. When dirty bytes press,
or a flush wants everything settled, policy is asked once more, then such chunks are removed (`remove`), the longest refused
first, leaves first; those that cannot be (somebody asked for them a moment ago, or pinned them) are written down after all.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from kvobj.arena import PinnedFrame
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import Durability, LossyCopy, ObjectRow, ObjectState
from kvobj.clock import Clock
from kvobj.errors import CorruptionError, FrameCorruptError, KvobjError, StoreFullError
from kvobj.ids import BlobId
from kvobj.store.placement import Placement
from kvobj.store.sealed import with_header_digest
from kvobj.tiers.protocol import BlobNames

BATCH_ROWS: Final = 64
BATCH_BYTES: Final = 256 * 1024 * 1024
CONCURRENT_BLOBS: Final = 8
# From this share of the bound on dirty bytes, objects are written down at once.
PRESSING_SHARE: Final = 0.5
# Refused chunks are removed down to this share of the bound on dirty bytes.
RELIEVED_SHARE: Final = 0.4
REFUSED_MAX: Final = 65_536


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits to be written down: objects, bytes, and the age of the oldest in seconds. `refused_objects` wait for nothing:
    policy does not want them in the home tier."""

    objects: int
    size_bytes: int
    oldest_seconds: float
    refused_objects: int = 0


class MakesRoom(Protocol):
    """`Collector.make_room`."""

    async def __call__(self, needed_bytes: int, *, is_waited_for: bool) -> int:
        """Make room in the home tier for what it refused; bytes that went."""
        ...


class Judged(Protocol):
    """`Collector.judged`."""

    def __call__(self, row: ObjectRow, /, *, is_admitted: bool) -> None:
        """Policy wants the row in the home tier, or does not."""
        ...


class _Failure(msgspec.Struct, frozen=True):
    """What was not written down, and why."""

    row: ObjectRow
    error: KvobjError


class _Entry(msgspec.Struct, frozen=True):
    bucket: str
    key: str
    blob_id: bytes
    size_bytes: int
    since: float
    is_forced: bool = False


async def _always(_: ObjectRow) -> bool:
    return True


async def _never(_: Sequence[ObjectRow]) -> int:
    return 0


async def _note_nothing(_: ObjectRow) -> None:
    """Nobody wants to know of refused chunks."""


def _count_nothing(_: ObjectRow, *, is_admitted: bool) -> None:
    """Nobody counts what policy says."""


def _ignore() -> None:
    """Nobody wants to know that blobs were queued for deletion."""


class WriteBehind:
    """One worker over one queue. `on_queued`: blobs were queued for deletion; `on_refused`: a chunk stays in memory alone,
    since policy does not want it in the home tier; `on_judged` is told what `admits` said of a row the first time, however often
    the row has to be tried. Event-loop-only."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        placement: Placement,
        clock: Clock,
        make_room: MakesRoom,
        on_written: Callable[[ObjectRow], Awaitable[None]],
        log: logging.Logger,
        admits: Callable[[ObjectRow], Awaitable[bool]] = _always,
        remove: Callable[[Sequence[ObjectRow]], Awaitable[int]] = _never,
        on_queued: Callable[[], None] = _ignore,
        on_refused: Callable[[ObjectRow], Awaitable[None]] = _note_nothing,
        on_judged: Judged = _count_nothing,
        delay_seconds: float = 2.0,
        retry_seconds: float = 0.2,
    ) -> None:
        self._catalog = catalog
        self._placement = placement
        self._clock = clock
        self._make_room = make_room
        self._on_written = on_written
        self._log = log
        self._admits = admits
        self._remove = remove
        self._on_queued = on_queued
        self._on_refused = on_refused
        self._on_judged = on_judged
        self._delay_seconds = delay_seconds
        self._retry_seconds = retry_seconds
        self._flushing = 0
        self._queue: deque[_Entry] = deque()
        self._queued_bytes = 0
        self._refused: dict[tuple[str, str], _Entry] = {}
        # Lossy copies that are at home and in no row yet, by the blob that they are of: a batch that is tried again names them.
        self._lossy: dict[bytes, LossyCopy] = {}
        # First blob ids of a batch that failed and is tried again.
        self._tried: frozenset[bytes] = frozenset()
        self._turn = asyncio.Lock()
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self.written_objects = 0
        self.written_bytes = 0
        self.failures = 0

    def enqueue(self, row: ObjectRow) -> None:
        """Take a committed row of class `memory` whose digests are known."""
        self._queue.append(_entry_of(row, self._clock.monotonic()))
        self._queued_bytes += row.size_bytes
        self._idle.clear()
        if len(self._queue) == 1 or self._presses:
            self._arrived.set()

    @property
    def _presses(self) -> bool:
        return bool(self._flushing) or self._placement.dirty_share >= PRESSING_SHARE

    @property
    def backlog(self) -> Backlog:
        """What waits now."""
        oldest = self._clock.monotonic() - self._queue[0].since if self._queue else 0.0
        return Backlog(
            objects=len(self._queue),
            size_bytes=self._queued_bytes,
            oldest_seconds=oldest,
            refused_objects=len(self._refused),
        )

    def refused(self) -> Iterator[tuple[str, str, int]]:
        """Bucket, key and bytes of the chunks that policy keeps from the home tier, longest refused first."""
        return ((entry.bucket, entry.key, entry.size_bytes) for entry in tuple(self._refused.values()))

    def start(self) -> None:
        """Begin to work off the queue."""
        self._task = asyncio.create_task(self._run(), name="write-behind")

    async def flush(self, *, timeout_seconds: float) -> bool:
        """Wait until everything enqueued so far is written down, or removed where policy refuses it; False if the deadline came
        first."""
        self._flushing += 1
        if self._refused:
            self._idle.clear()
        self._arrived.set()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        finally:
            self._flushing -= 1
        return True

    async def write_down_now(self, rows: Sequence[ObjectRow], *, lossless: bool) -> None:
        """Write these rows down before all that waits, whatever policy says of them: somebody needs them at home, and, if
        `lossless`, the very bytes. Their digests are known. Errors as of `Tier.put`; the rows are written down in their turn
        then."""
        batch = [_entry_of(row, self._clock.monotonic(), is_forced=True) for row in rows]
        failures = await self._write_down(batch, lossless=lossless)
        if failures:
            raise failures[0].error

    async def aclose(self) -> None:
        """Stop at once; what is left stays in the catalog's volatile rows."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            if self._refused and (self._presses or len(self._refused) >= REFUSED_MAX):
                try:
                    await self._settle_refused()
                except KvobjError as error:
                    self._log.warning("refused chunks could not be settled, will retry: %s", error)
                    await asyncio.sleep(self._retry_seconds)
                    continue
            if not self._queue:
                self._arrived.clear()
                self._idle.set()
                continue
            await self._ripen()
            batch = self._next_batch()
            failed = await self._failed(batch)
            if failed is not None:
                self.failures += 1
                self._log.warning("write-behind failed, will retry: %s", failed)
                self._tried = frozenset(entry.blob_id for entry in batch)
                await asyncio.sleep(self._retry_seconds)
                continue
            self._tried = frozenset()
            for entry in batch:
                self._queue.popleft()
                self._queued_bytes -= entry.size_bytes

    async def _ripen(self) -> None:
        """Wait until the oldest entry is old enough, or dirty bytes press, or somebody waits for a flush."""
        age = self._clock.monotonic() - self._queue[0].since
        if age >= self._delay_seconds or self._presses:
            return
        self._arrived.clear()
        try:
            async with asyncio.timeout(self._delay_seconds - age):
                await self._arrived.wait()
        except TimeoutError:
            return
        finally:
            self._arrived.set()

    async def _failed(self, batch: list[_Entry]) -> KvobjError | None:
        """Write a batch down, and make room for what the home tier refused of it; why it has to be tried again, if it has."""
        try:
            failures = await self._write_down(batch)
            # No more than that: the others of the batch are at home by now, and would have to go for it.
            lacking = sum(each.row.size_bytes for each in failures if isinstance(each.error, StoreFullError))
            if lacking:
                is_waited_for = bool(self._flushing) or self._placement.is_waited_for
                await self._make_room(lacking, is_waited_for=is_waited_for)
        except KvobjError as error:
            return error
        return failures[0].error if failures else None

    def _next_batch(self) -> list[_Entry]:
        batch: list[_Entry] = []
        size_bytes = 0
        for entry in self._queue:
            if batch and (len(batch) == BATCH_ROWS or size_bytes + entry.size_bytes > BATCH_BYTES):
                break
            batch.append(entry)
            size_bytes += entry.size_bytes
        return batch

    async def _write_down(self, batch: list[_Entry], *, lossless: bool = False) -> list[_Failure]:
        """What failed; the rest is written down, or need not be."""
        async with self._turn:
            return await self._write_batch(batch, lossless=lossless)

    async def _write_batch(self, batch: list[_Entry], *, lossless: bool) -> list[_Failure]:
        current = await self._current_rows(batch)
        await self._drop_lossy({entry.blob_id for entry in batch}.difference(row.blobs[0].blob_id for row in current))
        rows = await self._admitted(current, {entry.blob_id for entry in batch if entry.is_forced})
        if not rows:
            return []
        slots = asyncio.Semaphore(CONCURRENT_BLOBS)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._put_row(row, slots, lossless=lossless)) for row in rows]
        outcomes = [task.result() for task in tasks]
        raised = [outcome for outcome in outcomes if isinstance(outcome, ObjectRow)]
        failures = [
            _Failure(row, outcome)
            for row, outcome in zip(rows, outcomes, strict=True)
            if isinstance(outcome, KvobjError)
        ]
        try:
            results = await self._catalog.raise_durability(raised) if raised else []
        except KvobjError as error:
            return [*(_Failure(row, error) for row in raised), *failures]
        for row, done in zip(raised, results, strict=True):
            await self._after(row, done=done)
        return failures

    async def _admitted(self, rows: list[ObjectRow], forced: set[bytes]) -> list[ObjectRow]:
        """Those that the home tier should have; the others are kept as refused. A child of a refused chunk is of no use there."""
        admitted: list[ObjectRow] = []
        for row in rows:
            name = (row.bucket, row.key)
            is_behind = bool(row.parent) and (row.bucket, row.parent) in self._refused
            if row.blobs[0].blob_id in forced or (not is_behind and await self._asked(row)):
                self._refused.pop(name, None)
                admitted.append(row)
            elif name not in self._refused:
                self._refused[name] = _entry_of(row, self._clock.monotonic())
                await self._on_refused(row)
        return admitted

    async def _asked(self, row: ObjectRow) -> bool:
        """What policy says of the row now: asked anew each time it is tried, since others may have come to be worth more."""
        is_admitted = await self._admits(row)
        if row.blobs[0].blob_id not in self._tried and (row.bucket, row.key) not in self._refused:
            self._on_judged(row, is_admitted=is_admitted)
        return is_admitted

    async def _settle_refused(self) -> None:
        """Remove refused chunks until dirty bytes press no more (all of them for a flush); what cannot go is to be written."""
        entries = list(self._refused.values())
        rows = await self._current_rows(entries)
        for gone in {(entry.bucket, entry.key) for entry in entries}.difference((row.bucket, row.key) for row in rows):
            self._refused.pop(gone, None)
        # Whoever was asked for since may be worth more now. Oldest first: parents come before their children.
        to_write = {row.blobs[0].blob_id for row in await self._admitted(rows, set())}
        relieved_bytes = int(RELIEVED_SHARE * self._placement.dirty_bytes_max)
        by_name = {(row.bucket, row.key): row for row in rows}
        refused = _leaves_first([row for row in rows if row.blobs[0].blob_id not in to_write])
        while refused:
            excess_bytes = self._placement.cache.dirty_bytes - relieved_bytes
            if not self._flushing and excess_bytes <= 0:
                break
            batch = _first_of(refused, None if self._flushing else excess_bytes)
            del refused[: len(batch)]
            await self._remove(batch)
            for row in batch:
                entry = self._refused.pop((row.bucket, row.key), None)
                if entry is not None and await self._current_rows([entry]):
                    to_write.update(_with_ancestors(row, by_name))
        since = self._clock.monotonic()
        for row in rows:
            if row.blobs[0].blob_id in to_write:
                self._refused.pop((row.bucket, row.key), None)
                self._queue.append(_entry_of(row, since, is_forced=True))
                self._queued_bytes += row.size_bytes

    async def _give_up(self, row: ObjectRow, error: CorruptionError) -> None:
        """The only copy is not what was written: the row would hold up everybody behind it, and can never be served."""
        (current,) = await self._catalog.lookup(row.bucket, [row.key])
        if current is not None and current.blobs[0].blob_id == row.blobs[0].blob_id:
            self.failures += 1
            self._log.error("a chunk in memory is lost and is dropped bucket=%s key=%s: %s", row.bucket, row.key, error)
            await self._catalog.drop_rows([row], now_ms=self._clock.now_ms())
        # Where the row was deleted meanwhile, a blob of it that was put since is named by nobody.
        await self._queue_blobs(row)

    async def _queue_blobs(self, row: ObjectRow) -> None:
        """Blobs of a row that is gone, a pin of which may still be read from them."""
        blob_ids = row.blob_ids
        await self._catalog.queue_blobs(blob_ids, now_ms=self._clock.now_ms(), pinned_by=blob_ids[0])
        self._lossy.pop(blob_ids[0], None)
        self._on_queued()

    async def _drop_lossy(self, blob_ids: Iterable[bytes]) -> None:
        """Lossy copies of chunks that went before a row could name them."""
        dropped = [self._lossy[blob_id].blob_id for blob_id in blob_ids if blob_id in self._lossy]
        if dropped:
            await self._catalog.queue_blobs(dropped, now_ms=self._clock.now_ms(), pinned_by=dropped[0])
            self._lossy = {of: copy for of, copy in self._lossy.items() if copy.blob_id not in dropped}
            self._on_queued()

    async def _after(self, row: ObjectRow, *, done: bool) -> None:
        if not done:
            # Deleted or replaced meanwhile: its blobs were queued then, and the reaper may have been at the home tier
            # before our put was.
            await self._queue_blobs(row)
            return
        self._lossy.pop(row.blobs[0].blob_id, None)
        for blob in row.blobs:
            self._placement.written_down(BlobId(blob.blob_id), is_lossy=row.lossy is not None)
        if row.state is ObjectState.LIVE:
            await self._on_written(row)
        self.written_objects += 1
        self.written_bytes += row.size_bytes

    async def _current_rows(self, batch: list[_Entry]) -> list[ObjectRow]:
        rows: list[ObjectRow] = []
        for entry in batch:
            (row,) = await self._catalog.lookup(entry.bucket, [entry.key])
            if row is None:
                # A pin keeps it readable after its DELETE: it is written down too, else it would be dirty until the pin ends.
                row = await self._catalog.lookup_hidden(entry.bucket, entry.key)
            if row is not None and row.blobs[0].blob_id == entry.blob_id and row.durability is Durability.MEMORY:
                rows.append(row)
        return rows

    async def _put_row(
        self, row: ObjectRow, slots: asyncio.Semaphore, *, lossless: bool
    ) -> ObjectRow | KvobjError | None:
        """Put the row's blobs into the home tier: the row as it is to be recorded, what failed, or None if it was given up."""
        names = BlobNames(row.bucket, row.key)
        async with slots:
            try:
                for blob in row.blobs:
                    row = await self._put_blob(row, BlobId(blob.blob_id), names, lossless=lossless)
            except CorruptionError as error:
                await self._give_up(row, error)
                return None
            except KvobjError as error:
                return error
        return msgspec.structs.replace(row, durability=Durability.LOCAL)

    async def _put_blob(self, row: ObjectRow, blob_id: BlobId, names: BlobNames, *, lossless: bool) -> ObjectRow:
        frame = await self._placement.cache.get(blob_id)
        if frame is None:
            if await self._placement.home.missing([blob_id]):
                # Deleted while it waited; or lost, and then the row must never say that it is at home.
                raise FrameCorruptError("no tier holds the blob", blob_id=blob_id)
            return row  # a large part, which went to the home tier at once
        try:
            if row.digest is None and len(row.blobs) == 1:
                row = with_header_digest(row, frame)
            if await self._placement.home.missing([blob_id]):
                row = await self._put_frame(row, blob_id, frame, names, lossless=lossless)
        finally:
            frame.release()
        return row

    async def _put_frame(
        self, row: ObjectRow, blob_id: BlobId, frame: PinnedFrame, names: BlobNames, *, lossless: bool
    ) -> ObjectRow:
        """Put the frame into the home tier as the chunk's namespace wants it there; the row, with its lossy copy if any."""
        coded = self._placement.coded
        coding = None if coded is None else await coded.of_row(row)
        if coding is not None and coding.is_lossy and lossless:
            coding = None
        if coded is not None and coding is not None and coding.is_lossy:
            copy = self._lossy.get(bytes(blob_id)) or await coded.put_lossy(frame, names, coding)
            if copy is not None:
                self._lossy[bytes(blob_id)] = copy
                return msgspec.structs.replace(row, lossy=copy)
            coding = None
        await self._placement.put_home(blob_id, frame, names, coding, rides=True)  # its row is raised next
        return row


def _entry_of(row: ObjectRow, since: float, *, is_forced: bool = False) -> _Entry:
    return _Entry(row.bucket, row.key, row.blobs[0].blob_id, row.size_bytes, since, is_forced)


def _with_ancestors(row: ObjectRow, among: Mapping[tuple[str, str], ObjectRow]) -> Iterator[bytes]:
    """First blob ids of a chunk that has to stay and of its ancestors among the given rows, which it needs to be of use."""
    at: ObjectRow | None = row
    while at is not None:
        yield at.blobs[0].blob_id
        at = among.get((at.bucket, at.parent)) if at.parent else None


def _first_of(rows: Sequence[ObjectRow], size_bytes: int | None) -> list[ObjectRow]:
    """As many of the first rows as have so many bytes together, or as a batch takes. Not empty where there are rows."""
    batch: list[ObjectRow] = []
    for row in rows[:BATCH_ROWS]:
        if size_bytes is not None and size_bytes <= 0:
            break
        batch.append(row)
        size_bytes = None if size_bytes is None else size_bytes - row.size_bytes
    return batch


def _leaves_first(rows: Sequence[ObjectRow]) -> list[ObjectRow]:
    """The rows in their order, but each after those of them that descend from it."""
    children: dict[tuple[str, str], list[ObjectRow]] = {}
    for row in rows:
        if row.parent:
            children.setdefault((row.bucket, row.parent), []).append(row)
    ordered: list[ObjectRow] = []
    seen: set[tuple[str, str]] = set()
    for row in rows:
        branch: list[ObjectRow] = []
        stack = [row]
        while stack:
            at = stack.pop()
            if (at.bucket, at.key) not in seen:
                seen.add((at.bucket, at.key))
                branch.append(at)
                stack += children.get((at.bucket, at.key), ())
        ordered += reversed(branch)
    return ordered
