"""Calls over kept connections: what is made again, within which bounds, and what a server says before it hangs up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from kvobj.client import Credentials, Endpoint, KvClient, SignedConnection
from kvobj.client.kv_values import MatchAnswer
from kvobj.client.retry import RetryRule
from kvobj.errors import BusyError, StoreFullError, UnavailableError

MATCH = msgspec.msgpack.encode({"matched": 1, "tokens": 16, "size_bytes": 9, "expected_load_ms": 1, "pin": None})
Answering = Callable[[int, BaseHTTPRequestHandler], None]


def refusal(code: str) -> bytes:
    return msgspec.msgpack.encode({"error": {"code": code, "message": "no", "detail": {}}})


def reply(handler: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
    handler.send_response(status)
    handler.send_header("content-type", "application/msgpack")
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@contextmanager
def answering(answer: Answering) -> Iterator[tuple[Endpoint, list[float]]]:
    """A server whose n-th answer is the test's, and when each request came."""
    came: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            came.append(time.monotonic())
            answer(len(came), self)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield Endpoint(is_tls=False, host="127.0.0.1", port=server.server_address[1]), came
        finally:
            server.shutdown()
            thread.join()


def read_body(handler: BaseHTTPRequestHandler) -> None:
    handler.rfile.read(int(handler.headers.get("content-length", "0")))


def client(endpoint: Endpoint, **options: float) -> KvClient:
    rule = RetryRule(tries=int(options.get("tries", 3)), burst=options.get("burst", 20.0))
    return KvClient(
        endpoint,
        Credentials("a", "s"),
        "cache",
        retry=rule,
        timeout_seconds=options.get("timeout_seconds", 10.0),
        connections=2,
    )


def test_a_busy_server_is_asked_again_after_a_pause() -> None:
    def busy_twice(number: int, handler: BaseHTTPRequestHandler) -> None:
        read_body(handler)
        reply(handler, *((503, refusal("SlowDown")) if number < 3 else (200, MATCH)))

    with answering(busy_twice) as (endpoint, came), client(endpoint) as kv:
        assert isinstance(kv.match(ids=["a"]), MatchAnswer)
    assert len(came) == 3
    assert came[1] - came[0] >= 0.05
    assert came[2] - came[1] >= 0.1


def test_tries_of_a_call_and_retries_of_a_client_are_bounded() -> None:
    def always_busy(_: int, handler: BaseHTTPRequestHandler) -> None:
        read_body(handler)
        reply(handler, 503, refusal("SlowDown"))

    with answering(always_busy) as (endpoint, came), client(endpoint, burst=2.0) as kv:
        for _ in range(3):
            with pytest.raises(BusyError):
                kv.match(ids=["a"])
    assert len(came) == 3 + 2, "two retries were saved up, and three calls earn less than one"


def test_a_refusal_that_cannot_change_is_told_at_once() -> None:
    def full(_: int, handler: BaseHTTPRequestHandler) -> None:
        read_body(handler)
        reply(handler, 507, refusal("StoreFull"))

    with answering(full) as (endpoint, came), client(endpoint) as kv, pytest.raises(StoreFullError):
        kv.match(ids=["a"])
    assert len(came) == 1


def test_a_server_that_hangs_is_given_up_at_the_deadline() -> None:
    going_on = threading.Event()

    def hang(_: int, handler: BaseHTTPRequestHandler) -> None:
        read_body(handler)
        going_on.wait(10)
        handler.close_connection = True

    with answering(hang) as (endpoint, _), client(endpoint, timeout_seconds=0.3) as kv:
        began = time.monotonic()
        with pytest.raises(UnavailableError):
            kv.match(ids=["a"])
        assert time.monotonic() - began < 2
        going_on.set()


def test_an_answer_that_trickles_is_given_up_at_the_deadline() -> None:
    going_on = threading.Event()

    def half(_: int, handler: BaseHTTPRequestHandler) -> None:
        read_body(handler)
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        handler.wfile.write(b"x")
        handler.wfile.flush()
        going_on.wait(10)
        handler.close_connection = True

    with answering(half) as (endpoint, _), SignedConnection(endpoint, Credentials("a", "s")) as connection:
        with pytest.raises(UnavailableError), connection.open("POST", "/", timeout_seconds=0.3) as answer:
            answer.readinto(memoryview(bytearray(1000)))
        going_on.set()


def test_a_kept_connection_that_the_server_closed_is_replaced_without_a_retry() -> None:
    def close_after(number: int, handler: BaseHTTPRequestHandler) -> None:
        read_body(handler)
        reply(handler, 200, MATCH)
        handler.close_connection = number == 1

    with answering(close_after) as (endpoint, came), client(endpoint, tries=1) as kv:
        for _ in range(3):
            assert kv.match(ids=["a"]).matched == 1
    assert len(came) == 3


def test_a_refusal_that_comes_before_the_last_of_a_body_is_heard() -> None:
    def refuse_at_once(_: int, handler: BaseHTTPRequestHandler) -> None:
        reply(handler, 507, refusal("StoreFull"))
        handler.wfile.flush()
        handler.rfile.read(1 << 20)  # no more of it than that
        handler.close_connection = True

    with answering(refuse_at_once) as (endpoint, _), SignedConnection(endpoint, Credentials("a", "s")) as connection:
        with pytest.raises((StoreFullError, UnavailableError)) as caught:
            connection.open("POST", "/", body=[bytes(1 << 16)] * 16)
        assert isinstance(caught.value, StoreFullError)
