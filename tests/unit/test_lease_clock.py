"""The holder's side of leases without any server: its deadline, what it says of its pins, when it asks again."""

from __future__ import annotations

import random

import pytest
from blake3 import blake3
from fakes import ManualClock
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvobj.client.lease import CLOCK_RATE_ERROR, SLACK_SECONDS, Lease, holder_deadline
from kvobj.client.pin_ledger import RELEASES_MAX, PinLedger, Statement, Ticket, digest_of_pins
from kvobj.client.retry import RetryBudget, RetryRule, pause_seconds


def test_a_lease_counts_from_before_the_request_and_ends_before_the_servers() -> None:
    clock = ManualClock(monotonic=100.0)
    lease = Lease()
    sent_at = clock.monotonic()
    clock.advance(3)  # the answer was slow: that time is not the holder's
    lease.extend(sent_at, 30_000)
    assert lease.is_valid(clock.monotonic())
    clock.advance(26.49)
    assert lease.is_valid(clock.monotonic())
    clock.advance(0.01)
    assert not lease.is_valid(clock.monotonic()), "30 s less 200 ppm less half a second, from when it was sent"


def test_a_lease_that_was_never_granted_or_was_lost_is_not_valid() -> None:
    lease = Lease()
    assert not lease.is_valid(0.0)
    lease.extend(0.0, 30_000)
    assert lease.is_valid(1.0)
    lease.lose()
    lease.extend(1.0, 30_000)
    assert not lease.is_valid(1.0)
    assert lease.left_seconds(1.0) == 0.0


def test_answers_out_of_order_never_shorten_a_lease() -> None:
    lease = Lease()
    lease.extend(10.0, 30_000)
    lease.extend(5.0, 30_000)
    assert lease.left_seconds(10.0) == pytest.approx(30 * (1 - CLOCK_RATE_ERROR) - SLACK_SECONDS)


def test_a_lease_that_ran_out_is_valid_again_when_the_server_renews_it() -> None:
    lease = Lease()
    lease.extend(0.0, 1_000)
    assert not lease.is_valid(0.6)
    lease.extend(0.6, 1_000)
    assert lease.is_valid(0.6)


@given(
    ttl_ms=st.integers(1_000, 600_000),
    travel=st.floats(0, 10),
    rate=st.floats(1 - CLOCK_RATE_ERROR, 1 + CLOCK_RATE_ERROR),
)
def test_the_server_expires_no_session_that_its_holder_still_relies_on(ttl_ms: int, travel: float, rate: float) -> None:
    answered_at = 1000.0 + travel  # on the server's clock, which runs at `rate` against the holder's
    expires_at = answered_at + ttl_ms / 1000 + 0.5
    holder_lets_go = 1000.0 + (holder_deadline(1000.0, ttl_ms) - 1000.0) * rate
    assert holder_lets_go < expires_at


