"""The arena: extents that are reserved in turn, pinned and given back, and what a restart takes over."""

import asyncio
import errno
import mmap
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from arena_world import MIB, Open, arenas_at

from kvobj.arena import ALIGNMENT, Arena, Extent, Pin, orphaned_arenas
from kvobj.arena.location import SHARED_MEMORY
from kvobj.arena.outside_writers import mark_writer
from kvobj.arena.region import Region
from kvobj.errors import BusyError, CorruptionError, StoreFullError, UnavailableError

KIB = 1024


@pytest.fixture
async def open_arena(tmp_path: Path) -> AsyncIterator[Open]:
    async with arenas_at(tmp_path / "arena") as open_one:
        yield open_one


async def test_what_is_reserved_is_aligned_writable_and_accounted(open_arena: Open) -> None:
    arena = await open_arena()
    await arena.populate()
    pin = await arena.reserve(100_000, timeout_seconds=0)
    assert pin.extent.length == 102_400
    assert len(pin.view) == 102_400
    pin.view[:5] = b"hello"
    assert bytes(pin.view[:5]) == b"hello"
    usage = arena.usage()
    assert (usage.reserved_bytes, usage.requested_bytes, usage.pinned) == (102_400, 100_000, 1)
    assert (usage.capacity_bytes, usage.populated_bytes, usage.regions) == (4 * MIB, 4 * MIB, 4)
    pin.release()
    usage = arena.usage()
    assert (usage.reserved_bytes, usage.requested_bytes, usage.pinned) == (0, 0, 0)


async def test_an_extent_is_freed_with_its_last_pin_only(open_arena: Open) -> None:
    arena = await open_arena(capacity_bytes=MIB)
    pin = await arena.reserve(MIB, timeout_seconds=0)
    reader = pin.share()
    pin.release()
    assert arena.try_reserve(1) is None
    assert reader.pins == 1
    reader.release()
    again = arena.try_reserve(1)
    assert again is not None
    assert again.extent.generation > reader.extent.generation
    again.release()


async def test_a_second_release_and_a_late_share_are_refused(open_arena: Open) -> None:
    arena = await open_arena()
    pin = await arena.reserve(1, timeout_seconds=0)
    pin.release()
    with pytest.raises(RuntimeError):
        pin.release()
    with pytest.raises(RuntimeError):
        pin.share()


async def test_pins_let_go_together_free_what_nobody_else_holds_and_serve_who_waits(open_arena: Open) -> None:
    arena = await open_arena(capacity_bytes=MIB)
    pins = [await arena.reserve(128 * KIB, timeout_seconds=0) for _ in range(8)]
    reader = pins[3].share()
    waiting = asyncio.create_task(arena.reserve(512 * KIB, timeout_seconds=60))
    await asyncio.sleep(0)
    arena.release_many(pins)
    assert [pin.pins for pin in pins] == [0, 0, 0, 1, 0, 0, 0, 0]
    large = await waiting
    usage = arena.usage()
    assert (usage.pinned, usage.requested_bytes) == (2, 640 * KIB)
    with pytest.raises(RuntimeError):
        arena.release_many([reader, large, pins[0]])
    with pytest.raises(RuntimeError):
        arena.release_many([large, reader, large])
    assert (reader.pins, large.pins, arena.usage()) == (1, 1, usage)
    arena.release_many([reader, large])
    usage = arena.usage()
    assert (usage.reserved_bytes, usage.requested_bytes, usage.pinned) == (0, 0, 0)
    arena.release_many([])


async def test_what_can_never_fit_is_refused_at_once(open_arena: Open) -> None:
    arena = await open_arena()
    with pytest.raises(StoreFullError):
        await arena.reserve(MIB + 1, timeout_seconds=60)
    with pytest.raises(StoreFullError):
        await arena.reserve_many([600 * KIB] * 5, timeout_seconds=60)


async def test_no_room_in_time_is_busy_and_leaves_nothing_behind(open_arena: Open) -> None:
    arena = await open_arena(capacity_bytes=MIB)
    pin = await arena.reserve(512 * KIB, timeout_seconds=0)
    with pytest.raises(BusyError):
        await arena.reserve_many([256 * KIB, 512 * KIB], timeout_seconds=0.001)
    assert arena.usage().reserved_bytes == 512 * KIB
    assert not arena.is_waited_for
    pin.release()


