"""Sessions that are lost, closed or waited for at a bad moment: what the server is told, and what is left with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from scripted_server import CREDENTIALS, ScriptedServer
from scripted_sessions import Sessions

from kvobj.client import KvClient, Namespace, Pin, Session
from kvobj.client.pin_ledger import PinLedger
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


def test_a_session_that_was_closed_is_not_opened_again() -> None:
    sessions = Sessions()
    with opened(sessions) as session:
        session.close()
        with pytest.raises(NoSuchSessionError):
            session.__enter__()
        assert not session.is_valid
    assert sessions.asked == ["open 1", "close 1"]


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


def test_a_pin_of_a_match_that_is_refused_is_released() -> None:
    sessions = Sessions()
    sessions.matches, sessions.pins_more = 2, 1
    with opened(sessions) as session:
        with pytest.raises(UnavailableError, match="other chunks"):
            session.match(ids=["a", "b"])
        session.renew()
        assert sessions.released == [(1).to_bytes(16)]
        session.close()


def test_a_namespace_that_has_other_names_by_now_keeps_no_other_from_being_pinned_again() -> None:
    sessions = Sessions()
    with opened(sessions) as session:
        pins = [session.pin(["a"], namespace=each)[0] for each in (ONE, OTHER)]
        sessions.lost, sessions.refused = {1}, {"one"}
        session.renew()
        assert [pin is not None and pin.is_valid for pin in pins] == [False, True]
        session.close()


def test_names_of_both_forms_are_pinned_again_together() -> None:
    sessions = Sessions()
    raw = Namespace(name="raw", ids="kvobj", chunk_tokens=16)
    ids = [bytes([number]) * 32 for number in range(2)]
    with opened(sessions) as session:
        pins = [session.pin([name], namespace=raw)[0] for name in (ids[0], ids[1].hex())]
        pins += session.pin(["a"], namespace=ONE)
        sessions.lost = {1}
        session.renew()
        assert [pin is not None and pin.is_valid for pin in pins] == [True, True, True]
        session.close()


def test_a_name_is_read_by_its_pin_in_either_form_after_it_was_pinned_again() -> None:
    sessions = Sessions()
    sessions.matches = 3
    raw = Namespace(name="raw", ids="sglang-sha256", chunk_tokens=16)
    ids = [bytes([number]) * 32 for number in range(3)]
    with opened(sessions) as session:
        pin = session.match(ids=ids, namespace=raw, is_chain=False).pin
        assert pin is not None
        sessions.lost = {1}
        session.renew()
        grant = pin._grant
        assert grant is not None
        assert [grant.id_of(name, raw) for name in ids] == [grant.id_of(name.hex(), raw) for name in ids]
        assert len(set(grant.ids)) == 3
        session.close()


def test_a_pin_that_comes_when_its_session_was_replaced_is_asked_for_again() -> None:
    sessions = Sessions()
    going_on = sessions.hold("pins 1")
    with opened(sessions) as session:
        pins: list[Pin | None] = []
        pinning = Calling(lambda: pins.extend(session.pin(["a"], namespace=ONE)))
        assert sessions.came("pins 1").wait(10)
        sessions.lost = {1}
        session.renew()
        going_on.set()
        pinning.join(10)
        assert [pin is not None and pin.is_valid for pin in pins] == [True]
        assert sessions.asked[-1] in ("pins 2", "pins 3")
        session.close()


def test_a_request_whose_caller_was_interrupted_hides_no_lost_pin() -> None:
    ledger = PinLedger()
    first = ledger.begin()
    ledger.end(first, grant=1, pins=[b"1"])
    interrupted = ledger.begin()
    ledger.end(ledger.begin(), grant=3, pins=[b"3"])
    assert ledger.statement().as_of == 1, "it may have been granted already"
    del interrupted
    assert ledger.statement().as_of == 3


def test_a_match_that_finds_its_session_lost_ends_within_its_own_timeout() -> None:
    sessions = Sessions()
    going_on = sessions.hold("open 2")
    with opened(sessions) as session:
        sessions.lost = {1}
        began = time.monotonic()
        with pytest.raises(UnavailableError):
            session.match(ids=["a"], timeout_seconds=0.5)
        assert time.monotonic() - began < 5, "the client's timeout is 20 s"
        going_on.set()
        session.close()
