"""A chunk that is read into its caller's memory: the same outcome by the native call and by Python alone, whatever is answered."""

from __future__ import annotations

import ctypes
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, pairwise
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import pytest
from blake3 import blake3
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_server import CREDENTIALS, REQUEST_ID, ScriptedServer, Serving, answering, ok, read_request

from kvobj.buffers import address_of
from kvobj.client import KvClient
from kvobj.client.call_scope import CallScope
from kvobj.client.connection import SignedConnection
from kvobj.client.http_chunks import HttpChunks
from kvobj.client.kv_values import DEFAULT, NewChunk
from kvobj.client.native_fetch import STASH_BYTES, TIMED_OUT, fetch_calls
from kvobj.client.request_head import SignedHeads
from kvobj.client.retry import RetryRule
from kvobj.client.transport import Fetched, Lent, Transport
from kvobj.errors import CorruptionError, InvalidRequestError, KvobjError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from _typeshed import TraceFunction

PROMPT_SECONDS = 2.0
DIGEST = bytes(range(32))
BODY = bytes(range(256)) * 150
ROOM_BYTES = len(BODY) + 100
ID = REQUEST_ID.encode()

both_ways = pytest.mark.parametrize("is_native", [True, False])

Outcome = tuple[str, bytes, bytes | None]


def test_the_native_call_is_there_to_be_tested() -> None:
    assert fetch_calls() is not None


class Reads:
    """One kept connection, on which something has been answered already, as the native call has it."""

    def __init__(
        self, server: ScriptedServer, *, is_native: bool, timeout_seconds: float = 10.0, tries: int = 1
    ) -> None:
        def connect() -> SignedConnection:
            return SignedConnection(
                server.endpoint,
                CREDENTIALS,
                timeout_seconds=timeout_seconds,
                wall_seconds=lambda: 1_800_000_000.0,
                is_native=is_native,
            )

        self.transport = Transport(
            connect, connections=1, timeout_seconds=timeout_seconds, retry=RetryRule(tries=tries)
        )
        self.chunks = HttpChunks(self.transport, "/cache")

    def begin(self) -> None:
        """Connect, and have the connection kept."""
        with self.transport.open("GET", "/first") as answer:
            answer.read()

    def get(
        self, room: bytearray | memoryview, key: str = "key", *, pin: bytes | None = None, seconds: float | None = None
    ) -> tuple[memoryview, bytes | None] | None:
        """A chunk and its digest."""
        return self.chunks.get(key, layers=None, pin=pin, into=room, timeout_seconds=seconds, wants_digest=True)


@contextmanager
def reads_from(
    serve: Serving, *, is_native: bool, timeout_seconds: float = 10.0
) -> Iterator[tuple[Reads, ScriptedServer]]:
    with ScriptedServer(serve) as server:
        reads = Reads(server, is_native=is_native, timeout_seconds=timeout_seconds)
        reads.begin()
        yield reads, server
        reads.transport.close()


def then(*answers: bytes, cuts: Sequence[int] = ()) -> Serving:
    """Answers the request that `begin` makes, then each with the next of these, in pieces, and closes the connection. Another
    connection has an answer of its own."""

    def serve(connection: socket.socket, number: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for answer in (ok(b""), *answers) if number == 1 else (ok(b"anew"),):
            read_request(connection)
            for start, stop in pairwise([0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]):
                connection.sendall(answer[start:stop])

    return serve


def outcome_of(*answers: bytes, is_native: bool, cuts: Sequence[int] = ()) -> Outcome:
    """What is read of the first answer, or the error; the whole room; and what the next read has: the second answer, or, where the
    connection has ended, that of another."""
    room = bytearray(ROOM_BYTES)
    with reads_from(then(*answers, cuts=cuts), is_native=is_native) as (reads, _):
        try:
            found = reads.get(room)
            told = repr(None if found is None else (bytes(found[0]), found[1]))
        except KvobjError as error:
            told = type(error).__name__
            room = bytearray()
        following = reads.get(bytearray(10))
    return told, bytes(room), None if following is None else bytes(following[0])


def head(*lines: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, REQUEST_ID, "", ""]).encode("latin-1")


