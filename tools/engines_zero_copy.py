"""One chunk of each size, read again and again: seen in place, copied on the same host, over HTTP; Redis and Mooncake beside.

The chunk is pinned. Every way gives the bytes to the same process: a view of the store's own memory (its first and last byte are
touched), or a buffer whose pages are there. Beside that the views of many chunks that were asked for together. The client's own
verification is off: Redis and Mooncake have none.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

from bench_support import MIB
from engines_client import Ways
from engines_figures import Figures, Line, line_of, percentile
from limits import prefaulted
from load_client import redis_get, redis_set
from mooncake_peer import MooncakeClient

from kvobj.client import ChunkView, KvClient
from kvobj.client.kv_values import DEFAULT

PART: Final = "zero-copy"
SIZES: Final = (MIB, 8 * MIB, 32 * MIB, 80 * MIB)
QUICK_SIZES: Final = (MIB, 8 * MIB)
VIEW: Final = "kvobj, a view"
COPY: Final = "kvobj, copied on the same host"
HTTP: Final = "kvobj, over HTTP"
REDIS: Final = "redis"
MOONCAKE: Final = "mooncake over TCP"
MOONCAKE_OWN: Final = "mooncake, held by the reader"
SUBJECTS: Final = (VIEW, COPY, HTTP, REDIS, MOONCAKE, MOONCAKE_OWN)
VIEW_TARGET_US: Final = 150.0
TOGETHER: Final = 32
TOGETHER_BYTES: Final = MIB
TOGETHER_PLACE: Final = f"{PART} {TOGETHER} together/{VIEW}"

_WARM_UP: Final = 5
_SOCKET_SECONDS: Final = 60.0
_NOTHING: Final = b"$-1\r\n"


class Reads:
    """The chunks, stored in every peer that is there, and ways to read them."""

    def __init__(
        self,
        ways: Ways,
        redis_port: int | None,
        mooncake: tuple[MooncakeClient, MooncakeClient] | None,
        figures: Figures,
        *,
        sizes: Sequence[int],
        count: int,
        seconds: float,
    ) -> None:
        self._ways = ways
        self._redis = None if redis_port is None else RedisReader(redis_port)
        self._mooncake = mooncake
        self._figures = figures
        self._count = count
        self._seconds = seconds
        self._room = prefaulted(max(sizes))
        for size in sizes:
            body = _pattern(size)
            ways.http.put_chunk(f"get-{size}", body)
            if self._redis is not None:
                self._redis.put(f"get-{size}", body)

        self._together = [f"together-{number}" for number in range(TOGETHER)]
        for name in self._together:
            ways.http.put_chunk(name, _pattern(TOGETHER_BYTES))

    def close(self) -> None:
        """Close what this opened."""
        if self._redis is not None:
            self._redis.close()

    def measure(self, size: int) -> None:
        """All ways once, one after another; median and 99th percentile of each."""
        name = f"get-{size}"
        session = self._ways.http.open_session(holder="bench", ttl_ms=600_000).session
        try:
            pin = self._ways.http.pin_tails(session, [name], namespace=DEFAULT).pins[0].pin
            if pin is None:
                raise RuntimeError(f"the chunk is not stored any more key={name}")
            self._measure_kvobj(name, size, pin)
        finally:
            self._ways.http.close_session(session)
        if self._redis is None:
            self._figures.miss(f"{PART} {size}/{REDIS}", "redis-server is not installed")
        else:
            redis = self._redis
            self._note(size, REDIS, self._sampled(lambda: redis.get(name, self._room[:size])))
        if self._mooncake is not None:
            for subject, client in zip((MOONCAKE_OWN, MOONCAKE), self._mooncake, strict=True):
                try:
                    times = client.get(name, size, count=self._count, seconds=self._seconds)
                except RuntimeError as error:
                    self._figures.miss(f"{PART} {size}/{subject}", str(error))
                else:
                    self._note(size, subject, times)

    def measure_together(self) -> None:
        """Views of many pinned chunks by one question: the time of each, of all of them."""
        http, near, names = self._ways.http, self._ways.near, self._together
        if near is None:
            self._figures.miss(TOGETHER_PLACE, self._ways.absence)
            return
        session = http.open_session(holder="bench", ttl_ms=600_000).session
        try:
            pins = [each.pin for each in http.pin_tails(session, names, namespace=DEFAULT).pins]

            def look() -> None:
                for view in near.view_chunks(names, pins=pins):
                    _looked_at(view, TOGETHER_BYTES)

            times = [each / TOGETHER for each in self._sampled(look)]
        except NotSharedError as error:
            self._figures.miss(TOGETHER_PLACE, str(error))
        else:
            self._figures.note(f"{TOGETHER_PLACE}/p50", percentile(times, 0.5))
            self._figures.note(f"{TOGETHER_PLACE}/p99", percentile(times, 0.99))
        finally:
            http.close_session(session)

    def _measure_kvobj(self, name: str, size: int, pin: bytes) -> None:
        room = self._room[:size]
        http, near = self._ways.http, self._ways.near
        self._note(size, HTTP, self._sampled(lambda: _filled(http.get_chunk(name, pin=pin, into=room), size)))
        if near is None:
            for subject in (VIEW, COPY):
                self._figures.miss(f"{PART} {size}/{subject}", self._ways.absence)
            return
        try:
            self._note(size, VIEW, self._sampled(lambda: _seen(near, name, pin, size)))
        except NotSharedError as error:
            self._figures.miss(f"{PART} {size}/{VIEW}", str(error))
        self._note(size, COPY, self._sampled(lambda: _filled(near.get_chunk(name, pin=pin, into=room), size)))

    def _sampled(self, call: Callable[[], None]) -> list[float]:
        for _ in range(_WARM_UP):
            call()
        times: list[float] = []
        ends = time.monotonic() + self._seconds
        while len(times) < self._count and time.monotonic() < ends:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return times

    def _note(self, size: int, subject: str, times: Sequence[float]) -> None:
        place = f"{PART} {size}/{subject}"
        self._figures.note(f"{place}/p50", percentile(times, 0.5))
        self._figures.note(f"{place}/p99", percentile(times, 0.99))


class NotSharedError(RuntimeError):
    """A view is of memory of this process: the server gave no extent."""


def _pattern(size: int) -> bytes:
    return bytes(range(256)) * (size // 256)


def _seen(client: KvClient, name: str, pin: bytes, size: int) -> None:
    _looked_at(client.view_chunk(name, pin=pin), size)


def _looked_at(view: ChunkView | None, size: int) -> None:
    if view is None:
        raise RuntimeError("a pinned chunk was missed")
    with view:
        data = view.data
        is_right = len(data) == size and data[1] == 1 and data[size - 1] == 255  # noqa: PLR2004 - the pattern's bytes
        if not is_right or not view.is_valid:
            raise RuntimeError("wrong bytes")
        if not view.is_shared:
            raise NotSharedError("the bytes came over HTTP")


def _filled(view: memoryview | None, size: int) -> None:
    if view is None or len(view) != size:
        raise RuntimeError("a pinned chunk was missed")


class RedisReader:
    """One connection that stores values and receives them into a buffer, in a database that LMCache's runs do not empty. Not
    thread-safe."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_SOCKET_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = bytearray(64)
        self._expect_ok(b"*2\r\n$6\r\nSELECT\r\n$1\r\n1\r\n")

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def put(self, key: str, body: bytes) -> None:
        """SET. RuntimeError if it is refused."""
        self._socket.sendall(redis_set(key, len(body)))
        self._socket.sendall(body)
        self._expect_ok(b"\r\n")

    def get(self, key: str, room: memoryview) -> None:
        """GET into the room, which is as large as the value. RuntimeError for a value of another size."""
        self._socket.sendall(redis_get(key))
        head = memoryview(self._head)
        announced = b"$%d\r\n" % len(room)
        shortest = min(len(announced), len(_NOTHING))
        self._receive(head[:shortest])
        if self._head[:shortest] != _NOTHING:
            self._receive(head[shortest : len(announced)])
        if self._head[: len(announced)] != announced:
            raise RuntimeError(f"not the value: {bytes(self._head[:shortest])!r}")
        self._receive(room)
        self._receive(head[:2])

    def _expect_ok(self, command: bytes) -> None:
        self._socket.sendall(command)
        if (reply := self._socket.recv(64)) != b"+OK\r\n":
            raise RuntimeError(f"Redis refused: {reply!r}")

    def _receive(self, room: memoryview) -> None:
        filled = 0
        while filled < len(room):
            count = self._socket.recv_into(room[filled:])
            if not count:
                raise RuntimeError("Redis closed the connection")
            filled += count


def zero_copy_lines(figures: Figures, sizes: Sequence[int]) -> list[Line]:
    """Each way at each size; the view has a target."""
    lines: list[Line] = []
    for size in sizes:
        for subject in SUBJECTS:
            place = f"{PART} {size}/{subject}"
            tail = figures.median(f"{place}/p99")
            lines.append(
                line_of(
                    figures,
                    PART,
                    f"{subject}, {size // MIB} MiB",
                    f"{place}/p50",
                    "µs",
                    scale=1e-6,
                    most=VIEW_TARGET_US if subject == VIEW else None,
                    note="" if tail is None else f"p99 {tail * 1e6:,.0f} µs",
                )
            )
    tail = figures.median(f"{TOGETHER_PLACE}/p99")
    lines.append(
        line_of(
            figures,
            PART,
            f"{VIEW}, each of {TOGETHER} of {TOGETHER_BYTES // MIB} MiB together",
            f"{TOGETHER_PLACE}/p50",
            "µs",
            scale=1e-6,
            most=VIEW_TARGET_US,
            note="" if tail is None else f"p99 {tail * 1e6:,.0f} µs",
        )
    )
    return lines