async def test_small_requests_do_not_overtake_a_large_one(open_arena: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvobj.arena.queue.ALONE_SECONDS", 60.0)  # after which they may: see test_arena_queue
    arena = await open_arena(capacity_bytes=MIB)
    first = await arena.reserve(512 * KIB, timeout_seconds=0)
    second = await arena.reserve(256 * KIB, timeout_seconds=0)
    order: list[str] = []

    async def want(name: str, length: int) -> Pin:
        pin = await arena.reserve(length, timeout_seconds=5)
        order.append(name)
        return pin

    large = asyncio.create_task(want("large", 900 * KIB))
    await asyncio.sleep(0)
    small = asyncio.create_task(want("small", 4 * KIB))
    await asyncio.sleep(0)
    assert arena.try_reserve(4 * KIB) is None
    first.release()
    await asyncio.sleep(0)
    assert order == []
    second.release()
    pins = await asyncio.gather(large, small)
    assert order == ["large", "small"]
    for pin in pins:
        pin.release()


async def test_a_cancelled_wait_gives_back_what_it_held(open_arena: Open) -> None:
    arena = await open_arena(capacity_bytes=MIB)
    pin = await arena.reserve(512 * KIB, timeout_seconds=0)
    waiting = asyncio.create_task(arena.reserve_many([400 * KIB, 400 * KIB], timeout_seconds=5))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert arena.usage().reserved_bytes == 512 * KIB
    pin.release()


async def test_a_wait_cancelled_in_the_moment_it_is_granted_leaks_nothing(open_arena: Open) -> None:
    arena = await open_arena(capacity_bytes=MIB)
    pin = await arena.reserve(MIB, timeout_seconds=0)
    waiting = asyncio.create_task(arena.reserve(MIB, timeout_seconds=5))
    await asyncio.sleep(0)
    pin.release()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert arena.usage().pinned == 0


async def test_64_requests_for_two_extents_each_queue_and_all_finish(open_arena: Open) -> None:
    arena = await open_arena()
    await arena.populate()

    async def upload() -> None:
        pins = await arena.reserve_many([512 * KIB, 300 * KIB], timeout_seconds=20)
        await asyncio.sleep(0)
        for pin in pins:
            pin.release()

    await asyncio.gather(*(upload() for _ in range(64)))
    assert arena.usage().reserved_bytes == 0


async def test_the_reclaimer_is_asked_once_at_a_time_and_again_while_it_helps(open_arena: Open) -> None:
    arena = await open_arena(capacity_bytes=MIB)
    await arena.populate()
    held = [await arena.reserve(128 * KIB, timeout_seconds=0) for _ in range(8)]
    running, calls = 0, []

    async def reclaim(needed_bytes: int) -> int:
        nonlocal running
        running += 1
        assert running == 1
        calls.append(needed_bytes)
        await asyncio.sleep(0)
        held.pop().release()
        running -= 1
        return 128 * KIB

    arena.set_reclaimer(reclaim)
    pins = await asyncio.gather(*(arena.reserve(256 * KIB, timeout_seconds=5) for _ in range(3)))
    assert calls[0] == 256 * KIB * 3
    assert len(calls) == 6
    for pin in [*pins, *held]:
        pin.release()


async def test_a_reclaimer_that_fails_fails_those_who_wait(open_arena: Open) -> None:
    arena = await open_arena(capacity_bytes=MIB)
    await arena.populate()
    pin = await arena.reserve(MIB, timeout_seconds=0)

    async def reclaim(_: int) -> int:
        raise OSError("broken")

    arena.set_reclaimer(reclaim)
    with pytest.raises(UnavailableError):
        await arena.reserve(1, timeout_seconds=5)
    pin.release()


async def test_closing_fails_who_waits_and_outlives_views(open_arena: Open, tmp_path: Path) -> None:
    arena = await open_arena(capacity_bytes=MIB)
    pin = await arena.reserve(MIB, timeout_seconds=0)
    view = pin.view
    view[:4] = b"here"
    waiting = asyncio.create_task(arena.reserve(1, timeout_seconds=5))
    await asyncio.sleep(0)
    await arena.aclose(remove=True)
    with pytest.raises(UnavailableError):
        await waiting
    assert not (tmp_path / "arena").exists()
    assert bytes(view[:4]) == b"here"
    pin.release()


async def test_room_is_handed_out_as_it_is_populated(tmp_path: Path) -> None:
    arena = await Arena.open(
        tmp_path / "arena", capacity_bytes=96 * MIB, region_bytes=48 * MIB, store_id=b"s", boot_id="b"
    )
    assert arena.usage().populated_bytes == 32 * MIB
    first = await arena.reserve(32 * MIB, timeout_seconds=0)
    second = await arena.reserve(48 * MIB, timeout_seconds=20)
    assert second.extent.region == 1
    assert arena.usage().regions == 2
    await arena.populate()
    assert arena.usage().populated_bytes == 96 * MIB
    first.release()
    second.release()
    await arena.aclose(remove=True)


def test_a_new_region_is_backed_whole_whatever_its_pages_are_and_one_that_is_there_keeps_its_bytes() -> None:
    path = SHARED_MEMORY / f"kvobj-test-{os.getpid()}-region"
    try:
        region = Region(path, 5 * MIB)
        region.create(huge_pages=True)
        assert path.stat().st_blocks * 512 == 5 * MIB
        region.map(huge_pages=True)
        region.populate(0, 5 * MIB, fresh=True)
        assert region.room is not None
        assert not any(region.room)
        region.room[-4:] = b"keep"
        again = Region(path, 5 * MIB)
        again.create(huge_pages=True)
        again.map(huge_pages=True)
        assert again.room is not None
        assert bytes(again.room[-4:]) == b"keep"
    finally:
        path.unlink()


async def test_pages_are_touched_where_the_kernel_cannot_populate(tmp_path: Path) -> None:
    region = Region(tmp_path / "region", MIB)
    region.create()
    region.map(huge_pages=True)
    assert region.room is not None
    region.room[:4] = b"keep"
    region._touch(0, MIB, fresh=False)
    assert bytes(region.room[:4]) == b"keep"
    region._touch(ALIGNMENT, MIB, fresh=True)
    assert bytes(region.room[:4]) == b"keep"
    region.drop()


async def test_memory_that_runs_out_on_the_way_leaves_a_smaller_arena(
    open_arena: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = await open_arena()
    allocate = os.posix_fallocate
    left = [1]

    def refuse(descriptor: int, offset: int, length: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "no space")
        allocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StoreFullError):
        await arena.populate()
    assert arena.usage().populated_bytes == 2 * MIB
    pins = await arena.reserve_many([MIB, MIB], timeout_seconds=0.1)
    with pytest.raises(StoreFullError):
        await arena.reserve_many([MIB, MIB, MIB], timeout_seconds=0.1)
    for pin in pins:
        pin.release()


async def test_an_arena_larger_than_the_file_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreFullError):
        await Arena.open(tmp_path / "arena", capacity_bytes=1 << 60, store_id=b"s", boot_id="b")