@both_ways
@given(st.lists(st.integers(0, len(BODY) + 200), max_size=6), st.integers(0, len(BODY)))
def test_a_body_fills_the_beginning_of_its_room_however_it_comes(is_native: bool, cuts: list[int], size: int) -> None:  # noqa: FBT001
    body = BODY[:size]
    answer = ok(body, f"x-kvobj-digest: {DIGEST.hex()}", 'etag: "1"')
    told, room, following = outcome_of(answer, ok(b"kept"), is_native=is_native, cuts=cuts)
    assert told == repr((body, DIGEST))
    assert room == body + bytes(ROOM_BYTES - size)
    assert following == b"kept"


MISS = b'{"error": {"code": "NoSuchKey", "message": "no", "detail": {}}}'
KEEPING = [
    b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%b" % (len(MISS), MISS),
    b"HTTP/1.1 500 Wrong\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + ok(b"abc"),
    b"HTTP/1.1 200\r\ncontent-length: 3\r\n%b\r\n\r\nabc" % ID,
    b"HTTP/1.1 200 \r\ncontent-length: 3\r\n%b\r\n\r\nabc" % ID,
    ok(b"abc", "connection: keep-alive"),
    ok(b"abc", f"X-KVOBJ-Digest:\t {DIGEST.hex().upper()} \t"),
    ok(b"abc", *[f"field-{number}: {'a' * 100}" for number in range(200)]),
    ok(b"abc", *[f"f{number}: a" for number in range(253)]),
    ok(b"abc", f"x-kvobj-digest: {'z' * 64}"),
    head("content-length: 3", f"x-kvobj-digest: {chr(0xE9) * 64}") + b"abc",
    ok(bytes(ROOM_BYTES)),
    head("a: \xff\x80", "Content-Length:0000000000000003 ") + b"abc",
]
NO_CHUNKS = [
    *[
        b"HTTP/1.1 %d X\r\nlocation: /x\r\ncontent-length: 3\r\n%b\r\n\r\nabc" % (status, ID)
        for status in (201, 202, 203, 206, 299, 300, 301, 302, 307)
    ],
    b"HTTP/1.1 204 No Content\r\n%b\r\n\r\n" % ID,
    b"HTTP/1.1 304 Not Modified\r\ncontent-length: 3\r\n%b\r\n\r\n" % ID,
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n%b\r\n\r\n3\r\nabc\r\n0\r\n\r\n" % ID,
    b"HTTP/1.1 200 OK\r\n%b\r\n\r\nto the end" % ID,
]
ENDING = [
    *NO_CHUNKS,
    b"",
    b"SSH-2.0-x\r\n\r\n",
    b"x" * 70_000,
    b"HTTP/1.1 200 OK\ncontent-length: 3\n%b\n\nabc" % ID,
    b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n%b\r\n\r\nabc" % ID,
    b"HTTP/1.1 2000 OK\r\ncontent-length: 3\r\n%b\r\n\r\nabc" % ID,
    ok(b"abc", "connection: close"),
    ok(b"abc", "content-length: 3"),
    ok(b"abc", f"x-kvobj-digest: {DIGEST.hex()[:-1]}"),
    ok(b"abc", f"x-kvobj-digest: {DIGEST.hex()}", f"x-kvobj-digest: {DIGEST.hex()}"),
    ok(b"abc", *[f"f{number}: a" for number in range(254)]),
    ok(b"abc", *[f"f{number}: a" for number in range(255)]),
    ok(bytes(ROOM_BYTES + 1)),
    ok(b"abc") + b"d",
    ok(b"abc")[:-1],
    ok(b"abc")[:-4],
    ok(b"abc")[:20],
    head("content-length: +3") + b"abc",
    head("content-length: 0x3") + b"abc",
    head("content-length:") + b"abc",
    head("content-length: 3 3") + b"abc",
    head("content-length: " + "0" * 17 + "3") + b"abc",
    head("content-length: " + "0" * 18 + "3") + b"abc",
    head("content-length : 3") + b"abc",
    head(": 3", "content-length: 3") + b"abc",
    head("no colon", "content-length: 3") + b"abc",
    head(" folded: 3", "content-length: 3") + b"abc",
    head("a: b\x00", "content-length: 3") + b"abc",
    head("a: b\rc", "content-length: 3") + b"abc",
    head("a: b\nc: d", "content-length: 3") + b"abc",
    head("\xe4: b", "content-length: 3") + b"abc",
]


