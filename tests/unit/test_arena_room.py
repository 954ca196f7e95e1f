import math
import random
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.arena import Lane, choose_location
from kvobj.arena.geometry import FORMAT, Geometry, write_geometry
from kvobj.arena.room import Room

MIB = 1024 * 1024
UNIT = 4096
REGION = 32 * UNIT
A = Lane("a", 1, "owner")


def room_of(regions: int, dedicated: frozenset[str] = frozenset()) -> Room:
    room = Room(regions * REGION, REGION, dedicated)
    for region in range(regions):
        room.add(region * REGION, (region + 1) * REGION)
    return room


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 32), st.randoms(use_true_random=False))
def test_when_the_obstacles_are_gone_the_extent_fits_and_they_are_the_cheapest(
    units: list[int], wanted: int, rnd: random.Random
) -> None:
    room = room_of(3)
    held = [offset for length in units if (offset := room.allocate(length * UNIT, None)) is not None]
    refused = {offset for offset in held if rnd.random() < 0.2}
    for offset in held:
        if offset not in refused and rnd.random() < 0.3:
            room.free(offset)
    lengths = {offset: length for extents in room.extents for offset, length in extents.items()}
    obstacles = room.obstacles(wanted * UNIT, None, lambda offset: offset not in refused)
    assert not refused & set(obstacles)

    def cost_at(start: int) -> float:
        stop = start + wanted * UNIT
        if start // REGION != (stop - 1) // REGION:
            return math.inf
        inside = [at for at, length in lengths.items() if at < stop and at + length > start]
        return math.inf if refused & set(inside) else sum(lengths[at] for at in inside)

    cheapest = min(cost_at(start * UNIT) for start in range(3 * REGION // UNIT - wanted + 1))
    if cheapest is math.inf:
        assert obstacles == []
        return
    assert sum(lengths[offset] for offset in obstacles) == cheapest
    for offset in obstacles:
        room.free(offset)
    assert room.allocate(wanted * UNIT, None) is not None


def test_many_that_are_freed_together_leave_what_they_leave_one_by_one() -> None:
    chance = random.Random(5)
    for _ in range(50):
        rooms = [room_of(4, frozenset({"a"})) for _ in range(2)]
        held: list[int] = []
        for _ in range(40):
            length, lane = chance.randrange(1, 12) * UNIT, chance.choice([None, A])
            first, second = (room.allocate(length, lane) for room in rooms)
            assert first == second
            held += [] if first is None else [first]
        gone = chance.sample(held, chance.randrange(1, len(held) + 1))
        one_by_one, together = rooms
        for offset in gone:
            one_by_one.free(offset)
        together.free_many(gone)
        assert together.extents == one_by_one.extents
        assert together.owners == one_by_one.owners
        assert (together.free_bytes, together.allocated_bytes) == (one_by_one.free_bytes, one_by_one.allocated_bytes)
        for room in rooms:
            room.free_many([offset for extents in room.extents for offset in extents])
            assert room.owners == {}
            assert [room.allocate(REGION, None) is not None for _ in range(4)] == [True] * 4


def test_obstacles_of_a_dedicated_bucket_empty_a_region_for_it() -> None:
    room = room_of(2, frozenset({"a"}))
    held = [room.allocate(8 * UNIT, None) for _ in range(8)]
    assert None not in held
    assert room.allocate(UNIT, A) is None
    obstacles = room.obstacles(UNIT, A, lambda _: True)
    for offset in obstacles:
        room.free(offset)
    assert room.allocate(UNIT, A) is not None
    assert room.owners in ({0: A}, {1: A})


def test_obstacles_take_a_dedicated_region_back_where_nothing_else_helps() -> None:
    room = room_of(1, frozenset({"a"}))
    mine = room.allocate(UNIT, A)
    assert room.allocate(UNIT, None) is None
    assert room.obstacles(UNIT, None, lambda _: True) == [mine]
    assert mine is not None
    room.free(mine)
    assert room.allocate(UNIT, None) is not None


@pytest.mark.parametrize(
    ("units", "fits"), [([32, 32], True), ([33], False), ([20, 20], True), ([20, 20, 10], True), ([20, 20, 20], False)]
)
def test_what_can_ever_be_held_is_judged_by_whole_regions(units: list[int], *, fits: bool) -> None:
    assert room_of(2).can_ever_hold([length * UNIT for length in units]) is fits


def test_mixed_sizes_under_lru_eviction_keep_the_arena_in_use() -> None:
    """The tier's way: least recently used for the bytes needed, then the cheapest neighbours (0.94 measured at 4 GiB)."""
    rnd = random.Random(3)
    region_bytes = 256 * MIB
    room = Room(8 * region_bytes, region_bytes, frozenset())
    for region in range(8):
        room.add(region * region_bytes, (region + 1) * region_bytes)
    held: OrderedDict[int, int] = OrderedDict()
    used: list[float] = []
    for turn in range(1500):
        for touched in rnd.sample(list(held), min(2, len(held))):
            held.move_to_end(touched)
        length = int(math.exp(rnd.uniform(math.log(64 * 1024), math.log(80 * MIB))))
        offset = room.allocate(length, None)
        if offset is None:
            freed = 0
            while freed < length:
                freed += room.free(held.popitem(last=False)[0])
            offset = room.allocate(length, None)
        if offset is None:
            for obstacle in room.obstacles(length, None, lambda _: True):
                room.free(obstacle)
                del held[obstacle]
            offset = room.allocate(length, None)
        assert offset is not None
        held[offset] = length
        if turn > 500:
            used.append(room.allocated_bytes / room.capacity_bytes)
    assert sum(used) / len(used) > 0.88


class TestLocation:
    def test_shared_memory_is_taken_where_it_is_large_enough(self, tmp_path: Path) -> None:
        found = choose_location(
            tmp_path / "data", b"\1\2", boot_id="b", memory_bytes=1024 * MIB, shared_memory=tmp_path / "shm"
        )
        assert found.directory == tmp_path / "shm" / "kvobj-0102"
        assert found.capacity_bytes == 256 * MIB
        assert found.reason == ""

    def test_too_little_shared_memory_falls_back_to_the_data_directory_and_says_so(self, tmp_path: Path) -> None:
        found = choose_location(
            tmp_path / "data", b"\1", boot_id="b", memory_bytes=256 * MIB, shared_memory=tmp_path / "shm"
        )
        assert found.directory == tmp_path / "data" / "arena"
        assert found.capacity_bytes == 128 * MIB
        assert "too little for an arena of 128 MiB" in found.reason

    def test_an_arena_that_is_there_keeps_its_size(self, tmp_path: Path) -> None:
        place = tmp_path / "kvobj-01"
        place.mkdir()
        write_geometry(place, Geometry(FORMAT, b"\1", "b", 77 * MIB, 7 * MIB))
        found = choose_location(tmp_path / "data", b"\1", boot_id="b", memory_bytes=1024 * MIB, shared_memory=tmp_path)
        assert (found.directory, found.capacity_bytes) == (place, 77 * MIB)
