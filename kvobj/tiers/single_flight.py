"""Concurrent gets of one whole frame become one read, for tiers where a read is dear.

A flight lasts until its frame is filled, not only until it is handed out, so a late comer joins the read that goes on
instead of starting another. Ranges pass by: two are seldom equal. A flight costs a task (11 µs), so tiers in memory
do without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from kvobj.arena import PinnedFrame
from kvobj.errors import KvobjError
from kvobj.ids import BlobId
from kvobj.tiers.forwarding import ForwardingTier
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.protocol import BlobNames, ByteRange, Tier


class _Flight:
    """One read. Its own pin goes when the frame is filled and nobody is left who has yet to take a pin from it."""

    __slots__ = ("is_filled", "landed", "passengers", "task")

    def __init__(self) -> None:
        self.landed: asyncio.Future[PinnedFrame | None] = asyncio.get_running_loop().create_future()
        self.landed.add_done_callback(_note_outcome)
        self.passengers = 0
        self.is_filled = False
        self.task: asyncio.Task[None] | None = None

    def leave(self) -> None:
        """One passenger has its pin, or gave up. When the last gives up before the landing, the read ends."""
        self.passengers -= 1
        if self.passengers:
            return
        if self.landed.done():
            self.release_if_over()
        elif self.task is not None:
            self.task.cancel()

    def release_if_over(self) -> None:
        if self.is_filled and not self.passengers:
            frame = self.landed.result()
            assert frame is not None
            frame.release()


def _note_outcome(landed: asyncio.Future[PinnedFrame | None]) -> None:
    # An error that came when all passengers were cancelled is nobody's to fetch, which is no fault.
    if not landed.cancelled():
        landed.exception()


class SingleFlight(ForwardingTier):
    """See `Tier`. Each caller gets a pin of its own; one who is cancelled leaves the others' read alone.

    An error of the read is everybody's. A get that comes after a put or a delete has returned never joins a read from
    before.
    """

    __slots__ = ("_flights", "_shared", "_tasks")

    def __init__(self, inner: Tier, *, instruments: TierInstruments) -> None:
        super().__init__(inner)
        self._flights: dict[BlobId, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._shared = instruments.shared_gets.labels(inner.name)

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """See `Tier.get`."""
        if byte_range is not None:
            return await self.inner.get(blob_id, byte_range)
        flight = self._flights.get(blob_id)
        if flight is None:
            flight = self._flights[blob_id] = _Flight()
            flight.task = asyncio.create_task(self._fly(blob_id, flight))
            self._tasks.add(flight.task)
            flight.task.add_done_callback(self._tasks.discard)
        else:
            self._shared.inc()
        flight.passengers += 1
        try:
            # `wait` and not `shield`: a passenger's cancellation touches neither the future nor the log.
            await asyncio.wait((flight.landed,))
            frame = flight.landed.result()
            return None if frame is None else frame.share()
        finally:
            if flight.passengers == 1 and not flight.landed.done():
                self._end(blob_id, flight)
            flight.leave()

    async def _fly(self, blob_id: BlobId, flight: _Flight) -> None:
        try:
            frame = await self.inner.get(blob_id)
        except asyncio.CancelledError:
            flight.landed.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the passengers
            self._end(blob_id, flight)
            flight.landed.set_exception(error)
            return
        if frame is None:
            self._end(blob_id, flight)
        flight.landed.set_result(frame)
        if frame is None:
            return
        try:
            await frame.complete()
        except KvobjError:
            pass  # the passengers see it at their own pins
        finally:
            self._end(blob_id, flight)
            flight.is_filled = True
            flight.release_if_over()

    def _end(self, blob_id: BlobId, flight: _Flight) -> None:
        if self._flights.get(blob_id) is flight:
            del self._flights[blob_id]

    def _part(self, blob_ids: Iterable[BlobId]) -> None:
        """Let later gets of these blobs start flights of their own; those in the air go on for who is aboard."""
        for blob_id in blob_ids:
            self._flights.pop(blob_id, None)

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        """See `Tier.put`."""
        await self.inner.put(blob_id, frame, names)
        self._part((blob_id,))

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        """See `Tier.delete`."""
        await self.inner.delete(blob_ids)
        self._part(blob_ids)

    async def aclose(self) -> None:
        """See `Tier.aclose`. Waits for the reads in the air, which end by the inner tier's own deadline."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        await self.inner.aclose()
