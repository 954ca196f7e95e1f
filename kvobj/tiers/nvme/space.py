"""Which room of which segment is taken, and by whom it is being read; makes segments ahead of need.

The map lives in memory and is rebuilt from the directory at every open. It guarantees that an extent given back is not
handed out again while somebody still reads it; that it is given back only after the commit that freed it is up to the tier.
Event loop only; files are made on a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvobj.arena.allocator import ExtentAllocator
from kvobj.errors import KvobjError, StoreFullError, TierUnavailableError
from kvobj.tiers.nvme.directory import Place
from kvobj.tiers.nvme.io import Disk
from kvobj.tiers.nvme.record import RECORD_BYTES
from kvobj.tiers.nvme.segment_file import SegmentFile, is_out_of_room

_SEGMENT_BYTES_MAX: Final = 1 << 30
# Holds the largest blob (128 MiB of plain bytes) with its head and record; a capacity below it gets one segment.
_SEGMENT_BYTES_MIN: Final = 160 << 20
_SEGMENTS_WANTED: Final = 4
_MIB: Final = 1 << 20


def default_segment_bytes(capacity_bytes: int) -> int:
    """1 GiB, or less so that a small capacity is several segments, but never too small for the largest blob."""
    wanted = max(capacity_bytes // _SEGMENTS_WANTED, _SEGMENT_BYTES_MIN)
    return min(wanted, _SEGMENT_BYTES_MAX, capacity_bytes) // _MIB * _MIB or capacity_bytes


@dataclass(frozen=True, slots=True)
class SegmentStatus:
    """One segment as an operator sees it. A failed one takes nothing new; `mode` is `O_DIRECT` or `buffered`."""

    path: Path
    capacity_bytes: int
    used_bytes: int
    failed: bool
    mode: str


@dataclass(slots=True)
class _Segment:
    file: SegmentFile
    allocator: ExtentAllocator


class SegmentSpace:
    """Room in the segments of one directory, up to `capacity_bytes` in all, small frames in LMDB counted with it."""

    def __init__(
        self, disk: Disk, directory: Path, *, executor: Executor, capacity_bytes: int, segment_bytes: int
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._executor = executor
        self._segment_bytes = segment_bytes // RECORD_BYTES * RECORD_BYTES
        self._segments: dict[int, _Segment] = {}
        self._readers: dict[tuple[int, int], int] = {}
        self._freed_while_read: set[tuple[int, int]] = set()
        self._next_number = 0
        self._growing: asyncio.Task[None] | None = None
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.lost_segments: tuple[int, ...] = ()
        """Numbers of the segments that the directory names and whose files were not there at open."""

    @property
    def mode(self) -> str:
        """`O_DIRECT` if every segment is, else `buffered`."""
        return "O_DIRECT" if self.is_direct else "buffered"

    @property
    def is_direct(self) -> bool:
        """Whether every segment is opened with O_DIRECT."""
        return all(segment.file.direct for segment in self._segments.values())

    @property
    def is_queued(self) -> bool:
        """Whether no segment's file system has said that it makes no transfers without a thread."""
        return all(segment.file.queued for segment in self._segments.values())

    def statuses(self) -> list[SegmentStatus]:
        """All segments, by number."""
        return [
            SegmentStatus(
                path=segment.file.path,
                capacity_bytes=segment.file.size_bytes,
                used_bytes=segment.allocator.allocated_bytes,
                failed=segment.file.failed,
                mode="O_DIRECT" if segment.file.direct else "buffered",
            )
            for _, segment in sorted(self._segments.items())
        ]

    def file_of(self, place: Place) -> SegmentFile:
        """The file that a place is in. `TierUnavailableError` if it was not there at open."""
        segment = self._segments.get(place.segment)
        if segment is None:
            raise TierUnavailableError("segment file is missing", segment=place.segment)
        return segment.file

    def adopt(self, files: Sequence[SegmentFile], places: Iterable[Place]) -> None:
        """Take over the open files and what the directory says lies in them. `CorruptionError` if places overlap.

        Rows of a segment whose file is gone stay in the directory: reading them fails as a failed medium does.
        """
        taken: dict[int, list[tuple[int, int]]] = {file.number: [] for file in files}
        lost: set[int] = set()
        for place in places:
            if place.inline:
                self.used_bytes += place.extent_bytes
                continue
            # The number of a lost segment is not given to a new one: its rows would then name others' bytes.
            self._next_number = max(self._next_number, place.segment + 1)
            if place.segment in taken:
                taken[place.segment].append((place.offset, place.extent_bytes))
            else:
                lost.add(place.segment)
        self.lost_segments = tuple(sorted(lost))
        for file in files:
            allocator = ExtentAllocator(file.size_bytes, RECORD_BYTES)
            allocator.adopt(taken[file.number])
            self._segments[file.number] = _Segment(file, allocator)
            self._next_number = max(self._next_number, file.number + 1)
            self.used_bytes += allocator.allocated_bytes

    async def allocate(self, length: int) -> tuple[SegmentFile, int]:
        """Room for `length` bytes: the segment and the offset in it. Waits for a segment being made, if need be.

        `StoreFullError` where there is none; `TierUnavailableError` where there would be, but in segments that failed.
        """
        if self.used_bytes + length > self.capacity_bytes:
            raise StoreFullError("nvme tier is full", wanted_bytes=length, used_bytes=self.used_bytes)
        while True:
            found = self._try_allocate(length)
            if found is not None:
                self._grow_ahead()
                return found
            if self._growing is None and not self._next_segment_bytes(length):
                self._raise_no_room(length)
            await self._grow(length)

    def allocate_at_once(self, length: int) -> tuple[SegmentFile, int] | None:
        """As `allocate`, but None wherever that would wait or raise."""
        if self.used_bytes + length > self.capacity_bytes:
            return None
        found = self._try_allocate(length)
        if found is not None:
            self._grow_ahead()
        return found

    def take_inline(self, length: int) -> None:
        """Count a small frame in LMDB. `StoreFullError` where it would exceed the capacity."""
        if self.used_bytes + length > self.capacity_bytes:
            raise StoreFullError("nvme tier is full", wanted_bytes=length, used_bytes=self.used_bytes)
        self.used_bytes += length

    def free(self, place: Place) -> None:
        """Give a blob's room back: now, or when its last reader is done. Only after the freeing commit is durable."""
        spot = (place.segment, place.offset)
        if place.inline:
            self.used_bytes -= place.extent_bytes
        elif spot in self._readers:
            self._freed_while_read.add(spot)
        elif place.segment in self._segments:
            self.used_bytes -= self._segments[place.segment].allocator.free(place.offset)

    def free_many(self, places: Sequence[Place]) -> None:
        """`free` of each."""
        self.used_bytes -= sum(place.frame_bytes for place in places if place.inline)
        for place in places:
            if not place.inline:
                self.free(place)

    def hold(self, place: Place) -> None:
        """Count a reader of the place, in the same turn of the event loop in which its row was looked up."""
        spot = (place.segment, place.offset)
        self._readers[spot] = self._readers.get(spot, 0) + 1

    def release(self, place: Place) -> None:
        """Count a reader less; each `hold` is matched by one release."""
        spot = (place.segment, place.offset)
        left = self._readers[spot] - 1
        if left:
            self._readers[spot] = left
            return
        del self._readers[spot]
        if spot in self._freed_while_read:
            self._freed_while_read.remove(spot)
            self.free(place)

    async def start(self) -> None:
        """Make the first segment, if there is none, so that the I/O mode is known from the start."""
        if not self._segments:
            await self._grow(RECORD_BYTES)

    async def settle(self) -> None:
        """Wait for a segment that is being made."""
        if self._growing is not None:
            await asyncio.wait([self._growing])

    def close_files(self) -> None:
        """Close all segments. Nobody may be reading or writing any more."""
        for segment in self._segments.values():
            segment.file.close()
        self._segments.clear()

    def _try_allocate(self, length: int) -> tuple[SegmentFile, int] | None:
        for segment in self._segments.values():
            if segment.file.failed:
                continue
            offset = segment.allocator.allocate(length)
            if offset is not None:
                self.used_bytes += length
                return segment.file, offset
        return None

    def _next_segment_bytes(self, needed: int) -> int:
        """Size of the segment that could still be made and hold `needed`, 0 if none."""
        made = sum(segment.file.size_bytes for segment in self._segments.values())
        size = min(self._segment_bytes, (self.capacity_bytes - made) // RECORD_BYTES * RECORD_BYTES)
        return size if size >= max(needed, RECORD_BYTES) else 0

    def _grow_ahead(self) -> None:
        """Start making the next segment when less than a quarter of one is left."""
        wanted = self._segment_bytes // _SEGMENTS_WANTED
        for segment in self._segments.values():
            if not segment.file.failed:
                wanted -= segment.allocator.free_bytes
                if wanted <= 0:
                    return
        size = self._next_segment_bytes(RECORD_BYTES) if self._growing is None else 0
        if size:
            self._start_growing(size)

    def _start_growing(self, size: int) -> None:
        self._growing = asyncio.get_running_loop().create_task(self._make_segment(size), name="nvme segment")
        self._growing.add_done_callback(self._grown)

    def _grown(self, task: asyncio.Task[None]) -> None:
        self._growing = None
        if not task.cancelled():
            # A failure ahead of need is nobody's error yet: who needs the room tries again and gets it first hand.
            task.exception()

    async def _grow(self, needed: int) -> None:
        """Wait for the segment being made, or make one that holds `needed`, whose failure is the caller's."""
        if self._growing is not None:
            await asyncio.wait([self._growing])
            return
        size = self._next_segment_bytes(needed)
        if not size:
            self._raise_no_room(needed)
        self._start_growing(size)
        if self._growing is not None:
            await asyncio.shield(self._growing)

    async def _make_segment(self, size: int) -> None:
        number = self._next_number

        def make() -> SegmentFile:
            # Asked first, since a fallocate that fails takes all the room there is for a moment.
            free_bytes = self._disk.available_bytes(self._directory)
            if free_bytes < size:
                raise StoreFullError(
                    "no room on its file system for a segment file",
                    wanted_bytes=size,
                    free_bytes=free_bytes,
                    path=self._directory,
                )
            return SegmentFile.create(self._disk, self._directory, number=number, size_bytes=size)

        try:
            file = await asyncio.get_running_loop().run_in_executor(self._executor, make)
        except OSError as error:
            raise unavailable(error, "segment file cannot be made") from error
        self._next_number += 1
        self._segments[number] = _Segment(file, ExtentAllocator(file.size_bytes, RECORD_BYTES))

    def _raise_no_room(self, length: int) -> None:
        if any(segment.file.failed for segment in self._segments.values()):
            raise TierUnavailableError("only failed segments have room", wanted_bytes=length)
        raise StoreFullError("no segment has a gap this long", wanted_bytes=length, used_bytes=self.used_bytes)


def unavailable(error: OSError, message: str) -> KvobjError:
    """What an OSError means to the store: no room, or a medium that fails."""
    if is_out_of_room(error):
        return StoreFullError(message, reason=error.strerror)
    return TierUnavailableError(message, reason=error.strerror or str(error))
