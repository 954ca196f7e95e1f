"""Sessions that are lost, closed or waited for at a bad moment: what the server is told, and what is left with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from scripted_server import CREDENTIALS, ScriptedServer
from scripted_sessions import Sessions

from kvobj.client import KvClient, Namespace, Session
from kvobj.errors import KvobjError, NoSuchSessionError, UnavailableError

ONE, OTHER = (Namespace(name=name, ids="foreign", chunk_tokens=0) for name in ("one", "other"))


@contextmanager
def opened(sessions: Sessions, *, timeout_seconds: float = 20.0) -> Iterator[Session]:
    """A session without a thread of its own; the test closes it."""
    with (
        ScriptedServer(sessions) as server,
        KvClient(server.endpoint, CREDENTIALS, "cache", timeout_seconds=timeout_seconds, same_host=False) as client,
    ):
        yield Session(client, is_automatic=False).__enter__()


class Calling(threading.Thread):
    """A call in a thread, and what it raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.raised: KvobjError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except KvobjError as error:
            self.raised = error


def test_a_session_that_is_opened_as_its_holder_closes_is_closed_too() -> None:
    sessions = Sessions()
    going_on = sessions.hold("open 2")
    with opened(sessions) as session:
        sessions.lost = {1}
        renewing = Calling(session.renew)
        assert sessions.came("open 2").wait(10)
        session.close()
        going_on.set()
        renewing.join(10)
        assert isinstance(renewing.raised, NoSuchSessionError)
    assert sessions.asked == ["open 1", "renew 1", "open 2", "close 2"]


def test_a_holder_that_closes_while_its_pins_are_pinned_again_has_no_more_of_them_pinned() -> None:
    sessions = Sessions()
    with opened(sessions) as session:
        pins = [session.pin(["a"], namespace=each)[0] for each in (ONE, OTHER)]
        sessions.lost = {1}
        going_on = sessions.hold("pins 2")
        renewing = Calling(session.renew)
        assert sessions.came("pins 2").wait(10)
        session.close()
        going_on.set()
        renewing.join(10)
        assert isinstance(renewing.raised, NoSuchSessionError)
        assert [pin is not None and pin.is_valid for pin in pins] == [False, False]
    assert sessions.asked[-2:] == ["pins 2", "close 2"]


def test_a_session_that_is_lost_again_while_its_pins_are_pinned_is_replaced_by_the_next_renewal() -> None:
    sessions = Sessions()
    with opened(sessions) as session:
        (pin,) = session.pin(["a"], namespace=ONE)
        assert pin is not None
        sessions.lost = {1, 2}
        with pytest.raises(NoSuchSessionError):
            session.renew()
        assert not pin.is_valid
        session.renew()
        assert pin.is_valid
        session.close()
    assert sessions.asked[-4:] == ["renew 2", "open 3", "pins 3", "close 3"]


def test_pins_of_an_answer_that_is_refused_are_released() -> None:
    sessions = Sessions()
    sessions.pins_more = 1
    with opened(sessions) as session:
        with pytest.raises(UnavailableError, match="other chunks"):
            session.pin(["a", "b"], namespace=ONE)
        session.renew()
        assert sorted(sessions.released) == [number.to_bytes(16) for number in (1, 2, 3)]
        session.close()


def test_a_match_that_finds_its_session_lost_has_one_timeout_for_all_that_it_does() -> None:
    sessions = Sessions()
    sessions.lost = {1}
    sessions.late_seconds = dict.fromkeys(("match 1", "open 2"), 0.7)  # each in time, and both together not
    with opened(sessions, timeout_seconds=1.0) as session, pytest.raises(UnavailableError):
        session.match(ids=["a"])
    assert "match 2" not in sessions.asked
