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

from kvobj.arena import ALIGNMENT, Arena, Extent, Lane, Pin, PinnedFrame
from kvobj.catalog.rows import ObjectRow
from kvobj.codec.frame import raw_frame_bytes, raw_payload_offset
from kvobj.errors import BusyError
from kvobj.store.host_reads import HostReads
from kvobj.store.ingest import PutTransfer

HANDLES_MAX: Final = 65_536
"""Of one holder: handles cost it nothing, and this process some 300 bytes each."""
HANDLES_TOTAL_MAX: Final = 4 * HANDLES_MAX
"""Of all holders: some 80 MiB here, however many connections there are. Bytes alone do not bound them: all may be on one short
extent."""


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
    """What all holders may keep pinned together, so that there is always room for others. Bytes are those of whole extents: it is
    these that nobody else gets, however few bytes an object has."""

    __slots__ = ("handles", "handles_max", "holder_bytes_max", "pinned_bytes", "total_bytes_max")

    def __init__(self, *, holder_bytes_max: int, total_bytes_max: int, handles_max: int = HANDLES_TOTAL_MAX) -> None:
        self.holder_bytes_max = holder_bytes_max
        self.total_bytes_max = total_bytes_max
        self.handles_max = handles_max
        self.pinned_bytes = 0
        self.handles = 0


class FilledElsewhere:
    """A `ByteSource` of bytes that lie in the room already."""

    __slots__ = ()

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `ByteSource.receive_into`."""
        on_bytes(len(buffer))


class ExtentLedger:
    """See the module's text. `lane`: the bucket whose dedicated regions are all that this holder may see; None: it may see all.

    `hot_frame`: as `Store.frame_of`, at once, for what is in dram and needs no look at; None for all else.
    `budget` and `reads` are shared by all ledgers. `reserve_seconds`: how long a copy into the lane waits for room. Calls of one
    ledger may run concurrently.
    """

    def __init__(
        self,
        *,
        store: WholeFrames,
        arena: Arena,
        budget: PinnedBudget,
        reads: HostReads,
        lane: Lane | None = None,
        reserve_seconds: float = 10.0,
        hot_frame: Callable[[ObjectRow], PinnedFrame | None] = lambda _: None,
    ) -> None:
        self._hot_frame = hot_frame
        self._store = store
        self._arena = arena
        self._budget = budget
        self._reads = reads
        self._lane = lane
        self._reserve_seconds = reserve_seconds
        self._next_handle = 1
        self._pins: dict[int, Pin] = {}
        self._ahead: set[int] = set()
        self._opening = 0
        self._is_closed = False
        self.pinned_bytes = 0
        """Of whole extents."""

    def __len__(self) -> int:
        """How many handles are out."""
        return len(self._pins)

    @staticmethod
    def can_open(row: ObjectRow) -> bool:
        """Whether the object's plain bytes lie in one piece where they lie at all: one blob, raw, not empty."""
        return len(row.blobs) == 1 and row.blobs[0].codec == "raw" and row.size_bytes > 0

    def has_room_for(self, count: int, size_bytes: int, *, share: int = 1) -> bool:
        """Whether the holder may pin so many extents of so many bytes together now, in one of so many parts of what may be pinned;
        it may again once it has released others."""
        budget = self._budget
        return (
            len(self._pins) + self._opening + count <= HANDLES_MAX // share
            and budget.handles + count <= budget.handles_max // share
            and self.pinned_bytes + size_bytes <= budget.holder_bytes_max // share
            and budget.pinned_bytes + size_bytes <= budget.total_bytes_max // share
        )

    async def open(self, row: ObjectRow) -> OpenedExtent | None:
        """Where the bytes of a row lie that `can_open`; None where they are lost, as a GET would find.

        What is not in dram is brought there first. `BusyError`: the holder has too much pinned (`has_room_for`), or dram has no
        room in time.
        """
        expected_bytes = extent_bytes(row.size_bytes)
        if not self.has_room_for(1, expected_bytes):
            raise self._too_much()
        # Counted before anything is waited for: others of this holder open meanwhile.
        self._count(1, expected_bytes)
        self._opening += 1
        try:
            frame = await self._store.frame_of(row)
            if frame is not None and self._lane is not None:
                frame = await self._within_lane(frame)
        finally:
            self._opening -= 1
            self._count(-1, -expected_bytes)
        if frame is None:
            return None
        if self._is_closed:
            frame.release()
            return None
        if not self.has_room_for(1, frame.pin.extent.length):  # it may lie in a longer one than its frame needs
            frame.release()
            raise self._too_much()
        handle = self.keep(frame.pin)
        return OpenedExtent(handle, place_in(frame.pin.extent, row.size_bytes), frame.tier)

    def open_hot(self, row: ObjectRow) -> tuple[int, PinnedFrame] | None:
        """As `open`, at once: the handle and the frame, which stays the ledger's. None where `open` has to be asked."""
        if self._lane is not None or self._is_closed or not self.has_room_for(1, extent_bytes(row.size_bytes)):
            return None
        frame = self._hot_frame(row)
        if frame is None:
            return None
        if not self.has_room_for(1, frame.pin.extent.length):
            frame.release()
            return None
        return self.keep(frame.pin), frame

    def keep(self, pin: Pin, *, is_ahead: bool = False) -> int:
        """A handle for a pin on a whole frame in dram, which is the ledger's from now on. Who asks has looked for room. `is_ahead`:
        the holder will read it soon, and let go of it then."""
        handle = self._next_handle
        self._next_handle += 1
        self._pins[handle] = pin
        self._count(1, pin.extent.length)
        self._reads.note(pin.extent.length)
        if is_ahead:
            self._ahead.add(handle)
            self._reads.ahead_bytes += pin.extent.length
        return handle

    def release(self, handles: Iterable[int]) -> None:
        """Let go of what was opened. Handles that are not known are ignored: they may have been revoked."""
        for handle in handles:
            pin = self._pins.pop(handle, None)
            if pin is None:
                continue
            self._count(-1, -pin.extent.length)
            self._reads.note(pin.extent.length)
            if handle in self._ahead:
                self._ahead.remove(handle)
                self._reads.ahead_bytes -= pin.extent.length
            pin.release()

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
        self.release(list(self._pins))

    def _too_much(self) -> BusyError:
        return BusyError("too much is pinned by this holder or by all", pinned_bytes=self.pinned_bytes)

    def _count(self, handles: int, size_bytes: int) -> None:
        self.pinned_bytes += size_bytes
        self._budget.pinned_bytes += size_bytes
        self._budget.handles += handles


def room_of(transfer: PutTransfer) -> Place | None:
    """Where the body of a transfer goes that has not begun to receive; None where it is several blobs."""
    pin, size_bytes = transfer.room
    return None if pin is None else place_in(pin.extent, size_bytes)


def extent_bytes(plain_bytes: int) -> int:
    """What an extent takes that is made for the raw frame of so many bytes."""
    return -(-raw_frame_bytes(plain_bytes) // ALIGNMENT) * ALIGNMENT


def place_in(extent: Extent, plain_bytes: int) -> Place:
    """Where the plain bytes of a raw frame lie in its extent."""
    return Place(extent.region, extent.offset + raw_payload_offset(plain_bytes), plain_bytes, extent.generation)
