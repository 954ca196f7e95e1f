"""Calls that end before their answer: by another thread, by an interrupt, by a deadline. What they leave behind is known."""

from __future__ import annotations

import gc
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
from scripted_server import CREDENTIALS, ScriptedServer, answering, ok, read_request
from scripted_sessions import Sessions

from kvobj.client import KvClient, Session
from kvobj.client.call_scope import CallScope, current_scope, pause
from kvobj.client.retry import RetryRule, told_seconds
from kvobj.client.transport import Transport
from kvobj.errors import BusyError, UnavailableError

PROMPT_SECONDS = 2.0
BODY = bytes(1000)


def transport_to(server: ScriptedServer) -> closing[Transport]:
    """One connection, kept."""
    return closing(Transport(server.connection, connections=1, timeout_seconds=20, retry=RetryRule(tries=3)))


@contextmanager
def ended_by_another_thread(call: Callable[[], object], is_waiting: threading.Event) -> Iterator[CallScope]:
    """Makes the call in a thread, ends it once it waits, and expects it to be over soon, with an error."""
    scope = CallScope()
    raised: list[BaseException] = []

    def run() -> None:
        with scope.entered():
            try:
                call()
            except UnavailableError as error:
                raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert is_waiting.wait(10)
    began = time.monotonic()
    scope.cancel()
    thread.join(PROMPT_SECONDS)
    assert not thread.is_alive(), f"still waiting {time.monotonic() - began:.1f} s later"
    assert len(raised) == 1
    yield scope


def test_a_call_that_waits_for_its_answer_ends_at_once_and_is_not_made_again() -> None:
    came = threading.Event()

    def hang(connection: socket.socket, number: int) -> None:
        read_request(connection)
        if number > 1:
            connection.sendall(ok(b"later"))
        came.set()
        read_request(connection)

    with ScriptedServer(hang) as server, transport_to(server) as transport:
        with ended_by_another_thread(lambda: transport.open("GET", "/"), came):
            assert server.connections == 1
        with transport.open("GET", "/") as answer:
            assert answer.read() == b"later", "the connection of the ended call is not used again"
        assert server.connections == 2


def test_a_call_that_waits_in_the_middle_of_a_body_ends_at_once() -> None:
    came = threading.Event()

    def half(connection: socket.socket, _: int) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n" + BODY)
        came.set()
        read_request(connection)

    def call() -> None:
        with transport.open("GET", "/") as answer:
            answer.readinto(memoryview(bytearray(1_000_000)))

    with ScriptedServer(half) as server, transport_to(server) as transport, ended_by_another_thread(call, came):
        pass


