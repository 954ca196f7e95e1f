"""What spares a failing server: the breaker, the budgets, the pauses, the lateness. By a clock that is turned by hand."""

from __future__ import annotations

import random

from fakes import ManualClock
from hypothesis import given
from hypothesis import strategies as st

from kvobj.tiers.remote.breaker import CircuitBreaker
from kvobj.tiers.remote.pacing import FirstByteTimes, TokenBudget, backoff_seconds


def failing(breaker: CircuitBreaker, count: int) -> None:
    for _ in range(count):
        assert breaker.admits()
        breaker.failed()


def test_failures_in_a_row_open_it_and_one_trial_closes_it() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(clock)
    failing(breaker, 7)
    assert [breaker.state] == ["closed"]
    failing(breaker, 1)
    assert [breaker.state] == ["open"]
    assert not breaker.admits()
    clock.advance(0.49)
    assert not breaker.admits()
    clock.advance(0.01)
    assert [breaker.state] == ["half-open"]
    assert breaker.admits()
    assert not breaker.admits()  # one at a time
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.failed_share == 0.0
    assert breaker.admits()


def test_each_failed_trial_doubles_the_wait_up_to_a_bound() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(clock)
    failing(breaker, 8)
    waits = []
    for _ in range(8):
        waits.append(breaker.retry_seconds)
        clock.advance(waits[-1])
        assert breaker.admits()
        breaker.failed()
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


def test_a_share_of_failures_among_many_opens_it_and_a_smaller_one_does_not() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(clock)
    for _ in range(200):  # half of them
        breaker.succeeded()
        breaker.failed()
    assert [breaker.state] == ["closed"]
    assert breaker.failed_share == 0.5
    clock.advance(60)
    assert breaker.failed_share == 0.0  # what was long ago counts no more
    for _ in range(10):  # two of three
        breaker.succeeded()
        breaker.failed()
        breaker.failed()
    assert [breaker.state] == ["open"]  # and what was under way when it opened does not close it


def test_a_trial_that_is_given_up_lets_another_be_made() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(clock)
    failing(breaker, 8)
    clock.advance(1)
    assert breaker.admits()
    breaker.abandoned()
    assert breaker.admits()  # and of this one nobody is told
    clock.advance(29)
    assert not breaker.admits()
    clock.advance(1)
    assert breaker.admits()


@given(st.lists(st.booleans(), max_size=300))
def test_extra_requests_stay_within_their_share_of_the_others(asks_extra: list[bool]) -> None:
    budget = TokenBudget(share=0.2, burst=10)
    extra = 0
    for number, wants in enumerate(asks_extra, 1):
        budget.earn()
        while wants and budget.spend():
            extra += 1
        assert extra <= 10 + 0.2 * number + 1e-9


@given(st.integers(1, 40), st.none() | st.floats(0, 60), st.integers())
def test_pauses_are_bounded_and_never_shorter_than_asked_for(attempt: int, asked: float | None, seed: int) -> None:
    pause = backoff_seconds(attempt, asked, random.Random(seed))
    assert (asked or 0.0) <= pause <= (asked or 0.0) + min(5.0, 0.05 * 2**attempt)


def test_an_answer_is_late_after_twice_what_nearly_all_take() -> None:
    times = FirstByteTimes()
    assert times.late_seconds == 0.5  # nothing is known
    for number in range(15):
        times.add(0.001 * number)
    assert times.late_seconds == 0.5
    times.add(0.0)
    assert times.late_seconds == 0.028
    for _ in range(256):
        times.add(0.001)
    assert times.late_seconds == 0.02  # never so soon that every request is made twice
    for _ in range(256):
        times.add(0.1)
    assert times.late_seconds == 0.2
    for number in range(256):
        times.add(2.0 if number % 50 == 0 else 0.1)
    assert times.late_seconds == 0.2  # what stalls now and then does not count
