"""The device pool: a few large allocations of device memory, carved into extents of exact size.

It guarantees that an extent is not given to anybody else while a pin on it lives, nor while work that was queued against it
may still run. It never evicts and never waits: who wants room makes room (the hbm tier does). An extent has a generation that
is new for every reservation, so a name kept too long never means another's bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, Self

from kvobj.errors import DeviceError, StoreFullError
from kvobj.gpu.device import DeviceMemory, Event
from kvobj.gpu.gaps import ALIGNMENT, Gaps, aligned

SLAB_BYTES: Final = 2**30
"""Default of one allocation from the device: few enough to be exported once each, small enough to be given back."""


class SlabSource(Protocol):
    """Where a pool gets its slabs: a device, or torch's caching allocator."""

    def take(self, size_bytes: int) -> DeviceMemory:
        """See `Device.take`."""
        ...

    def give_back(self, memory: DeviceMemory) -> None:
        """See `Device.give_back`."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceExtent:
    """A piece of device memory: `[offset, offset + length)` of slab number `slab`, multiples of 256."""

    slab: int
    offset: int
    length: int
    generation: int


class MemoryPin(Protocol):
    """One reference on device memory. Thread-safe; `release` may come from a finalizer at any point of the program."""

    @property
    def address(self) -> int:
        """Where its first byte is on the device, 256-aligned."""
        ...

    @property
    def size_bytes(self) -> int:
        """How many bytes may be used."""
        ...

    def share(self) -> MemoryPin:
        """Another pin on the same memory, to be released on its own. RuntimeError once this one is released."""
        ...

    def release(self, after: Event | None = None) -> None:
        """Let go; the memory is used again once `after`, too, is done. A second release raises RuntimeError."""
        ...


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Occupancy. `reserved_bytes` are extents as rounded, `requested_bytes` what was asked for; `leaving_bytes` wait for work
    on the device to end; `fragmentation` is the part of the free bytes that one extent could not have."""

    capacity_bytes: int
    slab_bytes: int
    slabs: int
    extents: int
    reserved_bytes: int
    requested_bytes: int
    leaving_bytes: int
    largest_free_bytes: int
    fragmentation: float


class _Slab:
    __slots__ = ("gaps", "memory", "number")

    def __init__(self, number: int, memory: DeviceMemory) -> None:
        self.number = number
        self.memory = memory
        self.gaps = Gaps(memory.size_bytes)


class _Hold:
    __slots__ = ("events", "extent", "pins", "pool", "requested_bytes", "slab")

    def __init__(self, pool: DevicePool, slab: _Slab, extent: DeviceExtent, requested_bytes: int) -> None:
        self.pool = pool
        self.slab = slab
        self.extent = extent
        self.requested_bytes = requested_bytes
        self.pins = 0
        self.events: list[Event] = []


class DevicePin:
    """See `MemoryPin`: one reference on an extent of a pool."""

    __slots__ = ("_hold", "_is_released")

    def __init__(self, hold: _Hold) -> None:
        self._hold = hold
        self._is_released = False
        hold.pins += 1

    @property
    def extent(self) -> DeviceExtent:
        """The extent that is held."""
        return self._hold.extent

    @property
    def address(self) -> int:
        """See `MemoryPin.address`."""
        return self._hold.slab.memory.address + self._hold.extent.offset

    @property
    def size_bytes(self) -> int:
        """See `MemoryPin.size_bytes`: what was asked for, before rounding."""
        return self._hold.requested_bytes

    @property
    def slab(self) -> DeviceMemory:
        """The allocation that it lies in: for who exports it to another process."""
        return self._hold.slab.memory

    @property
    def pins(self) -> int:
        """How many pins the extent has now, releases counted that came so far."""
        return self._hold.pool.pins_of(self._hold)

    def share(self) -> Self:
        """See `MemoryPin.share`."""
        with self._hold.pool.locked():
            if self._is_released:
                raise RuntimeError("share of a released device pin")
            return type(self)(self._hold)

    def release(self, after: Event | None = None) -> None:
        """See `MemoryPin.release`."""
        if self._is_released:
            raise RuntimeError("device pin released twice")
        self._is_released = True
        self._hold.pool.let_go(self._hold, after)