@pytest.mark.parametrize("answer", KEEPING)
def test_odd_answers_that_are_whole_are_taken_alike_and_keep_their_connection(answer: bytes) -> None:
    told = outcome_of(answer, ok(b"kept"), is_native=True)
    assert told[2] == b"kept"
    assert told == outcome_of(answer, ok(b"kept"), is_native=False)


@pytest.mark.parametrize("answer", ENDING)
def test_other_odd_answers_are_taken_alike(answer: bytes) -> None:
    assert outcome_of(answer, is_native=True) == outcome_of(answer, is_native=False)


@both_ways
@pytest.mark.parametrize("answer", NO_CHUNKS)
def test_only_a_200_that_tells_its_length_is_a_chunk(is_native: bool, answer: bytes) -> None:  # noqa: FBT001
    with reads_from(then(answer), is_native=is_native) as (reads, _), pytest.raises(UnavailableError, match="no chunk"):
        reads.get(bytearray(10))
    with reads_from(then(answer), is_native=is_native) as (reads, _), pytest.raises(UnavailableError, match="no chunk"):
        reads.chunks.get_stored("key", accept=["raw"], max_error=None, pin=None, timeout_seconds=None)


PAGE = b'HTTP/1.1 200 OK\r\ncontent-type: text/html\r\netag: "1"\r\ncontent-length: 6\r\n\r\n<html>'
READS: dict[str, Callable[[KvClient], object]] = {
    "get_chunk": lambda client: client.get_chunk("key"),
    "get_chunk into a room": lambda client: client.get_chunk("key", into=bytearray(10)),
    "layers": lambda client: client.get_chunk("key", layers=(0, 1)),
    "view_chunk": lambda client: client.view_chunk("key"),
    "get_stored": lambda client: client.get_stored("key", accept=["raw"]),
    "follow_chunk": lambda client: list(client.follow_chunk("key")),
}


@pytest.mark.parametrize("read", READS)
def test_a_page_that_another_server_answers_is_no_chunk(read: str) -> None:
    with (
        ScriptedServer(answering(PAGE)) as server,
        KvClient(server.endpoint, CREDENTIALS, "cache", same_host=False, retry=RetryRule(tries=1)) as client,
        pytest.raises(UnavailableError, match="no chunk") as caught,
    ):
        READS[read](client)
    assert (caught.value.data["status"], caught.value.data["content_type"]) == (200, "text/html")


@both_ways
def test_a_page_on_a_kept_connection_is_no_chunk_and_is_not_put_into_the_room(is_native: bool) -> None:  # noqa: FBT001
    room = bytearray(10)
    with reads_from(then(PAGE), is_native=is_native) as (reads, _):
        with pytest.raises(UnavailableError, match="no chunk"):
            reads.get(room)
        assert not any(room)


@pytest.mark.parametrize("status", [200, 206])
def test_layers_of_a_chunk_come_with_either_status(status: int) -> None:
    answer = b"HTTP/1.1 %d X\r\ncontent-length: 3\r\n%b\r\n\r\nabc" % (status, ID)
    with reads_from(then(answer), is_native=True) as (reads, _):
        found = reads.chunks.get(
            "key", layers=(0, 1), pin=None, into=bytearray(10), timeout_seconds=None, wants_digest=False
        )
    assert found is not None
    assert bytes(found[0]) == b"abc"


def test_a_chunk_that_was_put_is_stored_by_a_200_alone() -> None:
    answer = b"HTTP/1.1 301 Moved\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n"
    with reads_from(then(answer), is_native=True) as (reads, _), pytest.raises(UnavailableError, match="301"):
        reads.chunks.put(DEFAULT, NewChunk("key", b"abc"), durability=None)


def test_what_is_followed_comes_with_a_200_alone() -> None:
    answer = b"HTTP/1.1 301 Moved\r\nlocation: /x\r\ncontent-length: 3\r\n\r\nabc"
    with (
        ScriptedServer(answering(answer)) as server,
        KvClient(server.endpoint, CREDENTIALS, "cache", same_host=False, connections=1) as client,
        pytest.raises(UnavailableError, match="301"),
    ):
        list(client.follow_chunk("key"))


