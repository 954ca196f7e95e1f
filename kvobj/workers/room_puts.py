"""The store process's side of chunks that come whole: `put` names a room that the worker was given before and has filled.

Most are stored in one step, without a transfer and without a task. The rest, and those that are told of before they are whole, are
transfers like any other, under the handle of their room. Event-loop-only.
"""

from __future__ import annotations

import asyncio
import logging

from kvobj.arena import Pin
from kvobj.catalog.rows import ObjectRow
from kvobj.errors import KvobjError
from kvobj.store.requests import PutRequest
from kvobj.store.standing import check_same_chunk
from kvobj.store.store import Store
from kvobj.task_endings import ended
from kvobj.workers.calls import FilledRoom, Hashed, Stored, WrittenRow
from kvobj.workers.channel import LATER
from kvobj.workers.given_rooms import GivenRooms
from kvobj.workers.held_transfers import HeldTransfers


class RoomPuts:
    """Those of one worker."""

    def __init__(self, store: Store, rooms: GivenRooms, transfers: HeldTransfers, log: logging.Logger) -> None:
        self._store = store
        self._rooms = rooms
        self._transfers = transfers
        self._log = log
        self._begun: dict[int, _Begun] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Rooms that the worker has, and those whose transfers are being opened. Transfers are counted by `HeldTransfers`."""
        return len(self._rooms) + len(self._begun)

    # -- what the worker tells -----------------------------------------------------------------------------------
    def begin(self, handle: int, request: PutRequest) -> None:
        """See `StoreCalls.begin`."""
        self._begin(handle, request).is_early = True

    def filled(self, handle: int, filled: int) -> None:
        """See `StoreCalls.filled`."""
        begun = self._begun.get(handle)
        if begun is not None:
            begun.filled = filled
        self._transfers.filled(handle, 0, filled)

    def hashed(self, told: Hashed) -> None:
        """See `StoreCalls.hashed`."""
        begun = self._begun.get(told.handle)
        if begun is not None and self._transfers.find(told.handle) is None:
            begun.hashed = told
        else:
            self._transfers.hashed(told)

    def give_back(self, handles: list[int]) -> None:
        """See `StoreCalls.give_back`."""
        for handle in handles:
            if not self._rooms.take_back(handle) and handle in self._begun:
                task = asyncio.create_task(self._end(handle), name="worker-leave")
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)

    # -- what it asks --------------------------------------------------------------------------------------------
    def put_now(self, filled: FilledRoom) -> object:
        """`put`, where nothing has to be waited for; else `LATER`, and the chunk is on its way to become a transfer."""
        handle, request = filled.handle, filled.request
        if handle in self._begun:
            return LATER
        room = self._rooms.get(handle, request)
        done = None if filled.want_digest else self._store.put_filled(request, room, filled.checksums)
        if done is None:
            self._begin(handle, request)  # now: the hash may be told before `put` has had its first step
            return LATER
        result, told = done
        self._rooms.take(handle)
        self._transfers.await_hash(handle, told)
        return Stored(WrittenRow.of(result), self._rooms.give(request, filled.rooms))

    async def put(self, filled: FilledRoom) -> Stored:
        """See `StoreCalls.put`; after `put_now`, which has begun it."""
        handle, request, want_digest = filled.handle, filled.request, filled.want_digest
        try:
            existing = await self._opened(handle, self._begun[handle], request)
            if existing is not None:
                check_same_chunk(existing, request)
                row = await self._store.settled(existing, wait=want_digest)
                written = WrittenRow(row, None, existed=True, durability=row.durability)
            else:
                held = self._transfers.get(handle)
                held.filled(0, request.size_bytes)
                transfer = await held.received(filled.digests)
                written = WrittenRow.of(await transfer.commit(checksums=filled.checksums, want_digest=want_digest))
        finally:
            await self._end(handle)
        return Stored(written, self._rooms.give(request, filled.rooms))

    # -- transfers -----------------------------------------------------------------------------------------------
    def _begin(self, handle: int, request: PutRequest) -> _Begun:
        room = self._rooms.get(handle, request)
        self._rooms.take(handle)
        begun = self._begun[handle] = _Begun(room.pin)
        begun.opening = asyncio.create_task(self._open(handle, begun, request), name="worker-transfer")
        return begun

    async def _open(self, handle: int, begun: _Begun, request: PutRequest) -> ObjectRow | None:
        # With a pin of its own: whatever ends the transfer, the worker may be writing into the room until `_end`.
        transfer = await self._store.start_put(request, room=begun.pin.share())
        if transfer.existing is not None:
            return transfer.existing
        _, held = await self._transfers.take(transfer, handle)
        held.filled(0, begun.filled)
        if begun.hashed is not None:
            self._transfers.hashed(begun.hashed)
        return None

    async def _opened(self, handle: int, begun: _Begun, request: PutRequest) -> ObjectRow | None:
        """What the start of the transfer found. One from before the body was there is made anew where it came to nothing: what
        stood in the way then, or answered for the chunk, may be gone."""
        if begun.is_early:
            begun.is_early = False
            await asyncio.wait([begun.opening])
            if begun.opening.cancelled() or begun.opening.exception() or begun.opening.result() is not None:
                begun.opening = asyncio.create_task(self._open(handle, begun, request), name="worker-transfer")
        return await asyncio.shield(begun.opening)

    async def _end(self, handle: int) -> None:
        """Leave the transfer: what was not committed is undone. Idempotent."""
        begun = self._begun.pop(handle, None)
        if begun is None:
            return
        try:
            await ended([begun.opening])
        finally:
            try:
                await self._transfers.end(handle)
            except KvobjError as error:
                self._log.warning("a transfer could not be undone whole: %s", error)
            finally:
                begun.pin.release()

    async def aclose(self) -> None:
        """The worker is gone, and no call of it runs any more: undo what was begun, and take the rooms back."""
        for handle in list(self._begun):
            await self._end(handle)
        if self._ending:
            await asyncio.wait(self._ending)
        self._rooms.close()


class _Begun:
    """A room whose chunk has become, or becomes, a transfer. `opening`: the start of that, and the live chunk that answers for it
    if there is one; `is_early`: it was started before the whole body was there. The rest is what was told before."""

    __slots__ = ("filled", "hashed", "is_early", "opening", "pin")

    opening: asyncio.Task[ObjectRow | None]

    def __init__(self, pin: Pin) -> None:
        self.pin = pin
        self.is_early = False
        self.filled = 0
        self.hashed: Hashed | None = None