async def test_an_orphan_is_one_whose_data_directory_is_gone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    place = tmp_path / "kvobj-00"
    arena = await Arena.open(place, capacity_bytes=MIB, store_id=b"s", boot_id="b", data_directory=data)
    assert orphaned_arenas(tmp_path) == []
    data.rmdir()
    assert orphaned_arenas(tmp_path) == [place]
    await arena.aclose(remove=True)


def mapped_by_a_writer(arena: Arena, region: int) -> mmap.mmap:
    """The memory as a client has it: mapped, its descriptor closed."""
    path, size_bytes = arena.region_file(region)
    descriptor = os.open(path, os.O_RDWR)
    mark_writer(descriptor, arena.life)
    # Python keeps a descriptor of its own beside a mapping, of the same description: the lock ends with both.
    memory = mmap.mmap(descriptor, size_bytes)
    os.close(descriptor)
    return memory


class TestRestart:
    async def test_the_next_process_finds_the_bytes_and_everything_else_is_free(self, open_arena: Open) -> None:
        before = await open_arena()
        await before.populate()
        pins = [await before.reserve(300 * KIB, timeout_seconds=0) for _ in range(6)]
        for number, pin in enumerate(pins):
            pin.view[:1] = bytes([number])
        kept = [pins[4].extent, pins[1].extent]
        await before.aclose(remove=False)

        after = await open_arena()
        assert after.adopted
        adopted = after.adopt(kept)
        assert [bytes(pin.view[:1]) for pin in adopted] == [b"\4", b"\1"]
        await after.populate()
        assert after.usage().reserved_bytes == 600 * KIB
        fresh = await after.reserve(MIB, timeout_seconds=0)
        assert fresh.extent.generation > max(pin.extent.generation for pin in pins)
        fresh.release()
        for pin in adopted:
            pin.release()
        whole = await after.reserve_many([MIB] * 4, timeout_seconds=0)
        for pin in whole:
            pin.release()

    async def test_room_that_was_given_outside_is_held_while_a_writer_of_before_has_it_mapped(
        self, open_arena: Open
    ) -> None:
        before = await open_arena()
        await before.populate()
        kept, given, free = [await before.reserve(300 * KIB, timeout_seconds=0) for _ in range(3)]
        for pin in (kept, given):
            before.give_outside(pin.extent.region, pin.extent.offset + KIB, pin.extent.length - KIB)
        assert given.extent.region == kept.extent.region
        memory = mapped_by_a_writer(before, given.extent.region)
        adopted_later, extent = kept.extent, given.extent
        del free
        await before.aclose(remove=False)

        after = await open_arena()
        (adopted,) = after.adopt([adopted_later])
        await after.populate()
        usage = after.usage()
        assert (usage.withheld_bytes, usage.reserved_bytes) == (extent.length, extent.length + adopted_later.length)
        after.look_outside()
        assert after.usage().withheld_bytes == extent.length
        everything = []
        while (page := after.try_reserve(4 * KIB)) is not None:
            everything.append(page)
        places = {(page.extent.region, page.extent.offset) for page in everything}
        assert not any((extent.region, extent.offset + at) in places for at in range(0, extent.length, 4 * KIB))
        memory.close()
        after.look_outside()
        assert after.usage().withheld_bytes == 0
        for pin in (adopted, *everything):
            pin.release()
        for pin in await after.reserve_many([MIB] * 4, timeout_seconds=0):
            pin.release()

    async def test_room_that_was_given_outside_is_free_where_nobody_of_before_is_left(self, open_arena: Open) -> None:
        before = await open_arena()
        pin = await before.reserve(300 * KIB, timeout_seconds=0)
        before.give_outside(pin.extent.region, pin.extent.offset, pin.extent.length)
        mapped_by_a_writer(before, pin.extent.region).close()
        await before.aclose(remove=False)
        after = await open_arena()
        await after.populate()
        assert after.usage().withheld_bytes == 0
        memory = mapped_by_a_writer(after, 0)  # of this life
        after.look_outside()
        for whole in await after.reserve_many([MIB] * 4, timeout_seconds=0):
            whole.release()
        memory.close()

    async def test_room_that_was_given_outside_and_came_back_is_not_held(self, open_arena: Open) -> None:
        before = await open_arena()
        pins = [await before.reserve(300 * KIB, timeout_seconds=0) for _ in range(3)]
        for pin in pins:
            before.give_outside(pin.extent.region, pin.extent.offset, pin.extent.length)
        memory = mapped_by_a_writer(before, 0)
        pins[0].release()
        before.release_many(pins[1:])
        await before.aclose(remove=False)
        after = await open_arena()
        await after.populate()
        assert after.usage().withheld_bytes == 0
        memory.close()

    async def test_where_there_is_no_room_for_notes_nothing_is_given_outside_and_the_next_life_begins(
        self, open_arena: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        allocate = os.posix_fallocate

        def full(descriptor: int, offset: int, length: int) -> None:
            if length < MIB:  # the notes of so small an arena, and no region
                raise OSError(errno.ENOSPC, "no space left")
            allocate(descriptor, offset, length)

        before = await open_arena()
        pin = await before.reserve(MIB, timeout_seconds=1)
        extent = pin.extent
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            with pytest.raises(UnavailableError):
                before.give_outside(extent.region, extent.offset, extent.length)
            await before.aclose(remove=False)
            after = await open_arena()
        (adopted,) = after.adopt([extent])
        again = await after.reserve(MIB, timeout_seconds=1)
        after.give_outside(again.extent.region, again.extent.offset, again.extent.length)
        for each in (adopted, again):
            each.release()

    async def test_room_outside_is_freed_no_more_once_the_process_is_about_to_end(self, open_arena: Open) -> None:
        before = await open_arena()
        pins = [await before.reserve(200 * KIB, timeout_seconds=0) for _ in range(4)]
        for pin in pins[1:]:
            before.give_outside(pin.extent.region, pin.extent.offset, pin.extent.length)
        memory = mapped_by_a_writer(before, 0)
        before.keep_outside()
        pins[0].release()
        pins[1].release()
        before.release_many(pins[2:])
        outside_bytes = 3 * pins[0].extent.length
        assert before.usage().reserved_bytes == outside_bytes
        await before.aclose(remove=False)
        after = await open_arena()
        await after.populate()
        assert after.usage().withheld_bytes == outside_bytes
        memory.close()

    async def test_what_a_writer_of_before_may_fill_is_held_over_several_lives(self, open_arena: Open) -> None:
        first = await open_arena()
        pin = await first.reserve(300 * KIB, timeout_seconds=0)
        first.give_outside(pin.extent.region, pin.extent.offset, pin.extent.length)
        memory = mapped_by_a_writer(first, 0)
        await first.aclose(remove=False)
        for _ in range(2):
            later = await open_arena()
            await later.populate()
            assert later.usage().withheld_bytes == pin.extent.length
            await later.aclose(remove=False)
        memory.close()
        last = await open_arena()
        await last.populate()
        assert last.usage().withheld_bytes == 0

    async def test_an_adopted_extent_freed_before_its_region_is_populated_is_room_once(self, open_arena: Open) -> None:
        before = await open_arena(capacity_bytes=MIB)
        pin = await before.reserve(256 * KIB, timeout_seconds=0)
        await before.aclose(remove=False)
        after = await open_arena(capacity_bytes=MIB)
        after.adopt([pin.extent])[0].release()
        await after.populate()
        whole = await after.reserve(MIB, timeout_seconds=0)
        assert after.usage().reserved_bytes == MIB
        whole.release()

    @pytest.mark.parametrize("other", [{"store_id": b"x"}, {"boot_id": "x"}, {"capacity_bytes": 3 * MIB}])
    async def test_another_store_boot_or_shape_is_not_adopted(self, open_arena: Open, other: dict[str, object]) -> None:
        before = await open_arena()
        await before.aclose(remove=False)
        after = await open_arena(**other)
        assert not after.adopted
        with pytest.raises(RuntimeError):
            after.adopt([])

    async def test_extents_that_overlap_or_lie_outside_are_refused(self, open_arena: Open) -> None:
        before = await open_arena()
        pin = await before.reserve(64 * KIB, timeout_seconds=0)
        good = pin.extent
        await before.aclose(remove=False)
        after = await open_arena()
        bad = [
            Extent(good.region, good.offset, good.length, good.generation),
            Extent(9, 0, 4096, 1),
            Extent(0, MIB, 4096, 1),
            Extent(0, 4096 * 100 + 1, 4096, 1),
            Extent(0, 4096 * 200, 4096, 1 << 60),
        ]
        for extent in bad:
            with pytest.raises(CorruptionError):
                after.adopt([good, extent])
        kept = after.adopt_usable([good, *bad])
        assert [pin is not None for pin in kept] == [True, False, False, False, False, False]
        assert after.usage().reserved_bytes == 64 * KIB

    async def test_adopting_after_a_reservation_is_refused(self, open_arena: Open) -> None:
        before = await open_arena(capacity_bytes=MIB)
        await before.aclose(remove=False)
        after = await open_arena(capacity_bytes=MIB)
        pin = await after.reserve(1, timeout_seconds=5)
        with pytest.raises(RuntimeError):
            after.adopt([])
        pin.release()