def test_a_body_that_waits_ends_at_once_also_after_another_call_in_the_midst_of_it() -> None:
    waiting = threading.Event()

    def half(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(ok(BODY) if number > 1 else b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n" + BODY)
        read_request(connection)

    def call() -> None:
        with transport.open("GET", "/") as answer:
            answer.readinto(memoryview(bytearray(len(BODY))))
            with transport.open("GET", "/") as another:
                assert another.read() == BODY
            waiting.set()
            answer.readinto(memoryview(bytearray(1000)))

    with ScriptedServer(half) as server:
        transport = Transport(server.connection, connections=2, timeout_seconds=20, retry=RetryRule(tries=3))
        with closing(transport), ended_by_another_thread(call, waiting):
            pass


def test_a_call_that_waits_for_anothers_renewal_ends_at_once() -> None:
    sessions = Sessions()
    sessions.lost = {1}
    going_on = sessions.hold("open 2")
    with (
        ScriptedServer(sessions) as server,
        KvClient(server.endpoint, CREDENTIALS, "cache", timeout_seconds=20, same_host=False) as client,
    ):
        session = Session(client, is_automatic=False).__enter__()
        renewing = threading.Thread(target=session.renew)
        renewing.start()
        assert sessions.came("open 2").wait(10)
        waiting = threading.Event()

        def call() -> None:
            waiting.set()
            session.renew()

        with ended_by_another_thread(call, waiting):
            assert renewing.is_alive()
        going_on.set()
        renewing.join(10)
        session.match(ids=["a"])
        session.close()
    assert sessions.asked[-2:] == ["match 2", "close 2"]


def test_a_call_that_sends_to_a_server_that_does_not_read_ends_at_once() -> None:
    came = threading.Event()

    def deaf(connection: socket.socket, _: int) -> None:
        connection.recv(1000)
        came.set()
        came_back.wait(10)

    came_back = threading.Event()
    body = [bytes(1 << 20)] * 64
    with (
        ScriptedServer(deaf) as server,
        transport_to(server) as transport,
        ended_by_another_thread(lambda: transport.open("PUT", "/", body=body), came),
    ):
        came_back.set()


def test_a_call_that_waits_for_a_connection_ends_at_once() -> None:
    def serve(connection: socket.socket, _: int) -> None:
        while True:
            read_request(connection)
            connection.sendall(ok(BODY))

    with ScriptedServer(serve) as server, transport_to(server) as transport:
        waiting = threading.Event()

        def call() -> None:
            waiting.set()
            transport.open("GET", "/")

        with transport.open("GET", "/") as lent:
            with ended_by_another_thread(call, waiting):
                pass
            lent.read()
        with transport.open("GET", "/") as answer:
            assert answer.read() == BODY
        assert server.connections == 1


@contextmanager
def silent_address() -> Iterator[tuple[str, int]]:
    """Where nobody is answered: nobody accepts, and the backlog is full."""
    with ExitStack() as held, socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        for _ in range(8):
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)  # noqa: FBT003 - the socket's own call
            filler.connect_ex(address)
        yield address


def test_a_host_whose_first_address_is_silent_is_reached_by_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_address() as silent, ScriptedServer(answering(ok(BODY))) as server:
        there = ("127.0.0.1", server.endpoint.port)

        def resolve(*_: object, **__: object) -> list[object]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", each) for each in (silent, there)]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        with server.connection(timeout_seconds=2) as connection:
            assert connection.request("GET", "/").body == BODY


def test_a_call_that_waits_to_be_connected_ends_at_once() -> None:
    with silent_address() as address:
        waiting = threading.Event()
        client = KvClient(f"http://127.0.0.1:{address[1]}", CREDENTIALS, "cache", timeout_seconds=20)

        def call() -> None:
            waiting.set()
            client.match(ids=["a"])

        with ended_by_another_thread(call, waiting):
            pass
        client.close()


def test_a_pause_ends_at_once_and_what_is_ended_stays_ended() -> None:
    waiting = threading.Event()

    def call() -> None:
        scope = current_scope()
        assert scope is not None
        waiting.set()
        pause(20)
        pause(20)

    with ended_by_another_thread(call, waiting) as scope:
        with pytest.raises(UnavailableError), scope.entered():
            pause(20)
        assert current_scope() is None


def test_a_scopes_deadline_bounds_each_of_its_calls() -> None:
    def hang(connection: socket.socket, _: int) -> None:
        read_request(connection)
        read_request(connection)

    with ScriptedServer(hang) as server, transport_to(server) as transport:
        began = time.monotonic()
        with pytest.raises(UnavailableError), CallScope(time.monotonic() + 0.2).entered():
            transport.open("GET", "/")
        assert time.monotonic() - began < PROMPT_SECONDS


class Interrupted(BaseException):
    """What a signal handler raises, as Python does for Ctrl-C."""


@pytest.mark.parametrize("is_in_body", [False, True])
def test_an_interrupt_leaves_no_connection_in_an_unknown_state(is_in_body: bool) -> None:  # noqa: FBT001
    def serve(connection: socket.socket, number: int) -> None:
        read_request(connection)
        if number == 1:
            if is_in_body:
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n" + BODY)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            read_request(connection)
        connection.sendall(ok(b"whole"))

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with ScriptedServer(serve) as server, transport_to(server) as transport:
            with pytest.raises(Interrupted), transport.open("GET", "/") as answer:
                answer.readinto(memoryview(bytearray(1_000_000)))
            with transport.open("GET", "/") as answer:
                assert answer.read() == b"whole"
            assert server.connections == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_server_that_says_when_to_come_again_is_obeyed_within_bounds() -> None:
    came: list[float] = []

    def busy_once(connection: socket.socket, _: int) -> None:
        while True:
            read_request(connection)
            came.append(time.monotonic())
            is_first = len(came) == 1
            busy = b"HTTP/1.1 503 Slow Down\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
            connection.sendall(busy if is_first else ok(b"a"))

    with ScriptedServer(busy_once) as server, transport_to(server) as transport:
        with transport.open("GET", "/") as answer:
            assert answer.read() == b"a"
        assert 1.0 <= came[1] - came[0] < 3
        assert server.connections == 1
        came.clear()
        with pytest.raises(UnavailableError):
            transport.open("GET", "/", timeout_seconds=0.5)
        assert len(came) == 1, "a pause that the deadline does not leave time for is none"
    assert told_seconds(BusyError("busy", retry_after_seconds=86_400)) == 10.0
    assert told_seconds(BusyError("busy", retry_after_seconds=10**400)) == 10.0
    assert told_seconds(BusyError("busy", retry_after_seconds=-5)) == 0.0
    assert told_seconds(BusyError("busy")) == 0.0


class Held:
    """Something that a caller has, as memory of a server's."""


@pytest.mark.parametrize("same_host", [True, False])
def test_a_connection_that_is_refused_keeps_nothing_of_its_caller_alive(same_host: bool) -> None:  # noqa: FBT001
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    def ask(client: KvClient) -> weakref.ref[Held]:
        held = Held()
        with suppress(UnavailableError):
            client.get_chunk("key")
        return weakref.ref(held)

    gc.collect()
    gc.disable()  # what a cycle keeps goes at some time or other, and where an engine has frozen its objects, never
    try:
        with KvClient(
            f"http://127.0.0.1:{port}", CREDENTIALS, "cache", same_host=same_host, timeout_seconds=1
        ) as client:
            assert ask(client)() is None
    finally:
        gc.enable()
