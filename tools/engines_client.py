"""kvobj's client over HTTP against bare sockets: match-and-pin with mget of the hits, and a GET into a caller's buffer.

`Ways` are the clients that all parts share: one that is kept to HTTP, one that may go the same-host way.
"""

from __future__ import annotations

import inspect
import socket
import struct
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from bench_support import MIB, ServerProcess, signed
from engines_figures import GB, Figures, Line, line_of
from limits import BARE_KINDS, prefaulted

from kvobj.client import Credentials, KvClient, NewChunk
from kvobj.client.kv_values import ROOT, StoredChunk

BUCKET: Final = "engine-client"
CHUNK_TOKENS: Final = 16
BATCH_PART: Final = "match and mget"
GET_PART: Final = "client"
BATCH_TARGET: Final = 0.85
GET_TARGET_US: Final = 100.0
CHUNKS: Final = 1000
CHUNK_BYTES: Final = MIB
GETS: Final = {4096: 1000, MIB: 400, 8 * MIB: 100}
"""Pairs of one round, by size."""
QUICK_GETS: Final = {4096: 100, MIB: 40}
GROUPS: Final = 10
"""The pairs of a size are divided among so many connections, and both of a pair go over the same one. What the kernel makes of a
connection (with BBR whether it holds the sender back yet, how large the buffers grew) differs from one to the next, by more than a
millisecond for 8 MiB: over a connection each, the two would differ by that."""

_WARM_UP: Final = 3
_BARE_REPLY_BYTES: Final = 64 * MIB
_HEAD_ROOM_BYTES: Final = 65536
_SOCKET_SECONDS: Final = 60.0
_PUT_BYTES: Final = 64 * MIB


