"""The arena itself: region files opened or adopted, populated in the background, reserved from with a deadline, and closed.

It guarantees that room handed out is backed and populated memory of which nobody else has a part, and that whoever waits for
room is served in turn or told no. It does not know what lies in an extent, never evicts (it asks its reclaimer to), and does not
guard against a second process in the same directory (the data directory's lock does).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeVar

from kvobj.arena.directory import prepare_directory, remove_files
from kvobj.arena.extent import ALIGNMENT, Extent, Hold, Pin, let_go
from kvobj.arena.geometry import FORMAT, Geometry, write_geometry
from kvobj.arena.lane import Lane, NamedBucket
from kvobj.arena.outside_writers import GivenOutside, has_earlier_writer
from kvobj.arena.queue import ReservationQueue
from kvobj.arena.region import Region
from kvobj.arena.room import Room
from kvobj.errors import BusyError, CorruptionError, KvobjError, StoreFullError, UnavailableError

REGION_BYTES: Final = 256 * 1024 * 1024
FORMER_SHARE: Final = 4
"""Regions that were shown to owners of a bucket that is gone are of use to nobody: once those of one name are more than this part
of the arena, its bucket's are shown no more."""
# Room is handed out in steps of this much while a region is being populated.
_STEP_BYTES: Final = 32 * 1024 * 1024
# A generation is (incarnation of the arena, reservation within it): higher than any of an earlier process.
_INCARNATION_SHIFT: Final = 40
_LOOK_SECONDS: Final = 1.0

Reclaimer = Callable[[int], Awaitable[int]]
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArenaUsage:
    """Occupancy. `reserved_bytes` are extents as rounded, `requested_bytes` what was asked for; `pinned` counts extents."""

    capacity_bytes: int
    populated_bytes: int
    reserved_bytes: int
    requested_bytes: int
    pinned: int
    regions: int
    dedicated_regions: int
    huge_pages: bool
    location: str
    withheld_bytes: int = 0
    """Extents that nobody has, since a process of before the restart may still write to them."""


