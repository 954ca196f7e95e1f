"""The device pool: extents of exact size, kept as long as anybody or the device itself may use them."""

from __future__ import annotations

import gc
import random
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.errors import DeviceError, StoreFullError
from kvobj.gpu.device import DeviceMemory
from kvobj.gpu.gaps import Gaps
from kvobj.gpu.host_device import HostEvent
from kvobj.gpu.pool import DevicePin, DevicePool

KIB = 1024


class Slabs:
    """A source of addresses without memory behind them; neighbours in address, as a GPU's allocations may be."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.at = 0x7F00_0000_0000
        self.out: list[DeviceMemory] = []

    def take(self, size_bytes: int) -> DeviceMemory:
        if sum(memory.size_bytes for memory in self.out) + size_bytes > self.limit:
            raise StoreFullError("no room")
        memory = DeviceMemory(self.at, size_bytes)
        self.at += size_bytes
        self.out.append(memory)
        return memory

    def give_back(self, memory: DeviceMemory) -> None:
        self.out.remove(memory)


def pool_of(capacity: int = 64 * KIB, slab: int = 16 * KIB, limit: int = 1 << 40) -> tuple[DevicePool, Slabs]:
    slabs = Slabs(limit)
    return DevicePool(slabs, capacity_bytes=capacity, slab_bytes=slab), slabs


def reserve(pool: DevicePool, size_bytes: int) -> DevicePin:
    pin = pool.try_reserve(size_bytes)
    assert pin is not None
    return pin


def test_extents_are_aligned_and_as_large_as_asked_for() -> None:
    pool, _ = pool_of()
    pins = [reserve(pool, size) for size in (1, 255, 256, 257, 5000)]
    assert [pin.extent.length for pin in pins] == [256, 256, 256, 512, 5120]
    assert [pin.size_bytes for pin in pins] == [1, 255, 256, 257, 5000]
    assert all(pin.address % 256 == 0 for pin in pins)
    assert len({pin.extent.generation for pin in pins}) == 5


def test_the_smallest_gap_that_fits_is_taken() -> None:
    gaps = Gaps(64 * KIB)
    starts = [gaps.allocate(length) for length in (4 * KIB, 256, 2 * KIB, 256, 8 * KIB, 256)]
    assert None not in starts
    for at, length in ((0, 4 * KIB), (2, 2 * KIB), (4, 8 * KIB)):
        gaps.free(starts[at] or 0, length)
    assert gaps.allocate(2 * KIB) == starts[2]
    assert gaps.allocate(3 * KIB) == starts[0]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=120))
def test_extents_never_overlap_and_free_neighbours_are_one_gap(steps: list[tuple[bool, int]]) -> None:
    gaps = Gaps(64 * 256)
    held: list[tuple[int, int]] = []
    for is_free, size in steps:
        if is_free and held:
            gaps.free(*held.pop(size % len(held)))
            continue
        offset = gaps.allocate(size * 256)
        if offset is not None:
            held.append((offset, size * 256))
        else:
            assert gaps.largest < size * 256
        ends = sorted((start, start + length) for start, length in held)
        assert all(before[1] <= after[0] for before, after in pairwise(ends))
    assert gaps.free_bytes == 64 * 256 - sum(length for _, length in held)
    for extent in held:
        gaps.free(*extent)
    assert (gaps.largest, gaps.is_empty) == (64 * 256, True)


def test_no_extent_crosses_from_one_slab_into_the_next() -> None:
    pool, slabs = pool_of()
    pins = [reserve(pool, 12 * KIB) for _ in range(4)]
    assert pool.try_reserve(8 * KIB) is None
    spans = [(memory.address, memory.address + memory.size_bytes) for memory in slabs.out]
    for pin in pins:
        assert any(start <= pin.address and pin.address + 12 * KIB <= stop for start, stop in spans)
    for pin in pins:
        pin.release()
    assert pool.usage().largest_free_bytes == 16 * KIB
    assert pool.try_reserve(17 * KIB) is None, (
        "four slabs of 16 KiB have no room for it, and the capacity none for a fifth"
    )


def test_an_extent_larger_than_a_slab_has_a_slab_of_its_own() -> None:
    pool, slabs = pool_of()
    assert reserve(pool, 40 * KIB).extent.length == 40 * KIB
    assert [memory.size_bytes for memory in slabs.out] == [40 * KIB]
    assert pool.try_reserve(40 * KIB) is None


def test_a_device_with_less_than_the_capacity_is_used_as_far_as_it_goes() -> None:
    pool, _ = pool_of(limit=20 * KIB)
    reserve(pool, 10 * KIB)
    assert pool.try_reserve(10 * KIB) is None
    full, _ = pool_of(limit=20 * KIB)
    with pytest.raises(StoreFullError):
        full.fill()


def test_filling_takes_the_whole_capacity_at_once() -> None:
    pool, slabs = pool_of(capacity=40 * KIB)
    pool.fill()
    assert sorted(memory.size_bytes for memory in slabs.out) == [8 * KIB, 16 * KIB, 16 * KIB]


def test_an_extent_is_kept_until_its_last_pin_is_released() -> None:
    pool, _ = pool_of(capacity=KIB, slab=KIB)
    pin = reserve(pool, KIB)
    other = pin.share()
    assert (pin.pins, other.pins) == (2, 2)
    pin.release()
    assert pool.try_reserve(1) is None
    with pytest.raises(RuntimeError):
        pin.release()
    with pytest.raises(RuntimeError):
        pin.share()
    other.release()
    again = reserve(pool, KIB)
    assert again.extent.generation > other.extent.generation
    assert again.address == other.address


def test_an_extent_is_kept_until_the_devices_work_on_it_is_done() -> None:
    pool, _ = pool_of(capacity=KIB, slab=KIB)
    event = HostEvent()
    reserve(pool, KIB).release(after=event)
    assert pool.usage().leaving_bytes == KIB
    assert pool.try_reserve(1) is None
    event.happen(None)
    reserve(pool, KIB)


def test_memory_that_failed_work_may_still_use_is_not_used_again() -> None:
    pool, _ = pool_of(capacity=KIB, slab=KIB)
    event = HostEvent()
    reserve(pool, KIB).release(after=event)
    event.happen(DeviceError("an illegal address"))
    assert pool.try_reserve(1) is None
    assert pool.usage().leaving_bytes == KIB


def test_trimming_gives_back_what_is_not_in_use() -> None:
    pool, slabs = pool_of()
    pins = [reserve(pool, 16 * KIB) for _ in range(3)]
    assert pool.trim() == 0
    pins[1].release()
    assert pool.trim() == 16 * KIB
    assert len(slabs.out) == 2
    reserve(pool, 16 * KIB)
    assert len(slabs.out) == 3


def test_usage_says_how_scattered_the_free_room_is() -> None:
    pool, _ = pool_of(capacity=16 * KIB)
    pins = [reserve(pool, KIB) for _ in range(16)]
    for pin in pins[::2]:
        pin.release()
    usage = pool.usage()
    assert (usage.reserved_bytes, usage.largest_free_bytes, usage.extents) == (8 * KIB, KIB, 8)
    assert usage.fragmentation == pytest.approx(1 - 1 / 8)
    for pin in pins[1::2]:
        pin.release()
    assert pool.usage().fragmentation == 0.0


def test_a_release_inside_the_garbage_collector_takes_no_lock() -> None:
    """A tensor may be collected in the middle of any call of ours, on the very thread that holds the lock."""
    pool, _ = pool_of(capacity=KIB, slab=KIB)
    pin = reserve(pool, KIB)
    with pool._counts.locked():
        pin.release()
    assert pool.usage().extents == 0
    gc.collect()


def test_many_threads_reserve_and_release_without_losing_room() -> None:
    pool, _ = pool_of(capacity=64 * KIB, slab=16 * KIB)
    overlaps: list[tuple[int, int]] = []
    owners: dict[int, int] = {}

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(400):
            pin = pool.try_reserve(rng.randrange(1, 4 * KIB))
            if pin is None:
                continue
            if owners.setdefault(pin.address, seed) != seed:
                overlaps.append((pin.address, seed))
            shared = pin.share()
            pin.release()
            owners.pop(shared.address, None)
            shared.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not overlaps
    usage = pool.usage()
    assert (usage.extents, usage.reserved_bytes, usage.requested_bytes) == (0, 0, 0)


def test_a_closed_pool_gives_everything_back_and_reserves_nothing() -> None:
    pool, slabs = pool_of()
    pin = reserve(pool, KIB)
    pool.close()
    pool.close()
    assert slabs.out == []
    assert pool.try_reserve(1) is None
    pin.release()