class Ways:
    """Clients of one bucket: `http` never leaves HTTP, `near` may go the same-host way (None: `absence` says why it cannot)."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.http = self.client(is_near=False)
        self.near: KvClient | None = None
        self.absence = "the client has no same-host way"
        if hasattr(self.http, "view_chunk"):
            near = self.client(is_near=True)
            near.put_chunk("near", b"near")
            view = near.view_chunk("near")
            if view is None:
                raise RuntimeError("a chunk is gone that was just stored")
            with view:
                is_near = bytes(view.data) == b"near" and near.is_same_host
            self.absence = "the server offered no same-host way"
            if is_near:
                self.near = near
            else:
                near.close()

    def client(self, *, is_near: bool, verify: bool = False, connections: int = 8) -> KvClient:
        """A client of the root user. The caller closes it."""
        keys = self._server.credentials()
        settings: dict[str, Any] = {"connections": connections, "verify": verify, "timeout_seconds": 120.0}
        if "same_host" in inspect.signature(KvClient.__init__).parameters:
            settings["same_host"] = is_near
        return KvClient(self._server.endpoint, Credentials(keys.access_key, keys.secret_key), BUCKET, **settings)

    def close(self) -> None:
        """Close the clients."""
        self.http.close()
        if self.near is not None:
            self.near.close()


class Batches:
    """A chain of chunks that is matched, pinned and read whole, and the bare servers that send as many bytes."""

    def __init__(
        self, server: ServerProcess, ways: Ways, bare_ports: dict[str, int], figures: Figures, *, chunks: int, size: int
    ) -> None:
        self._server = server
        self._ways = ways
        self._bare_ports = bare_ports
        self._figures = figures
        self._rooms = _rooms(chunks, size)
        declaration = {"model": "bench", "chunk_tokens": CHUNK_TOKENS, "layout": {"kind": "opaque"}, "ids": "kvobj"}
        self._namespace = ways.http.declare_namespace("bench", declaration)
        self._ids = self._namespace.chunk_ids(struct.pack("<I", 7) * (CHUNK_TOKENS * chunks))
        self._store(size)

    def _store(self, size: int) -> None:
        parents: list[bytes | str] = [ROOT, *self._ids]
        data = bytes(range(256)) * (size // 256)
        step = max(1, _PUT_BYTES // size)
        for start in range(0, len(self._ids), step):
            names = self._ids[start : start + step]
            batch = [NewChunk(name, data, parent=parents[start + at]) for at, name in enumerate(names)]
            told = self._ways.http.mput(batch, namespace=self._namespace)
            problems = [str(each) for each in told if not isinstance(each, StoredChunk)]
            if problems:
                raise RuntimeError(f"a chunk was refused: {problems[0]}")

    def measure(self) -> None:
        """Bare servers, then the client without and with its own verification."""
        for kind, port in self._bare_ports.items():
            self._figures.note(f"{BATCH_PART}/bare {kind}", self._bare(port))
        for name, verify in (("kvobj", False), ("kvobj verified", True)):
            with self._ways.client(is_near=False, verify=verify) as client:
                self._read(client, f"{BATCH_PART}/{name}")

    def _read(self, client: KvClient, name: str) -> None:
        session = client.open_session(holder="bench", ttl_ms=600_000).session
        cpu, own = self._server.cpu_seconds(), time.process_time()
        began = time.perf_counter()
        answer = client.match(namespace=self._namespace, ids=self._ids, session=session)
        matched = time.perf_counter()
        if answer.matched != len(self._ids) or answer.pin is None:
            raise RuntimeError(f"only {answer.matched} of {len(self._ids)} chunks matched")
        items = client.mget(self._ids, namespace=self._namespace, into=lambda index, _layer, _size: self._rooms[index])
        came = sum(len(item.data) for item in items if item.data is not None)
        ended = time.perf_counter()
        total = sum(len(room) for room in self._rooms)
        if came != total:
            raise RuntimeError(f"only {came} of {total} bytes came")
        self._figures.note(name, total / (ended - began))
        self._figures.note(f"{name} match", matched - began)
        self._figures.note(f"{name} client CPU", (time.process_time() - own) / (ended - began))
        self._figures.note(f"{name} server CPU", (self._server.cpu_seconds() - cpu) / (total / 2**30))
        client.close_session(session)

    def _bare(self, port: int) -> float:
        """The same bytes into the same rooms, from a server that does nothing else; bytes a second."""
        total = sum(len(room) for room in self._rooms)
        with socket.create_connection(("127.0.0.1", port), timeout=_SOCKET_SECONDS) as connection:
            _blocking(connection)
            sink = _Rooms(connection, self._rooms)
            began = time.perf_counter()
            left = total
            while left:
                size = min(left, _BARE_REPLY_BYTES)
                connection.sendall(b"GET /%d HTTP/1.1\r\n\r\n" % size)
                sink.skip_head()
                sink.receive(size)
                left -= size
            return total / (time.perf_counter() - began)


class _Rooms:
    """Receives a stream into rooms, one after the other."""

    def __init__(self, connection: socket.socket, rooms: Sequence[memoryview]) -> None:
        self._connection = connection
        self._rooms = iter(rooms)
        self._room = next(self._rooms)

    def skip_head(self) -> None:
        """Read the head of a reply, and not a byte of what follows."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            peeked = self._connection.recv(_HEAD_ROOM_BYTES, socket.MSG_PEEK)
            end = peeked.find(b"\r\n\r\n")
            count = len(peeked) if end < 0 else end + 4
            head += self._connection.recv(count)
            if not count:
                raise ConnectionError("the server closed the connection")

    def receive(self, size: int) -> None:
        """Receive so many bytes of body."""
        left = size
        while left:
            if not len(self._room):
                self._room = next(self._rooms)
            count = self._connection.recv_into(self._room, min(left, len(self._room)))
            if not count:
                raise ConnectionError("the server closed the connection")
            self._room = self._room[count:]
            left -= count


