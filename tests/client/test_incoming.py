"""Bodies of answers, however they are framed, cut up and asked for; and connections, which are used again or known to be dead."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import ScriptedServer, answering, ok, read_request

from kvobj.client.incoming import Incoming
from kvobj.errors import InvalidRequestError, NoSuchKeyError, UnavailableError

HEAD = b"HTTP/1.1 200 OK\r\n"
BODY = bytes(range(256)) * 150
"""Larger than what is received ahead, and no line longer than 256 bytes."""


def chunked(body: bytes, cuts: Sequence[int]) -> bytes:
    at = [0, *sorted(cuts), len(body)]
    pieces = [body[start:stop] for start, stop in pairwise(at) if stop > start]
    framed = [b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"".join(framed) + b"0\r\ntrailer: a\r\n\r\n"


def measured(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def to_the_end(body: bytes) -> bytes:
    return HEAD + b"\r\n" + body


@contextmanager
def one_answer(raw: bytes, cuts: Sequence[int] = ()) -> Iterator[Incoming]:
    """An answer that comes in these pieces, each of them sent when the one before has been."""

    def serve(connection: socket.socket, _: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        read_request(connection)
        for start, stop in pairwise([0, *sorted(cuts), len(raw)]):
            connection.sendall(raw[start:stop])

    with (
        ScriptedServer(serve) as server,
        server.connection() as connection,
        connection.open("GET", "/a") as incoming,
    ):
        yield incoming


_cuts = st.lists(st.integers(0, len(BODY)), max_size=6)
_framings = st.one_of(st.just(measured(BODY)), st.just(to_the_end(BODY)), _cuts.map(lambda cuts: chunked(BODY, cuts)))


_asks = st.lists(st.tuples(st.sampled_from(["into", "some", "line"]), st.integers(1, 20_000)), max_size=8)


@given(_framings, _cuts, _asks)
def test_a_body_is_the_same_however_it_comes_and_is_asked_for(
    raw: bytes, cuts: list[int], asks: list[tuple[str, int]]
) -> None:
    came = bytearray()
    with one_answer(raw, cuts) as incoming:
        for ask, size_bytes in asks:
            room = bytearray(min(size_bytes, len(BODY) - len(came)))
            if ask == "into":
                incoming.readinto(memoryview(room))
                came += room
            elif ask == "some":
                came += room[: incoming.read_some(memoryview(room))]
            else:
                line = incoming.readline()
                assert b"\n" not in line[:-1]
                came += line
        came += incoming.read()
        assert incoming.read() == b""
        assert incoming.readline() == b""
    assert came == BODY


@given(st.booleans(), _cuts, st.integers(1, len(BODY)))
def test_a_body_that_breaks_off_is_never_taken_for_whole(is_chunked: bool, cuts: list[int], missing: int) -> None:  # noqa: FBT001
    raw = (chunked(BODY, cuts) if is_chunked else measured(BODY))[:-missing]
    with pytest.raises(UnavailableError), one_answer(raw) as incoming:
        incoming.read()


@pytest.mark.parametrize("wrong", [b"zz\r\n", b"5\r\nabcdefgh\r\n", b"-1\r\n", b"\r\n", b"0" * 300, b"5\nabcde\n"])
def test_wrong_chunks_are_refused(wrong: bytes) -> None:
    raw = HEAD + b"transfer-encoding: chunked\r\n\r\n" + wrong + b"\r\n0\r\n\r\n"
    with pytest.raises(UnavailableError), one_answer(raw) as incoming:
        incoming.read()


@pytest.mark.parametrize(
    "raw", [b"", b"HTTP/1.1 200", b"SSH-2.0-x\r\n\r\n", b"x" * 100_000, HEAD + b"a: b\r\n" * 20_000]
)
def test_what_is_no_answer_is_a_server_that_does_not_answer(raw: bytes) -> None:
    with pytest.raises(UnavailableError), one_answer(raw):
        pass


def test_a_connection_is_used_again_once_its_answer_is_read_and_never_before() -> None:
    answers = [ok(b"one"), ok(b"two"), ok(b"three")]
    with ScriptedServer(answering(*answers)) as server, server.connection() as connection:
        assert [connection.request("GET", "/").body for _ in range(2)] == [b"one", b"two"]
        assert server.connections == 1
        with connection.open("GET", "/") as incoming:
            assert incoming.read_some(memoryview(bytearray(2))) == 2
        assert connection.request("GET", "/").body == b"one"
        assert server.connections == 2, "what was left of the third answer went with its connection"


def test_an_answer_that_says_so_is_the_last_of_its_connection() -> None:
    with (
        ScriptedServer(answering(ok(b"a", "connection: close"), ok(b"never"))) as server,
        server.connection() as connection,
    ):
        assert [connection.request("GET", "/").body for _ in range(2)] == [b"a", b"a"]
        assert server.connections == 2


def test_a_kept_connection_on_which_something_came_unasked_is_not_used() -> None:
    sent = threading.Event()

    def serve(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(ok(b"answer %d" % number))
        if number == 1:
            connection.sendall(ok(b"smuggled"))
            sent.set()
        read_request(connection)

    with ScriptedServer(serve) as server, server.connection() as connection:
        assert connection.request("GET", "/").body == b"answer 1"
        assert sent.wait(10)
        assert connection.request("GET", "/").body == b"answer 2"


def test_a_connection_that_dies_after_a_body_was_sent_is_tried_once_more_if_it_was_kept() -> None:
    bodies: list[bytes] = []

    def serve(connection: socket.socket, number: int) -> None:
        bodies.append(read_request(connection)[1])
        if number > 1:
            connection.sendall(ok(b"stored"))
            return
        connection.sendall(ok(b"first"))
        bodies.append(read_request(connection)[1])  # and then dies without a word

    with ScriptedServer(serve) as server, server.connection() as connection:
        connection.request("PUT", "/", body=b"1")
        assert connection.request("PUT", "/", body=b"2").body == b"stored"
        assert bodies == [b"1", b"2", b"2"]


def test_a_new_connection_that_dies_after_a_body_was_sent_is_told() -> None:
    def serve(connection: socket.socket, _: int) -> None:
        read_request(connection)

    with ScriptedServer(serve) as server, server.connection() as connection:
        with pytest.raises(UnavailableError):
            connection.request("PUT", "/", body=b"1")
        assert server.connections == 1


def test_interim_answers_are_passed_over_but_not_for_ever() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    with ScriptedServer(answering(interim * 3 + ok(b"a"))) as server, server.connection() as connection:
        assert connection.request("PUT", "/", body=b"x").body == b"a"
    with (
        ScriptedServer(answering(interim * 100)) as server,
        server.connection() as connection,
        pytest.raises(UnavailableError),
    ):
        connection.request("PUT", "/", body=b"x")


def test_errors_keep_their_connection_and_are_typed() -> None:
    refusal = b'{"error": {"code": "NoSuchKey", "message": "no", "detail": {}}}'
    raw = b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%b" % (len(refusal), refusal)
    with ScriptedServer(answering(raw, ok(b"a"))) as server, server.connection() as connection:
        with pytest.raises(NoSuchKeyError):
            connection.request("GET", "/")
        assert connection.request("GET", "/").body == b"a"
        assert server.connections == 1


def test_a_large_body_of_many_buffers_arrives_whole() -> None:
    came: list[bytes] = []

    def serve(connection: socket.socket, _: int) -> None:
        came.append(read_request(connection)[1])
        connection.sendall(ok(b""))

    buffers: list[bytes | memoryview] = [bytes([number % 251]) * (number * 7) for number in range(1500)]
    with ScriptedServer(serve) as server, server.connection() as connection, connection.open("PUT", "/", body=buffers):
        pass
    assert came == [b"".join(buffers)]


def test_a_header_cannot_smuggle_another() -> None:
    with ScriptedServer(answering(ok(b""))) as server, server.connection() as connection:
        for value in ("a\r\nx: y", "a\nb", "a\0b", "\u20ac"):
            with pytest.raises(InvalidRequestError):
                connection.request("GET", "/", headers={"x-a": value})
        assert server.connections == 0


def test_a_body_goes_into_the_callers_memory_and_is_nowhere_held_twice() -> None:
    size_bytes = 8 * 1024 * 1024
    raw, room = measured(bytes(size_bytes)), memoryview(bytearray(b"x" * size_bytes))
    with one_answer(raw) as incoming:
        tracemalloc.start()
        try:
            incoming.readinto(room)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert not any(room)
    assert peak_bytes < 64 * 1024
