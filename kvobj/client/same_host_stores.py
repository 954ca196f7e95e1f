"""How a batch of chunks goes into shared memory: by a staging room, by room of the arena, or several batches in turn.

What these raise, or leave out, was not stored by them as far as the writer knows: it may be sent again by another way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from kvobj.buffers import address_of
from kvobj.client.errors import error_of
from kvobj.client.kv_values import NewChunk, StoredChunk
from kvobj.client.same_host_lane import Lane
from kvobj.errors import KvobjError, UnavailableError
from kvobj.same_host.copying import Piece, copiers
from kvobj.same_host.mapping import copy
from kvobj.same_host.messages import Commit, Committed, NewItem, Reserve, Reserved, ReservedRoom, StoredItem

_ALIGNMENT: Final = 64
_OK: Final = 200
ROOMS_MAX: Final = 64
ROOMS_BYTES_MAX: Final = 64 * 1024 * 1024
"""What one client has of the arena ahead of a store."""


@dataclass(frozen=True, slots=True)
class StoreBatch:
    """Chunks to be stored together; `items` says where each is in a staging room, one behind the other."""

    namespace: str
    bodies: Sequence[memoryview]
    items: list[NewItem]
    durability: str | None

    @classmethod
    def of(cls, namespace: str, chunks: Sequence[NewChunk], durability: str | None) -> Self:
        """A batch of chunks, whose bytes stay the caller's."""
        bodies = [memoryview(chunk.data).cast("B") for chunk in chunks]
        items: list[NewItem] = []
        at = 0
        for chunk, body in zip(chunks, bodies, strict=True):
            items.append(NewItem(chunk.id, len(body), chunk.parent, chunk.tokens, chunk.digest, at))
            at += -(-len(body) // _ALIGNMENT) * _ALIGNMENT
        return cls(namespace, bodies, items, durability)

    @property
    def is_named_alone(self) -> bool:
        """Whether nothing but its place is asked of any chunk's bytes: no digest is compared."""
        return all(item.digest is None for item in self.items)

    @property
    def reserve(self) -> Reserve:
        """The call that asks for its room."""
        return Reserve(self.namespace, self.items, self.durability)


def store_staged(lane: Lane, batch: StoreBatch, deadline: float) -> list[StoredItem]:
    """By the lane's staging room, which the server copies. `KvobjError` where nothing was stored."""
    last = batch.items[-1]
    room = lane.stage(last.at + last.size_bytes, deadline=deadline).room
    for item, body in zip(batch.items, batch.bodies, strict=True):
        copy(room[item.at :], body)
    commit = Commit(0, batch.namespace, batch.items, batch.durability)
    return lane.call(commit, Committed, deadline=deadline).items


def store_in_place(lane: Lane, batch: StoreBatch, deadline: float) -> list[StoredItem]:
    """By room in the arena, of a trusted writer. `KvobjError` where nothing was stored."""
    reserved = lane.call(batch.reserve, Reserved, deadline=deadline)
    try:
        _fill(lane, reserved.rooms, batch.bodies)
    except BaseException:
        lane.abandon(reserved.batch)
        raise
    return lane.call(Commit(reserved.batch), Committed, deadline=deadline).items


def store_in_turn(
    lanes: Sequence[Lane], batches: Sequence[StoreBatch], told: list[list[StoredItem] | None], *, seconds: float
) -> None:
    """As `store_in_place` of batches, one after the other: while one's bytes are copied, the server makes the one before it visible
    on the same lane, and room for the next on the other. `told[i]` is set for each that was stored.

    Room is asked for only once the room before it is had, and is not waited for before that is committed: writers who wait for room
    never wait for each other's. Two lanes, of a trusted writer; each step has so many `seconds`. `KvobjError` where a lane has
    ended; one that owes an answer then is closed.
    """
    committing: list[int | None] = [None, None]
    try:
        lanes[0].ask(batches[0].reserve, deadline=time.monotonic() + seconds)
        for index, batch in enumerate(batches):
            side = index % 2
            lane, other = lanes[side], lanes[1 - side]
            deadline = time.monotonic() + seconds
            _note_told(lane, committing[side], told, deadline)
            committing[side] = None
            reserved = _room_for(lane, deadline)
            try:
                if index + 1 < len(batches):
                    other.ask(batches[index + 1].reserve, deadline=deadline)
                if reserved is None:
                    continue
                _fill(lane, reserved.rooms, batch.bodies)
            except BaseException:
                if reserved is not None:
                    lane.abandon(reserved.batch)
                raise
            lane.ask(Commit(reserved.batch), deadline=deadline)
            committing[side] = index
        last = len(batches) % 2  # the side whose turn would be next: its answer has been waiting longest
        for side in (last, 1 - last):
            _note_told(lanes[side], committing[side], told, time.monotonic() + seconds)
    finally:
        for lane in lanes:
            if lane.owes:
                lane.close()


def prepare_for_more(lane: Lane, batches: Sequence[StoreBatch], deadline: float) -> None:
    """Ask for room for as many chunks as these, where they are of one size and few enough, and none is named by its digest. Nobody
    waits for it."""
    sizes = {item.size_bytes for batch in batches for item in batch.items}
    count = sum(len(batch.items) for batch in batches)
    is_alike = len(sizes) == 1 and len({batch.durability for batch in batches}) == 1
    if not lane.prepares or not is_alike or count > ROOMS_MAX or not all(batch.is_named_alone for batch in batches):
        return
    (size_bytes,) = sizes
    if 0 < size_bytes * count <= ROOMS_BYTES_MAX:
        lane.prepare(size_bytes, count, batches[0].durability, deadline=deadline)


def take_rooms_for(lane: Lane, batches: Sequence[StoreBatch], deadline: float) -> list[tuple[int, ReservedRoom]] | None:
    """The lane's rooms for all chunks of these, with their numbers; None where it has none for them, and then it has none left.
    Errors as `Lane.answer`."""
    sizes = {item.size_bytes for batch in batches for item in batch.items}
    durabilities = {batch.durability for batch in batches}
    rooms: list[tuple[int, ReservedRoom]] = []
    if len(sizes) == len(durabilities) == 1 and all(batch.is_named_alone for batch in batches):
        count = sum(len(batch.items) for batch in batches)
        rooms = lane.take_rooms(sizes.pop(), count, durabilities.pop(), deadline=deadline)
    if not rooms:
        lane.prepare(0, 0, None, deadline=deadline)
    return rooms or None


def store_prepared(
    lane: Lane,
    batches: Sequence[StoreBatch],
    rooms: Sequence[tuple[int, ReservedRoom]],
    told: list[list[StoredItem] | None],
    *,
    seconds: float,
) -> None:
    """By rooms that were asked for before, one for each chunk of all batches: while one's bytes are copied, the server makes those
    before it visible, and last come rooms for the next. `told[i]` is set for each that was stored. Errors as `store_in_turn`."""
    committing: list[int] = []
    try:
        at = 0
        for index, batch in enumerate(batches):
            some = rooms[at : at + len(batch.items)]
            at += len(some)
            _fill(lane, [room for _, room in some], batch.bodies)
            numbers = [number for number, _ in some]
            commit = Commit(0, batch.namespace, batch.items, batch.durability, numbers)
            lane.ask(commit, deadline=time.monotonic() + seconds)
            committing.append(index)
        prepare_for_more(lane, batches, time.monotonic() + seconds)
        for index in committing:
            _note_told(lane, index, told, time.monotonic() + seconds)
    except BaseException:
        lane.close()  # with it goes what is left of the rooms
        raise


def _note_told(lane: Lane, index: int | None, told: list[list[StoredItem] | None], deadline: float) -> None:
    if index is None:
        return
    try:
        told[index] = lane.answer(Committed, deadline=deadline).items
    except KvobjError:
        if not lane.is_usable:
            raise


def _room_for(lane: Lane, deadline: float) -> Reserved | None:
    """The answer to a `Reserve`; None where the server refuses."""
    try:
        return lane.answer(Reserved, deadline=deadline)
    except KvobjError:
        if not lane.is_usable:
            raise
        return None


def _fill(lane: Lane, rooms: Sequence[ReservedRoom | None], bodies: Sequence[memoryview]) -> None:
    if len(rooms) != len(bodies):
        raise UnavailableError("the server reserves room for other chunks")
    pieces: list[Piece] = []
    for room, body in zip(rooms, bodies, strict=True):
        if room is None or not body:
            continue
        mapping, _ = lane.piece(room.region, room.offset, len(body))
        pieces.append(Piece(mapping.address(room.offset), address_of(body), len(body), mapping, room.offset))
    if not lane.is_valid:
        raise UnavailableError("the reservation does not hold any more")
    copiers.copy_all(pieces)


def outcome_of(item: StoredItem) -> StoredChunk | KvobjError:
    """What became of a chunk."""
    if item.status != _OK:
        return error_of(item.status, item.code, item.message, item.detail)
    return StoredChunk(existed=item.existed, durability=item.durability, etag=item.etag, digest=item.digest)
