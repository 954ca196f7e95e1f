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
from kvobj.same_host.messages import Commit, Committed, NewItem, Reserve, Reserved, StoredItem

_ALIGNMENT: Final = 64
_OK: Final = 200


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
        _fill(lane, reserved, batch.bodies)
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
                _fill(lane, reserved, batch.bodies)
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


def _fill(lane: Lane, reserved: Reserved, bodies: Sequence[memoryview]) -> None:
    if len(reserved.rooms) != len(bodies):
        raise UnavailableError("the server reserves room for other chunks")
    pieces: list[Piece] = []
    for room, body in zip(reserved.rooms, bodies, strict=True):
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
