"""Frames in flight: extents that the bucket fills while their frames are read already.

Each is filled by a task of its own, so that it goes on when its reader lets go early and others have joined; its pin on the extent
lives until nobody fills it any more. Guarantees that a progress ends, in `advance` to the end or in `fail`, when the bucket's call
does, and that this pin is gone by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from kvobj.arena import Pin, Progress
from kvobj.errors import TierUnavailableError
from kvobj.ids import BlobId
from kvobj.tiers.protocol import ByteRange
from kvobj.tiers.remote.object_bucket import ObjectBucket
from kvobj.tiers.tasks_in_flight import TasksInFlight


class _Filling:
    """One of them. `begun` tells whether the object is there, as soon as that is known; an error before that is its error."""

    __slots__ = ("_filled", "_pin", "begun", "progress")

    def __init__(self, pin: Pin, total: int) -> None:
        self.begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.progress = Progress(total)
        self._filled = 0
        self._pin: Pin | None = pin

    @property
    def into(self) -> memoryview:
        """What is to be filled."""
        assert self._pin is not None
        return self._pin.view[: self.progress.total]

    def advance(self, filled: int) -> None:
        """The first `filled` bytes are there. `end` tells of the last of them, so nobody has the whole while this has a pin."""
        self._filled = max(self._filled, filled)
        if filled < self.progress.total:
            self.progress.advance(filled)
            if not self.begun.done():
                self.begun.set_result(True)

    def end(self, error: BaseException) -> None:
        """The bucket is done: all bytes are there, or no more will come because of `error`. Idempotent."""
        if self._pin is None:
            return
        self._pin.release()
        self._pin = None
        if self._filled >= self.progress.total:
            self.progress.advance(self.progress.total)
            if not self.begun.done():
                self.begun.set_result(True)
            return
        if not self.begun.done():
            self.begun.set_exception(error)
            self.begun.exception()  # who asked may be gone, which is no fault
        self.progress.fail(error)

    def vanish(self) -> None:
        """There is no such object, or not any more."""
        if not self.begun.done():
            self.begun.set_result(False)
        self.end(TierUnavailableError("a frame vanished while it was read"))


class Fillings:
    """Those of one tier. Event-loop-only. `on_vanished` is awaited when a blob's object is found to be gone."""

    def __init__(
        self, bucket: ObjectBucket, tasks: TasksInFlight, *, on_vanished: Callable[[BlobId], Awaitable[None]]
    ) -> None:
        self._bucket = bucket
        self._tasks = tasks
        self._on_vanished = on_vanished
        self._running: dict[BlobId, set[asyncio.Task[None]]] = {}

    async def begin(self, blob_id: BlobId, key: str, asked: ByteRange, pin: Pin) -> Progress | None:
        """Begin to read the range, which is not empty, into the front of the extent; None: no such object. Returns with the first
        bytes. The caller's pin stays the caller's. A caller who is cancelled before it returns ends the read."""
        filling = _Filling(pin.share(), asked.stop - asked.start)
        task = self._tasks.run(self._fill(blob_id, key, asked, filling))
        self._running.setdefault(blob_id, set()).add(task)

        def on_ended(_: asyncio.Task[None]) -> None:
            # Here, and not in the task: one that is cancelled before its first step runs no line of its own.
            filling.end(TierUnavailableError("closed while a frame was filling", blob_id=blob_id, tier="remote"))
            running = self._running[blob_id]
            running.discard(task)
            if not running:
                del self._running[blob_id]

        task.add_done_callback(on_ended)
        try:
            await asyncio.wait((filling.begun,))
        except asyncio.CancelledError:
            if not filling.begun.done():
                task.cancel()
            raise
        return filling.progress if filling.begun.result() else None

    def is_running(self, blob_id: BlobId) -> bool:
        """Whether a frame of the blob is being filled."""
        return blob_id in self._running

    async def settle(self, blob_ids: Iterable[BlobId]) -> None:
        """Wait until none of these blobs is being read: by the bucket's deadline."""
        for blob_id in blob_ids:
            while tasks := self._running.get(blob_id):
                await asyncio.wait(tuple(tasks))

    async def _fill(self, blob_id: BlobId, key: str, asked: ByteRange, filling: _Filling) -> None:
        try:
            is_there = await self._bucket.get(key, asked, filling.into, filling.advance)
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to who reads
            filling.end(error)
            return
        if is_there:
            filling.end(TierUnavailableError("the remote gave fewer bytes than the frame has", blob_id=blob_id))
        else:
            await self._on_vanished(blob_id)
            filling.vanish()