class Arena:
    """Shared memory in extents. Made by `open`; every call on the event loop that opened it."""

    def __init__(
        self, directory: Path, geometry: Geometry, *, adopted: bool, huge_pages: bool, dedicated_buckets: frozenset[str]
    ) -> None:
        self.directory = directory
        self.adopted = adopted
        self.capacity_bytes = geometry.capacity_bytes
        self._geometry = geometry
        self._huge_pages = huge_pages
        self._huge_pages_seen = False
        self._room = Room(
            geometry.capacity_bytes,
            geometry.region_bytes,
            dedicated_buckets,
            on_dedicated=lambda number: self._regions[number].wipe(),
            may_share=self._may_share,
        )
        self._regions = [
            Region(directory / f"region-{number:04}", self._room.region_span(number)[1])
            for number in range(len(self._room.extents))
        ]
        self._holds: dict[int, Hold] = {}
        # One method object for all holds, and not one for each.
        self._released = self._on_released
        self._requested_bytes = 0
        self._generation = geometry.incarnation << _INCARNATION_SHIFT
        self._queue = ReservationQueue(self._take, self._give_back, self._is_settled)
        # Spans still to be handed out, ascending; None: an earlier life's extents may yet be adopted.
        self._pending: deque[tuple[int, int]] | None = None if adopted else deque([(0, geometry.capacity_bytes)])
        self._populated_bytes = 0
        self._populating: asyncio.Task[None] | None = None
        self._stopping = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="arena")
        self._outside = GivenOutside(directory, geometry.capacity_bytes)
        self._withheld: dict[int, list[Pin]] = {}
        """By region, room that a process of an earlier life may still write to."""
        self._watching: asyncio.Task[None] | None = None
        self._keeps_outside = False
        self._cannot_note = False

    @classmethod
    async def open(
        cls,
        directory: Path,
        *,
        capacity_bytes: int,
        store_id: bytes,
        boot_id: str,
        region_bytes: int = REGION_BYTES,
        huge_pages: bool = True,
        dedicated_buckets: frozenset[str] = frozenset(),
        data_directory: Path | None = None,
    ) -> Self:
        """Open the arena in `directory`: adopt what an earlier process of this store and boot left, or make it anew.

        Quick in both cases: of a fresh arena only the first 32 MiB are populated, `populate` does the rest. Both sizes are
        rounded down to `ALIGNMENT`. `data_directory` is noted, so that an orphan can be told. `StoreFullError` where the file
        system has not that much free; `UnavailableError` where the directory cannot be used.
        """
        capacity_bytes -= capacity_bytes % ALIGNMENT
        region_bytes = min(region_bytes - region_bytes % ALIGNMENT, capacity_bytes)
        if region_bytes <= 0:
            raise ValueError(f"an arena of {capacity_bytes} bytes in regions of {region_bytes} holds nothing")
        geometry = Geometry(
            format=FORMAT,
            store_id=store_id,
            boot_id=boot_id,
            capacity_bytes=capacity_bytes,
            region_bytes=region_bytes,
            data_directory="" if data_directory is None else str(data_directory),
        )
        geometry, adopted = await asyncio.to_thread(prepare_directory, directory, geometry)
        arena = cls(directory, geometry, adopted=adopted, huge_pages=huge_pages, dedicated_buckets=dedicated_buckets)
        if adopted:
            arena._map_existing()
            await asyncio.to_thread(arena._read_outside)
        else:
            try:
                await arena._populate_step()
            except BaseException:  # a half-made arena leaves nothing behind
                await arena.aclose(remove=True)
                raise
        return arena

    # -- an earlier life ---------------------------------------------------------------------------------------------
    def adopt(self, extents: Sequence[Extent]) -> list[Pin]:
        """Take over extents of an earlier process, usable at once; all else becomes free. Pins in the order given.

        Once, before anything is reserved or populated, and only if `adopted` (RuntimeError otherwise). `CorruptionError` if
        any is out of bounds, not of an earlier process or overlaps another; nothing is adopted then.
        """
        usable = self._usable(extents)
        if len(usable) != len(extents):
            bad = min(set(range(len(extents))) - {at for _, at in usable})
            raise CorruptionError("extent cannot be adopted", extent=extents[bad])
        return [pin for pin in self._keep(extents, usable) if pin is not None]

    def adopt_usable(self, extents: Sequence[Extent]) -> list[Pin | None]:
        """As `adopt`, but what cannot be adopted gets None and stays free; of extents that overlap, the first in the arena
        is kept. 100,000 extents take 0.15 s."""
        return self._keep(extents, self._usable(extents))

    def _usable(self, extents: Sequence[Extent]) -> list[tuple[int, int]]:
        """Place in the arena, and position in `extents`, of those that can be adopted together, ascending."""
        if not self.adopted or self._pending is not None:
            raise RuntimeError("adopt comes first, and only in an adopted arena")
        region_bytes = self._room.region_bytes
        sizes = [0 if region.room is None else region.size_bytes for region in self._regions]
        earlier = self._geometry.incarnation << _INCARNATION_SHIFT
        starts = [extent.region * region_bytes + extent.offset for extent in extents]
        usable: list[tuple[int, int]] = []
        position = 0
        for at in sorted(range(len(starts)), key=starts.__getitem__):
            start, extent = starts[at], extents[at]
            offset, length, region = extent.offset, extent.length, extent.region
            if (
                start >= position
                and extent.generation < earlier
                and not (offset | length) % ALIGNMENT
                and length > 0
                and offset >= 0
                and 0 <= region < len(sizes)
                and offset + length <= sizes[region]
            ):
                usable.append((start, at))
                position = start + length
        return usable

    def _keep(self, extents: Sequence[Extent], usable: Sequence[tuple[int, int]]) -> list[Pin | None]:
        """Adopt the usable ones; what lies between them is to be handed out as it is populated."""
        pending: deque[tuple[int, int]] = deque()
        pins: list[Pin | None] = [None] * len(extents)
        spans: list[tuple[int, int]] = []
        rooms = [region.room for region in self._regions]
        holds, on_released = self._holds, self._released
        position = 0
        for start, at in usable:
            extent = extents[at]
            length = extent.length
            self._keep_between(position, start, pending, spans)
            position = start + length
            spans.append((start, length))
            room = rooms[extent.region]
            assert room is not None  # or it would not be usable
            hold = holds[start] = Hold(extent, room, length, on_released)
            pins[at] = Pin(hold)
        self._keep_between(position, self.capacity_bytes, pending, spans)
        self._room.record(spans)
        self._requested_bytes += sum(length for _, length in spans)
        self._pending = pending
        if self._withheld:
            held_bytes = sum(pin.extent.length for pins in self._withheld.values() for pin in pins)
            _log.warning(
                "%d bytes of the arena wait for writers of before the restart, which may fill them", held_bytes
            )
            self._watching = asyncio.get_running_loop().create_task(self._watch(), name="arena withheld")
            self._watching.add_done_callback(_note_failure)
        return pins

    def _keep_between(
        self, start: int, stop: int, pending: deque[tuple[int, int]], spans: list[tuple[int, int]]
    ) -> None:
        """What is between two adopted extents is free, but for what somebody of before may still write to: that is held."""
        for begin, end in self._outside.within(start, stop):
            if begin > start:
                pending.append((start, begin))
            start = end
            for at, length in self._by_region(begin, end):
                region, offset = divmod(at, self._room.region_bytes)
                self._generation += 1
                hold = Hold(
                    Extent(region, offset, length, self._generation), self._memory(region), length, self._released
                )
                self._holds[at] = hold
                self._withheld.setdefault(region, []).append(Pin(hold))
                spans.append((at, length))
        if stop > start:
            pending.append((start, stop))

    def _by_region(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Offset and length of the parts of a span that lie in one region each."""
        while start < stop:
            end = min(stop, (start // self._room.region_bytes + 1) * self._room.region_bytes)
            yield start, end - start
            start = end

    async def _watch(self) -> None:
        while self._withheld:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look_outside()

    def look_outside(self) -> None:
        """See whether writers of an earlier life have ended, and free what was held for them. Done by itself each second."""
        for number in [number for number in self._withheld if not self._has_earlier_writer(number)]:
            self.release_many(self._withheld.pop(number))

    def _map_existing(self) -> None:
        for region in self._regions:
            if region.path.exists():
                region.map(huge_pages=self._huge_pages)
        self._room.adopt_owners(self._geometry.lanes, self._geometry.lent)
        if self._room.owners.keys() != self._geometry.dedicated.keys():
            # Others come to lie in what is a bucket's no longer: a note of before would give it that with them in it.
            self._note_owners()

    def _read_outside(self) -> None:
        """What was given to writers outside, of regions that such a process of before still has; of others it is free."""
        try:
            self._outside.read()
        except OSError as error:
            raise UnavailableError(
                "arena directory cannot be used", directory=str(self.directory), cause=str(error)
            ) from error
        for number in range(len(self._regions)):
            start, size_bytes = self._room.region_span(number)
            if any(self._outside.within(start, start + size_bytes)) and not self._has_earlier_writer(number):
                self._outside.clear(start, size_bytes)

    def _has_earlier_writer(self, number: int) -> bool:
        return has_earlier_writer(self._regions[number].path, self._geometry.incarnation)

    # -- reserving -----------------------------------------------------------------------------------------------------
    def try_reserve(self, length: int, *, bucket: NamedBucket | None = None) -> Pin | None:
        """An extent of at least `length` bytes at once, or None where there is none to be had now: no room, others wait for it, or
        it cannot be noted whom its region serves."""
        lane = self._room.lane(bucket)
        self._start_populating()
        if self._queue.is_waiting(lane):
            return None
        try:
            hold = self._take(length, lane)
        except UnavailableError:  # who has other means takes them, and who waits for room is told why there is none
            return None
        return None if hold is None else Pin(hold)

    async def reserve(self, length: int, *, timeout_seconds: float, bucket: NamedBucket | None = None) -> Pin:
        """An extent of at least `length` bytes, in turn, as `queue` has it. The caller releases the pin.

        Calls the reclaimer where there is no room. `BusyError` after the deadline, `StoreFullError` if it could never fit,
        `UnavailableError` once the arena is closed, or where it cannot be noted whom a region serves. Cancel-safe.
        """
        pin = self.try_reserve(length, bucket=bucket)
        if pin is not None:
            return pin
        return (await self.reserve_many([length], timeout_seconds=timeout_seconds, bucket=bucket))[0]

    async def reserve_many(
        self, lengths: Sequence[int], *, timeout_seconds: float, bucket: NamedBucket | None = None
    ) -> list[Pin]:
        """Extents of all the lengths, or none: what one request needs is asked for at once, so that two half-served
        requests never wait for each other. Otherwise as `reserve`."""
        if any(length <= 0 for length in lengths):
            raise ValueError(f"an extent has at least one byte, got {lengths}")
        if not self._room.can_ever_hold(lengths):
            raise StoreFullError("larger than the arena", lengths=list(lengths), capacity_bytes=self.capacity_bytes)
        self._start_populating()
        holds = await self._queue.wait(tuple(lengths), self._room.lane(bucket), timeout_seconds) if lengths else []
        return [Pin(hold) for hold in holds]

    def set_reclaimer(self, reclaim: Reclaimer | None) -> None:
        """Who is asked to free about n bytes when somebody waits; it returns how many it freed, 0 for "nothing to free now".

        Never two calls at a time. It is asked again after each call that freed something, each release, and `reconsider`.
        """
        self._queue.set_reclaim(reclaim)

    def reconsider(self) -> None:
        """Tell that the reclaimer may find more than before. Costs nothing where nobody waits."""
        self._queue.kick()

    def obstacles(self, may_go: Callable[[Extent], bool]) -> list[Extent]:
        """Extents whose removal lets a first waiter in, cheapest found, only such as `may_go` accepts. Empty where nobody
        waits, or no choice of them would do. Takes milliseconds in a crowded arena: for a reclaimer whose first victims did
        not suffice."""
        found: list[Extent] = []
        for length, lane in self._queue.heads():
            offsets = self._room.obstacles(length, lane, lambda offset: may_go(self._holds[offset].extent))
            found.extend(self._holds[offset].extent for offset in offsets)
        return found

    def lane(self, bucket: NamedBucket) -> Lane | None:
        """Whose regions the bucket's extents come from; None: those that are shared."""
        return self._room.lane(bucket)

    def lane_of(self, region: int) -> Lane | None:
        """The bucket that a region serves alone now; None: it is shared."""
        return self._room.owners.get(region)

    def region_file(self, region: int) -> tuple[Path, int]:
        """The file behind a region, and its size: for who hands it to another process."""
        found = self._regions[region]
        return found.path, found.size_bytes

    def region_memory(self, region: int) -> memoryview:
        """All of a region, for who makes it known to a device. `UnavailableError` once the arena is closed."""
        return self._memory(region)

    def shared_regions(self) -> list[int]:
        """The regions that there are now and that serve all, in order: for who maps them before it has anything in them."""
        owners = self._room.owners
        return [
            number for number, region in enumerate(self._regions) if region.room is not None and number not in owners
        ]

    @property
    def life(self) -> int:
        """Which process since the arena was made anew this is."""
        return self._geometry.incarnation

    def give_outside(self, region: int, offset: int, size_bytes: int) -> None:
        """Another process is about to be given this part of an extent to fill. Should it outlive this one, that part is nobody
        else's for as long as it has the region mapped. `UnavailableError` where that cannot be noted."""
        try:
            self._outside.note(region * self._room.region_bytes + offset, size_bytes)
        except OSError as error:
            raise UnavailableError("room cannot be given outside", region=region, cause=str(error)) from error

    def keep_outside(self) -> None:
        """End before clients do: from now on no room is freed that was given outside. The next life sees who still has it."""
        self._keeps_outside = True

    def _stays_outside(self, start: int, hold: Hold) -> bool:
        """Whether an extent is not to be freed, though nobody here has it any more; else it is noted no longer."""
        length = hold.extent.length
        if not self._outside.has(start, length):
            return False
        if not self._keeps_outside:
            self._outside.clear(start, length)
        return self._keeps_outside

    def lend(self, region: int, lane: Lane) -> None:
        """Somebody outside, who may see this bucket alone, is about to be shown the whole region: it is the bucket's for good from
        now on, and no other's that gets its name. ValueError where it is not the bucket's. `BusyError` where so much was shown to
        those who had the name before that no more can be spared (`FORMER_SHARE`); `UnavailableError` where it cannot be noted:
        nobody may be shown the region then."""
        if self._room.owners.get(region) != lane:
            raise ValueError(f"region {region} is not {lane.name}'s alone")
        if region not in self._room.lent:
            former_bytes = self._room.lent_bytes_of_former(lane)
            if former_bytes > self.capacity_bytes // FORMER_SHARE:
                raise BusyError(
                    "too many regions are former buckets' of the name", bucket=lane.name, bytes=former_bytes
                )
            self._room.lent.add(region)
            try:
                self._note_owners()
            except BaseException:  # or the next try would go by what no later life knows of
                self._room.lent.discard(region)
                raise

    @property
    def is_waited_for(self) -> bool:
        """Whether anybody waits for room."""
        return bool(self._queue.heads())

    @property
    def reserved_bytes(self) -> int:
        """All extents, as rounded."""
        return self._room.allocated_bytes

    def usage(self) -> ArenaUsage:
        """Present occupancy."""
        return ArenaUsage(
            capacity_bytes=self.capacity_bytes,
            populated_bytes=self._populated_bytes,
            reserved_bytes=self._room.allocated_bytes,
            requested_bytes=self._requested_bytes,
            pinned=len(self._holds),
            regions=sum(region.room is not None for region in self._regions),
            dedicated_regions=len(self._room.owners),
            huge_pages=self._huge_pages_seen,
            location=str(self.directory),
            withheld_bytes=sum(pin.extent.length for pins in self._withheld.values() for pin in pins),
        )

    def _take(self, length: int, lane: Lane | None) -> Hold | None:
        start = self._room.allocate(length, lane)
        if start is None:
            return None
        region, offset = divmod(start, self._room.region_bytes)
        try:
            memory = self._memory(region)
            if lane is not None and region not in self._geometry.dedicated:
                self._note_owners()
        except BaseException:  # nobody has it, so nobody would give it back
            self._room.free(start)
            raise
        self._generation += 1
        extent = Extent(region, offset, self._room.rounded(length), self._generation)
        hold = Hold(extent, memory, length, self._released)
        self._holds[start] = hold
        self._requested_bytes += length
        return hold

    def _give_back(self, hold: Hold) -> None:
        start = self._start_of(hold.extent)
        if self._stays_outside(start, hold):
            return
        del self._holds[start]
        self._requested_bytes -= hold.requested_bytes
        self._room.free(start)

    def release_many(self, pins: Sequence[Pin]) -> None:
        """`Pin.release` of each, which are this arena's: in a third of the time, and who waits is served once. RuntimeError,
        and nothing is released, where one is released already or given twice."""
        ended = let_go(pins)
        if ended:
            places = [(self._start_of(hold.extent), hold) for hold in ended]
            freed = [(start, hold) for start, hold in places if not self._stays_outside(start, hold)]
            for start, hold in freed:
                del self._holds[start]
                self._requested_bytes -= hold.requested_bytes
            self._room.free_many([start for start, _ in freed])
            self._queue.serve()
        self._queue.kick()

    def _on_released(self, hold: Hold) -> None:
        if not hold.pins:
            self._give_back(hold)
            self._queue.serve()
        self._queue.kick()

    def _start_of(self, extent: Extent) -> int:
        return extent.region * self._room.region_bytes + extent.offset

    def _memory(self, region: int) -> memoryview:
        room = self._regions[region].room
        if room is None:
            raise UnavailableError("the arena is closed", region=region)
        return room

    def _may_share(self, region: int) -> bool:
        """Whether a bucket's region may serve all again: not before it is noted, since by a note of before a later life would give
        the bucket what others have put there."""
        if region not in self._geometry.dedicated:
            return True
        try:
            self._note_owners(without=region)
        except UnavailableError as error:
            if not self._cannot_note and not self._stopping:
                _log.error("a bucket's empty regions serve no other for now: %s", error)
                self._cannot_note = True
            return False
        return True

    def _note_owners(self, *, without: int | None = None) -> None:
        """Write down whom regions serve, and which were shown; `without` is one that serves no bucket any more. `UnavailableError`
        where that cannot be: what was noted before stands."""
        if self._stopping:
            raise UnavailableError("the arena is closed")
        owners = {number: lane for number, lane in self._room.owners.items() if number != without}
        noted = Geometry(
            **{
                name: getattr(self._geometry, name)
                for name in Geometry.__struct_fields__
                if name not in ("dedicated", "made", "lent")
            },
            dedicated={number: lane.name for number, lane in owners.items()},
            made={number: (lane.created_ms, lane.owner) for number, lane in owners.items()},
            lent=sorted(self._room.lent),
        )
        try:
            write_geometry(self.directory, noted)
        except OSError as error:
            raise UnavailableError(
                "whom the arena's regions serve cannot be noted", directory=str(self.directory), cause=str(error)
            ) from error
        self._geometry = noted
        self._cannot_note = False

    # -- populating ------------------------------------------------------------------------------------------------------
    async def populate(self) -> None:
        """Back and fault in everything, in a thread, step by step; each step's room is handed out as it is ready.

        Returns when all is done or the arena closes. Start it once adoption is over. `StoreFullError` where the memory ran
        out on the way: what is populated stays in use. Cancelling the caller does not stop it.
        """
        self._start_populating()
        if self._populating is not None:
            await asyncio.shield(self._populating)

    def _start_populating(self) -> None:
        if self._populating is None and not self._stopping:
            self._populating = asyncio.get_running_loop().create_task(self._populate(), name="arena populate")
            self._populating.add_done_callback(_note_failure)

    def _is_settled(self) -> bool:
        """Whether room comes from eviction only: while there is more to populate, waiting for that is cheaper."""
        return self._populating is not None and self._populating.done()

    async def _populate(self) -> None:
        try:
            while self._populated_bytes < self.capacity_bytes and not self._stopping:
                await self._populate_step()
        except KvobjError:
            self._room.usable_bytes = self._populated_bytes
            raise
        finally:
            # The task is done only after this, and reclaim waits for that.
            asyncio.get_running_loop().call_soon(self._queue.kick)

    async def _populate_step(self) -> None:
        start = self._populated_bytes
        region_bytes = self._room.region_bytes
        number, offset = divmod(start, region_bytes)
        region = self._regions[number]
        stop = min(offset + _STEP_BYTES, region.size_bytes)
        if offset == 0:
            await self._on_thread(partial(region.create, huge_pages=self._huge_pages))
            if region.room is None:
                region.map(huge_pages=self._huge_pages)
        await self._on_thread(lambda: region.populate(offset, stop, fresh=not self.adopted))
        if start == 0 and self._huge_pages:
            self._huge_pages_seen = await self._on_thread(region.uses_huge_pages)
        self._populated_bytes = number * region_bytes + stop
        self._hand_out(self._populated_bytes)
        self._queue.serve()

    def _hand_out(self, upto: int) -> None:
        if self._pending is None:
            self._keep((), ())
        assert self._pending is not None
        region_bytes = self._room.region_bytes
        while self._pending and self._pending[0][0] < upto:
            start, stop = self._pending.popleft()
            end = min(stop, upto, (start // region_bytes + 1) * region_bytes)
            if end < stop:
                self._pending.appendleft((end, stop))
            self._room.add(start, end)

    async def _on_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # -- closing ---------------------------------------------------------------------------------------------------------
    async def aclose(self, *, remove: bool) -> None:
        """Stop populating, fail who waits, drop the mappings; with `remove`, delete the files. Idempotent.

        Views that are still out stay readable: memory goes with the last of them, the files' names go now. Without `remove` the
        next process of this boot can adopt what the directory of the dram tier names.
        """
        self._stopping = True
        await self._queue.aclose()
        if self._populating is not None:
            await asyncio.wait([self._populating])
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        self._thread.shutdown(wait=False)
        self._outside.close()
        for region in self._regions:
            region.drop()
        if remove:
            await asyncio.to_thread(remove_files, self.directory)


def _note_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("%s ended early: %s", task.get_name(), task.exception())