@both_ways
@pytest.mark.parametrize("digit", ["z", "\xe9", " ", "/", ":", "@", "G", "`", "g"])
def test_a_digest_that_is_none_is_an_answer_of_no_kvobj_server(is_native: bool, digit: str) -> None:  # noqa: FBT001
    told = DIGEST.hex()[:-3] + digit + "00"
    answer = head("content-length: 3", f"x-kvobj-digest: {told}") + b"abc"
    with reads_from(then(answer), is_native=is_native) as (reads, _), pytest.raises(UnavailableError, match="digest"):
        reads.get(bytearray(10))


def test_a_plain_answer_comes_by_the_native_call_and_any_other_is_handed_over() -> None:
    answers = (
        ok(b"abc", f"x-kvobj-digest: {DIGEST.hex()}"),
        ok(b"def", "connection: keep-alive"),
        KEEPING[0],
        ok(b"ghi"),
    )
    room = bytearray(10)
    with reads_from(then(*answers), is_native=True) as (reads, server):
        fetched = reads.transport.fetch("/cache/key", {}, memoryview(room), wants_digest=True)
        assert fetched == Fetched(3, DIGEST)
        lent = reads.transport.fetch("/cache/key", {}, memoryview(room), wants_digest=True)
        assert isinstance(lent, Lent)
        with lent as answer:
            assert answer.read() == b"def"
        with pytest.raises(NotFoundError):
            reads.transport.fetch("/cache/key", {}, memoryview(room), wants_digest=True)
        fetched = reads.transport.fetch("/cache/key", {}, memoryview(room), wants_digest=False)
        assert fetched == Fetched(3, None)
        assert room == b"ghi" + bytes(7)
        assert server.connections == 1


@pytest.mark.parametrize("verify", [True, False])
def test_a_view_of_corrupt_bytes_tells_so_when_it_is_checked(verify: bool) -> None:  # noqa: FBT001
    digest = blake3(b"abc")

    def serve(connection: socket.socket, _: int) -> None:
        for body in (b"abc", b"abX"):
            read_request(connection)
            connection.sendall(ok(body, f"x-kvobj-digest: {digest.hexdigest()}"))

    with (
        ScriptedServer(serve) as server,
        KvClient(server.endpoint, CREDENTIALS, "cache", verify=verify, same_host=False, connections=1) as client,
    ):
        view = client.view_chunk("key")
        assert view is not None
        assert view.digest == digest.digest()
        assert view.check()
        if verify:
            with pytest.raises(CorruptionError):
                client.view_chunk("key")
        else:
            corrupt = client.view_chunk("key")
            assert corrupt is not None
            assert not corrupt.check()


_names = st.sampled_from(
    [
        *("content-length", "Content-Length", "x-kvobj-digest", "etag", "connection", "transfer-encoding"),
        *("x-amz-request-id", "X-Amz-Request-Id", "a b", ""),
    ]
)
_values = st.sampled_from(
    ["3", "0", " 3\t", "03", "three", "", "close", "chunked", DIGEST.hex(), DIGEST.hex().upper(), "a:b", "\x7f"]
)
_lines = st.lists(st.one_of(st.tuples(_names, _values).map(":".join), st.text("a:\r\n\0 \t", max_size=4)), max_size=5)
_status_lines = st.sampled_from(
    ["HTTP/1.1 200 OK", "HTTP/1.1 200", "HTTP/1.1 200OK", "HTTP/1.2 200 OK", "http/1.1 200 OK", "HTTP/1.1  200"]
)


@given(_status_lines, _lines)
@example("HTTP/1.1 200 OK", ["content-length:3"])
@example("HTTP/1.1 200 OK", ["content-length:3", "X-Amz-Request-Id:"])
def test_heads_of_any_kind_are_taken_alike(status_line: str, lines: list[str]) -> None:
    answer = "\r\n".join([status_line, *lines, "", ""]).encode("latin-1") + b"abc"
    assert outcome_of(answer, is_native=True) == outcome_of(answer, is_native=False)


