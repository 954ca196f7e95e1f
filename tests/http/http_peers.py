"""A served `HttpServer` and raw clients, for tests over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from kvobj.api.errors import refusal_reply
from kvobj.api.http import HttpServer, HttpSettings
from kvobj.api.message import Handler, RepeatedRequests, Reply, RequestBody, RequestHead
from kvobj.metrics import Metrics
from kvobj.wire.body_handover import ReceiveMode

TIMEOUT_SECONDS = 20.0
HOST_ID = "HOST"


@dataclass
class TurnedClock:
    """Time that stands still until it is turned."""

    seconds: float = 1000.0

    def now_ms(self) -> int:
        return int(self.seconds * 1000) + 1_700_000_000_000

    def monotonic(self) -> float:
        return self.seconds


@dataclass
class Answer:
    """A reply as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes


class Peer:
    """One client connection, by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await asyncio.wait_for(self.writer.drain(), TIMEOUT_SECONDS)

    async def answer(self, *, is_head: bool = False) -> Answer:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), TIMEOUT_SECONDS)
        status_line, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        length = 0 if is_head else int(headers.get("content-length", "0"))
        body = await asyncio.wait_for(self.reader.readexactly(length), TIMEOUT_SECONDS)
        return Answer(int(status_line.split(" ")[1]), headers, body)

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        return await asyncio.wait_for(self.reader.read(), TIMEOUT_SECONDS)

    async def is_cut(self) -> bool:
        """Whether the connection ends with a reset rather than an end of stream."""
        try:
            await self.rest()
        except ConnectionResetError:
            return True
        return False

    def vanish(self) -> None:
        """Go without a word."""
        self.writer.transport.abort()

    def reset(self) -> None:
        """The same, with a reset: nothing says that the client has ended its side."""
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.vanish()

    async def aclose(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionError, ssl.SSLError):
            return


@dataclass
class Served:
    """A running server and what it logged."""

    server: HttpServer
    clock: TurnedClock
    metrics: Metrics
    lines: list[str]
    ssl_context: ssl.SSLContext | None = None
    peers: list[Peer] = field(default_factory=list)

    async def connect(self, source: str | None = None) -> Peer:
        """`source`: the client's own address, another of the loopback's than the server's to be no client of this machine."""
        context = self.ssl_context
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            self.server.ports[0],
            ssl=context,
            server_hostname="localhost" if context else None,
            local_addr=(source, 0) if source else None,
        )
        peer = Peer(reader, writer)
        self.peers.append(peer)
        return peer

    def turn(self, seconds: float) -> None:
        """Let the server see where things stand, then let time pass, then let it look again."""
        self.server.sweep()
        self.clock.seconds += seconds
        self.server.sweep()


class ListLog(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@asynccontextmanager
async def serving(
    handler: Handler,
    settings: HttpSettings | None = None,
    *,
    server_context: ssl.SSLContext | None = None,
    client_context: ssl.SSLContext | None = None,
    receive_mode: ReceiveMode | None = ReceiveMode.DIRECT,
    clock: TurnedClock | None = None,
    repeated: RepeatedRequests | None = None,
    hot: RepeatedRequests | None = None,
) -> AsyncIterator[Served]:
    """Serve `handler` on a free port. Sweeps run only when a test turns the clock."""
    clock, metrics, kept = clock or TurnedClock(), Metrics(), ListLog()
    log = logging.getLogger("kvobj-test-http")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(kept)
    ids = itertools.count(1)
    server = HttpServer(
        handler,
        settings=settings or HttpSettings(sweep_seconds=3600.0),
        metrics=metrics,
        clock=clock,
        new_request_id=lambda: f"REQUEST{next(ids)}",
        log=log,
        render_refusal=partial(refusal_reply, host_id=HOST_ID),
        receive_mode=receive_mode,
        repeated=repeated,
        hot=hot,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    served = Served(server, clock, metrics, kept.lines, client_context)
    try:
        await server.start([listener], server_context)
        yield served
    finally:
        for peer in served.peers:
            await peer.aclose()
        await server.aclose()
        listener.close()
        log.removeHandler(kept)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds; fails in the end rather than hang."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for is inside the code under test
            await asyncio.sleep(0)


def pattern(size: int, seed: int = 1) -> bytes:
    """Bytes that differ from place to place."""
    block = bytes((seed * 31 + index * 7) % 251 for index in range(4099))
    return (block * (size // len(block) + 1))[:size]


async def receive_all(body: RequestBody) -> bytes:
    """A body of any framing, by pieces."""
    pieces = []
    while piece := await body.read_some(50_000):
        pieces.append(piece)
    return b"".join(pieces)


async def echo(head: RequestHead, body: RequestBody) -> Reply:
    """Send back method, target and body; the body received in place where its length is known."""
    if body.length is None:
        content = await receive_all(body)
    else:
        buffer = bytearray(body.length)
        with memoryview(buffer) as view:
            half = body.length // 2
            await body.receive_into(view[:half], lambda _: None)
            await body.receive_into(view[half:], lambda _: None)
        content = bytes(buffer)
    return Reply(200, (("x-method", head.method), ("x-target", head.target)), content)


class Views:
    """A body stream over one buffer that its owner overwrites as soon as it may."""

    def __init__(
        self,
        contents: list[bytes],
        *,
        fail_after: int | None = None,
        length: int | None = None,
        is_measured: bool = True,
    ) -> None:
        self.contents = contents
        self.fail_after = fail_after
        self.closed = 0
        self._length = (sum(map(len, contents)) if length is None else length) if is_measured else None
        self.memory = memoryview(bytearray(max(map(len, contents), default=0)))

    @property
    def length(self) -> int | None:
        return self._length

    async def views(self) -> AsyncIterator[memoryview]:
        for index, content in enumerate(self.contents):
            if index == self.fail_after:
                raise RuntimeError("the medium failed")
            self.memory[: len(content)] = content
            yield self.memory[: len(content)]
            self.memory[:] = b"\xee" * len(self.memory)

    async def aclose(self) -> None:
        self.memory[:] = b"\xdd" * len(self.memory)
        self.closed += 1
