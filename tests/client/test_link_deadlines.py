"""What a link's loads and stores cost at most, and what a server that answers, but moves nothing, is taken for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from scripted_server import ScriptedServer, ok, read_request
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings

from kvobj.api.kv.chunk_stream import framed
from kvobj.client import NewChunk
from kvobj.connectors import LinkSettings, StoreLink

MATCHED = ok(msgspec.msgpack.encode({"matched": 0, "tokens": 0, "size_bytes": 0, "expected_load_ms": 0}))
CHUNK = b"a chunk"

Moving = Callable[[socket.socket, bytes], None]
"""Answers a call that moves chunks; given its body."""


@contextmanager
def link_to(moving: Moving, *, timeout_seconds: float, hangs: bool = False) -> Iterator[StoreLink]:
    """A link to a server that says of every list that none of it is stored, and has `moving` answer what moves chunks. `hangs`:
    once it was asked for that it answers nothing else either."""
    is_away = threading.Event()

    def serve(connection: socket.socket, _: int) -> None:
        while True:
            head, body = read_request(connection)
            if b"?match" in head.partition(b"\r\n")[0]:
                if is_away.is_set():
                    return hold(connection)
                connection.sendall(MATCHED)
                continue
            if hangs:
                is_away.set()
            moving(connection, body)

    with ScriptedServer(serve) as server:
        values: dict[str, object] = {
            "endpoint": f"http://127.0.0.1:{server.endpoint.port}",
            "bucket": "cache",
            "access_key": "a",
            "secret_key": "s",
            "same_host": False,
            "timeout_seconds": timeout_seconds,
        }
        with closing(StoreLink(LinkSettings.parse(values, {}))) as link:
            yield link


def hold(connection: socket.socket) -> None:
    """Answer nothing, until the client has gone."""
    while connection.recv(65536):
        pass


def read_one(link: StoreLink) -> bool:
    return link.load(["a"], [memoryview(bytearray(len(CHUNK)))])[0]


def fetch_one(link: StoreLink) -> bool:
    return link.fetch(["a"], [memoryview(bytearray(len(CHUNK)))])[0] is not None


def read_unsized(link: StoreLink) -> bool:
    return link.read(["a"])[0] is not None


def store_one(link: StoreLink) -> bool:
    return link.store([NewChunk("a", CHUNK)])[0]


CALLS = [read_one, fetch_one, read_unsized, store_one]


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_moves_nothing_and_answers_is_not_taken_for_one_that_is_away(
    call: Callable[[StoreLink], bool],
) -> None:
    with link_to(lambda connection, _: connection.shutdown(socket.SHUT_RDWR), timeout_seconds=10) as link:
        assert not call(link)
        assert link.is_up
        assert "BusyError" in str(link.report()["last_error"])


@pytest.mark.parametrize("call", [read_one, fetch_one, store_one])
def test_a_server_that_hangs_costs_a_call_its_deadline_and_the_question_whether_it_answers_nothing_more(
    call: Callable[[StoreLink], bool],
) -> None:
    with link_to(lambda connection, _: hold(connection), timeout_seconds=3, hangs=True) as link:
        began = time.monotonic()
        assert not call(link)
        assert time.monotonic() - began < 3.9, "a second and more beyond it"
        assert not link.is_up


def item(index: int, data: bytes | None, status: int) -> bytes:
    header = {"i": index, "layer": None, "codec": "raw", "size_bytes": len(data or b""), "status": status}
    return framed(header | {"digest": None if data is None else blake3(data).digest()}) + (data or b"")


def test_a_chunk_for_which_the_server_has_no_room_is_a_miss_and_the_others_come() -> None:
    def moving(connection: socket.socket, _: bytes) -> None:
        items = [item(0, CHUNK, 200), item(1, None, 503), item(2, CHUNK, 200), framed({"end": True, "items": 3})]
        connection.sendall(ok(b"".join(items)))

    with link_to(moving, timeout_seconds=10) as link:
        assert link.load(["a", "b", "c"], [memoryview(bytearray(len(CHUNK))) for _ in "abc"]) == [True, False, True]
        assert link.is_up
        assert link.report()["errors"] == 0


def test_chunks_that_have_each_to_be_waited_for_cost_one_deadline_together() -> None:
    count = 40
    is_over = threading.Event()

    def moving(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\nx-amz-request-id: 1\r\n\r\n")
        for index in range(count):
            connection.sendall(item(index, None, 503))
            is_over.wait(0.2)
        connection.sendall(framed({"end": True, "items": count}))
        connection.shutdown(socket.SHUT_RDWR)

    with link_to(moving, timeout_seconds=2) as link:
        began = time.monotonic()
        found = link.load([f"{at}" for at in range(count)], [memoryview(bytearray(len(CHUNK))) for _ in range(count)])
        assert time.monotonic() - began < 3
        is_over.set()
        assert found == [False] * count
        assert link.is_up


def test_the_batches_of_a_store_have_one_deadline_together_and_those_that_were_stored_count() -> None:
    is_over = threading.Event()

    def moving(connection: socket.socket, _: bytes) -> None:
        is_over.wait(1.2)
        told = {"status": 200, "existed": False, "durability": "memory", "etag": "", "digest": None}
        connection.sendall(ok(msgspec.msgpack.encode({"items": [{"i": index, **told} for index in range(1000)]})))

    chunks = [NewChunk(f"{at}", CHUNK) for at in range(5000)]
    with link_to(moving, timeout_seconds=3) as link:
        began = time.monotonic()
        stored = link.store(chunks)
        assert time.monotonic() - began < 4
        is_over.set()
        assert stored == [True] * 1000 + [False] * 4000
        assert link.is_up


def test_chunks_that_came_by_shared_memory_count_where_the_others_of_their_batch_do_not_come_in_time(
    tmp_path: Path,
) -> None:
    settings = ServerSettings(
        dram_bytes=64 * MIB, nvme_bytes=128 * MIB, buckets=(BucketSetting("cache", kind="kv", durability="memory"),)
    )
    with ServerProcess(tmp_path, settings) as server, relay_without_reads(server.port) as port:
        keys = server.credentials()
        values: dict[str, object] = {
            "endpoint": f"http://127.0.0.1:{port}",
            "bucket": "cache",
            "access_key": keys.access_key,
            "secret_key": keys.secret_key,
            "timeout_seconds": 4,
        }
        # The second is more than a client may pin, and so has to come over HTTP.
        chunks = [NewChunk("small", blake3(b"small").digest(length=MIB)), NewChunk("large", bytes(20 * MIB))]
        with closing(StoreLink(LinkSettings.parse(values, {}))) as link:
            assert link.store(chunks) == [True, True]
            rooms = [memoryview(bytearray(len(chunk.data))) for chunk in chunks]
            began = time.monotonic()
            assert link.load(["small", "large"], rooms) == [True, False]
            assert time.monotonic() - began < 4.5
            assert rooms[0] == chunks[0].data
            assert link.is_up


@contextmanager
def relay_without_reads(target: int) -> Iterator[int]:
    """A port of this machine from which all gets to the target's but ?mget, of which nothing is heard."""
    opened: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                if b"?mget" in piece:
                    hold(source)
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                ends = (listener.accept()[0], socket.create_connection(("127.0.0.1", target)))
                opened.extend(ends)
                for each in (ends, ends[::-1]):
                    threading.Thread(target=pump, args=each, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield int(listener.getsockname()[1])
        for each in [listener, *opened]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
            each.close()


def test_a_chunk_that_does_not_come_behind_others_ends_a_load_at_its_deadline() -> None:
    is_over = threading.Event()

    def moving(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\nx-amz-request-id: 1\r\n\r\n" + item(0, CHUNK, 200))
        is_over.wait(1.5)
        connection.sendall(item(1, CHUNK, 200))
        hold(connection)

    with link_to(moving, timeout_seconds=3) as link:
        began = time.monotonic()
        found = link.load(["a", "b", "c"], [memoryview(bytearray(len(CHUNK))) for _ in "abc"])
        assert time.monotonic() - began < 3
        is_over.set()
        assert found == [True, True, False]
        assert link.is_up