@given(st.text("abcXYZ019._~-/ %+é\u4e16", min_size=1, max_size=40), st.sampled_from([None, bytes(16), b"\1" * 16]))
@example("k" * 9000, None)
def test_the_request_is_the_same_byte_for_byte(key: str, pin: bytes | None) -> None:
    came: list[bytes] = []

    def serve(connection: socket.socket, _: int) -> None:
        while True:
            came.append(read_request(connection)[0])
            connection.sendall(ok(b"abc"))

    with ScriptedServer(serve) as server:
        for is_native in (True, False):
            reads = Reads(server, is_native=is_native)
            reads.begin()
            for each in (None, pin, pin):
                assert reads.get(bytearray(3), key, pin=each) is not None
            reads.transport.close()
    assert len(came) == 8
    assert came[:4] == came[4:]


@both_ways
def test_a_connection_that_the_server_has_closed_is_replaced(is_native: bool) -> None:  # noqa: FBT001
    with reads_from(then(), is_native=is_native) as (reads, server):
        found = reads.get(bytearray(10))
        assert found is not None
        assert bytes(found[0]) == b"anew"
        assert server.connections == 2


@both_ways
def test_what_came_unasked_is_no_answer(is_native: bool) -> None:  # noqa: FBT001
    is_sent = threading.Event()

    def serve(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(ok(b"number %d" % number))
        if number == 1:
            connection.sendall(ok(b"smuggled"))
            is_sent.set()
        read_request(connection)

    with reads_from(serve, is_native=is_native) as (reads, _):
        assert is_sent.wait(10)
        found = reads.get(bytearray(10))
        assert found is not None
        assert bytes(found[0]) == b"number 2"


@both_ways
def test_a_body_that_breaks_off_is_an_error_and_ends_its_connection(is_native: bool) -> None:  # noqa: FBT001
    with reads_from(then(ok(BODY)[:-1]), is_native=is_native) as (reads, server):
        with pytest.raises(UnavailableError):
            reads.get(bytearray(ROOM_BYTES))
        found = reads.get(bytearray(10))
        assert found is not None
        assert bytes(found[0]) == b"anew"
        assert server.connections == 2


@both_ways
def test_a_room_that_is_too_small_is_told_and_not_touched(is_native: bool) -> None:  # noqa: FBT001
    room = bytearray(len(BODY) - 1)
    with reads_from(then(ok(BODY)), is_native=is_native) as (reads, _):
        with pytest.raises(InvalidRequestError):
            reads.get(room)
        assert not any(room)


@both_ways
@pytest.mark.parametrize(
    "room", [memoryview(bytes(10)), memoryview(bytearray(20))[::2]], ids=["read-only", "in pieces"]
)
def test_a_room_that_cannot_be_filled_is_refused(is_native: bool, room: memoryview) -> None:  # noqa: FBT001
    with reads_from(then(ok(b"abc")), is_native=is_native) as (reads, _):
        with pytest.raises((TypeError, BufferError)):
            reads.get(room)
        assert not any(room)


@both_ways
@pytest.mark.parametrize("part", [0, 20, 2000], ids=["nothing", "of the head", "of the body"])
def test_a_server_that_falls_silent_is_not_waited_for_beyond_the_deadline(is_native: bool, part: int) -> None:  # noqa: FBT001
    def serve(connection: socket.socket, _: int) -> None:
        read_request(connection)
        connection.sendall(ok(b""))
        read_request(connection)
        connection.sendall(ok(BODY)[:part])
        read_request(connection)

    with reads_from(serve, is_native=is_native, timeout_seconds=20.0) as (reads, _):
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=r"timed out|deadline"):
            reads.get(bytearray(ROOM_BYTES), seconds=0.2)
        assert 0.2 <= time.monotonic() - began < PROMPT_SECONDS


