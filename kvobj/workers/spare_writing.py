"""A chunk on its way in through a worker that has room for it at hand: received, then stored by one call (`StoreCalls.put`).

The worker's side of `room_puts`. Event-loop-only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from kvobj.api.message import ByteSource
from kvobj.arena import Pin
from kvobj.catalog.rows import Checksum, ObjectRow
from kvobj.codec.checksums import Digester
from kvobj.codec.frame import raw_payload_offset
from kvobj.errors import IncompleteBodyError
from kvobj.store.hashing import BlobHash
from kvobj.store.requests import PutRequest, PutResult
from kvobj.workers.calls import FilledRoom, SpareRoom, StoreCalls
from kvobj.workers.channel import Channel
from kvobj.workers.mapped_arena import MappedArena
from kvobj.workers.spare_rooms import SpareRooms
from kvobj.workers.writing import LaterHashes, nothing

BEGIN_SECONDS: Final = 0.02
"""A body that takes longer is told of, since somebody may want to follow it; a shorter one would cost two messages more."""
_TOLD_SECONDS: Final = 0.005


class SpareTransfer:
    """Implements `api.object_store.Transfer`. Made by `WorkerStore`. One task uses it."""

    def __init__(
        self,
        request: PutRequest,
        room: SpareRoom,
        *,
        channel: Channel,
        calls: StoreCalls,
        arena: MappedArena,
        later: LaterHashes,
        rooms: SpareRooms,
    ) -> None:
        self.existing: ObjectRow | None = None
        self._request = request
        self._room = room
        self._channel = channel
        self._calls = calls
        self._arena = arena
        self._later = later
        self._rooms = rooms
        self._loop = asyncio.get_running_loop()
        self._body = Digester(request.algorithms) if request.algorithms else None
        self._pin: Pin | None = None
        self._blob: BlobHash | None = None
        self._filled = 0
        self._told = 0
        self._telling: asyncio.TimerHandle | None = None
        self._is_begun = False
        self._is_received = False
        self._is_over = False

    async def __aenter__(self) -> Self:
        """Nothing: the room is there."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep the room for another chunk unless this one was stored, or told of."""
        self._tell_no_more()
        if self._pin is not None:
            self._pin.release()
            self._pin = None
        if not self._is_over:
            self._is_over = True
            if self._is_begun:
                self._rooms.give_back([self._room.handle])
            else:
                self._rooms.add(self._request, [self._room])

    async def receive(self, source: ByteSource) -> None:
        """See `Transfer.receive`."""
        size_bytes = self._request.size_bytes
        pin = self._pin = self._arena.pin(self._room.room, nothing)
        offset = raw_payload_offset(size_bytes)
        payload = pin.view[offset : offset + size_bytes]
        self._blob = BlobHash(payload)
        self._telling = self._loop.call_later(BEGIN_SECONDS, self._tell)
        await source.receive_into(payload, self._feeder(payload))
        self._tell_no_more()
        self._is_received = True

    def _feeder(self, payload: memoryview) -> Callable[[int], None]:
        body = self._body

        def feed(available_bytes: int) -> None:
            self._filled = available_bytes
            if body is not None:
                # Where the bytes arrive, as `ingest` does it: they are in the cache.
                body.update(payload[body.size_bytes : available_bytes])

        return feed

    def _tell(self) -> None:
        """The body takes its time: others may know of it."""
        if not self._is_begun:
            self._is_begun = True
            self._channel.tell("begin", self._room.handle, self._request)
        if self._filled > self._told:
            self._told = self._filled
            self._channel.tell("filled", self._room.handle, 0, self._filled)
        self._telling = self._loop.call_later(_TOLD_SECONDS, self._tell)

    def _tell_no_more(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None

    async def digests(self) -> Digester:
        """See `Transfer.digests`."""
        if not self._is_received:
            raise IncompleteBodyError("the body has not been received")
        assert self._body is not None
        return self._body

    async def commit(self, *, checksums: tuple[Checksum, ...] = (), want_digest: bool = False) -> PutResult:
        """See `Transfer.commit`."""
        if not self._is_received:
            raise IncompleteBodyError("the body has not been received")
        assert self._blob is not None
        assert self._pin is not None
        self._is_over = True  # whatever comes of it, the room is gone
        body = self._body
        digests = {} if body is None else {name: body.digest(name) for name in body.algorithms}
        handle = self._room.handle
        filled = FilledRoom(handle, self._request, digests, checksums, want_digest, rooms=1)
        # Told by a task of its own: the call, which leaves with the `await`, comes before it.
        self._later.add(handle, self._blob, self._pin.share(), is_awaited=want_digest)
        stored = await self._calls.put(filled)
        self._rooms.add(self._request, stored.rooms)
        return stored.written.result()
