"""Puts in flight: room, write, flush, then the directory row, in that order and each blob once.

A put goes on whatever becomes of the caller, because extents and room must not be given back while a thread or the kernel still
uses them: by callbacks while it need not wait for room, in a task of its own where it must. Guarantees that a put that ends in an
error holds nothing, that one whose callers are all gone before the directory row is written holds nothing either, and that
concurrent puts of one id are one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from kvobj.arena import Pin, PinnedFrame
from kvobj.database import Database, WriteView
from kvobj.errors import KvobjError, TierUnavailableError
from kvobj.ids import BlobId
from kvobj.tiers.nvme.blob_io import BlobIo, settle
from kvobj.tiers.nvme.directory import BLOBS, INLINE, INLINE_BYTES_MAX, Place, extent_bytes
from kvobj.tiers.nvme.early_write import EARLY_FRAME_BYTES_MIN, EarlyWrite
from kvobj.tiers.nvme.log_entries import encode_inline_put
from kvobj.tiers.nvme.record import Record
from kvobj.tiers.nvme.riding_rows import RidingRows
from kvobj.tiers.nvme.space import SegmentSpace
from kvobj.tiers.protocol import BlobNames
from kvobj.tiers.tasks_in_flight import TasksInFlight


class _Put:
    """One put in flight, and a future of each caller that still wants it, and of each who waits for it to be over for its callers
    (`settling`): it enters no row any more then. The tier's tasks count it until nothing of it goes on. Where it goes on by
    callbacks, neither a thread nor the kernel uses the extent then, which may be long after its callers were told; of a task that
    missed the deadline, what it left behind gives the extent back by itself. `task`: what goes on by itself, if anything does."""

    __slots__ = ("settling", "task", "waiters")

    def __init__(self) -> None:
        self.settling: list[asyncio.Future[None]] = []
        self.waiters: list[asyncio.Future[None]] = []
        self.task: asyncio.Task[None] | None = None


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
        self._loop = asyncio.get_running_loop()

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
        put = self._puts.get(blob_id)
        if put is not None or self.place_of(blob_id) is None:
            if put is None:
                put = self._start(blob_id, frame, names)
            waiter: asyncio.Future[None] = self._loop.create_future()
            put.waiters.append(waiter)
            try:
                await waiter
            finally:
                put.waiters.remove(waiter)
        if not self.riding.may_ride(blob_id) and blob_id in self.riding:
            await self.riding.land()

    async def settle(self, blob_ids: Iterable[BlobId]) -> None:
        """Wait until no put of these ids is in flight, or will enter a row: not for a medium that hangs."""
        settling: list[asyncio.Future[None]] = []
        for blob_id in blob_ids:
            put = self._puts.get(blob_id)
            if put is not None:
                settling.append(self._loop.create_future())
                put.settling.append(settling[-1])
        if settling:
            await asyncio.wait(settling)

    def _start(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> _Put:
        pin = frame.pin.share()
        put = self._puts[blob_id] = _Put()
        self._tasks.begin()
        try:
            if not self._write_at_once(put, blob_id, pin, frame_bytes=frame.frame_bytes, names=names):
                put.task = self._tasks.run(self._run(put, blob_id, pin, frame_bytes=frame.frame_bytes, names=names))
        except BaseException as error:
            # Nobody else can have joined yet.
            pin.release()
            self._tell(put, blob_id, error)
            self._tasks.end()
            raise
        return put

    def _tell(self, put: _Put, blob_id: BlobId, error: BaseException | None) -> None:
        """The put is over for its callers."""
        if self._puts.get(blob_id) is put:
            del self._puts[blob_id]
        for settling in put.settling:
            settle(settling, None)
        for waiter in put.waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            elif isinstance(error, asyncio.CancelledError):
                waiter.cancel()
            else:
                waiter.set_exception(error)

    def _write_at_once(self, put: _Put, blob_id: BlobId, pin: Pin, *, frame_bytes: int, names: BlobNames) -> bool:
        """Begin to write a frame that goes to a segment which has room, and do all the rest once it is written. False: not here."""
        if frame_bytes <= INLINE_BYTES_MAX or blob_id in self._early:
            return False
        room = self._space.allocate_at_once(extent_bytes(frame_bytes))
        if room is None:
            return False
        segment, offset = room
        place = Place(segment=segment.number, offset=offset, frame_bytes=frame_bytes)

        def on_ended(error: Exception | None) -> None:
            deadline.cancel()
            is_late = self._puts.get(blob_id) is not put
            if error is None and put.waiters and not is_late:
                self._go_on(put, blob_id, pin, place)
                return
            self._space.free(place)
            pin.release()
            if not is_late:
                self._tell(put, blob_id, error)
            self._tasks.end()

        def on_deadline() -> None:
            # The extent and the place are still in use: they are given back when that ends, if ever.
            error = TierUnavailableError("segment write missed its deadline", path=segment.path)
            self._tell(put, blob_id, error)

        try:
            self._io.write(
                segment, Record(place.segment, place.offset, blob_id, frame_bytes, names), pin.view, on_ended
            )
        except BaseException:
            self._space.free(place)  # nothing was begun
            raise
        deadline = self._loop.call_later(self._io_timeout_seconds, on_deadline)
        return True

    def _go_on(self, put: _Put, blob_id: BlobId, pin: Pin, place: Place) -> None:
        """The frame is durable: now the directory row."""
        pin.release()
        error: Exception | None = None
        try:
            if not self._rides(blob_id, place):
                put.task = self._tasks.run(self._enter(put, blob_id, place))
                return
        except Exception as failure:  # noqa: BLE001 - callers wait for it: whatever it was must reach them
            error = failure
        self._tell(put, blob_id, error)
        self._tasks.end()

    async def _enter(self, put: _Put, blob_id: BlobId, place: Place) -> None:
        error: BaseException | None = None
        try:
            await self._commit_row(blob_id, place)
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._tell(put, blob_id, error)
            self._tasks.end()

    async def _run(self, put: _Put, blob_id: BlobId, pin: Pin, *, frame_bytes: int, names: BlobNames) -> None:
        error: BaseException | None = None
        try:
            if frame_bytes <= INLINE_BYTES_MAX:
                await self._put_inline(blob_id, bytes(pin.view[:frame_bytes]), names)
            else:
                await self._put_in_segment(put, blob_id, pin, frame_bytes=frame_bytes, names=names)
        except BaseException as failure:
            error = failure
            raise
        finally:
            pin.release()
            self._tell(put, blob_id, error)
            self._tasks.end()

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
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            if early is None:
                self._io.write(segment, record, pin.view, partial(settle, written))
            else:
                written = self._tasks.run(early.finish(record))
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
        if not put.waiters:
            self._space.free(place)
        elif not self._rides(blob_id, place):
            await self._commit_row(blob_id, place)

    async def _commit_row(self, blob_id: BlobId, place: Place) -> None:
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
            if self.place_of(blob_id) != place:
                self._space.free(place)
            raise
        if not placed:
            self._space.free(place)

    def place_of(self, blob_id: BlobId) -> Place | None:
        """Where the blob lies: by its row, or where that still rides."""
        place = self.riding.get(blob_id)
        if place is not None:
            return place
        row = self._database.read().get_alone(BLOBS, blob_id)
        return None if row is None else Place.decode(row)

    def _give_back_later(self, written: asyncio.Future[None], pin: Pin, place: Place) -> None:
        def give_back(_: asyncio.Future[None]) -> None:
            pin.release()
            self._space.free(place)

        written.add_done_callback(give_back)
        self._tasks.add(written)
