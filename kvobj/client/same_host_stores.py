"""How one connection of the same-host path stores batches of chunks: into room of the arena that it reserves, or through a staging
room.

A trusted writer reserves room ahead: while it copies one batch, the server makes room for those behind it and commits those before
it. Batches are visible one by one, each in one step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from kvobj.buffers import address_of
from kvobj.client.kv_values import NewChunk
from kvobj.client.same_host_lane import Lane
from kvobj.errors import BusyError, KvobjError, UnavailableError
from kvobj.same_host.copying import Piece, copiers
from kvobj.same_host.mapping import copy
from kvobj.same_host.messages import Commit, Committed, NewItem, Reserve, Reserved, StoredItem

AHEAD: Final = 4
"""Batches that have room and are not committed, at most; a server allows a connection twice as many."""
AHEAD_BYTES: Final = 64 * 1024 * 1024
"""And their bytes, but for one that is larger by itself."""
_ALIGNMENT: Final = 64

Told = list[list[StoredItem] | None]
"""For each batch what became of its chunks; None where it has to go another way."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Chunks to be stored together; `items` says where each is in a staging room, one behind the other."""

    namespace: str
    bodies: Sequence[memoryview]
    items: list[NewItem]
    durability: str | None
    size_bytes: int

    @classmethod
    def of(cls, namespace: str, chunks: Sequence[NewChunk], durability: str | None) -> Self:
        """Of chunks whose data are contiguous buffers."""
        bodies = [memoryview(chunk.data).cast("B") for chunk in chunks]
        items: list[NewItem] = []
        at = 0
        for chunk, body in zip(chunks, bodies, strict=True):
            items.append(NewItem(chunk.id, len(body), chunk.parent, chunk.tokens, chunk.digest, at))
            at += -(-len(body) // _ALIGNMENT) * _ALIGNMENT
        return cls(namespace, bodies, items, durability, at)


def store_staged(lane: Lane, batches: Sequence[StoredBatch], deadline: float) -> Told:
    """One after the other through the staging room."""
    told: Told = [None] * len(batches)
    for index, batch in enumerate(batches):
        last = batch.items[-1]
        try:
            room = lane.stage(last.at + last.size_bytes, deadline=deadline).room
            for item, body in zip(batch.items, batch.bodies, strict=True):
                copy(room[item.at :], body)
            commit = Commit(0, batch.namespace, batch.items, batch.durability)
            told[index] = lane.call(commit, Committed, deadline=deadline).items
        except KvobjError:
            if lane.is_closed:
                break
    return told


def store_in_place(lane: Lane, batches: Sequence[StoredBatch], deadline: float) -> Told:
    """Into the arena itself, with room ahead."""
    return _InPlace(lane, batches, deadline).run()


class _InPlace:
    """One call of `store_in_place`. Requests are posted, and their answers read in that order."""

    def __init__(self, lane: Lane, batches: Sequence[StoredBatch], deadline: float) -> None:
        self._lane = lane
        self._batches = batches
        self._deadline = deadline
        self._told: Told = [None] * len(batches)
        self._new = deque(range(len(batches)))
        self._late: deque[int] = deque()
        """Batches that get room once no other has any: who waits for room while he has some might wait for himself."""
        self._asked: deque[tuple[int, int]] = deque()
        """Answers to come: of which batch, and how many others had room or asked for it before; -1: a commit's."""
        self._open: dict[int, int] = {}
        """Bytes of the batches that have room, or asked for it."""

    def run(self) -> Told:
        """Store all; what the server refuses, or a server that is gone, leaves batches to be told of another way."""
        try:
            self._reserve()
            while self._asked:
                self._hear(*self._asked.popleft())
                self._reserve()
        except KvobjError:
            if not self._lane.is_closed:  # its answers would be taken for those to other calls
                self._lane.close()
        except BaseException:
            self._lane.close()
            raise
        return self._told

    def _reserve(self) -> None:
        """Ask for room as far ahead as may be."""
        while len(self._open) < AHEAD:
            queue = self._new or self._late
            if not queue or (self._open and queue is self._late):
                return
            size_bytes = self._batches[queue[0]].size_bytes
            if self._open and sum(self._open.values()) + size_bytes > AHEAD_BYTES:
                return
            index = queue.popleft()
            batch = self._batches[index]
            self._asked.append((index, len(self._open)))
            self._open[index] = size_bytes
            self._lane.post(Reserve(batch.namespace, batch.items, batch.durability), deadline=self._deadline)

    def _hear(self, index: int, others: int) -> None:
        """Take the next answer: fill the room that it names, or keep what it tells."""
        lane = self._lane
        try:
            if others < 0:
                self._told[index] = lane.answer(Committed, deadline=self._deadline).items
                return
            reserved = lane.answer(Reserved, deadline=self._deadline)
        except KvobjError as error:
            if lane.is_closed:
                raise
            self._open.pop(index, None)
            if others > 0 and isinstance(error, BusyError):
                self._late.append(index)
            return
        _fill(lane, reserved, self._batches[index].bodies)
        del self._open[index]
        self._asked.append((index, -1))
        lane.post(Commit(reserved.batch), deadline=self._deadline)


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
