"""Ages by a wall clock that jumps: never more than the truth."""

from __future__ import annotations

from fakes import ManualClock
from hypothesis import given
from hypothesis import strategies as st

from kvobj.gc.wall_ages import WallAges

HOUR = 3600.0


def test_without_jumps_it_is_the_wall_clock() -> None:
    clock = ManualClock()
    ages = WallAges(clock)
    clock.advance(100)
    assert ages.now_ms(HOUR) == clock.now_ms()
    assert ages.cutoff_ms(HOUR) == clock.now_ms() - 3_600_000


def test_a_jump_ahead_counts_once_everything_of_before_is_old_enough_by_itself() -> None:
    clock = ManualClock()
    ages = WallAges(clock)
    before_ms = clock.now_ms()
    clock.jump_wall(10 * HOUR)
    assert ages.cutoff_ms(HOUR) < before_ms
    clock.advance(HOUR - 1)
    assert ages.cutoff_ms(HOUR) < before_ms
    clock.advance(2)
    assert ages.cutoff_ms(HOUR) > before_ms


def test_a_clock_that_was_put_right_again_has_not_jumped() -> None:
    clock = ManualClock()
    ages = WallAges(clock)
    clock.jump_wall(HOUR)
    ages.now_ms(HOUR)
    clock.jump_wall(-HOUR)
    assert ages.now_ms(10 * HOUR) == clock.now_ms()


def test_a_clock_that_is_steered_has_not_jumped() -> None:
    clock = ManualClock()
    ages = WallAges(clock)
    for _ in range(100):
        clock.advance(60)
        clock.jump_wall(0.03)
        assert ages.now_ms(HOUR) == clock.now_ms()


@given(
    st.lists(st.tuples(st.sampled_from(["pass", "jump", "stamp"]), st.integers(-10_000, 10_000)), max_size=30),
    st.integers(1, 20_000),
)
def test_nothing_is_taken_for_older_than_it_is(steps: list[tuple[str, int]], age_seconds: int) -> None:
    clock = ManualClock()
    ages = WallAges(clock)
    stamps: list[tuple[int, float]] = []
    for what, seconds in steps:
        if what == "pass":
            clock.advance(abs(seconds))
        elif what == "jump":
            clock.jump_wall(seconds)
        else:
            stamps.append((clock.now_ms(), clock.monotonic()))
        cutoff_ms = ages.cutoff_ms(age_seconds)
        for wall_ms, stamped_at in stamps:
            if wall_ms < cutoff_ms:
                assert clock.monotonic() - stamped_at > age_seconds