@both_ways
def test_a_server_that_sends_a_little_all_the_time_is_not_waited_for_either(is_native: bool) -> None:  # noqa: FBT001
    def serve(connection: socket.socket, _: int) -> None:
        read_request(connection)
        connection.sendall(ok(b""))
        read_request(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n%b\r\n\r\n" % ID)
        while not is_over.wait(0.01):
            connection.sendall(b"a")

    is_over = threading.Event()
    with reads_from(serve, is_native=is_native) as (reads, _):
        began = time.monotonic()
        with pytest.raises(UnavailableError):
            reads.get(bytearray(100_000_000), seconds=0.3)
        assert time.monotonic() - began < PROMPT_SECONDS
        is_over.set()


@both_ways
@pytest.mark.parametrize("part", [0, 20, 2000], ids=["nothing", "of the head", "of the body"])
def test_a_read_that_another_thread_ends_is_over_at_once_and_not_made_again(is_native: bool, part: int) -> None:  # noqa: FBT001
    came = threading.Event()
    requests: list[bytes] = []

    def serve(connection: socket.socket, _: int) -> None:
        requests.append(read_request(connection)[0])
        connection.sendall(ok(b""))
        requests.append(read_request(connection)[0])
        connection.sendall(ok(BODY)[:part])
        came.set()
        requests.append(read_request(connection)[0])

    with reads_from(serve, is_native=is_native) as (reads, server):
        scope = CallScope()
        raised: list[BaseException] = []

        def run() -> None:
            try:
                with scope.entered():
                    reads.get(bytearray(ROOM_BYTES))
            except UnavailableError as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert came.wait(10)
        scope.cancel()
        thread.join(PROMPT_SECONDS)
        assert not thread.is_alive()
        assert len(raised) == 1
        assert len(requests) == 2
        assert server.connections == 1


@both_ways
def test_a_connection_that_ends_late_is_not_replaced_beyond_the_deadline(
    is_native: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, passed = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed[0])

    def serve(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(ok(b"number %d" % number))
        if number == 1:
            read_request(connection)
            passed[0] = 20.0

    with reads_from(serve, is_native=is_native) as (reads, _), pytest.raises(UnavailableError, match="deadline"):
        reads.get(bytearray(10), seconds=10.0)


def test_a_native_call_keeps_its_deadline_where_the_sockets_own_timeout_is_longer() -> None:
    calls = fetch_calls()
    assert calls is not None
    frame = SignedHeads(CREDENTIALS, host="h", region="r").native(calls, {}, second=0)
    assert frame is not None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 10, 0))
        stash, room = memoryview(bytearray(STASH_BYTES)), memoryview(bytearray(10))
        state = ctypes.create_string_buffer(calls.state_bytes)
        at = ctypes.addressof(state)
        calls.ready(at, ours.fileno(), address_of(stash), STASH_BYTES)
        began = time.monotonic()
        assert calls.begin(at, frame.address, b"/k", 2, address_of(room), len(room), 0.2, 10.0) == TIMED_OUT
        assert 0.2 <= time.monotonic() - began < PROMPT_SECONDS


class Interrupted(BaseException):
    """What a signal handler raises, as Python does for Ctrl-C."""


def lines_run(read: Callable[[], object], codes: set[CodeType], lines: int) -> int:
    """Interrupt a call at the given one of the lines that it runs in these functions, at none for 0; how many it came to."""
    left = lines

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        nonlocal left
        if frame.f_code not in codes:
            return None
        if event == "line":
            left -= 1
            if not left:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        read()
    except Interrupted:
        assert not left
    finally:
        sys.settrace(before)
    return lines - left


@both_ways
@pytest.mark.parametrize("fields", [(), ("connection: keep-alive",)], ids=["filled", "handed over"])
def test_an_interrupt_anywhere_in_a_read_costs_no_place_for_a_connection(
    is_native: bool,  # noqa: FBT001
    fields: tuple[str, ...],
) -> None:
    def serve(connection: socket.socket, _: int) -> None:
        while True:
            read_request(connection)
            connection.sendall(ok(b"abc", *fields))

    codes = {Transport.fetch.__code__} | ({Transport.open.__code__} if is_native else set())
    with ScriptedServer(serve) as server:
        for lines in count(1):
            reads = Reads(server, is_native=is_native)
            reads.begin()
            came_to = lines_run(partial(reads.get, bytearray(10)), codes, lines)
            found = reads.get(bytearray(10))
            assert found is not None
            assert bytes(found[0]) == b"abc"
            reads.transport.close()
            if came_to < lines:
                break
    assert lines > 10


