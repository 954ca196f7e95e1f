import math
import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvobj.arena.allocator import ExtentAllocator
from kvobj.errors import CorruptionError

MIB = 1024 * 1024
UNIT = 4096
UNITS = 512
SEGMENT_UNITS = 128


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator against a plain list of owners, one a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(UNITS * UNIT, UNIT, segment_bytes=SEGMENT_UNITS * UNIT)
        self.owned: dict[int, int] = {}
        self.taken = [False] * UNITS

    def mark(self, offset: int, length: int, *, taken: bool) -> None:
        for unit in range(offset // UNIT, (offset + length) // UNIT):
            assert self.taken[unit] is not taken
            self.taken[unit] = taken

    @rule(length=st.integers(1, 140 * UNIT))
    def allocate(self, length: int) -> None:
        largest = self.allocator.largest_free_bytes
        offset = self.allocator.allocate(length)
        if offset is None:
            assert self.allocator.rounded(length) > largest
            return
        room = self.allocator.rounded(length)
        assert offset % UNIT == 0
        assert offset // (SEGMENT_UNITS * UNIT) == (offset + room - 1) // (SEGMENT_UNITS * UNIT)
        self.mark(offset, room, taken=True)
        self.owned[offset] = room

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.owned)))
        length = self.owned.pop(offset)
        assert self.allocator.free(offset) == length
        self.mark(offset, length, taken=False)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free_many(self, data: st.DataObject) -> None:
        offsets = data.draw(st.lists(st.sampled_from(sorted(self.owned)), unique=True))
        self.allocator.free_many(offsets)
        for offset in offsets:
            self.mark(offset, self.owned.pop(offset), taken=False)

    @rule(unit=st.integers(0, UNITS - 1), units=st.integers(1, 20))
    def remove_and_record(self, unit: int, units: int) -> None:
        inside = unit + units <= UNITS and unit // SEGMENT_UNITS == (unit + units - 1) // SEGMENT_UNITS
        if inside and not any(self.taken[unit : unit + units]):
            self.allocator.remove(unit * UNIT, units * UNIT)
            self.allocator.record([(unit * UNIT, units * UNIT)])
            self.mark(unit * UNIT, units * UNIT, taken=True)
            self.owned[unit * UNIT] = units * UNIT
        else:
            with pytest.raises(CorruptionError):
                self.allocator.remove(unit * UNIT, units * UNIT)

    @invariant()
    def accounting_is_exact_and_neighbours_are_one_gap(self) -> None:
        taken_bytes = sum(self.taken) * UNIT
        assert self.allocator.allocated_bytes == taken_bytes
        assert self.allocator.free_bytes == UNITS * UNIT - taken_bytes
        assert self.allocator.extents() == sorted(self.owned.items())
        expected: list[tuple[int, int]] = []
        for unit in range(UNITS):
            if self.taken[unit]:
                continue
            if unit % SEGMENT_UNITS and unit and not self.taken[unit - 1]:
                expected[-1] = (expected[-1][0], expected[-1][1] + UNIT)
            else:
                expected.append((unit * UNIT, UNIT))
        assert self.allocator.gaps() == expected
        assert self.allocator.largest_free_bytes == max((length for _, length in expected), default=0)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@given(st.integers(64 * 1024, 128 * MIB))
def test_internal_waste_is_at_most_an_eighth_over_64_kib(length: int) -> None:
    assert ExtentAllocator(256 * MIB).rounded(length) <= length * 1.125


@given(st.sets(st.integers(0, UNITS - 2), max_size=60))
def test_adopt_leaves_exactly_the_rest_free(units: set[int]) -> None:
    extents = [(unit * UNIT, UNIT) for unit in units]
    random.Random(1).shuffle(extents)
    allocator = ExtentAllocator(UNITS * UNIT, UNIT, segment_bytes=SEGMENT_UNITS * UNIT)
    allocator.adopt(extents)
    assert allocator.extents() == sorted(extents)
    assert allocator.free_bytes == (UNITS - len(units)) * UNIT
    for offset, _ in extents:
        allocator.free(offset)
    assert allocator.gaps() == [(at * SEGMENT_UNITS * UNIT, SEGMENT_UNITS * UNIT) for at in range(4)]


@pytest.mark.parametrize(
    "extents",
    [
        [(0, 2 * UNIT), (UNIT, UNIT)],
        [(UNIT // 2, UNIT)],
        [((UNITS - 1) * UNIT, 2 * UNIT)],
        [((SEGMENT_UNITS - 1) * UNIT, 2 * UNIT)],
    ],
)
def test_adopt_refuses_what_cannot_be_and_changes_nothing(extents: list[tuple[int, int]]) -> None:
    allocator = ExtentAllocator(UNITS * UNIT, UNIT, segment_bytes=SEGMENT_UNITS * UNIT)
    with pytest.raises(CorruptionError):
        allocator.adopt(extents)
    assert allocator.free_bytes == UNITS * UNIT
    assert allocator.extents() == []


def test_a_second_free_is_refused() -> None:
    allocator = ExtentAllocator(UNIT * 4)
    offset = allocator.allocate(1)
    assert offset is not None
    allocator.free(offset)
    with pytest.raises(ValueError, match="no extent"):
        allocator.free(offset)


@pytest.mark.parametrize("offsets", [[0, UNIT, 0], [0, 3 * UNIT], [0, UNIT // 2]])
def test_of_many_of_which_one_cannot_be_freed_none_is(offsets: list[int]) -> None:
    allocator = ExtentAllocator(UNIT * 4)
    assert [allocator.allocate(UNIT) for _ in range(3)] == [0, UNIT, 2 * UNIT]
    with pytest.raises(ValueError, match="different extents"):
        allocator.free_many(offsets)
    assert allocator.extents() == [(0, UNIT), (UNIT, UNIT), (2 * UNIT, UNIT)]
    assert (allocator.allocated_bytes, allocator.free_bytes) == (3 * UNIT, UNIT)


def test_room_that_was_added_joins_its_neighbours_and_can_be_removed() -> None:
    allocator = ExtentAllocator(UNIT * 8, empty=True)
    assert allocator.allocate(1) is None
    allocator.add(0, UNIT * 2)
    allocator.add(UNIT * 2, UNIT * 2)
    assert allocator.gaps() == [(0, UNIT * 4)]
    allocator.remove(UNIT, UNIT)
    assert allocator.gaps() == [(0, UNIT), (UNIT * 2, UNIT * 2)]
    assert allocator.free_bytes == UNIT * 3


def test_mixed_sizes_under_eviction_in_order_keep_most_of_the_space_in_use() -> None:
    """First-in first-out victims alone: the floor that the arena's choice of neighbours then raises (0.89 measured)."""
    rnd = random.Random(7)
    allocator = ExtentAllocator(2048 * MIB, segment_bytes=256 * MIB)
    held: OrderedDict[int, None] = OrderedDict()
    used: list[float] = []
    for turn in range(3000):
        length = int(math.exp(rnd.uniform(math.log(64 * 1024), math.log(80 * MIB))))
        offset = allocator.allocate(length)
        while offset is None:
            allocator.free(held.popitem(last=False)[0])
            offset = allocator.allocate(length)
        held[offset] = None
        if turn > 1000:
            used.append(allocator.allocated_bytes / allocator.size_bytes)
    assert sum(used) / len(used) > 0.75