class DevicePool:
    """At most `capacity_bytes` of slabs from `source`, each `slab_bytes` or, for a larger extent, as large as that.

    Slabs are taken when they are needed, or all at once by `fill`. Thread-safe. `close` gives everything back, whoever still pins.
    """

    def __init__(self, source: SlabSource, *, capacity_bytes: int, slab_bytes: int = SLAB_BYTES) -> None:
        self.capacity_bytes = capacity_bytes - capacity_bytes % ALIGNMENT
        if self.capacity_bytes <= 0:
            raise ValueError(f"a pool of {capacity_bytes} bytes holds nothing")
        self._source = source
        self._slab_bytes = min(aligned(slab_bytes), self.capacity_bytes)
        self._slabs: list[_Slab] = []
        self._numbers = 0
        self._generation = 0
        self._extents = 0
        self._reserved_bytes = 0
        self._requested_bytes = 0
        # Freed, but work on the device may still read or write them.
        self._leaving: list[_Hold] = []
        # What was let go and is not yet counted: a finalizer may run inside any of our own calls, where it can take no lock.
        self._let_go: deque[tuple[_Hold, Event | None]] = deque()
        self._lock = threading.Lock()
        self._is_closed = False

    def fill(self) -> None:
        """Take all slabs now: later they may not be there any more. `StoreFullError` where the device has less."""
        with self.locked():
            while (left := self.capacity_bytes - self._slab_total()) > 0:
                if self._add_slab(min(self._slab_bytes, left)) is None:
                    raise StoreFullError(
                        "the device has no such memory free", capacity_bytes=self.capacity_bytes, left=left
                    )

    def try_reserve(self, size_bytes: int) -> DevicePin | None:
        """An extent of at least `size_bytes`, or None where there is no room now. Its contents are undefined."""
        if size_bytes <= 0:
            raise ValueError(f"an extent has at least one byte, got {size_bytes}")
        length = aligned(size_bytes)
        with self.locked():
            if self._is_closed:
                return None
            slab = self._slab_for(length)
            if slab is None:
                return None
            offset = slab.gaps.allocate(length)
            assert offset is not None
            self._generation += 1
            self._extents += 1
            self._reserved_bytes += length
            self._requested_bytes += size_bytes
            extent = DeviceExtent(slab.number, offset, length, self._generation)
            return DevicePin(_Hold(self, slab, extent, size_bytes))

    def can_ever_hold(self, size_bytes: int) -> bool:
        """Whether an empty pool would have room for it."""
        return aligned(size_bytes) <= self.capacity_bytes

    def trim(self) -> int:
        """Give slabs back of which nothing is in use; how many bytes that were."""
        with self.locked():
            empty = [slab for slab in self._slabs if slab.gaps.is_empty]
            for slab in empty:
                self._slabs.remove(slab)
                self._source.give_back(slab.memory)
            return sum(slab.memory.size_bytes for slab in empty)

    def usage(self) -> PoolUsage:
        """Present occupancy."""
        with self.locked():
            free_bytes = sum(slab.gaps.free_bytes for slab in self._slabs)
            largest = max((slab.gaps.largest for slab in self._slabs), default=0)
            return PoolUsage(
                capacity_bytes=self.capacity_bytes,
                slab_bytes=self._slab_total(),
                slabs=len(self._slabs),
                extents=self._extents,
                reserved_bytes=self._reserved_bytes,
                requested_bytes=self._requested_bytes,
                leaving_bytes=sum(hold.extent.length for hold in self._leaving),
                largest_free_bytes=largest,
                fragmentation=1 - largest / free_bytes if free_bytes else 0.0,
            )

    def close(self) -> None:
        """Give all slabs back. Idempotent. Nothing on the device may use them any more."""
        with self.locked():
            self._is_closed = True
            slabs, self._slabs = self._slabs, []
            for slab in slabs:
                self._source.give_back(slab.memory)

    # -- for pins --------------------------------------------------------------------------------------------------------
    @contextmanager
    def locked(self) -> Iterator[None]:
        """The lock, and everything counted that was let go by then."""
        with self._lock:
            self._settle()
            yield
            self._settle()

    def let_go(self, hold: _Hold, after: Event | None) -> None:
        """A pin is gone. Never blocks: where another call is at work, this is counted by it or by the next."""
        self._let_go.append((hold, after))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def pins_of(self, hold: _Hold) -> int:
        """How many pins an extent has."""
        with self.locked():
            return hold.pins

    def _settle(self) -> None:
        while self._let_go:
            hold, after = self._let_go.popleft()
            hold.pins -= 1
            if after is not None:
                hold.events.append(after)
            if not hold.pins:
                self._leaving.append(hold)
        still: list[_Hold] = []
        for hold in self._leaving:
            hold.events = [event for event in hold.events if not is_over(event)]
            if hold.events:
                still.append(hold)
            else:
                self._free(hold)
        self._leaving = still

    def _free(self, hold: _Hold) -> None:
        extent = hold.extent
        self._extents -= 1
        self._reserved_bytes -= extent.length
        self._requested_bytes -= hold.requested_bytes
        hold.slab.gaps.free(extent.offset, extent.length)

    def _slab_total(self) -> int:
        return sum(slab.memory.size_bytes for slab in self._slabs)

    # -- slabs -----------------------------------------------------------------------------------------------------------
    def _slab_for(self, length: int) -> _Slab | None:
        fitting = [(room, slab.number, slab) for slab in self._slabs if (room := slab.gaps.best(length)) is not None]
        if fitting:
            return min(fitting)[2]
        return self._add_slab(length)

    def _add_slab(self, length: int) -> _Slab | None:
        """A slab more that holds `length`; None where the pool is at its capacity or the device has no more."""
        left = self.capacity_bytes - self._slab_total()
        size_bytes = min(max(self._slab_bytes, length), left)
        if size_bytes < length or not size_bytes:
            return None
        try:
            memory = self._source.take(size_bytes)
        except StoreFullError:
            return None
        self._numbers += 1
        slab = _Slab(self._numbers, memory)
        self._slabs.append(slab)
        return slab


def is_over(event: Event) -> bool:
    """Whether memory may be used again that work before the event uses; never, where that work failed."""
    try:
        return event.is_done()
    except DeviceError:
        return False  # nobody knows what the device still does to the memory: it stays out of use
