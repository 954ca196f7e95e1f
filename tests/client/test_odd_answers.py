"""Answers that no kvobj server gives, a proxy's or another version's: typed errors, and a connection that is not used again."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import CREDENTIALS, REQUEST_ID, ScriptedServer, ok, read_request

from kvobj.client import KvClient, NewChunk, RetryRule
from kvobj.client.errors import answer_error
from kvobj.client.kv_stream import LENGTH_BYTES, ItemHeader, header_length, parse_header
from kvobj.errors import ConflictError, KvobjError, NoSuchUploadError, UnavailableError

ONCE = RetryRule(tries=1)
CHUNK = NewChunk("a", b"x")


def item(header: dict[str, object], body: bytes = b"") -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return struct.pack("<I", len(encoded)) + encoded + body


def chunk(index: int, **fields: object) -> bytes:
    return item({"i": index, "status": 200, "size_bytes": 1, **fields}, b"x")


def end(items: int) -> bytes:
    return item({"end": True, "items": items})


def document(value: object) -> bytes:
    return ok(msgspec.msgpack.encode(value), "content-type: application/msgpack")


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode()


def put(client: KvClient) -> object:
    return client.mput([CHUNK, NewChunk("b", b"x")])


def got(client: KvClient) -> object:
    return list(client.mget(["a", "b"]))


def got_by_layer(client: KvClient) -> object:
    return list(client.mget(["a", "b"], layer_order=True))


def filled(client: KvClient) -> object:
    return client.get_chunks(["a", "b"], [memoryview(bytearray(9))] * 2)


def events(client: KvClient) -> object:
    return list(client.events())


def followed(client: KvClient) -> object:
    return list(client.follow_chunk("a", layers=(0, 1)))


STORED = {"status": 200, "existed": False, "durability": "memory", "etag": "e"}
HUGE = 10**17
ODD: dict[str, tuple[Callable[[KvClient], object], bytes]] = {
    "an mput without items": (put, document({})),
    "an mput of no list": (put, document({"items": None})),
    "an mput of too few items": (put, document({"items": [{"i": 0, **STORED}]})),
    "an mput of too many items": (put, document({"items": [{"i": i, **STORED} for i in range(3)]})),
    "an mput of other items": (put, document({"items": [{"i": i, **STORED} for i in (0, 2)]})),
    "an mput of odd items": (put, document({"items": [{"foo": 1}] * 2})),
    "an mput of odd errors": (put, document({"items": [{"i": i, "status": 409, "error": 5} for i in (0, 1)]})),
    "an mput so deep that nobody reads it": (put, ok(b"\x91" * 100_000)),
    "an mget of too few items": (got, ok(chunk(0) + end(1))),
    "an mget of none": (got, ok(end(0))),
    "an mget of too many items": (got, ok(chunk(0) + chunk(1) + chunk(0) + end(3))),
    "an mget of another item": (filled, ok(chunk(7) + chunk(1) + end(2))),
    "an mget of an item twice": (filled, ok(chunk(0) + chunk(0) + end(2))),
    "an mget of an item before the first": (filled, ok(chunk(-1) + chunk(1) + end(2))),
    "an mget of less than nothing": (got, ok(chunk(0, size_bytes=-1) + end(1))),
    "an mget of more than there is memory": (got, ok(chunk(0, size_bytes=HUGE) + end(1))),
    "an mget of more than can be": (got, ok(chunk(0, size_bytes=2**63 - 1) + end(1))),
    "an mget of half a layer": (got_by_layer, ok(chunk(0, layer=0) + chunk(1, layer=0) + chunk(0, layer=1) + end(3))),
    "a chunk of more than there is memory": (
        lambda client: client.get_chunk("a"),
        head("HTTP/1.1 200 OK", f"content-length: {HUGE}", REQUEST_ID),
    ),
    "events that are a page": (events, ok(b"<html>\n")),
    "events that are none": (events, ok(b'{"seq":"x"}\n')),
    "events that are elsewhere": (events, head("HTTP/1.1 302 Found", "location: /", "content-length: 0")),
    "no count of what was removed": (lambda client: client.remove_namespace("a"), document({})),
    "odd namespaces": (lambda client: list(client.namespaces()), document({"namespaces": [{"x": 1}]})),
    "no namespaces": (lambda client: list(client.namespaces()), document({"namespaces": None})),
    "namespaces without an end": (lambda client: list(client.namespaces()), document({"next_start_after": "a"})),
    "a longer match than the list": (
        lambda client: client.match(ids=["a"]),
        document({"matched": 2, "tokens": 0, "size_bytes": 0, "expected_load_ms": 0}),
    ),
    "layers that end before they begin": (
        followed,
        head("HTTP/1.1 206 Partial", "content-range: bytes 10-5/100", "content-length: 0"),
    ),
    "layers of more than there is memory": (
        followed,
        head("HTTP/1.1 206 Partial", f"content-range: bytes 0-{HUGE - 1}/{HUGE}", "transfer-encoding: chunked"),
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_an_answer_that_is_none_is_an_error_of_ours(case: str) -> None:
    call, answer = ODD[case]

    def serve(connection: socket.socket, _: int) -> None:
        while True:
            read_request(connection)
            connection.sendall(answer)

    with (
        ScriptedServer(serve) as server,
        KvClient(server.endpoint, CREDENTIALS, "cache", same_host=False, retry=ONCE, timeout_seconds=10) as client,
        pytest.raises(UnavailableError),
    ):
        call(client)


def test_a_stream_that_is_none_ends_its_connection() -> None:
    def serve(connection: socket.socket, number: int) -> None:
        read_request(connection)
        connection.sendall(ok(chunk(1) + end(1)) if number == 1 else ok(chunk(0) + end(1)))
        read_request(connection)

    with (
        ScriptedServer(serve) as server,
        KvClient(server.endpoint, CREDENTIALS, "cache", same_host=False, connections=1) as client,
    ):
        with pytest.raises(UnavailableError):
            list(client.mget(["a"]))
        assert [each.index for each in client.mget(["a"])] == [0]
        assert server.connections == 2


def test_an_error_whose_details_have_no_names_is_told_without_them() -> None:
    body = msgspec.msgpack.encode({"error": {"code": "X", "message": "m", "detail": {1: 2, "at": 3, "self": 4}}})
    error = answer_error(409, body, content_type="application/msgpack")
    assert isinstance(error, ConflictError)
    assert error.data == {"at": 3, "code": "X", "status": 409}


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9) | st.sampled_from(["error", "code", "detail"]), inner)
    ),
    max_leaves=8,
)


@given(
    st.integers(400, 599),
    st.binary(max_size=40) | _values.map(msgspec.msgpack.encode),
    st.sampled_from(["", "application/msgpack"]),
)
def test_whatever_an_error_says_it_is_one_of_ours(status: int, body: bytes, kind: str) -> None:
    assert isinstance(answer_error(status, body, content_type=kind), KvobjError)


@given(st.binary(max_size=40) | _values.map(msgspec.msgpack.encode))
def test_whatever_a_header_says_it_is_one_or_an_error_of_ours(raw: bytes) -> None:
    try:
        header: Any = parse_header(raw)
    except UnavailableError:
        return
    assert isinstance(header, ItemHeader)
    assert header.size_bytes >= 0


@given(st.binary(min_size=LENGTH_BYTES, max_size=LENGTH_BYTES))
def test_whatever_a_length_says_it_is_bounded_or_an_error_of_ours(raw: bytes) -> None:
    try:
        assert 0 < header_length(raw) <= 64 * 1024
    except UnavailableError:
        return


@pytest.mark.parametrize(
    "call",
    [events, lambda client: client.get_chunk("a"), lambda client: list(client.follow_chunk("a"))],
    ids=["events", "get_chunk", "follow_chunk"],
)
def test_every_call_is_made_again_where_the_server_is_busy(call: Callable[[KvClient], object]) -> None:
    asked: list[bytes] = []

    def busy_once(connection: socket.socket, _: int) -> None:
        while True:
            asked.append(read_request(connection)[0])
            connection.sendall(head("HTTP/1.1 503 Busy", "content-length: 0") if len(asked) == 1 else ok(b""))

    with (
        ScriptedServer(busy_once) as server,
        KvClient(server.endpoint, CREDENTIALS, "cache", same_host=False) as client,
    ):
        call(client)
    assert len(asked) == 2


def test_a_layer_that_drips_is_waited_for_no_longer_than_its_time() -> None:
    pause = threading.Event()  # never set

    def serve(connection: socket.socket, _: int) -> None:
        read_request(connection)
        connection.sendall(
            head("HTTP/1.1 206 Partial Content", "content-range: bytes 0-999/2000", "content-length: 1000")
        )
        while True:  # until the client has gone
            connection.sendall(b"x")
            pause.wait(0.1)

    with ScriptedServer(serve) as server:
        client = KvClient(server.endpoint, CREDENTIALS, "cache", same_host=False, retry=ONCE)
        stream = client.follow_chunk("a", layers=(0, 0), timeout_seconds=0.5)
        with pytest.raises(UnavailableError):
            next(stream)


def test_parts_that_a_delete_has_given_up_are_told_as_such() -> None:
    error = answer_error(404, b"<Error><Code>NoSuchUpload</Code><Message>gone</Message></Error>")
    assert type(error) is NoSuchUploadError
