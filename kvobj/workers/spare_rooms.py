"""Rooms that a worker has at hand for chunks to come, so that it receives them without asking, and stores each with one call.

Engines write chunks of few sizes: a size that came twice is expected to come again. Each `put` brings the room for the next one,
and what was not used for a while is given back. Event-loop-only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from kvobj.catalog.rows import BucketKind, Durability
from kvobj.codec.checksums import fast_algorithms
from kvobj.codec.frame import CODEC_RAW
from kvobj.errors import KvobjError
from kvobj.store.hashing import INLINE_BYTES
from kvobj.store.requests import PutRequest
from kvobj.store.rooms import HASH_LATER_BYTES_MAX
from kvobj.workers.calls import SpareRoom, StoreCalls
from kvobj.workers.channel import Channel

IDLE_SECONDS: Final = 0.5
"""Rooms that were not needed for so long are given back."""

_Key = tuple[str, int, int]


class SpareRooms:
    """See the module's text. A room belongs to a bucket as it was made then, and to one size."""

    def __init__(self, channel: Channel, calls: StoreCalls) -> None:
        self._channel = channel
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._rooms: dict[_Key, list[SpareRoom]] = {}
        self._unused: dict[_Key, int] = {}
        self._seen: set[_Key] = set()
        self._asked: set[_Key] = set()
        self._asking: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.TimerHandle | None = None

    def take(self, request: PutRequest) -> SpareRoom | None:
        """A room for the chunk, which is the caller's from here on; None where there is none, so that room has to be asked for."""
        if not _may_come_whole(request):
            return None
        key = _key_of(request)
        rooms = self._rooms.get(key)
        if rooms:
            room = rooms.pop()
            if len(rooms) < self._unused.get(key, 0):
                self._unused[key] = len(rooms)
            return room
        if key not in self._seen:
            self._seen.add(key)
            self._sweep_soon()
        elif key not in self._asked:
            self._asked.add(key)
            task = self._loop.create_task(self._ask(request, key), name="spare-rooms")
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        return None

    async def _ask(self, request: PutRequest, key: _Key) -> None:
        rooms: Sequence[SpareRoom] = ()
        with suppress(KvobjError):  # whoever asks next does with less, or meets it
            rooms = await self._calls.spare_rooms(request, 1)
        if rooms:
            self._asked.discard(key)  # else not before the next sweep
            self.add(request, rooms)

    def add(self, request: PutRequest, rooms: Sequence[SpareRoom]) -> None:
        """Keep rooms for chunks like this one."""
        if rooms:
            self._rooms.setdefault(_key_of(request), []).extend(rooms)
            self._sweep_soon()

    def give_back(self, handles: Sequence[int]) -> None:
        """Rooms that nobody wants."""
        if handles:
            self._channel.tell("give_back", list(handles))

    def _sweep_soon(self) -> None:
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(IDLE_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Give back what was not needed since the last time."""
        self._sweeping = None
        unused: list[SpareRoom] = []
        for key, rooms in list(self._rooms.items()):
            idle = min(self._unused.get(key, 0), len(rooms))
            unused += rooms[:idle]
            del rooms[:idle]
            if not rooms:
                del self._rooms[key]
        self._unused = {key: len(rooms) for key, rooms in self._rooms.items()}
        self._seen &= self._rooms.keys()
        self._asked.clear()
        self.give_back([room.handle for room in unused])
        if self._rooms or self._seen:
            self._sweep_soon()

    def close(self) -> None:
        """Give back all of them."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        rooms, self._rooms = self._rooms, {}
        self.give_back([room.handle for each in rooms.values() for room in each])


def _key_of(request: PutRequest) -> _Key:
    return request.bucket.name, request.bucket.created_ms, request.size_bytes


def _may_come_whole(request: PutRequest) -> bool:
    """Whether the store would hash the body after its acknowledgement, and nothing has to be found out before it is received. A
    shorter one is acknowledged with its digest."""
    bucket = request.bucket
    return (
        INLINE_BYTES < request.size_bytes <= HASH_LATER_BYTES_MAX
        and bucket.kind is BucketKind.KV
        and bucket.codec == CODEC_RAW
        and (bucket.durability if request.durability is None else request.durability) is Durability.MEMORY
        and request.condition is None
        and request.part is None
        and request.ends is None
        and not request.wants_digest
        and request.algorithms <= fast_algorithms()
    )