@both_ways
def test_an_answer_that_nobody_reads_any_more_is_not_taken_for_the_next(is_native: bool) -> None:  # noqa: FBT001
    answer = ok(ok(b"smuggled"), "connection: keep-alive")
    head_bytes = answer.index(b"\r\n\r\n") + 4

    def serve(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(ok(b"number %d" % number))
        read_request(connection)
        connection.sendall(answer[:head_bytes])
        read_request(connection)
        connection.sendall(answer[head_bytes:])

    codes = {Transport.open.__code__}
    with reads_from(then(ok(b"abc", "connection: keep-alive")), is_native=is_native) as (reads, _):
        lines = lines_run(partial(reads.get, bytearray(100)), codes, 0)
    with reads_from(serve, is_native=is_native) as (reads, server):
        assert lines_run(partial(reads.get, bytearray(100)), codes, lines) == lines
        found = reads.get(bytearray(100))
        assert found is not None
        assert bytes(found[0]) == b"number 2"
        assert server.connections == 2


@both_ways
@pytest.mark.parametrize("part", [20, 2000], ids=["of the head", "of the body"])
def test_a_signal_is_not_taken_for_why_an_answer_breaks_off(is_native: bool, part: int) -> None:  # noqa: FBT001
    is_handled = threading.Event()

    def serve(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(ok(b"number %d" % number))
        if number == 1:
            read_request(connection)
            connection.sendall(ok(BODY)[:part])
            while not is_handled.wait(0.05):  # until it finds the thread within its wait
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: is_handled.set())
    try:
        with reads_from(serve, is_native=is_native) as (reads, server):
            with pytest.raises(UnavailableError, match=r"breaks off|ends early"):
                reads.get(bytearray(ROOM_BYTES))
            assert server.connections == 1
    finally:
        signal.signal(signal.SIGUSR1, before)


@both_ways
def test_a_request_that_cannot_be_signed_leaves_its_connection_as_it_is(is_native: bool) -> None:  # noqa: FBT001
    with reads_from(then(ok(b"kept")), is_native=is_native) as (reads, server):
        with pytest.raises(InvalidRequestError):
            reads.transport.open("GET", "/cache/key", headers={"a": "b\r\nc"})
        with pytest.raises(InvalidRequestError):
            reads.transport.fetch("/cache/key", {"a": "b\r\nc"}, memoryview(bytearray(10)), wants_digest=True)
        found = reads.get(bytearray(10))
        assert found is not None
        assert bytes(found[0]) == b"kept"
        assert server.connections == 1


@both_ways
@pytest.mark.parametrize("is_raised", [True, False])
@pytest.mark.parametrize("part", [0, 20, 2000], ids=["nothing", "of the head", "of the body"])
def test_a_signal_is_seen_to_while_a_read_waits(is_native: bool, is_raised: bool, part: int) -> None:  # noqa: FBT001
    is_handled = threading.Event()

    def serve(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(ok(b""))
        read_request(connection)
        connection.sendall(ok(BODY)[:part])
        if number == 1:
            while not is_handled.wait(0.05):  # until it finds the thread within its wait
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        connection.sendall(ok(BODY)[part:])
        read_request(connection)

    def handle(*_: object) -> None:
        is_handled.set()
        if is_raised:
            raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with reads_from(serve, is_native=is_native) as (reads, server):
            if is_raised:
                with pytest.raises(Interrupted):
                    reads.get(bytearray(ROOM_BYTES))
                reads.begin()
            found = reads.get(bytearray(ROOM_BYTES))
            assert found is not None
            assert bytes(found[0]) == BODY
            assert server.connections == (2 if is_raised else 1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@both_ways
def test_a_busy_server_is_asked_again(is_native: bool) -> None:  # noqa: FBT001
    busy = b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\n\r\n"
    with ScriptedServer(then(busy, ok(b"later"))) as server:
        reads = Reads(server, is_native=is_native, tries=2)
        reads.begin()
        found = reads.get(bytearray(10))
        assert found is not None
        assert bytes(found[0]) == b"later"
        assert server.connections == 1
        reads.transport.close()
