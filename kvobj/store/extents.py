"""What a same-host client has of the arena: extents that it reads.

It is another process that maps the arena, and is handed places instead of bytes, each under a handle, which is a pin that lives
here: whatever becomes of the holder, `close` gives back all that it had. How the calls travel, and who may make them, is not known
here. One ledger belongs to one holder.

An open counts as a GET does. What it answers stays the chunk's bytes until the handle is released, also where the chunk is
deleted or leaves the tier meanwhile. Event-loop-only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from kvobj.arena import Arena, Extent, Pin, PinnedFrame
from kvobj.catalog.rows import ObjectRow
from kvobj.codec.frame import raw_payload_offset
from kvobj.errors import BusyError
from kvobj.store.ingest import PutTransfer

HANDLES_MAX: Final = 65_536
"""Of one holder: handles cost it nothing, and this process a kilobyte each."""


class WholeFrames(Protocol):
    """What is needed of `Store`."""

    async def frame_of(self, row: ObjectRow) -> PinnedFrame | None:
        """The whole, complete frame of a row of one blob, or None where the bytes are lost."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """`size_bytes` plain bytes at `offset` of region file number `region`; `generation` is the extent's own, never used again."""

    region: int
    offset: int
    size_bytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class OpenedExtent:
    """An object's plain bytes `[0, size_bytes)`, under a handle to be released."""

    handle: int
    place: Place
    tier: str


class PinnedBudget:
    """Bytes of extents that all holders may keep pinned together, so that there is always room for others."""

    __slots__ = ("holder_bytes_max", "pinned_bytes", "total_bytes_max")

    def __init__(self, *, holder_bytes_max: int, total_bytes_max: int) -> None:
        self.holder_bytes_max = holder_bytes_max
        self.total_bytes_max = total_bytes_max
        self.pinned_bytes = 0


class FilledElsewhere:
    """A `ByteSource` of bytes that lie in the room already."""

    __slots__ = ()

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `ByteSource.receive_into`."""
        on_bytes(len(buffer))


class ExtentLedger:
    """See the module's text. `lane`: the bucket whose dedicated regions are all that this holder may see; None: it may see all.

    `hot_frame`: as `Store.frame_of`, at once, for what is in dram and needs no look at; None for all else.
    `budget` is shared by all ledgers. `reserve_seconds`: how long a copy into the lane waits for room. Calls of one ledger may
    run concurrently.
    """

    def __init__(
        self,
        *,
        store: WholeFrames,
        arena: Arena,
        budget: PinnedBudget,
        lane: str | None = None,
        reserve_seconds: float = 10.0,
        hot_frame: Callable[[ObjectRow], PinnedFrame | None] = lambda _: None,
    ) -> None:
        self._hot_frame = hot_frame
        self._store = store
        self._arena = arena
        self._budget = budget
        self._lane = lane
        self._reserve_seconds = reserve_seconds
        self._next_handle = 1
        self._frames: dict[int, tuple[PinnedFrame | Pin, int]] = {}
        self._is_closed = False
        self.pinned_bytes = 0

    def __len__(self) -> int:
        """How many handles are out."""
        return len(self._frames)

    @staticmethod
    def can_open(row: ObjectRow) -> bool:
        """Whether the object's plain bytes lie in one piece where they lie at all: one blob, raw, not empty."""
        return len(row.blobs) == 1 and row.blobs[0].codec == "raw" and row.size_bytes > 0

    def has_room(self, row: ObjectRow) -> bool:
        """Whether the holder may pin the row's bytes now; it may again once it has released others."""
        return self.has_room_for(1, row.size_bytes)

    def has_room_for(self, count: int, size_bytes: int, *, share: int = 1) -> bool:
        """`has_room` of several rows together, in one of so many parts of what may be pinned."""
        budget = self._budget
        return (
            len(self._frames) + count <= HANDLES_MAX // share
            and self.pinned_bytes + size_bytes <= budget.holder_bytes_max // share
            and budget.pinned_bytes + size_bytes <= budget.total_bytes_max // share
        )

    async def open(self, row: ObjectRow) -> OpenedExtent | None:
        """Where the bytes of a row lie that `can_open`; None where they are lost, as a GET would find.

        What is not in dram is brought there first. `BusyError`: the holder has too much pinned (`has_room`), or dram has no room
        in time.
        """
        if not self.has_room(row):
            raise BusyError("too many bytes are pinned by this holder or by all", pinned_bytes=self.pinned_bytes)
        self._count(row.size_bytes)
        try:
            frame = await self._store.frame_of(row)
            if frame is not None and self._lane is not None:
                frame = await self._within_lane(frame)
        except BaseException:
            self._count(-row.size_bytes)
            raise
        if frame is None or self._is_closed:
            self._count(-row.size_bytes)
            if frame is not None:
                frame.release()
            return None
        handle = self._take_handle()
        self._frames[handle] = (frame, row.size_bytes)
        return OpenedExtent(handle, place_in(frame.pin.extent, row.size_bytes), frame.tier)

    def open_hot(self, row: ObjectRow) -> tuple[int, PinnedFrame] | None:
        """As `open`, at once: the handle and the frame, which stays the ledger's. None where `open` has to be asked."""
        size_bytes = row.size_bytes
        if self._lane is not None or self._is_closed or not self.has_room(row):
            return None
        frame = self._hot_frame(row)
        if frame is None:
            return None
        handle = self._take_handle()
        self._frames[handle] = (frame, size_bytes)
        self._count(size_bytes)
        return handle, frame

    def keep(self, pin: Pin, size_bytes: int) -> int:
        """A handle for a pin on a whole frame in dram, which is the ledger's from now on. Who asks has looked for room."""
        handle = self._take_handle()
        self._frames[handle] = (pin, size_bytes)
        self._count(size_bytes)
        return handle

    def release(self, handles: Iterable[int]) -> None:
        """Let go of what was opened. Handles that are not known are ignored: they may have been revoked."""
        for handle in handles:
            held = self._frames.pop(handle, None)
            if held is not None:
                frame, size_bytes = held
                self._count(-size_bytes)
                frame.release()

    async def _within_lane(self, frame: PinnedFrame) -> PinnedFrame:
        """The frame in a region of the lane: copied where it lies among others' (it was promoted, or stored before the bucket got
        regions of its own)."""
        if self._arena.lane_of(frame.pin.extent.region) == self._lane:
            return frame
        try:
            pin = await self._arena.reserve(frame.frame_bytes, timeout_seconds=self._reserve_seconds, bucket=self._lane)
            pin.view[: frame.frame_bytes] = frame.view
            return PinnedFrame(pin, frame_bytes=frame.frame_bytes, tier=frame.tier)
        finally:
            frame.release()

    def close(self) -> None:
        """The holder is gone: all pins are released. Idempotent; opens that are going on end with nothing held."""
        self._is_closed = True
        self.release(list(self._frames))

    def _take_handle(self) -> int:
        handle = self._next_handle
        self._next_handle += 1
        return handle

    def _count(self, size_bytes: int) -> None:
        self.pinned_bytes += size_bytes
        self._budget.pinned_bytes += size_bytes


def room_of(transfer: PutTransfer) -> Place | None:
    """Where the body of a transfer goes that has not begun to receive; None where it is several blobs."""
    pin, size_bytes = transfer.room
    return None if pin is None else place_in(pin.extent, size_bytes)


def place_in(extent: Extent, plain_bytes: int) -> Place:
    """Where the plain bytes of a raw frame lie in its extent."""
    return Place(extent.region, extent.offset + raw_payload_offset(plain_bytes), plain_bytes, extent.generation)
