"""The device pool: a few large allocations of device memory, carved into extents of exact size.

It guarantees that an extent is not given to anybody else while a pin on it lives, nor while work that was queued against it
may still run. It never evicts and never waits: who wants room makes room (the hbm tier does). An extent has a generation that
is new for every reservation, so a name kept too long never means another's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from kvobj.errors import StoreFullError
from kvobj.gpu.device import DeviceMemory
from kvobj.gpu.gaps import ALIGNMENT, Gaps, aligned
from kvobj.gpu.pins import CountedPin, Held, PinCounts

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


class _Hold(Held):
    __slots__ = ("extent", "requested_bytes", "slab")

    def __init__(self, slab: _Slab, extent: DeviceExtent, requested_bytes: int) -> None:
        super().__init__()
        self.slab = slab
        self.extent = extent
        self.requested_bytes = requested_bytes


class DevicePin(CountedPin[_Hold]):
    """See `MemoryPin`: one reference on an extent of a pool."""

    __slots__ = ()

    @property
    def extent(self) -> DeviceExtent:
        """The extent that is held."""
        return self._held.extent

    @property
    def address(self) -> int:
        """See `MemoryPin.address`."""
        return self._held.slab.memory.address + self._held.extent.offset

    @property
    def size_bytes(self) -> int:
        """See `MemoryPin.size_bytes`: what was asked for, before rounding."""
        return self._held.requested_bytes

    @property
    def slab(self) -> DeviceMemory:
        """The allocation that it lies in: for who exports it to another process."""
        return self._held.slab.memory


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
        self._counts = PinCounts(self._free)
        self._is_closed = False

    def fill(self) -> None:
        """Take all slabs now: later they may not be there any more. `StoreFullError` where the device has less."""
        with self._counts.locked():
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
        with self._counts.locked():
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
            return DevicePin(self._counts, _Hold(slab, extent, size_bytes))

    def can_ever_hold(self, size_bytes: int) -> bool:
        """Whether an empty pool would have room for it."""
        return aligned(size_bytes) <= self.capacity_bytes

    def trim(self) -> int:
        """Give slabs back of which nothing is in use; how many bytes that were."""
        with self._counts.locked():
            empty = [slab for slab in self._slabs if slab.gaps.is_empty]
            for slab in empty:
                self._slabs.remove(slab)
                self._source.give_back(slab.memory)
            return sum(slab.memory.size_bytes for slab in empty)

    def usage(self) -> PoolUsage:
        """Present occupancy."""
        with self._counts.locked():
            free_bytes = sum(slab.gaps.free_bytes for slab in self._slabs)
            largest = max((slab.gaps.largest for slab in self._slabs), default=0)
            return PoolUsage(
                capacity_bytes=self.capacity_bytes,
                slab_bytes=self._slab_total(),
                slabs=len(self._slabs),
                extents=self._extents,
                reserved_bytes=self._reserved_bytes,
                requested_bytes=self._requested_bytes,
                leaving_bytes=sum(hold.extent.length for hold in self._counts.leaving),
                largest_free_bytes=largest,
                fragmentation=1 - largest / free_bytes if free_bytes else 0.0,
            )

    def close(self) -> None:
        """Give all slabs back. Idempotent. Nothing on the device may use them any more."""
        with self._counts.locked():
            self._is_closed = True
            slabs, self._slabs = self._slabs, []
            for slab in slabs:
                self._source.give_back(slab.memory)

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
