"""Rooms that a worker was given ahead of the chunks that it will receive: prepared here, filled there, named again by `put`.

What they hold of the arena is bounded, and the worker gives back what it has no use for. Event-loop-only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvobj.catalog.rows import BucketRow
from kvobj.errors import InvalidRequestError
from kvobj.store.extents import extent_bytes
from kvobj.store.ingest import ReceivedBlob
from kvobj.store.prepared import PreparedRooms
from kvobj.store.requests import PutRequest
from kvobj.workers.calls import SpareRoom
from kvobj.workers.held_transfers import room_of

GIVEN_BYTES_MAX: Final = 32 * 1024 * 1024
"""What one worker holds at most: some seven of the longest chunks that come so."""
GIVEN_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class GivenRoom:
    """One room, of a bucket, for a chunk of one size."""

    bucket: BucketRow
    blob: ReceivedBlob


class GivenRooms:
    """All rooms that one of so many workers has been given. `prepared`: what all of them are of. Half of that is for clients on the
    same host."""

    def __init__(self, prepared: PreparedRooms, *, workers: int) -> None:
        self._prepared = prepared
        self._bytes_max = min(GIVEN_BYTES_MAX, prepared.bytes_max // 2 // workers)
        self._bytes = 0
        self._next_handle = -1
        self._rooms: dict[int, GivenRoom] = {}

    def __len__(self) -> int:
        """How many are out."""
        return len(self._rooms)

    def give(self, request: PutRequest, count: int) -> list[SpareRoom]:
        """So many rooms for chunks like this one, or as many as there are to spare."""
        bucket, plain_bytes = request.bucket, request.size_bytes
        room_bytes = extent_bytes(plain_bytes)
        rooms: list[SpareRoom] = []
        while len(rooms) < count and len(self._rooms) < GIVEN_MAX and self._bytes + room_bytes <= self._bytes_max:
            blobs = self._prepared.prepare(bucket, request.durability, plain_bytes, 1)
            if not blobs:
                break
            handle, self._next_handle = self._next_handle, self._next_handle - 1
            self._rooms[handle] = GivenRoom(bucket, blobs[0])
            self._bytes += blobs[0].pin.extent.length
            rooms.append(SpareRoom(handle, room_of(blobs[0].pin)))
        return rooms

    def get(self, handle: int, request: PutRequest) -> ReceivedBlob:
        """The room of a handle, which is for this chunk. `InvalidRequestError` for what is none, or another's."""
        room = self._rooms.get(handle)
        if room is None:
            raise InvalidRequestError("no such room", handle=handle)
        bucket, own = request.bucket, room.bucket
        is_same = (bucket.name, bucket.created_ms) == (own.name, own.created_ms)
        if not is_same or request.size_bytes != room.blob.plain_bytes:
            raise InvalidRequestError("the room is another chunk's", bucket=own.name, handle=handle)
        return room.blob

    def take(self, handle: int) -> None:
        """The room is somebody else's from here on."""
        self._prepared.take(self._forget(handle))

    def take_back(self, handle: int) -> bool:
        """The worker does not want it. False for what is none."""
        if handle not in self._rooms:
            return False
        self._prepared.give_back([self._forget(handle)])
        return True

    def _forget(self, handle: int) -> ReceivedBlob:
        blob = self._rooms.pop(handle).blob
        self._bytes -= blob.pin.extent.length
        return blob

    def close(self) -> None:
        """The worker is gone."""
        for handle in list(self._rooms):
            self.take_back(handle)
