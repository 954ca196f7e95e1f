"""Rows of class `local` that are to be `shared` go to the remote tier: those that somebody waits for first, the others in the order
in which they were queued, and no faster than readers can bear (`remote_pace`).

The queue is the catalog's, and durable (`catalog.remote_protocol`): a crash at any point leaves the row and its entry, and the
upload is done at the next start. An entry goes in the transaction that raises its row, removes it or puts another in its place; one
whose row is hidden, and what was read of the queue before such a transaction, is dropped at its turn. What fails is tried again
after growing pauses and holds up nobody else; where everything fails, one is tried at a time. Nothing is forgotten for age or
number: the queue's bound makes writers wait instead (`remote_room`).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from kvobj.background import BackgroundWorker
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.remote_protocol import QueuedUpload, QueueReason
from kvobj.catalog.rows import Durability, ObjectRow
from kvobj.clock import Clock
from kvobj.errors import CorruptionError, KvobjError, StoreFullError, TierUnavailableError
from kvobj.store.remote_frames import lasting_blobs
from kvobj.store.remote_pace import UploadPace
from kvobj.tiers.in_use import BlobsInUse

OBJECTS_AT_ONCE: Final = 16
RAISED_AT_ONCE: Final = 256
_PAGE: Final = 256
_FAILING: Final = 4
"""So many failures on end, and only one upload is tried at a time."""
_FIRST_PAUSE_SECONDS: Final = 0.2
_PAUSE_MAX_SECONDS: Final = 5.0
_RETRY_MAX_SECONDS: Final = 30.0
_LOOK_AGAIN_SECONDS: Final = 1.0
_DOUBLINGS_MAX: Final = 16
EVICTION_SECONDS: Final = 30.0


class Journal(Protocol):
    """Tells the remote what the catalog publishes (`manifests`)."""

    async def settled(self, position: int, *, timeout_seconds: float) -> bool:
        """Whether everything published up to the position is durable on the remote, in time."""
        ...

    async def flush(self, *, timeout_seconds: float) -> bool:
        """`settled` of all that is published now."""
        ...


class Sending(Protocol):
    """Puts what a row rests on into the remote (`RemoteFrames`)."""

    async def put(self, row: ObjectRow) -> int:
        """See `RemoteFrames.put`."""
        ...

    async def put_all(self, row: ObjectRow) -> int:
        """See `RemoteFrames.put_all`."""
        ...


@dataclass(frozen=True, slots=True)
class UploadBacklog:
    """What waits to be uploaded now, the age of the oldest in seconds, and how many attempts have failed since the start."""

    objects: int
    size_bytes: int
    oldest_seconds: float
    failures: int


async def _nothing_sound(_: ObjectRow) -> bool:
    return False


def _ignore() -> None:
    """Nobody wants to know."""


def _ignore_row(_: ObjectRow) -> None:
    """Nobody wants to know of rows that are shared."""


class RemoteUploads(BackgroundWorker):
    """See the module's text. Event-loop-only.

    `refusal`: why nothing may be written to the remote now, "" where it may. `is_available`: whether the remote answers, as far as
    is known. `has_sound_copy` looks at (and repairs) all copies of a row here that could not be read. `on_queued`: blobs were
    queued for deletion; `on_shorter`: the queue is shorter than it was; `on_shared`: the row is of class SHARED now.
    """

    worker_name = "remote-uploads"

    def __init__(
        self,
        *,
        catalog: Catalog,
        frames: Sending,
        journal: Journal,
        in_use: BlobsInUse,
        clock: Clock,
        log: logging.Logger,
        bytes_at_once: int,
        objects_at_once: int = OBJECTS_AT_ONCE,
        pause_max_seconds: float = _PAUSE_MAX_SECONDS,
        refusal: Callable[[], str] = str,
        is_available: Callable[[], bool] = lambda: True,
        has_sound_copy: Callable[[ObjectRow], Awaitable[bool]] = _nothing_sound,
        on_queued: Callable[[], None] = _ignore,
        on_shorter: Callable[[], None] = _ignore,
        on_shared: Callable[[ObjectRow], None] = _ignore_row,
    ) -> None:
        super().__init__()
        self._catalog = catalog
        self._queue = catalog.remote_queue
        self._frames = frames
        self._journal = journal
        self._in_use = in_use
        self._clock = clock
        self._log = log
        self._bytes_at_once = bytes_at_once
        self._objects_at_once = objects_at_once
        self._pause_max_seconds = pause_max_seconds
        self._refusal = refusal
        self._is_available = is_available
        self._has_sound_copy = has_sound_copy
        self._on_queued = on_queued
        self._on_shorter = on_shorter
        self._on_shared = on_shared
        self._queue.on_queued = self.wake
        self._queue.on_shorter = self._note_shorter
        self._woken = asyncio.Event()
        self._shortened = asyncio.Event()
        self._cursor = 0
        self._page: deque[QueuedUpload] = deque()
        self._urgent: dict[int, QueuedUpload] = {}
        self._next: QueuedUpload | None = None
        self._again: list[tuple[float, int, QueuedUpload]] = []
        self._attempts: dict[int, int] = {}
        self._busy: set[int] = set()
        self._uploading: set[asyncio.Task[None]] = set()
        self._uploading_bytes = 0
        self._sent: list[tuple[QueuedUpload, ObjectRow]] = []
        self._uncommitted: set[bytes] = set()
        self._raising: asyncio.Task[None] | None = None
        self._waiters: dict[int, list[asyncio.Future[bool]]] = {}
        self._failing = 0
        self._resume_at = 0.0
        self.pace = UploadPace()
        self.state = ""
        """Why nothing goes up at present; "" while all is well."""
        self.failures = 0
        self.uploaded_objects = 0
        self.uploaded_bytes = 0
        self.dropped_entries = 0

    @property
    def backlog(self) -> UploadBacklog:
        """What waits now."""
        totals = self._queue.totals
        oldest_ms = totals.oldest_ms
        oldest = 0.0 if oldest_ms is None else max(0.0, (self._clock.now_ms() - oldest_ms) / 1000)
        return UploadBacklog(totals.objects, totals.size_bytes, oldest, self.failures)

    def wake(self) -> None:
        """Look at the queue now."""
        self._woken.set()

    # -- waiting -------------------------------------------------------------------------------------------------
    async def wait_shared(self, row: ObjectRow, *, deadline_seconds: float) -> Durability:
        """Wait until a row of class LOCAL is SHARED, and the remote has been told of it; the class that was reached in time. A row
        that is not in the queue is put there. Ends early where the remote does not answer, is full, or may not be written."""
        try:
            async with asyncio.timeout(deadline_seconds):
                if row.durability is not Durability.SHARED and not await self._raised(row, QueueReason.SHARED):
                    return Durability.LOCAL
                is_told = await self._journal.settled(self._catalog.outbox.position, timeout_seconds=deadline_seconds)
        except TimeoutError:
            return Durability.LOCAL
        return Durability.SHARED if is_told else Durability.LOCAL

    async def put(self, row: ObjectRow, *, owns_blobs: bool = True) -> None:
        """Put the bytes of a row that is not committed yet; if that fails, none of them stay there, unless somebody else may name
        the blobs (`owns_blobs` False): what went up is the next try's then. Errors as `RemoteFrames.put`. What is there is nobody's
        until the row is committed: `concluded` tells of that."""
        refusal = self._refusal()
        if refusal:
            raise TierUnavailableError("the remote tier may not be written", cause=refusal)
        self._uncommitted.update(row.blob_ids)
        try:
            sent_bytes = await (self._frames.put_all(row) if owns_blobs else self._frames.put(row))
            self.uploaded_bytes += sent_bytes  # not in one: the sum would be read before the wait
        except BaseException:
            self.concluded(row)
            raise

    def concluded(self, row: ObjectRow) -> None:
        """A row whose bytes were `put` is committed, or never will be."""
        self._uncommitted.difference_update(row.blob_ids)

    def is_uncommitted(self, blob_id: bytes) -> bool:
        """Whether the blob is on the remote, or on its way there, for a row that is not committed yet."""
        return blob_id in self._uncommitted

    def note_shared(self, row: ObjectRow) -> None:
        """The row of `put` was committed as SHARED."""
        self.uploaded_objects += 1
        self._on_shared(row)

    async def upload_now(
        self, rows: Sequence[ObjectRow], *, timeout_seconds: float = EVICTION_SECONDS
    ) -> list[ObjectRow]:
        """Upload rows of class LOCAL before all that nobody waits for; those of them that are SHARED now. Ends early as
        `wait_shared`."""
        waiting = [row for row in rows if row.durability is Durability.LOCAL]
        if not waiting or self._refusal() or not self._is_available():
            return []
        await self._queue.add(waiting, QueueReason.EVICTED)
        tasks = [asyncio.create_task(self._raised(row, QueueReason.EVICTED)) for row in waiting]
        try:
            await asyncio.wait(tasks, timeout=timeout_seconds)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return [
            msgspec.structs.replace(row, durability=Durability.SHARED)
            for row, task in zip(waiting, tasks, strict=True)
            if not task.cancelled() and task.exception() is None and task.result()
        ]

    async def _raised(self, row: ObjectRow, reason: QueueReason) -> bool:
        entry = self._queue.find(row)
        if entry is None:
            await self._queue.add([row], reason)
            entry = self._queue.find(row)
        if entry is None:
            return await self._is_shared(row)
        if self._refusal():
            return False
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(entry.position, [])
        waiters.append(future)
        self._urgent[entry.position] = entry
        if self._is_available():
            self._resume_at = 0.0
        self._woken.set()
        try:
            return await future
        finally:
            waiters.remove(future)
            if not waiters and self._waiters.get(entry.position) is waiters:
                del self._waiters[entry.position]
                self._urgent.pop(entry.position, None)

    async def _is_shared(self, row: ObjectRow) -> bool:
        (live,) = await self._catalog.lookup(row.bucket, [row.key])
        return live is not None and live.durability is Durability.SHARED and live.blob_ids[:1] == row.blob_ids[:1]

    async def flush(self, *, timeout_seconds: float) -> bool:
        """Wait until nothing waits to be uploaded and the remote has been told of everything; False if the deadline came first.
        Hurries nobody: uploads keep out of readers' way as before."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._queue.totals.objects:
                    self._shortened.clear()
                    self._woken.set()
                    await self._shortened.wait()
                return await self._journal.flush(timeout_seconds=timeout_seconds)
        except TimeoutError:
            return False

    # -- work ----------------------------------------------------------------------------------------------------
    async def _run(self) -> None:
        try:
            while True:
                self._woken.clear()
                try:
                    pause_seconds = self._begin_what_can()
                except KvobjError as error:
                    self._log.warning("the remote queue cannot be read, will retry: %s", error)
                    pause_seconds = _LOOK_AGAIN_SECONDS
                try:
                    async with asyncio.timeout(pause_seconds):
                        await self._woken.wait()
                except TimeoutError:
                    continue
        finally:
            tasks = [*self._uploading, *([] if self._raising is None else [self._raising])]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            self._release_waiters()

    def _begin_what_can(self) -> float | None:
        """Begin uploads as far as there is room; seconds until there may be more to begin, None where only an event tells."""
        refusal = self._refusal()
        if refusal:
            self._say(refusal)
            self._release_waiters()
            return _LOOK_AGAIN_SECONDS
        now, at_once = asyncio.get_running_loop().time(), self._objects_at_once
        if self._failing >= _FAILING:
            if now < self._resume_at:
                return self._resume_at - now
            at_once = 1
        elif not self._failing:
            self._say("")
        while len(self._uploading) < at_once:
            wait = self.pace.wait_seconds(now)
            entry = self._choose(now, is_urgent_only=wait > 0)
            if entry is None and wait > 0:
                return wait
            if entry is None:
                return self._again[0][0] - now if self._again else None
            if self._uploading and self._uploading_bytes + entry.size_bytes > self._bytes_at_once:
                # Goes first once there is room, so that large ones are not overtaken for ever.
                self._next = self._next or entry
                return None
            if entry.position not in self._urgent:
                totals = self._queue.totals
                self.pace.begun(entry.size_bytes, now, queued_bytes=totals.size_bytes, queued=totals.objects)
            self._begin(entry)
        return None

    def _choose(self, now: float, *, is_urgent_only: bool) -> QueuedUpload | None:
        """The next entry that nobody is at: one that had no room, one that is waited for, one whose pause is over, the queue's
        next."""
        if self._next is not None and (not is_urgent_only or self._next.position in self._urgent):
            entry, self._next = self._next, None
            if entry.position not in self._busy:
                return entry
        for position, urgent in self._urgent.items():
            if position not in self._busy and position not in self._attempts:
                return urgent
        return None if is_urgent_only else self._choose_unawaited(now)

    def _choose_unawaited(self, now: float) -> QueuedUpload | None:
        while self._again and self._again[0][0] <= now:
            _, position, entry = heapq.heappop(self._again)
            if position not in self._busy:
                return entry
        while True:
            if not self._page:
                self._page.extend(self._queue.entries(self._cursor, limit=_PAGE))
                if not self._page:
                    return None
                self._cursor = self._page[-1].position
            entry = self._page.popleft()
            if entry.position not in self._busy and entry.position not in self._attempts:
                return entry

    def _begin(self, entry: QueuedUpload) -> None:
        self._busy.add(entry.position)
        self._uploading_bytes += entry.size_bytes
        task = asyncio.create_task(self._upload(entry), name="remote-upload")
        self._uploading.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._uploading.discard(task)
            self._uploading_bytes -= entry.size_bytes
            self._woken.set()

        task.add_done_callback(ended)

    async def _upload(self, entry: QueuedUpload) -> None:
        """One attempt. The row's blobs are in use meanwhile, so that none is reaped, here or there, while it is being put."""
        try:
            row = await self._current(entry)
            if row is None:
                await self._drop(entry, is_shared=False)
                return
            held = row.blob_ids
            self._in_use.hold(held)
            try:
                sent_bytes = await self._frames.put(row)
                self.uploaded_bytes += sent_bytes
            finally:
                self._in_use.release(held)
        except CorruptionError as error:
            await self._look_at_copies(entry, error)
        except KvobjError as error:
            self._failed(entry, error)
        except Exception as error:  # noqa: BLE001 - a defect met by one object must not keep its entry, and who waits, for ever
            self._failed_oddly([entry], error)
        else:
            self._sent.append((entry, row))
            if self._raising is None or self._raising.done():
                self._raising = asyncio.create_task(self._raise_sent(), name="raise-shared")

    async def _current(self, entry: QueuedUpload) -> ObjectRow | None:
        """The entry's row, if it is still to be uploaded. What DELETE has hidden is not, even while a pin still reads it."""
        (row,) = await self._catalog.lookup(entry.bucket, [entry.key])
        if row is None or _first_blob(row) != entry.blob_id or row.durability is not Durability.LOCAL:
            return None
        return row

    async def _raise_sent(self) -> None:
        """Raise what has arrived, all that there is in one commit, until there is no more."""
        while self._sent:
            batch, self._sent = self._sent[:RAISED_AT_ONCE], self._sent[RAISED_AT_ONCE:]
            raised = [msgspec.structs.replace(row, durability=Durability.SHARED) for _, row in batch]
            try:
                results = await self._catalog.raise_durability(raised)
                for (entry, row), done in zip(batch, results, strict=True):
                    if done:
                        self._done(entry, row)
                    else:
                        await self._overtaken(entry, row)
            except KvobjError as error:
                for entry, _ in batch:
                    if entry.position in self._busy:
                        self._failed(entry, error)
            except Exception as error:  # noqa: BLE001 - as for `_upload`
                self._failed_oddly([entry for entry, _ in batch if entry.position in self._busy], error)

    def _failed_oddly(self, entries: Sequence[QueuedUpload], error: Exception) -> None:
        self._log.error("uploads to the remote tier failed in an unforeseen way, will retry", exc_info=error)
        for entry in entries:
            self._failed(entry, TierUnavailableError("the upload failed in an unforeseen way", cause=repr(error)))

    def _done(self, entry: QueuedUpload, row: ObjectRow) -> None:
        self.uploaded_objects += 1
        if self._failing:
            self._log.info("uploads to the remote tier go on")
            if self._failing >= _FAILING:  # what waited for its turn to fail again need not wait longer
                self._again = [(0.0, position, again) for _, position, again in self._again]
                heapq.heapify(self._again)
            self._failing = 0
            self._say("")
        self._ended(entry, is_shared=True)
        self._on_shared(msgspec.structs.replace(row, durability=Durability.SHARED))

    async def _overtaken(self, entry: QueuedUpload, row: ObjectRow) -> None:
        """The row was deleted, replaced, or got another lossy copy while it was uploaded."""
        (live,) = await self._catalog.lookup(row.bucket, [row.key])
        named = set() if live is None or _first_blob(live) != entry.blob_id else set(live.blob_ids)
        leftover = [blob.blob_id for blob in lasting_blobs(row) if blob.blob_id not in named]
        if leftover:
            # Its blobs were queued when it went, and the reaper may have been at the remote before our put was.
            await self._catalog.queue_blobs(leftover, now_ms=self._clock.now_ms(), pinned_by=row.blob_ids[0])
            self._on_queued()
        if live is not None and named and live.durability is Durability.LOCAL:
            self._busy.discard(entry.position)
            self._repeat(entry, 0.0)
            return
        await self._drop(entry, is_shared=live is not None and bool(named) and live.durability is Durability.SHARED)

    async def _look_at_copies(self, entry: QueuedUpload, error: CorruptionError) -> None:
        """No sound copy could be read: where one can be after all, it is tried again; else nothing can be uploaded."""
        try:
            row = await self._current(entry)
            if row is not None and self._attempts.get(entry.position, 0) < _FAILING and await self._has_sound_copy(row):
                self._failed(entry, error)
                return
            if row is not None:
                self.failures += 1
                self._log.error(
                    "an object cannot be uploaded, its bytes are lost bucket=%s key=%s: %s", row.bucket, row.key, error
                )
            await self._drop(entry, is_shared=False)
        except KvobjError as failure:
            self._failed(entry, failure)

    async def _drop(self, entry: QueuedUpload, *, is_shared: bool) -> None:
        await self._queue.remove([entry.position])
        self.dropped_entries += 1
        self._ended(entry, is_shared=is_shared)

    def _ended(self, entry: QueuedUpload, *, is_shared: bool) -> None:
        self._busy.discard(entry.position)
        self._attempts.pop(entry.position, None)
        self._urgent.pop(entry.position, None)
        if self._next is not None and self._next.position == entry.position:
            self._next = None
        for future in self._waiters.pop(entry.position, ()):
            if not future.done():
                future.set_result(is_shared)
        self._note_shorter()

    def _note_shorter(self) -> None:
        self._shortened.set()
        self._on_shorter()

    def _failed(self, entry: QueuedUpload, error: KvobjError) -> None:
        attempts = self._attempts.get(entry.position, 0) + 1
        self._busy.discard(entry.position)
        self.failures += 1
        self._failing += 1
        if self._failing == 1:
            self._log.warning("an upload to the remote tier failed, will retry: %s", error)
        self._say("the remote is full" if isinstance(error, StoreFullError) else str(error))
        self._resume_at = asyncio.get_running_loop().time() + _pause(self._failing, self._pause_max_seconds)
        self._attempts[entry.position] = attempts
        self._repeat(entry, _pause(attempts, _RETRY_MAX_SECONDS))
        if isinstance(error, StoreFullError) or not self._is_available():
            self._release_waiters()

    def _repeat(self, entry: QueuedUpload, pause_seconds: float) -> None:
        when = asyncio.get_running_loop().time() + pause_seconds
        heapq.heappush(self._again, (when, entry.position, entry))
        self._woken.set()

    def _release_waiters(self) -> None:
        """Nothing will be there soon: who waits is told so now."""
        waiting, self._waiters = self._waiters, {}
        self._urgent.clear()
        for futures in waiting.values():
            for future in futures:
                if not future.done():
                    future.set_result(False)

    def _say(self, state: str) -> None:
        self.state = state


def _first_blob(row: ObjectRow) -> bytes:
    return row.blobs[0].blob_id if row.blobs else b""


def _pause(attempts: int, most_seconds: float) -> float:
    """Doubling, with full jitter above its half: retries of many objects must not come together."""
    seconds = min(most_seconds, _FIRST_PAUSE_SECONDS * float(1 << min(attempts - 1, _DOUBLINGS_MAX)))
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311 - spreading, no secret
