"""What a link's loads and stores cost at most, and what a server that answers, but moves nothing, is taken for."""

from __future__ import annotations

import re
import socket
import threading
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from blake3 import blake3
from scripted_server import ScriptedServer, ok, read_request
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings

from kvobj.api.kv.chunk_stream import framed
from kvobj.client import NewChunk
from kvobj.connectors import LinkSettings, StoreLink
from kvobj.connectors.clearing import clear
from kvobj.errors import UnavailableError

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

    with ScriptedServer(serve) as server, link_at(server, timeout_seconds) as link:
        yield link


@contextmanager
def link_at(server: ScriptedServer, timeout_seconds: float) -> Iterator[StoreLink]:
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


class ListedBucket:
    """Answers what lists and deletes: a bucket of these keys and namespaces. Each list, and each deletion, takes so long;
    `removed` is told of each deletion's keys once they are gone, and may store others."""

    def __init__(
        self,
        keys: Sequence[str] = (),
        *,
        namespaces: Sequence[str] = (),
        seconds: float = 0.0,
        every: float = 0.0,
        removed: Callable[[list[str]], None] = lambda _: None,
    ) -> None:
        self.keys = sorted(keys)
        self.lists = self.deletions = 0
        self._namespaces = [{"name": name, "ids": "foreign", "chunk_tokens": 16} for name in namespaces]
        self._seconds = seconds
        self._every = every
        self._removed = removed
        self._is_over = threading.Event()

    @contextmanager
    def link(self, *, timeout_seconds: float) -> Iterator[StoreLink]:
        with ScriptedServer(self._serve) as server, link_at(server, timeout_seconds) as link:
            yield link
            self._is_over.set()

    def _serve(self, connection: socket.socket, _: int) -> None:
        while True:
            head, body = read_request(connection)
            method, target, _version = head.partition(b"\r\n")[0].decode().split(" ")
            query = {
                name: values[0] for name, values in parse_qs(urlsplit(target).query, keep_blank_values=True).items()
            }
            self._is_over.wait(self._every)
            connection.sendall(ok(self._answer(method, query, body.decode("latin-1"))))

    def _answer(self, method: str, query: dict[str, str], body: str) -> bytes:
        if "list-type" in query:
            self.lists += 1
            self._is_over.wait(self._seconds)
            start = bisect_right(self.keys, query["start-after"])
            page = self.keys[start : start + int(query["max-keys"])]
            return "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in page).encode()
        if method == "POST" and "delete" in query:
            self.deletions += 1
            self._is_over.wait(self._seconds)
            removed = re.findall("<Key>(.*?)</Key>", body)
            self.keys = sorted({*self.keys} - {*removed})
            self._removed(removed)
            return b"<DeleteResult/>"
        if "namespaces" in query:
            return msgspec.msgpack.encode({"namespaces": self._namespaces})
        return msgspec.msgpack.encode({"matched": 0, "tokens": 0, "size_bytes": 0, "expected_load_ms": 0})


def test_a_delete_of_many_names_has_one_deadline_and_the_server_that_did_some_of_it_is_there() -> None:
    bucket = ListedBucket(seconds=0.8)
    with bucket.link(timeout_seconds=2) as link:
        assert link.ping()
        began = time.monotonic()
        assert not link.delete([f"{at}" for at in range(5000)])
        assert time.monotonic() - began < 3, "all of them take 4 s"
        assert bucket.deletions > 1
        assert link.is_up
        assert "BusyError" in str(link.report()["last_error"])
        assert link.delete(["1", "2"])


def test_a_listing_that_does_not_end_in_time_is_told_apart_from_one_of_which_there_is_no_more() -> None:
    keys = [f"{at:05}" for at in range(5000)]
    with ListedBucket(keys, seconds=0.8).link(timeout_seconds=2) as link:
        assert link.ping()
        assert link.page(limit=1000) == [(key, 1) for key in keys[:1000]]
        began = time.monotonic()
        assert link.page(limit=5000) is None
        assert time.monotonic() - began < 3, "all of it takes 4 s"
        assert link.is_up
        assert "BusyError" in str(link.report()["last_error"])


def test_a_listing_costs_no_more_where_other_namespaces_have_many_keys_before_its_own() -> None:
    others = [f"{name}/{at:05}" for name in ("other", "others") for at in range(5000)]
    bucket = ListedBucket([*others, "p", "other", "otherwise/1"], namespaces=["other", "others"])
    with bucket.link(timeout_seconds=10) as link:
        assert link.page(limit=2) == [("other", 1), ("otherwise/1", 1)]
        assert link.page(limit=3) == [("other", 1), ("otherwise/1", 1), ("p", 1)]
        assert link.page(after="other", limit=10) == [("otherwise/1", 1), ("p", 1)]
        assert bucket.lists <= 12


@pytest.mark.parametrize(
    "call",
    [
        lambda link: link.ping(),
        lambda link: link.usage(),
        lambda link: link.page(),
        lambda link: link.delete(["a"]),
        lambda link: link.present(["a"]),
    ],
    ids=["ping", "usage", "page", "delete", "present"],
)
def test_all_that_a_call_asks_for_has_one_deadline(call: Callable[[StoreLink], object]) -> None:
    with ListedBucket(every=0.9).link(timeout_seconds=1) as link:
        began = time.monotonic()
        call(link)
        assert time.monotonic() - began < 1.7


def test_a_clear_passes_once_over_what_stood_there_whatever_is_stored_behind_it() -> None:
    def removed(keys: list[str]) -> None:
        for key in keys:
            insort(bucket.keys, f"a/{key}")

    bucket = ListedBucket([f"k/{at:05}" for at in range(2500)], removed=removed)
    with bucket.link(timeout_seconds=10) as link:
        clear(link, seconds=60)
        assert not [key for key in bucket.keys if key.startswith("k/")]
        assert bucket.deletions == 3


def test_a_clear_ends_and_says_so_where_others_store_before_it_as_fast_as_it_goes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def removed(keys: list[str]) -> None:
        bucket.keys = [f"k{key}" for key in keys]  # all behind these

    bucket = ListedBucket([f"k/{at:05}" for at in range(1000)], removed=removed)
    with bucket.link(timeout_seconds=10) as link:
        with pytest.raises(UnavailableError, match="were not removed, and may be had on"):
            clear(link, seconds=1)
        assert bucket.deletions > 1
        assert link.is_up
    (told,) = caplog.messages
    assert "more than could be removed in 1 s" in told
