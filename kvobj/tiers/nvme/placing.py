"""Puts in flight: room, write, flush, then the directory row, in that order and each blob once.

A put runs in a task of its own, because extents and room must not be given back while a thread still uses them, whatever
becomes of the caller. Guarantees that a put that ends in an error holds nothing, that one whose callers are all gone before the
directory row is written holds nothing either, and that concurrent puts of one id are one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvobj.arena import Pin, PinnedFrame
from kvobj.database import Database, WriteView
from kvobj.errors import KvobjError, TierUnavailableError
from kvobj.ids import BlobId
from kvobj.tiers.nvme.blob_io import BlobIo
from kvobj.tiers.nvme.directory import BLOBS, INLINE, INLINE_BYTES_MAX, Place, extent_bytes
from kvobj.tiers.nvme.early_write import EARLY_FRAME_BYTES_MIN, EarlyWrite
from kvobj.tiers.nvme.log_entries import encode_inline_put
from kvobj.tiers.nvme.record import Record
from kvobj.tiers.nvme.riding_rows import RidingRows
from kvobj.tiers.nvme.space import SegmentSpace
from kvobj.tiers.protocol import BlobNames
from kvobj.tiers.tasks_in_flight import TasksInFlight


class _Put:
    """One put in flight, and how many callers still want it."""

    __slots__ = ("abandoned", "task", "waiters")

    def __init__(self) -> None:
        self.task: asyncio.Task[None]
        self.waiters = 0
        self.abandoned = False


class BlobPlacing:
    """Brings frames into segments, or small ones into the database. Event loop only."""

    def __init__(
        self,
        *,
        database: Database,
        space: SegmentSpace,
        io: BlobIo,
        tasks: TasksInFlight,
        io_timeout_seconds: float,
    ) -> None:
        self._database = database
        self._space = space
        self._io = io
        self._tasks = tasks
        self._io_timeout_seconds = io_timeout_seconds
        self.riding = RidingRows(database)
        self._puts: dict[BlobId, _Put] = {}
        self._early: dict[BlobId, EarlyWrite] = {}

    def begin(self, blob_id: BlobId, frame: PinnedFrame, *, head_bytes: int) -> EarlyWrite | None:
        """See `NvmeTier.begin_put`."""
        if frame.frame_bytes < EARLY_FRAME_BYTES_MIN or blob_id in self._early or blob_id in self._puts:
            return None
        room = self._space.allocate_at_once(extent_bytes(frame.frame_bytes))
        if room is None:
            return None
        segment, offset = room
        place = Place(segment=segment.number, offset=offset, frame_bytes=frame.frame_bytes)

        def on_abandoned() -> None:
            self._early.pop(blob_id, None)
            self._space.free(place)

        early = EarlyWrite(
            self._io,
            segment,
            place,
            frame,
            head_bytes=head_bytes,
            on_job=self._tasks.add,
            on_abandoned=on_abandoned,
        )
        self._early[blob_id] = early
        return early

    def abandon(self) -> None:
        """Nobody will put what was begun."""
        for early in list(self._early.values()):
            early.abandon()

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        """Hold a whole, complete frame; see `NvmeTier.put`."""
        while True:
            put = self._puts.get(blob_id)
            if put is None:
                if self._place_of(blob_id) is not None:
                    break
                put = self._start(blob_id, frame, names)
            if not put.abandoned:
                await self._join(put)
                break
            await asyncio.wait([put.task])
        if blob_id in self.riding and not self.riding.may_ride(blob_id):
            await self.riding.land()

    @staticmethod
    async def _join(put: _Put) -> None:
        put.waiters += 1
        try:
            await asyncio.shield(put.task)
        finally:
            put.waiters -= 1

    async def settle(self, blob_ids: Iterable[BlobId]) -> None:
        """Wait until no put of these ids is in flight."""
        in_flight = [put.task for blob_id in blob_ids if (put := self._puts.get(blob_id))]
        if in_flight:
            await asyncio.wait(in_flight)

    def _start(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> _Put:
        put = _Put()
        pin = frame.pin.share()
        put.task = self._tasks.run(self._run(put, blob_id, pin, frame_bytes=frame.frame_bytes, names=names))
        self._puts[blob_id] = put
        return put

    async def _run(self, put: _Put, blob_id: BlobId, pin: Pin, *, frame_bytes: int, names: BlobNames) -> None:
        try:
            if frame_bytes <= INLINE_BYTES_MAX:
                await self._put_inline(blob_id, bytes(pin.view[:frame_bytes]), names)
            else:
                await self._put_in_segment(put, blob_id, pin, frame_bytes=frame_bytes, names=names)
        finally:
            pin.release()
            del self._puts[blob_id]

    async def _put_inline(self, blob_id: BlobId, frame: bytes, names: BlobNames) -> None:
        place = Place.in_database(len(frame))
        entry = encode_inline_put(blob_id, names, frame)
        self._space.take_inline(len(frame))

        def change(view: WriteView) -> bool:
            if view.get(BLOBS, blob_id) is not None:
                return False
            view.put(INLINE, blob_id, entry)
            view.put(BLOBS, blob_id, place.encode())
            view.log(entry)
            return True

        await self._commit(blob_id, place, change)

    async def _put_in_segment(
        self, put: _Put, blob_id: BlobId, pin: Pin, *, frame_bytes: int, names: BlobNames
    ) -> None:
        early = self._taken_over(blob_id, pin, frame_bytes)
        if early is None:
            segment, offset = await self._space.allocate(extent_bytes(frame_bytes))
            place = Place(segment=segment.number, offset=offset, frame_bytes=frame_bytes)
        else:
            segment, place = early.segment, early.place
        record = Record(place.segment, place.offset, blob_id, frame_bytes, names)
        written = self._io.write(segment, record, pin.view) if early is None else self._tasks.run(early.finish(record))
        try:
            async with asyncio.timeout(self._io_timeout_seconds):
                await asyncio.shield(written)
        except (TimeoutError, asyncio.CancelledError) as error:
            # A thread still reads the extent and writes the place: they are given back when it ends, if ever.
            self._give_back_later(written, pin.share(), place)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise TierUnavailableError("segment write missed its deadline", path=segment.path) from error
        except Exception:
            self._space.free(place)
            raise
        if put.waiters == 0:
            put.abandoned = True
            self._space.free(place)
            return
        if self._rides(blob_id, place):
            return

        def change(view: WriteView) -> bool:
            if view.get(BLOBS, blob_id) is not None:
                return False
            view.put(BLOBS, blob_id, place.encode())
            return True

        await self._commit(blob_id, place, change)

    def _taken_over(self, blob_id: BlobId, pin: Pin, frame_bytes: int) -> EarlyWrite | None:
        early = self._early.get(blob_id)
        if early is None:
            return None
        if not early.is_of(pin, frame_bytes):
            early.abandon()
            return None
        del self._early[blob_id]
        early.take()
        return early

    def _rides(self, blob_id: BlobId, place: Place) -> bool:
        """Whether the row is on its way with the next commit."""
        if not self.riding.takes(blob_id):
            return False
        try:
            self.riding.add(blob_id, place)
        except KvobjError:
            self._space.free(place)
            raise
        return True

    async def _commit(self, blob_id: BlobId, place: Place, change: Callable[[WriteView], bool]) -> None:
        # 0.3 ms with one put in flight, two thirds of it LMDB's own flush. Not waiting for it would acknowledge a blob whose row
        # the database then has no room for; whose next change can wait for it instead lets the row ride (`RidingRows`).
        try:
            placed = await self._database.write(change, synced=False)
        except KvobjError:
            # A failed sync may leave the row behind, and then the room is not free.
            if self._place_of(blob_id) != place:
                self._space.free(place)
            raise
        if not placed:
            self._space.free(place)

    def _place_of(self, blob_id: BlobId) -> Place | None:
        riding = self.riding.get(blob_id)
        if riding is not None:
            return riding.place
        with self._database.read() as view:
            row = view.get(BLOBS, blob_id)
        return None if row is None else Place.decode(row)

    def _give_back_later(self, written: asyncio.Future[None], pin: Pin, place: Place) -> None:
        def give_back(_: asyncio.Future[None]) -> None:
            pin.release()
            self._space.free(place)

        written.add_done_callback(give_back)
        self._tasks.add(written)
