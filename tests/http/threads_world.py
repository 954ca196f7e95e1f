"""Wires whose long bodies threads move, over a listener of a test's own: what was begun on a thread is noted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import pytest
from http_peers import TIMEOUT_SECONDS

from kvobj.wire.body_handover import ReceiveMode, Wire
from kvobj.wire.body_receivers import BodyReceivers
from kvobj.wire.body_senders import BodySenders
from kvobj.wire.body_threads import BodyThreads, Moving

Threads = TypeVar("Threads", bound=BodyThreads)


@dataclass
class Served(Generic[Threads]):
    """One wire a client; `movings`: what threads were given, in order."""

    threads: Threads
    listener: socket.socket
    made: asyncio.Queue[Wire] = field(default_factory=asyncio.Queue)
    movings: list[Moving] = field(default_factory=list)

    async def connect(self) -> tuple[Wire, socket.socket]:
        client = socket.create_connection(self.listener.getsockname())
        client.settimeout(0)
        return await asyncio.wait_for(self.made.get(), TIMEOUT_SECONDS), client


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch, threads: Threads) -> AsyncIterator[Served[Threads]]:
    """Serve wires that have these threads, which are closed at the end."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = Served(threads, listener)
        for name in ("begin", "begin_parts"):
            monkeypatch.setattr(threads, name, _noting(served.movings, getattr(threads, name)))
        wires: list[Wire] = []

        def make() -> Wire:
            wire = Wire(
                loop,
                served.made.put_nowait,
                shared=memoryview(bytearray(64 * 1024)),
                mode=ReceiveMode.DIRECT,
                senders=threads if isinstance(threads, BodySenders) else None,
                receivers=threads if isinstance(threads, BodyReceivers) else None,
            )
            wires.append(wire)
            return wire

        server = await loop.create_server(make, sock=listener.dup())
        try:
            yield served
        finally:
            for wire in wires:
                wire.reset()
                await asyncio.wait_for(wire.wait_closed(), TIMEOUT_SECONDS)
            threads.close()
            server.close()
            await server.wait_closed()


def _noting(movings: list[Moving], begin: Callable[..., Moving | None]) -> Callable[..., Moving | None]:
    def noted(*arguments: object, **keywords: object) -> Moving | None:
        moving = begin(*arguments, **keywords)
        if moving is not None:
            movings.append(moving)
        return moving

    return noted
