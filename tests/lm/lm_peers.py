"""A served `LmServer` over a whole node, and clients of `lm://` that pack and unpack by themselves, as LMCache does."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kv_driver import KvDriver, kv_node
from s3_driver import ALICE

from kvobj.api.lm import LmCommands, LmLimits, LmServer
from kvobj.api.users import UserDirectory
from kvobj.clock import SystemClock
from kvobj.config import LmSettings
from kvobj.metrics import Metrics
from kvobj.wire.body_handover import ReceiveMode

PUT, GET, EXIST, LIST, HEALTH = range(1, 6)
SUCCESS, FAIL = 200, 400
FORM: Final = (1, 3, 2, 32, 256, 1024)
"""KV_2LTD, bfloat16, [2, 32, 256, 1024] in LMCache's numbers."""
NO_FORM: Final = (1, 2, 0, 0, 0, 0)
HEAD_BYTES: Final = 36
TIMEOUT_SECONDS: Final = 20.0


def request(
    command: int, key: str | bytes, *, length: int = 0, form: tuple[int, ...] = NO_FORM, location: int = 0
) -> bytes:
    """A request's head, packed as `ClientMetaMessage.serialize` does."""
    fmt, dtype, *dimensions = form
    name = key if isinstance(key, bytes) else key.encode()
    return struct.pack("iiiiiiiii150s", command, length, fmt, dtype, location, *dimensions, name.ljust(150))


@dataclass(frozen=True)
class Told:
    """A reply, unpacked as `ServerMetaMessage.deserialize` does, and the bytes behind it."""

    code: int
    form: tuple[int, ...]
    body: bytes


class LmPeer:
    """One connection, by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await asyncio.wait_for(self.writer.drain(), TIMEOUT_SECONDS)

    async def put(self, key: str, body: bytes, form: tuple[int, ...] = FORM) -> None:
        await self.send(request(PUT, key, length=len(body), form=form), body)

    async def told(self) -> Told:
        head = await asyncio.wait_for(self.reader.readexactly(HEAD_BYTES), TIMEOUT_SECONDS)
        code, length, fmt, dtype, *dimensions, location = struct.unpack("iiiiiiiii", head)
        assert location == 0
        body = await asyncio.wait_for(self.reader.readexactly(length), TIMEOUT_SECONDS)
        return Told(code, (fmt, dtype, *dimensions), body)

    async def ask(self, command: int, key: str | bytes = "") -> Told:
        await self.send(request(command, key))
        return await self.told()

    async def has(self, key: str) -> bool:
        return (await self.ask(EXIST, key)).code == SUCCESS

    async def is_ended(self) -> bool:
        """Whether the server ends the connection without another byte."""
        try:
            return await asyncio.wait_for(self.reader.read(1), TIMEOUT_SECONDS) == b""
        except ConnectionResetError:
            return True

    def vanish(self) -> None:
        self.writer.transport.abort()


class TurnedClock(SystemClock):
    """The machine's clock, which a test can turn on."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_seconds


class ListLog(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass
class ServedLm:
    """A running listener on Alice's bucket `cache`."""

    kv: KvDriver
    server: LmServer
    clock: TurnedClock
    metrics: Metrics
    log: list[str]
    port: int
    peers: list[LmPeer] = field(default_factory=list)

    async def connect(self) -> LmPeer:
        peer = LmPeer(*await asyncio.open_connection("127.0.0.1", self.port))
        self.peers.append(peer)
        return peer

    def turn(self, seconds: float) -> None:
        """Let the server see where things stand, then let time pass, then let it look again."""
        self.server.sweep()
        self.clock.ahead_seconds += seconds
        self.server.sweep()

    def count(self, command: str, result: str) -> float:
        """How many requests came to this."""
        labels = {"command": command, "result": result}
        return self.metrics.registry.get_sample_value("kvobj_lm_requests_total", labels) or 0.0

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    @property
    def is_clean(self) -> bool:
        """Whether nothing is reserved, in use or being written."""
        return not len(self.kv.node.in_use) and not self.kv.node.store._rooms._placement._reserved_bytes


@asynccontextmanager
async def lm_node(
    tmp_path: Path,
    shm_path: Path,
    *,
    user_id: str = ALICE.id,
    bucket: str = "cache",
    limits: LmLimits | None = None,
    receive_mode: ReceiveMode | None = None,
) -> AsyncIterator[ServedLm]:
    """A node with a listener. Sweeps run when a test turns the clock, and once a second."""
    async with kv_node(tmp_path, shm_path, dram_mib=64) as kv:
        clock, metrics, kept = TurnedClock(), Metrics(), ListLog()
        log = logging.getLogger("kvobj-test-lm")
        log.setLevel(logging.INFO)
        log.propagate = False
        log.addHandler(kept)
        commands = LmCommands(kv.node.store, UserDirectory(kv.node.catalog, clock), bucket=bucket, user_id=user_id)
        server = LmServer(
            commands,
            limits=limits or LmLimits(allow=LmSettings().allow),
            metrics=metrics,
            clock=clock,
            log=log,
            receive_mode=receive_mode,
        )
        listener = socket.create_server(("127.0.0.1", 0))
        served = ServedLm(kv, server, clock, metrics, kept.lines, listener.getsockname()[1])
        try:
            await server.start(listener)
            yield served
        finally:
            for peer in served.peers:
                peer.vanish()
            await server.aclose()
            listener.close()
            log.removeHandler(kept)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds; fails in the end rather than hang."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is waited for is inside the code under test
            await asyncio.sleep(0)
