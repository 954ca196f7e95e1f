"""Look-ups and transfers beside an engine's scheduler, over a link that the test answers for. No engine is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import pytest
from forked import in_child

from kvobj.connectors.link import StoreLink
from kvobj.connectors.lookups import TOUCH_SECONDS, Lookups
from kvobj.connectors.transfers import Piece, Transfers

DEADLINE_SECONDS = 5.0
KEYS = [b"key-%d" % number for number in range(4)]


class Link:
    """Answers at once, or when it is let; keeps count of what is held."""

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.held: list[str] = []
        self.asked: list[list[str]] = []
        self.ran: list[list[str]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.let_go = threading.Event()

    def hold(self, names: Sequence[str]) -> list[bool]:
        self.asked.append(list(names))
        self.may_answer.wait(10)
        found = [name in self.stored for name in names]
        self.held += [name for name in names if name in self.stored]
        return found

    def run(self, names: Sequence[str]) -> int:
        if names:
            self.ran.append(list(names))
        return 0

    def release(self, names: Sequence[str]) -> None:
        for name in names:
            self.held.remove(name)
            self.let_go.set()

    def report(self) -> dict[str, object]:
        return {"held": len(self.held)}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lookups(link: Link, clock: Clock) -> Iterator[Lookups]:
    made = Lookups(cast("StoreLink", link), name_of=bytes.decode, deadline_seconds=DEADLINE_SECONDS, now=clock)
    yield made
    link.may_answer.set()
    made.close()


def answered(lookups: Lookups, key: bytes, request: str = "r") -> bool:
    """What comes of a question, asked step by step."""
    pause = threading.Event()
    for _ in range(5000):
        answer = lookups.ask(key, request)
        if answer is not None:
            return answer
        lookups.flush()
        pause.wait(0.001)
    raise TimeoutError("no answer")


def test_a_question_is_answered_later_and_a_step_asks_for_all_in_one_batch(lookups: Lookups, link: Link) -> None:
    link.stored = {"key-1"}
    assert [lookups.ask(key, "r") for key in KEYS] == [None] * 4
    assert not link.asked
    assert [answered(lookups, key) for key in KEYS] == [False, True, False, False]
    assert link.asked == [["key-0", "key-1", "key-2", "key-3"]]
    assert (lookups.hits, lookups.misses) == (1, 3)


def test_a_hit_is_held_until_it_is_loaded_and_then_asked_for_anew(lookups: Lookups, link: Link) -> None:
    link.stored = {"key-0"}
    assert answered(lookups, KEYS[0])
    assert link.held == ["key-0"]
    lookups.loaded([KEYS[0]])
    assert not link.held
    link.stored.clear()
    assert not answered(lookups, KEYS[0])


def test_a_hit_is_held_until_the_last_request_that_wants_it_has_ended(lookups: Lookups, link: Link) -> None:
    link.stored = {"key-0"}
    assert answered(lookups, KEYS[0], "one")
    assert answered(lookups, KEYS[0], "two")
    lookups.ended("one")
    assert link.held == ["key-0"]
    lookups.ended("two")
    assert not link.held
    lookups.ended("two")


def test_a_failed_load_is_a_miss_for_those_who_asked_and_a_question_for_those_who_come(
    lookups: Lookups, link: Link
) -> None:
    link.stored = {"key-0"}
    assert answered(lookups, KEYS[0], "one")
    lookups.failed([KEYS[0], KEYS[1]])
    assert lookups.ask(KEYS[0], "one") is False
    assert not link.held
    assert answered(lookups, KEYS[0], "two")
    assert lookups.ask(KEYS[0], "one") is False
    assert link.held == ["key-0"]
    lookups.ended("two")
    assert not link.held  # the other one has no use for it
    assert lookups.ask(KEYS[0], "one") is False
    assert answered(lookups, KEYS[0], "three")
    lookups.ended("one")
    assert link.held == ["key-0"]
    lookups.ended("three")
    assert not link.held


def test_what_was_a_miss_is_asked_for_again_once_it_is_stored(lookups: Lookups, link: Link) -> None:
    assert not answered(lookups, KEYS[0])
    link.stored = {"key-0"}
    lookups.stored([KEYS[0]])
    assert answered(lookups, KEYS[0])


def test_an_answer_that_comes_too_late_is_a_miss_and_holds_nothing(lookups: Lookups, link: Link, clock: Clock) -> None:
    link.stored = {"key-0"}
    link.may_answer.clear()
    assert lookups.ask(KEYS[0], "r") is None
    lookups.flush()
    clock.now += DEADLINE_SECONDS + 1
    assert lookups.ask(KEYS[0], "r") is False
    link.may_answer.set()
    assert not answered(lookups, KEYS[1])  # behind it
    assert lookups.ask(KEYS[0], "r") is False
    assert not link.held


def test_who_ends_before_the_answer_leaves_nothing_held(lookups: Lookups, link: Link) -> None:
    link.stored = {"key-0"}
    link.may_answer.clear()
    lookups.ask(KEYS[0], "one")
    lookups.ask(KEYS[1], "one")
    lookups.flush()
    lookups.ask(KEYS[2], "one")  # never sent
    lookups.ended("one")
    link.may_answer.set()
    assert not answered(lookups, KEYS[3], "two")
    assert not link.held
    assert all("key-2" not in names for names in link.asked)


def test_what_an_ended_request_wanted_is_let_go_of_though_nobody_asks_again(lookups: Lookups, link: Link) -> None:
    link.stored = {"key-0"}
    link.may_answer.clear()
    lookups.ask(KEYS[0], "one")
    lookups.flush()
    lookups.ended("one")
    link.may_answer.set()
    assert link.let_go.wait(10), "an idle engine would keep its pin"
    assert not link.held


def test_in_a_forked_process_every_question_is_a_miss_at_once(lookups: Lookups, link: Link) -> None:
    link.stored = {"key-0", "key-1"}
    assert answered(lookups, KEYS[0], "one")

    def used() -> bool:
        found = [lookups.ask(key, "one") for key in KEYS]
        lookups.flush()
        lookups.ended("one")
        lookups.close()
        return found == [False] * 4 and link.held == ["key-0"]

    with lookups._lock:  # as its thread may have it at that moment
        assert in_child(used)
    assert lookups.ask(KEYS[0], "one")
    assert answered(lookups, KEYS[1], "two")


def test_what_is_used_elsewhere_is_told_now_and_then(lookups: Lookups, link: Link, clock: Clock) -> None:
    lookups.touch(KEYS[:2])
    lookups.flush()
    clock.now += TOUCH_SECONDS
    lookups.touch([KEYS[0]])
    lookups.flush()
    assert not answered(lookups, KEYS[3])  # behind it
    assert link.ran == [["key-1", "key-0"]]


def drained(run: Callable[[], Sequence[bool]]) -> list[list[bool]]:
    transfers = Transfers(threads=2, store_wait_seconds=60.0)
    transfers.submit(1, [Piece(2, run), Piece(1, lambda: [True])], is_load=True)
    transfers.drain()
    copied = [ended.copied for ended in transfers.finished()]
    transfers.close()
    return copied


def test_a_job_tells_of_each_chunk_whatever_its_pieces_do() -> None:
    def breaks() -> Sequence[bool]:
        raise OSError("broken")

    assert drained(lambda: [True, False]) == [[True, False, True]]
    assert drained(breaks) == [[False, False, True]]
    assert drained(lambda: [True]) == [[False, False, True]]  # not as many answers as chunks


def test_loads_go_before_stores_and_a_store_that_waited_too_long_is_given_up() -> None:
    order: list[str] = []
    may_go, is_in = threading.Event(), threading.Event()

    def first() -> Sequence[bool]:
        is_in.set()
        may_go.wait(10)
        return [True]

    def noted(what: str) -> Piece:
        def run() -> Sequence[bool]:
            order.append(what)
            return [True]

        return Piece(1, run)

    transfers = Transfers(threads=1, store_wait_seconds=0.0)
    transfers.submit(1, [Piece(1, first)], is_load=True)
    assert is_in.wait(10)
    transfers.submit(2, [noted("store")], is_load=False)
    transfers.submit(3, [noted("load")], is_load=True)
    may_go.set()
    transfers.drain()
    assert [(ended.job, ended.copied) for ended in transfers.finished()] == [(1, [True]), (3, [True]), (2, [False])]
    assert order == ["load"]
    transfers.close()


def test_in_a_forked_process_every_job_has_failed_and_nothing_waits_for_it() -> None:
    may_go, is_in = threading.Event(), threading.Event()

    def copies() -> Sequence[bool]:
        is_in.set()
        may_go.wait(10)
        return [True]

    transfers = Transfers(threads=1, store_wait_seconds=60.0)
    transfers.submit(1, [Piece(1, copies)], is_load=True)
    transfers.submit(2, [Piece(1, copies)], is_load=True)
    assert is_in.wait(10)

    def used() -> bool:
        transfers.submit(3, [Piece(1, copies)], is_load=False)
        transfers.drain()
        ended = [(ended.job, ended.copied) for ended in transfers.finished()]
        transfers.close()
        return ended == [(1, [False]), (2, [False]), (3, [False])]

    with transfers._changed:  # as one of its threads may have it at that moment
        assert in_child(used)
    may_go.set()
    transfers.drain()
    assert [(ended.job, ended.copied) for ended in transfers.finished()] == [(1, [True]), (2, [True])]
    transfers.close()


def test_what_is_queued_when_it_closes_has_failed_and_says_so() -> None:
    transfers = Transfers(threads=1, store_wait_seconds=60.0)
    transfers.close()
    transfers.submit(1, [Piece(2, lambda: [True, True])], is_load=False)
    transfers.submit(2, [], is_load=True)
    transfers.drain()
    assert [ended.copied for ended in transfers.finished()] == [[False, False], []]
    transfers.close()
