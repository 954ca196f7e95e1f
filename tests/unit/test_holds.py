"""Holds: bounded promises to clients that lease nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvobj.gc.holds import Holds

A, B, C = (bytes([number]) * 16 for number in range(3))


def test_a_chunk_is_held_for_the_grace_time_and_no_longer() -> None:
    holds = Holds(grace_ms=1000, bytes_max=100)
    holds.hold(A, 10, now_boot_ms=5000)
    assert holds.is_held(A, now_boot_ms=5999)
    assert not holds.is_held(A, now_boot_ms=6000)
    assert not holds.is_held(B, now_boot_ms=5000)


def test_asking_again_holds_it_for_longer_and_counts_once() -> None:
    holds = Holds(grace_ms=1000, bytes_max=100)
    holds.hold(A, 10, now_boot_ms=0)
    holds.hold(A, 10, now_boot_ms=900)
    assert holds.is_held(A, now_boot_ms=1500)
    assert (len(holds), holds.size_bytes) == (1, 10)


def test_over_the_bound_the_oldest_are_let_go_first() -> None:
    holds = Holds(grace_ms=1000, bytes_max=25)
    for name in (A, B, C):
        holds.hold(name, 10, now_boot_ms=0)
    assert [holds.is_held(name, now_boot_ms=0) for name in (A, B, C)] == [False, True, True]
    assert holds.size_bytes == 20


def test_what_is_gone_is_held_no_longer() -> None:
    holds = Holds(grace_ms=1000, bytes_max=100)
    holds.hold(A, 10, now_boot_ms=0)
    holds.drop(A)
    holds.drop(B)
    assert (len(holds), holds.size_bytes) == (0, 0)
    assert not holds.is_held(A, now_boot_ms=0)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 50), st.integers(0, 700), st.booleans()), min_size=1, max_size=60
    )
)
def test_no_order_of_calls_breaks_a_bound_or_forgets_the_newest(
    calls: list[tuple[int, int, int, bool]],
) -> None:
    holds = Holds(grace_ms=1000, bytes_max=100, holds_max=5)
    now = 0
    for number, size_bytes, wait, is_drop in calls:
        now += wait
        name = bytes([number]) * 16
        if is_drop:
            holds.drop(name)
            assert not holds.is_held(name, now_boot_ms=now)
        else:
            holds.hold(name, size_bytes, now_boot_ms=now)
            assert holds.is_held(name, now_boot_ms=now)
        assert holds.size_bytes <= 100
        assert len(holds) <= 5
        assert holds.size_bytes >= 0
