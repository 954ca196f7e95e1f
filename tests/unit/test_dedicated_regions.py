"""Regions that serve one bucket alone: kept apart, wiped, and noted before anybody relies on whose they are."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from arena_world import MIB, Open, arenas_at

from kvobj.arena import Arena, Lane
from kvobj.arena.geometry import GEOMETRY_FILE, Geometry, read_geometry
from kvobj.errors import BusyError, UnavailableError

KIB = 1024
A = Lane("a", 1, "owner")
ANEW = Lane("a", 2, "another")
B = Lane("b", 1, "another")
OWN = frozenset({"a"})


@pytest.fixture
async def open_arena(tmp_path: Path) -> AsyncIterator[Open]:
    async with arenas_at(tmp_path / "arena") as open_one:
        yield open_one


@contextmanager
def nothing_can_be_noted(arena: Arena) -> Iterator[None]:
    """A directory stands where the next note is written first."""
    blocking = arena.directory / f"{GEOMETRY_FILE}.new"
    blocking.mkdir()
    try:
        yield
    finally:
        blocking.rmdir()


def noted(arena: Arena) -> Geometry:
    """What a later life would know."""
    found = read_geometry(arena.directory)
    assert found is not None
    return found


async def test_a_dedicated_bucket_shares_no_region(open_arena: Open) -> None:
    arena = await open_arena(dedicated_buckets=frozenset({"a"}))
    await arena.populate()
    shared = await arena.reserve(4 * KIB, timeout_seconds=0)
    mine = await arena.reserve(4 * KIB, timeout_seconds=0, bucket=A)
    other = await arena.reserve(4 * KIB, timeout_seconds=0, bucket=Lane("b", 1, "owner"))
    assert mine.extent.region not in {shared.extent.region, other.extent.region}
    assert shared.extent.region == other.extent.region
    assert arena.usage().dedicated_regions == 1
    mine.release()
    assert arena.usage().dedicated_regions == 0
    shared.release()
    other.release()
    assert arena.usage().reserved_bytes == 0


async def test_a_dedicated_region_stays_so_over_a_restart(open_arena: Open) -> None:
    before = await open_arena(dedicated_buckets=frozenset({"a"}))
    await before.populate()
    pin = await before.reserve(4 * KIB, timeout_seconds=0, bucket=A)
    await before.aclose(remove=False)
    after = await open_arena(dedicated_buckets=frozenset({"a"}))
    adopted = after.adopt([pin.extent])[0]
    await after.populate()
    shared = await after.reserve_many([MIB] * 3, timeout_seconds=0)
    assert pin.extent.region not in {held.extent.region for held in shared}
    adopted.release()
    assert after.usage().dedicated_regions == 0
    for held in shared:
        held.release()


async def test_a_waiting_dedicated_bucket_does_not_hold_up_the_others(open_arena: Open) -> None:
    arena = await open_arena(dedicated_buckets=frozenset({"a"}))
    await arena.populate()
    spread = await arena.reserve_many([MIB - 4 * KIB] * 4, timeout_seconds=0)
    waiting = asyncio.create_task(arena.reserve(4 * KIB, timeout_seconds=5, bucket=A))
    await asyncio.sleep(0)
    small = await arena.reserve(4 * KIB, timeout_seconds=0)
    small.release()
    assert not waiting.done()
    for pin in spread:
        pin.release()
    (await waiting).release()


async def test_a_region_that_was_lent_is_no_other_buckets_of_the_name_also_after_a_restart(open_arena: Open) -> None:
    before = await open_arena(dedicated_buckets=frozenset({"a"}))
    await before.populate()
    pin = await before.reserve(4 * KIB, timeout_seconds=0, bucket=A)
    lent = pin.extent.region
    before.lend(lent, A)
    pin.release()
    other = await before.reserve(4 * KIB, timeout_seconds=0, bucket=ANEW)
    assert before.lane_of(lent) == A
    assert before.lane_of(other.extent.region) == ANEW
    await before.aclose(remove=False)
    after = await open_arena(dedicated_buckets=frozenset({"a"}))
    adopted = after.adopt([other.extent])
    await after.populate()
    assert (after.lane_of(lent), after.lane_of(other.extent.region)) == (A, ANEW)
    held = await after.reserve_many([MIB - 4 * KIB, MIB, MIB], timeout_seconds=0, bucket=ANEW)
    assert lent not in {each.extent.region for each in held}
    own = await after.reserve(MIB, timeout_seconds=0, bucket=A)
    assert own.extent.region == lent
    for each in [*adopted, *held, own]:
        each.release()
    assert after.usage().dedicated_regions == 1


async def test_a_bucket_keeps_regions_that_were_lent_where_it_is_no_longer_declared_so(open_arena: Open) -> None:
    before = await open_arena(dedicated_buckets=frozenset({"a"}))
    pin = await before.reserve(4 * KIB, timeout_seconds=1, bucket=A)
    before.lend(pin.extent.region, A)
    await before.aclose(remove=False)
    after = await open_arena()
    (adopted,) = after.adopt([pin.extent])
    await after.populate()
    assert after.lane(A) == A
    assert after.lane(ANEW) is None
    shared = await after.reserve_many([MIB] * 3, timeout_seconds=0, bucket=ANEW)
    assert pin.extent.region not in {each.extent.region for each in shared}
    for each in [adopted, *shared]:
        each.release()


async def test_where_an_older_version_lent_a_region_nobody_knows_whose_it_is_and_what_lies_there_stays(
    open_arena: Open, tmp_path: Path
) -> None:
    before = await open_arena(dedicated_buckets=frozenset({"a"}))
    pin = await before.reserve(4 * KIB, timeout_seconds=1, bucket=A)
    pin.view[:4] = b"mine"
    before.lend(pin.extent.region, A)
    await before.aclose(remove=False)
    note = tmp_path / "arena" / GEOMETRY_FILE
    written = msgspec.msgpack.decode(note.read_bytes())
    del written["made"]
    note.write_bytes(msgspec.msgpack.encode(written))
    after = await open_arena(dedicated_buckets=frozenset({"a"}))
    (adopted,) = after.adopt([pin.extent])
    assert bytes(adopted.view[:4]) == b"mine"
    await after.populate()
    assert after.lane_of(pin.extent.region) == Lane("a")
    fresh = await after.reserve(4 * KIB, timeout_seconds=0, bucket=A)
    assert fresh.extent.region != pin.extent.region
    adopted.release()
    fresh.release()


async def test_what_former_buckets_of_a_name_keep_of_the_arena_is_bounded(open_arena: Open) -> None:
    arena = await open_arena(dedicated_buckets=frozenset({"a", "b"}))
    await arena.populate()
    for number in range(2):
        lane = Lane("a", number + 1, "owner")
        pin = await arena.reserve(4 * KIB, timeout_seconds=0, bucket=lane)
        arena.lend(pin.extent.region, lane)
        pin.release()
    third = Lane("a", 3, "owner")
    pin = await arena.reserve(4 * KIB, timeout_seconds=0, bucket=third)
    with pytest.raises(BusyError):
        arena.lend(pin.extent.region, third)
    pin.release()
    other = await arena.reserve(4 * KIB, timeout_seconds=0, bucket=Lane("b", 1, "owner"))
    arena.lend(other.extent.region, Lane("b", 1, "owner"))
    other.release()
    assert arena.usage().dedicated_regions == 3  # what could not be lent went back to all


async def test_a_region_whose_showing_could_not_be_noted_is_shown_to_nobody_before_it_is(open_arena: Open) -> None:
    before = await open_arena(dedicated_buckets=OWN)
    await before.populate()
    pin = await before.reserve(4 * KIB, timeout_seconds=0, bucket=A)
    region = pin.extent.region
    with nothing_can_be_noted(before):
        for _ in range(2):
            with pytest.raises(UnavailableError):
                before.lend(region, A)
    assert noted(before).lent == []
    before.lend(region, A)
    assert noted(before).lent == [region]
    pin.release()
    await before.aclose(remove=False)
    after = await open_arena(dedicated_buckets=OWN)
    after.adopt([])
    await after.populate()
    assert after.lane_of(region) == A
    shared = await after.reserve_many([MIB] * 3, timeout_seconds=0)
    assert region not in {each.extent.region for each in shared}
    for each in shared:
        each.release()


async def test_a_region_whose_bucket_could_not_be_noted_is_not_taken_and_nothing_is_lost(open_arena: Open) -> None:
    arena = await open_arena(dedicated_buckets=OWN)
    await arena.populate()
    with nothing_can_be_noted(arena):
        for _ in range(2):
            assert arena.try_reserve(4 * KIB, bucket=A) is None
            with pytest.raises(UnavailableError):
                await arena.reserve(4 * KIB, timeout_seconds=60, bucket=A)
        usage = arena.usage()
        assert (usage.reserved_bytes, usage.requested_bytes, usage.pinned) == (0, 0, 0)
        assert usage.dedicated_regions == 0
        assert not arena.is_waited_for
    pin = await arena.reserve(4 * KIB, timeout_seconds=0, bucket=A)
    assert noted(arena).dedicated == {pin.extent.region: "a"}
    pin.release()
    for held in await arena.reserve_many([MIB] * 4, timeout_seconds=0):
        held.release()


async def test_a_wait_that_ends_as_nothing_can_be_noted_fails_alone(open_arena: Open) -> None:
    arena = await open_arena(dedicated_buckets=OWN)
    await arena.populate()
    held = await arena.reserve_many([MIB] * 4, timeout_seconds=0)
    waiting = asyncio.create_task(arena.reserve_many([MIB, MIB], timeout_seconds=60, bucket=A))
    await asyncio.sleep(0)
    with nothing_can_be_noted(arena):
        held[0].release()  # to whom that goes is no concern of who gives it
        with pytest.raises(UnavailableError):
            await waiting
    assert arena.usage().pinned == 3
    other = await arena.reserve(MIB, timeout_seconds=0)
    arena.release_many([*held[1:], other])
    assert arena.usage().reserved_bytes == 0


@pytest.mark.parametrize("is_together", [False, True])
async def test_an_empty_region_serves_others_no_sooner_than_that_is_noted(
    open_arena: Open,
    caplog: pytest.LogCaptureFixture,
    is_together: bool,  # noqa: FBT001
) -> None:
    arena = await open_arena(dedicated_buckets=OWN)
    await arena.populate()
    pins = await arena.reserve_many([4 * KIB, MIB], timeout_seconds=0, bucket=A)
    regions = {pin.extent.region for pin in pins}
    with nothing_can_be_noted(arena):
        if is_together:
            arena.release_many(pins)
        else:
            for pin in pins:
                pin.release()
        assert arena.usage().pinned == 0
        shared = await arena.reserve_many([MIB] * 2, timeout_seconds=0)
        assert arena.try_reserve(4 * KIB) is None
        assert regions.isdisjoint(held.extent.region for held in shared)
        again = arena.try_reserve(4 * KIB, bucket=A)  # for its own bucket it is as before
        assert again is not None
        again.release()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
    shared += await arena.reserve_many([MIB] * 2, timeout_seconds=0)
    assert noted(arena).dedicated == {}
    arena.release_many(shared)


async def test_a_region_that_a_restart_finds_empty_is_not_its_former_buckets_at_the_next(open_arena: Open) -> None:
    first = await open_arena(dedicated_buckets=OWN)
    await first.populate()
    arriving = await first.reserve(4 * KIB, timeout_seconds=0, bucket=A)
    await first.aclose(remove=False)  # what was arriving is in no catalog
    second = await open_arena(dedicated_buckets=OWN)
    second.adopt([])
    await second.populate()
    shared = await second.reserve_many([MIB] * 4, timeout_seconds=0, bucket=B)
    await second.aclose(remove=False)
    third = await open_arena(dedicated_buckets=OWN)
    kept = third.adopt([pin.extent for pin in shared])
    assert third.lane_of(arriving.extent.region) is None
    third.release_many(kept)


async def test_a_region_is_not_its_former_buckets_after_a_life_in_which_that_was_not_declared_so(
    open_arena: Open,
) -> None:
    first = await open_arena(dedicated_buckets=OWN)
    await first.populate()
    pin = await first.reserve(4 * KIB, timeout_seconds=0, bucket=A)
    await first.aclose(remove=False)
    second = await open_arena()
    adopted = second.adopt([pin.extent])
    await second.populate()
    shared = await second.reserve_many([MIB - 4 * KIB] * 4, timeout_seconds=0, bucket=B)
    await second.aclose(remove=False)
    third = await open_arena(dedicated_buckets=OWN)
    kept = third.adopt([each.extent for each in (*adopted, *shared)])
    assert third.lane_of(pin.extent.region) is None
    third.release_many(kept)