def pin(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_statement_counts_what_is_held_and_releases_what_was_let_go_of() -> None:
    ledger = PinLedger()
    for number in (3, 1, 2):
        ledger.end(ledger.begin(), grant=number, pins=[pin(number)])
    ledger.release([pin(2), pin(99)])
    statement = ledger.statement()
    assert statement == Statement(3, 2, blake3(pin(1) + pin(3)).digest(), (pin(2),))
    assert len(ledger) == 3, "a release counts once the server has answered"
    ledger.confirm(statement)
    assert ledger.statement() == Statement(3, 2, blake3(pin(1) + pin(3)).digest(), ())


def test_a_release_whose_answer_was_lost_is_said_again() -> None:
    ledger = PinLedger()
    ledger.end(ledger.begin(), grant=1, pins=[pin(1)])
    ledger.release([pin(1)])
    assert ledger.statement().release == (pin(1),)
    assert ledger.statement().release == (pin(1),)


def test_releases_beyond_one_renewal_are_still_counted_as_held() -> None:
    ledger = PinLedger()
    pins = [pin(number) for number in range(RELEASES_MAX + 3)]
    ledger.end(ledger.begin(), grant=1, pins=pins)
    ledger.release(pins)
    first = ledger.statement()
    assert (len(first.release), first.pins) == (RELEASES_MAX, 3)
    ledger.confirm(first)
    second = ledger.statement()
    assert (len(second.release), second.pins, second.pins_digest) == (3, 0, blake3(b"").digest())


def test_a_grant_in_flight_is_not_spoken_of() -> None:
    ledger = PinLedger()
    ledger.end(ledger.begin(), grant=1, pins=[pin(1)])
    slow = ledger.begin()  # the server grants it number 2
    ledger.end(ledger.begin(), grant=3, pins=[pin(3)])
    assert ledger.statement() == Statement(1, 1, blake3(pin(1)).digest(), ())
    ledger.end(slow, grant=2, pins=[pin(2)])
    assert ledger.statement().as_of == 3
    assert ledger.statement().pins == 3


def test_a_grant_whose_answer_was_lost_is_a_mismatch_as_soon_as_a_later_one_is_seen() -> None:
    ledger = PinLedger()
    ledger.end(ledger.begin())  # the server granted number 1, and nobody heard of it
    ledger.end(ledger.begin(), grant=2, pins=[pin(2)])
    statement = ledger.statement()
    assert (statement.as_of, statement.pins) == (2, 1), "the server counts two up to grant 2, and says reclaim"


class HolderAndServer(RuleBasedStateMachine):
    """A server's record and a holder's, with requests whose answers come late and in any order: no statement ever differs."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PinLedger()
        self.granted: dict[bytes, int] = {}
        self.pins = 0
        self.grant = 0
        self.under_way: list[tuple[Ticket, int, list[bytes]]] = []
        self.held: list[bytes] = []

    @rule(pins=st.integers(0, 3))
    def ask(self, pins: int) -> None:
        ticket = self.ledger.begin()
        self.grant += 1 if pins else 0
        ids = [pin(self.pins + number) for number in range(pins)]
        self.pins += pins
        self.granted.update(dict.fromkeys(ids, self.grant))
        self.under_way.append((ticket, self.grant, ids))

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.under_way:
            number = data.draw(st.integers(0, len(self.under_way) - 1))
            ticket, grant, ids = self.under_way.pop(number)
            self.ledger.end(ticket, grant=grant if ids else 0, pins=ids)
            self.held += ids

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            self.ledger.release([self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))])

    @rule(is_answered=st.booleans())
    def renew(self, is_answered: bool) -> None:  # noqa: FBT001 - drawn by Hypothesis
        statement = self.ledger.statement()
        for released in statement.release:
            self.granted.pop(released, None)
        kept = sorted(each for each, grant in self.granted.items() if grant <= statement.as_of)
        assert statement.pins == len(kept)
        assert statement.pins_digest == digest_of_pins(kept)
        if is_answered:
            self.ledger.confirm(statement)


TestHolderAndServer = HolderAndServer.TestCase


def test_retries_are_bounded_for_a_client_and_not_only_for_a_call() -> None:
    budget = RetryBudget(RetryRule(burst=2, share=0.5))
    assert [budget.take() for _ in range(3)] == [True, True, False]
    budget.note_call()
    assert not budget.take()
    budget.note_call()
    assert [budget.take(), budget.take()] == [True, False]
    for _ in range(100):
        budget.note_call()
    assert [budget.take() for _ in range(3)] == [True, True, False], "what is saved up is bounded"


@pytest.mark.parametrize("tries", [1, 2, 5, 50])
def test_pauses_grow_and_are_bounded(tries: int) -> None:
    shortest, longest = pause_seconds(tries, fraction=0.0), pause_seconds(tries, fraction=1.0)
    assert shortest == longest / 2
    assert longest <= 2.0
    assert shortest <= pause_seconds(tries) <= longest


def test_a_pause_draws_nothing_from_the_chance_that_an_engine_has_seeded() -> None:
    before = random.getstate()
    assert len({pause_seconds(4) for _ in range(20)}) > 1
    assert random.getstate() == before
