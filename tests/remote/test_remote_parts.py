"""Into which parts bodies are cut: nothing is left out, and a little more than a part is one request."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.tiers.remote.parts import part_spans, read_spans

MIB = 2**20
PART = 8 * MIB


def lengths(spans: list[range]) -> list[int]:
    return [len(span) for span in spans]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, [0]),
        (1, [1]),
        (PART + 4096, [PART + 4096]),
        (PART + PART // 4, [PART + PART // 4]),
        (PART + PART // 4 + 1, [PART, PART // 4 + 1]),
        (4 * PART + 4096, [PART, PART, PART, PART + 4096]),
    ],
)
def test_a_small_rest_joins_the_last_part(size: int, expected: list[int]) -> None:
    assert lengths(part_spans(size, PART)) == expected


def test_a_range_of_several_parts_has_a_small_front() -> None:
    assert lengths(read_spans(PART + 4096, PART)) == [PART + 4096]
    assert lengths(read_spans(4 * PART + 4096, PART)) == [2 * MIB, PART, PART, PART, 6 * MIB + 4096]


@given(size=st.integers(min_value=1, max_value=10_000), part=st.integers(min_value=4, max_value=1000))
def test_the_parts_are_all_there_is_in_order_and_none_is_empty_or_too_long(size: int, part: int) -> None:
    for spans in (part_spans(size, part), read_spans(size, part)):
        assert spans[0].start == 0
        assert spans[-1].stop == size
        assert all(before.stop == after.start for before, after in itertools.pairwise(spans))
        assert all(0 < len(span) <= part + part // 4 for span in spans)
    assert all(len(span) == part for span in part_spans(size, part)[:-1])
