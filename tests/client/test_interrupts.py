"""An interrupt at every place of a call where one may come: what was lent comes back, no lock is held, the next bytes are right."""

from __future__ import annotations

import dis
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from module_paths import ModulePaths
from real_client import BUCKET, bytes_of, credentials_of, held_handles, kv_server, payload
from server_process import ServerProcess, wait_until

import kvobj.client
import kvobj.same_host
from kvobj.client import KvClient, NewChunk, Session, same_host_lane
from kvobj.client.call_scope import ends_by
from kvobj.client.loans import Bell, Loans, Places
from kvobj.same_host import mapping

FOLLOWED = (*kvobj.client.__path__, *kvobj.same_host.__path__, threading.__file__)
LOOKS_BEHIND = ("CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD")
SIZE = 50_000

# A connection that an interrupt leaves to nobody is closed with its last reference.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


class Interrupted(BaseException):
    """What a signal's handler raises."""


class Interrupt:
    """Raises at the n-th place where CPython looks for signals: at a function's beginning, and behind a call of what is written in
    C or a jump backwards. (A tracer is asked before every step, but a signal is not looked for between all of them.)"""

    def __init__(self, number: int, followed: tuple[str, ...] = FOLLOWED) -> None:
        self._left = number
        self._followed = followed
        self._before: tuple[FrameType, str] | None = None
        self.has_come = False

    def __call__(self, frame: FrameType, event: str, _: object) -> Interrupt | None:
        if event == "call":
            if not frame.f_code.co_filename.startswith(self._followed) or frame.f_code.co_name == "__del__":
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self._look()
        elif event == "opcode":
            if self._before is not None and self._before[0] is frame and self._before[1] in LOOKS_BEHIND:
                self._look()
            self._before = (frame, dis.opname[frame.f_code.co_code[frame.f_lasti]])
            return self
        self._before = None
        return self

    def _look(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._before = None  # a frame refers to all that its call had
            self.has_come = True
            raise Interrupted


def interrupted_everywhere(call: Callable[[], object], followed: tuple[str, ...] = FOLLOWED) -> Iterator[int]:
    """The call is made again and again, each time interrupted at another place, until it comes to its end."""
    for number in range(1, 100_000):
        interrupt = Interrupt(number, followed)
        before = sys.gettrace()
        try:
            sys.settrace(interrupt)
            try:
                call()
            finally:
                sys.settrace(before)
        except Interrupted:
            pass
        if not interrupt.has_come:
            return
        yield number


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with kv_server(module_paths.mktemp("interrupts")) as running:
        yield running


def opened_ahead(client: KvClient) -> object:
    client.open_ahead(["a"])
    return client.get_chunks(["a"], [memoryview(bytearray(SIZE))])


CALLS: dict[str, Callable[[KvClient], Any]] = {
    "get_chunk": lambda client: client.get_chunk("a"),
    "get_chunk into a room": lambda client: client.get_chunk("a", into=bytearray(SIZE)),
    "get_chunk of what is absent": lambda client: client.get_chunk("absent"),
    "mget": lambda client: list(client.mget(["a", "b"])),
    "put_chunk": lambda client: client.put_chunk("c", b"c"),
    "match": lambda client: client.match(ids=["a", "b"]),
    "open_ahead": lambda client: client.open_ahead(["a"]),
    "get_chunks of what is opened ahead": opened_ahead,
}


def check_that_nothing_is_kept(client: KvClient) -> None:
    transport, path = client._transport, client._same_host
    locks = (transport._lock, client._leases._lock, path._lock, path._ahead._lock, path._storing._lock)
    for lock in locks:  # the thread that keeps the path up has them for a moment, too
        assert lock.acquire(timeout=10)
        lock.release()
    assert (len(transport._lent), len(client._leases._lent), len(transport._given)) == (0, 0, 0)
    assert (len(path._loans), len(path._storing._taken)) == (0, 0)


@pytest.mark.parametrize(
    ("call", "way"),
    [(call, way) for call in CALLS for way in ("same host", "http") if way == "same host" or "ahead" not in call],
)
def test_whoever_is_interrupted_keeps_nothing(server: ServerProcess, call: str, way: str) -> None:
    is_same_host = way == "same host"
    with KvClient(
        server.endpoint, credentials_of(server), BUCKET, connections=1, same_host=is_same_host, timeout_seconds=10
    ) as client:
        data = payload(b"a", SIZE)
        client.mput([NewChunk("a", data), NewChunk("b", data[:9])])
        places = 0
        for places in interrupted_everywhere(lambda: CALLS[call](client)):
            check_that_nothing_is_kept(client)
            client._same_host._rest_until = 0.0  # as if the rest were over that a lane's end begins
            assert bytes_of(client.get_chunk("a")) == data, f"after an interrupt at place {places}"
        assert places > 10
        assert client.is_same_host == is_same_host
        check_that_nothing_is_kept(client)
        lanes = client._same_host._lanes
        assert set(lanes) == set(client._same_host._idle)


def test_what_nobody_refers_to_any_more_is_not_on_loan() -> None:
    loans: Loans[Interrupted] = Loans()
    one, other = Interrupted(), Interrupted()
    loans.add(one)
    loans.add(other)
    assert (len(loans), set(loans.alive())) == (2, {one, other})
    del one
    assert (len(loans), loans.alive()) == (1, [other])
    loans.remove(other)
    loans.remove(other)
    assert len(loans) == 0


def test_a_place_that_was_lost_is_free_again() -> None:
    places = Places(1)
    place = places.take(0.0)
    assert place is not None
    assert places.take(0.0) is None
    waiting: list[object] = []
    thread = threading.Thread(target=lambda: waiting.append(places.take(30.0)))
    thread.start()
    del place
    thread.join(30)
    assert waiting != [None]


def test_a_place_is_waited_for_no_longer_than_the_call_has() -> None:
    places = Places(1)
    place = places.take(0.0)
    began = time.monotonic()
    with ends_by(began + 0.2):
        assert places.take(30.0) is None
    assert time.monotonic() - began < 15
    assert place is not None


def test_who_waits_is_woken_in_the_order_of_coming_and_rings_that_nobody_hears_are_harmless() -> None:
    bell = Bell()
    first, second = bell.ticket(), bell.ticket()
    bell.ring()
    assert first.acquire(blocking=False)
    assert not second.acquire(blocking=False)
    bell.ring_all()
    assert second.acquire(blocking=False)
    bell.ring()
    lost = bell.ticket()
    bell.wait(lost, 0.0)
    assert len(bell) == 0


SESSION_CALLS: dict[str, Callable[[Session], Any]] = {
    "match": lambda session: session.match(ids=["a", "b"]),
    "pin": lambda session: session.pin(["a"]),
    "renew": lambda session: session.renew(),
}


@pytest.mark.parametrize("call", list(SESSION_CALLS))
def test_whoever_is_interrupted_keeps_nothing_of_a_session(server: ServerProcess, call: str) -> None:
    with KvClient(
        server.endpoint, credentials_of(server), BUCKET, connections=1, same_host=False, timeout_seconds=10
    ) as client:
        client.mput([NewChunk("a", b"a"), NewChunk("b", b"b")])
        with Session(client, is_automatic=False) as session:
            places = 0
            for _ in interrupted_everywhere(lambda: SESSION_CALLS[call](session)):
                places += 1
                check_that_nothing_is_kept(client)
                assert not session._renewing.is_full
                assert session._lock.acquire(timeout=10)
                session._lock.release()
                assert len(session._current().ledger._under_way) == 0
                session.renew()
            assert places > 10


def test_what_an_interrupted_call_had_opened_is_let_go_of(server: ServerProcess) -> None:
    with KvClient(server.endpoint, credentials_of(server), BUCKET, timeout_seconds=10) as client:
        client.mput([NewChunk("a", payload(b"a", SIZE))])
        assert client.is_same_host
        held = client._same_host.open(["a"])
        assert held is not None
        lane = held.lane
        del held
        assert lane.has_releases


@pytest.mark.parametrize(
    "call",
    [lambda client: client.get_chunk("a"), lambda client: client.view_chunk("a").release()],
    ids=["get_chunk", "view_chunk and its release"],
)
def test_whoever_is_interrupted_has_let_go_of_what_was_opened(
    server: ServerProcess, call: Callable[[KvClient], object]
) -> None:
    with KvClient(server.endpoint, credentials_of(server), BUCKET, timeout_seconds=10) as client:
        client.mput([NewChunk("a", payload(b"a", SIZE))])
        path = client._same_host
        for place in interrupted_everywhere(lambda: call(client)):
            path._rest_until = 0.0  # as if the rest were over that a lane's end begins
            assert client.is_same_host
            path.flush()
            what = f"the handles to go that an interrupt at place {place} left"
            wait_until(lambda: held_handles(server) == 0, timeout_seconds=10, what=what)


def shown_descriptors() -> set[tuple[str, str]]:
    """What this process has open of the memory that servers show."""
    links: set[tuple[str, str]] = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            links.add((descriptor.name, str(descriptor.readlink())))
    return {(name, link) for name, link in links if "region-" in link or "kvobj-control" in link}


def test_whoever_is_interrupted_while_it_connects_leaves_no_descriptor_open(server: ServerProcess) -> None:
    with KvClient(server.endpoint, credentials_of(server), BUCKET, timeout_seconds=10) as client:
        path = client._same_host

        def connect() -> None:
            assert client.is_same_host

        def disconnect() -> None:
            path.flush()  # closes what was lost
            for lane in list(path._idle):
                path._retire(lane)
            path._rest_until = 0.0  # as if the rest were over that a lane's end begins

        disconnect()
        gc.collect()
        before = shown_descriptors()  # of clients that other tests have left
        places = 0
        for places in interrupted_everywhere(connect, (same_host_lane.__file__, mapping.__file__)):
            disconnect()
            assert shown_descriptors() <= before, f"after an interrupt at place {places}"
        assert places > 100
