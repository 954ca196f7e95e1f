"""Chunks from an upstream into this store: with their place and their bytes, checked, ancestors first, one flight each.

A chunk is stored here as a writer would store it, so that all that holds for chunks holds for it: its parent is live, its layout
and quota hold, its bytes have the digest that the upstream told. Whatever fails is as if there were no upstream.

Who waits for whom: no flight waits for another, or for room, with an exchange open; and none takes room before the flight of its
parent, whoever started that, has its own or is over. So who holds a connection or room depends on nobody who waits for one. Room
is memory of this process: an upstream that is slow keeps nothing of the arena, which is given bytes that are all here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketRow, ObjectRow
from kvobj.clock import Clock
from kvobj.errors import (
    CapacityError,
    ConflictError,
    DigestMismatchError,
    EntityTooLargeError,
    InvalidRequestError,
    KvobjError,
    ParentNotFoundError,
)
from kvobj.store.byte_gate import ByteGate
from kvobj.store.places import DEFAULT_NAMESPACE, ChunkPlace, check_size, default_namespace, place_of
from kvobj.store.upstream.agreement import Agreement
from kvobj.store.upstream.body_memory import give_back, new_memory
from kvobj.store.upstream.client import ChunkHead, UpstreamClient
from kvobj.store.upstream.instruments import UpstreamInstruments
from kvobj.store.upstream.passing import fill, passed_row
from kvobj.store.upstream.storing import ChunkWriter
from kvobj.tiers.remote.faults import RemoteFault
from kvobj.tiers.remote.requests import Exchange

AT_ONCE: Final = 8
"""Chunks of one asker that are on their way at once; and of their ancestors as many."""
ANCESTORS_MAX: Final = 1024
"""A chunk with more of them to fetch is handed on without being stored."""
FETCHED_BYTES_MAX: Final = 256 * 2**20
"""Of chunks on their way: they come in one blob each, which is half as large at most."""


class Outcome(Enum):
    """What became of a chunk that was asked for. `LOOSE`: it is there, and cannot be stored here."""

    STORED = "hit"
    MISSING = "miss"
    LOOSE = "loose"
    FAILED = "failed"
    DISAGREES = "disagrees"


@dataclass(frozen=True, slots=True)
class Found:
    """`row`: of a loose chunk, as it is read there (`passing`); it is in no catalog. `is_late`: it failed by time."""

    outcome: Outcome
    row: ObjectRow | None = None
    is_late: bool = False


class _MustWait(Exception):  # noqa: N818 - a turn that a read takes, no error
    """The chunk cannot be taken at once: something has to be asked or waited for, and is without the exchange."""


class _Ended(Exception):  # noqa: N818 - the end of a flight, no error
    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


@dataclass(slots=True, eq=False)
class _Flight:
    """One chunk on its way. `is_alone`: it is the only one that was asked for, so it is read at once if its parent is here, and may
    be handed on: half of its time is for ancestors. `turns`: of the reads for one asker; `after`: the flight before it in its
    list. `head` and `place` are what it was found to be first, and `parent` the flight that it waits for. `has_room` is set too
    when it is over."""

    bucket: BucketRow
    key: str
    until: float
    is_alone: bool
    turns: asyncio.Semaphore
    depth: int = 0
    after: _Flight | None = None
    head: ChunkHead | None = None
    place: ChunkPlace | None = None
    parent: _Flight | None = None
    has_room: asyncio.Event = field(default_factory=asyncio.Event)
    memory: memoryview = field(default_factory=lambda: memoryview(b""))
    room: ExitStack = field(default_factory=ExitStack)
    task: asyncio.Task[Found] = field(init=False)

    @property
    def is_coming(self) -> bool:
        """It has room, and is not over."""
        return self.has_room.is_set() and not self.task.done()

    @property
    def outcome(self) -> Outcome | None:
        """None while it is on its way, and where it met a defect."""
        is_known = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return self.task.result().outcome if is_known else None


class Fetcher:
    """Of one bucket. Event loop only; `aclose` ends what is on its way."""

    def __init__(
        self,
        client: UpstreamClient,
        agreement: Agreement,
        *,
        catalog: Catalog,
        writer: ChunkWriter,
        instruments: UpstreamInstruments,
        clock: Clock,
        log: logging.Logger,
        room_bytes: int = FETCHED_BYTES_MAX,
    ) -> None:
        self._client = client
        self._agreement = agreement
        self._catalog = catalog
        self._writer = writer
        self._instruments = instruments
        self._clock = clock
        self._log = log
        self._room = ByteGate(limit_bytes=room_bytes, wait_seconds=client.settings.timeout_seconds)
        # An answer may wait for one who came by another way: a flight is for those that came by the same stores.
        self._flights: dict[tuple[str, tuple[str, ...]], _Flight] = {}

    async def aclose(self) -> None:
        """End what is on its way."""
        flights = [flight.task for flight in self._flights.values()]
        for flight in flights:
            flight.cancel()
        if flights:
            await asyncio.wait(flights)

    async def fetch(self, bucket: BucketRow, key: str, *, until: float) -> Found:
        """Have a chunk here, with its ancestors. Who asks while it is on its way waits for the same flight, which goes on when the
        first of them leaves."""
        return await self._landed(self._flight(bucket, key, until=until, is_alone=True), until=until)

    async def fetch_all(self, bucket: BucketRow, keys: Sequence[str], *, until: float, is_run: bool) -> int:
        """Have chunks here, in any order; how many of them are. `is_run`: none after the first that is not."""
        running: deque[_Flight] = deque()
        stored, waiting, turns = 0, iter(keys), asyncio.Semaphore(AT_ONCE)
        last: _Flight | None = None
        is_over = False
        while True:
            while not is_over and len(running) < AT_ONCE and (key := next(waiting, None)) is not None:
                last = self._flight(bucket, key, until=until, is_alone=len(keys) == 1, turns=turns, after=last)
                running.append(last)
            if not running:
                return stored
            found = await self._landed(running.popleft(), until=until)
            if found.outcome is Outcome.STORED:
                stored += not is_over
            elif is_run or self._client.is_down:
                is_over = True

    # -- flights -------------------------------------------------------------------------------------------------
    def _flight(
        self,
        bucket: BucketRow,
        key: str,
        *,
        until: float,
        is_alone: bool = False,
        turns: asyncio.Semaphore | None = None,
        depth: int = 0,
        after: _Flight | None = None,
    ) -> _Flight:
        """The flight of a chunk: the one that is under way, or else a new one."""
        name = (key, self._client.via.came_by)
        under_way = self._flights.get(name)
        if under_way is not None:
            return under_way
        turns = asyncio.Semaphore(AT_ONCE) if turns is None else turns
        flight = _Flight(bucket, key, until, is_alone, turns, depth, after)
        flight.task = asyncio.create_task(self._fly(flight), name="fetch-chunk")
        self._flights[name] = flight
        flight.task.add_done_callback(lambda _: self._flights.pop(name, None))
        return flight

    async def _landed(self, flight: _Flight, *, until: float) -> Found:
        """What became of it. Who joined a flight that had less time than this has it fly once more."""
        found = await asyncio.shield(flight.task)
        if found.is_late and flight.until < until and not self._client.is_down:
            again = self._flight(flight.bucket, flight.key, until=until, is_alone=flight.is_alone)
            found = await asyncio.shield(again.task)
        return found

    async def _fly(self, flight: _Flight) -> Found:
        bucket, is_late = flight.bucket, False
        try:
            async with asyncio.timeout_at(flight.until):
                outcome = await self._outcome(flight)
        except (TimeoutError, RemoteFault) as error:
            outcome = Outcome.FAILED
            is_late = isinstance(error, TimeoutError) or error.kind == "timeout"
        except _Ended as ended:
            outcome = ended.outcome
        except DigestMismatchError as error:
            self._log.error("upstream of %s: a chunk came with wrong bytes: %s", bucket.name, error)
            outcome = Outcome.FAILED
        except (CapacityError, EntityTooLargeError, ParentNotFoundError):
            outcome = Outcome.LOOSE
        except (InvalidRequestError, ConflictError) as error:
            self._log.warning("upstream of %s: a chunk that does not fit here: %s", bucket.name, error)
            outcome = Outcome.DISAGREES
        except KvobjError as error:
            self._log.warning("upstream of %s: a chunk could not be stored: %s", bucket.name, error)
            outcome = Outcome.LOOSE
        finally:
            flight.room.close()
            flight.has_room.set()
            flight.after = flight.parent = None  # or a list's last would keep all of them
        if outcome is Outcome.LOOSE:
            return Found(outcome, self._row(flight))
        if flight.head is not None or outcome is not Outcome.STORED:
            self._instruments.chunk(outcome.value)
        return Found(outcome, is_late=is_late)

    async def _outcome(self, flight: _Flight) -> Outcome:
        if not flight.is_alone and await self._is_here(flight, flight.key):
            return Outcome.STORED  # it came as an ancestor of another that was asked for
        # In a chain's list the one before is the parent: once that has room there is nothing to wait for, nor to be asked first.
        is_next = flight.after is not None and flight.after.has_room.is_set()
        if not (flight.is_alone or is_next) or not await self._read_at_once(flight):
            await self._read_in_turn(flight)
        head, place, parent = flight.head, flight.place, flight.parent
        assert head is not None
        assert place is not None
        if parent is not None:
            await asyncio.wait([parent.task], timeout=self._patience_seconds(flight))
            if parent.outcome is not Outcome.STORED:
                return Outcome.LOOSE
        await self._writer.write(flight.bucket, flight.key, head, place, flight.memory)
        return Outcome.STORED

    async def _read_at_once(self, flight: _Flight) -> bool:
        """Have the bytes, if nothing has to be waited for but they; else `_read_in_turn`."""

        async def take(head: ChunkHead, exchange: Exchange) -> bool:
            if not flight.has_room.is_set():  # an attempt before this one may have taken it
                flight.head, flight.place = head, await self._place(flight, head)
                if head.digest is None or flight.place is None:
                    raise _MustWait
                if flight.place.parent and not await self._is_here(flight, flight.place.parent):
                    if flight.after is None or flight.after.key != flight.place.parent or not flight.after.is_coming:
                        raise _MustWait
                    flight.parent = flight.after
                try:
                    async with asyncio.timeout(0):
                        await self._take_room(flight, head.size_bytes)
                except TimeoutError:
                    raise _MustWait from None
            return await self._fill(flight, head, exchange)

        try:
            async with flight.turns:
                if not await self._client.read(flight.key, take, until=flight.until):
                    raise _Ended(Outcome.MISSING)
        except _MustWait:
            return False
        return True

    async def _read_in_turn(self, flight: _Flight) -> None:
        """Have the bytes, after all that has to be waited for."""
        if flight.head is None or flight.head.digest is None:
            flight.head = await self._client.head(flight.key, until=flight.until)
        head = flight.head
        if head is None:
            raise _Ended(Outcome.MISSING)
        place = await self._place(flight, head)
        if place is None:
            await self._agreement.ask(await self._namespace(flight, head), until=flight.until)
            place = await self._place(flight, head)
        if place is None or head.digest is None:
            raise _Ended(Outcome.FAILED)
        flight.place = place
        if place.parent and not await self._is_here(flight, place.parent):
            await self._follow_parent(flight, place.parent)
        await self._take_room(flight, head.size_bytes)

        async def take(head: ChunkHead, exchange: Exchange) -> bool:
            return await self._fill(flight, head, exchange)

        async with flight.turns:
            if not await self._client.read(flight.key, take, until=flight.until):
                raise _Ended(Outcome.MISSING)

    async def _follow_parent(self, flight: _Flight, key: str) -> None:
        """Have the parent's flight go before this one: return once that has its room. What the upstream has, it has with all
        ancestors; it is loose here where they cannot be had."""
        if flight.depth >= ANCESTORS_MAX:
            raise _Ended(Outcome.LOOSE)
        until = asyncio.get_running_loop().time() + self._patience_seconds(flight)
        parent = self._flight(flight.bucket, key, until=until, turns=flight.turns, depth=flight.depth + 1)
        before: _Flight | None = parent
        while before is not None:
            if before is flight:
                raise InvalidRequestError("the chunk is an ancestor of itself", key=flight.key)
            before = before.parent
        flight.parent = parent
        try:
            async with asyncio.timeout_at(until):
                await parent.has_room.wait()
        except TimeoutError:
            raise _Ended(Outcome.LOOSE) from None
        if parent.outcome not in (None, Outcome.STORED):
            raise _Ended(Outcome.LOOSE)

    @staticmethod
    def _patience_seconds(flight: _Flight) -> float:
        """How long ancestors are waited for: where the chunk may be handed on, that has half of the time."""
        left = flight.until - asyncio.get_running_loop().time()
        return max(0.0, left / 2 if flight.is_alone else left)

    async def _take_room(self, flight: _Flight, size_bytes: int) -> None:
        await self._room.enter(size_bytes)
        flight.room.callback(self._room.leave, size_bytes)
        flight.memory = new_memory(size_bytes)
        flight.room.callback(give_back, flight.memory)
        flight.has_room.set()

    @staticmethod
    async def _fill(flight: _Flight, head: ChunkHead, exchange: Exchange) -> bool:
        first = flight.head
        assert first is not None
        if (head.size_bytes, head.namespace, head.parent) != (first.size_bytes, first.namespace, first.parent):
            raise RemoteFault("server", "another chunk than before", is_repeatable=False)
        await fill(flight.memory, exchange)
        return True

    async def _is_here(self, flight: _Flight, key: str) -> bool:
        """Whether a chunk of the same bucket is live here, and not just on its way."""
        (row,) = await self._catalog.lookup(flight.bucket.name, [key])
        return row is not None

    async def _namespace(self, flight: _Flight, head: ChunkHead) -> NamespaceRow:
        if head.namespace in ("", DEFAULT_NAMESPACE):
            return default_namespace(flight.bucket.name)
        row = await self._catalog.namespaces.namespace(flight.bucket.name, head.namespace)
        if row is None:
            raise _Ended(Outcome.DISAGREES)  # it is not imported
        return row

    async def _place(self, flight: _Flight, head: ChunkHead) -> ChunkPlace | None:
        """Where the chunk belongs here; None where the upstream has to be asked whether its namespace is the same there. Errors of
        `place_of` and `check_size`: it fits nowhere."""
        namespace = await self._namespace(flight, head)
        place = place_of(namespace, flight.key, parent=head.parent, tokens=head.tokens or None)
        check_size(place, head.size_bytes)
        problem = self._agreement.known(namespace)
        if problem:
            raise _Ended(Outcome.DISAGREES)
        return None if problem is None else place

    def _row(self, flight: _Flight) -> ObjectRow | None:
        """The row by which a loose chunk is read there; None where too little of it is known."""
        if flight.head is None or flight.place is None or flight.head.digest is None:
            return None
        return passed_row(flight.bucket, flight.key, flight.head, flight.place, now_ms=self._clock.now_ms())