class Gets:
    """One GET by the client and one by a bare loop that sends the same request signed beforehand, in turn."""

    def __init__(self, server: ServerProcess, ways: Ways, figures: Figures, *, counts: dict[int, int]) -> None:
        self._server = server
        self._ways = ways
        self._figures = figures
        self._counts = counts
        for size in counts:
            ways.http.put_chunk(f"client-{size}", bytes(range(256)) * (size // 256))

    def measure(self) -> None:
        """The client's own time of a GET at each size: the median of what it takes longer than the bare loop."""
        for size, count in self._counts.items():
            for name, verify in (("client", False), ("client verified", True)):
                pairs: list[tuple[float, float]] = []
                for _ in range(GROUPS):
                    with self._ways.client(is_near=False, verify=verify, connections=1) as client:
                        pairs += self._pairs(client, size, count // GROUPS)
                self._figures.note(f"{GET_PART} {size}/{name} adds", median(own - bare for bare, own in pairs))
                self._figures.note(f"{GET_PART} {size}/{name} bare", median(bare for bare, _ in pairs))

    def _pairs(self, client: KvClient, size: int, count: int) -> list[tuple[float, float]]:
        """Seconds of the bare loop and of the client beside it, over the client's connection; either begins as often."""
        room = prefaulted(size + _HEAD_ROOM_BYTES)
        head = signed(self._server, "GET", f"/{BUCKET}/client-{size}")
        pairs: list[tuple[float, float]] = []
        _own_get(client, room, size)
        connection = _socket_of(client)
        for number in range(count + _WARM_UP):
            own = _own_get(client, room, size) if number % 2 else None
            began = time.perf_counter()
            _bare_get(connection, head, room, size)
            bare = time.perf_counter() - began
            pairs.append((bare, _own_get(client, room, size) if own is None else own))
        if _socket_of(client) is not connection:
            raise RuntimeError("the client has made another connection")
        return pairs[_WARM_UP:]


def _socket_of(client: KvClient) -> socket.socket:
    """The client's one connection. It blocks, the deadline is the kernel's, and between two calls nothing is on it."""
    (idle,) = client._transport._idle  # noqa: SLF001 - both sides must use the very same one
    found = idle._wire._socket  # noqa: SLF001
    if found is None:
        raise RuntimeError("the client is not connected")
    return found


def _own_get(client: KvClient, room: memoryview, size: int) -> float:
    began = time.perf_counter()
    view = client.get_chunk(f"client-{size}", into=room[:size])
    took = time.perf_counter() - began
    if view is None or len(view) != size:
        raise RuntimeError("the chunk was missed")
    return took


def _bare_get(connection: socket.socket, head: bytes, room: memoryview, size: int) -> None:
    """Send a request and receive its reply, head and body behind one another."""
    connection.sendall(head)
    filled, end = 0, -1
    while end < 0:
        count = connection.recv_into(room[filled:])
        if not count:
            raise ConnectionError("the server closed the connection")
        filled += count
        end = bytes(room[: min(filled, 4096)]).find(b"\r\n\r\n")
    if bytes(room[9:12]) != b"200":
        raise RuntimeError(f"not a success: {bytes(room[:200])!r}")
    while filled < end + 4 + size:
        count = connection.recv_into(room[filled : end + 4 + size])
        if not count:
            raise ConnectionError("the server closed the connection")
        filled += count


def _blocking(connection: socket.socket) -> None:
    """Deadlines by the kernel: Python's own cost a poll before every receive."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_SOCKET_SECONDS), 0))


def _rooms(count: int, size: int) -> list[memoryview]:
    memory = prefaulted(count * size)
    return [memory[at * size : (at + 1) * size] for at in range(count)]


def batch_lines(figures: Figures) -> list[Line]:
    """Match-and-pin with mget against the better bare server."""
    bare = max((f"{BATCH_PART}/bare {kind}" for kind in BARE_KINDS), key=lambda name: figures.median(name) or 0.0)
    lines: list[Line] = []
    for name, what in (("kvobj", "not verified by the client"), ("kvobj verified", "verified by the client")):
        place = f"{BATCH_PART}/{name}"
        notes = []
        for kind, unit, scale in (
            ("match", "ms to match and pin", 1e3),
            ("client CPU", "of a core in the client", 1.0),
        ):
            value = figures.median(f"{place} {kind}")
            if value is not None:
                notes.append(f"{value * scale:.2f} {unit}")
        cpu = figures.median(f"{place} server CPU")
        if cpu is not None:
            notes.append(f"server {cpu:.2f} CPU s/GiB")
        lines.append(
            line_of(
                figures,
                BATCH_PART,
                f"match, pin and mget, {what}",
                place,
                "GB/s",
                scale=GB,
                limit=bare,
                limit_name=bare.partition("/")[2],
                least_ratio=BATCH_TARGET,
                note=", ".join(notes),
            )
        )
    return lines


def get_lines(figures: Figures, sizes: Sequence[int]) -> list[Line]:
    """What the client adds to a GET; the hash of what came is shown without a target."""
    lines: list[Line] = []
    for size in sizes:
        for name, what in (("client", "not verified"), ("client verified", "verified")):
            place = f"{GET_PART} {size}/{name}"
            bare = figures.median(f"{place} bare")
            shown = f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"
            lines.append(
                line_of(
                    figures,
                    GET_PART,
                    f"what the client adds to a GET of {shown}, {what}",
                    f"{place} adds",
                    "µs",
                    scale=1e-6,
                    most=GET_TARGET_US if name == "client" else None,
                    note="" if bare is None else f"bare loop {bare * 1e6:,.0f} µs",
                )
            )
    return lines
