"""The `lm://` listener: who may connect, how many, their deadlines, and an orderly end.

Nothing on this wire says who a client is, so addresses stand in for it: those of `LmLimits.allow`, by default this machine's. The
sockets are the caller's; the server listens on duplicates.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import Final

from kvobj.api.access.source_address import Network, parse_address
from kvobj.api.http.limits import HttpSettings
from kvobj.api.lm.commands import LmCommands
from kvobj.api.lm.connection import LmConnection, LmServing
from kvobj.api.lm.instruments import LmInstruments
from kvobj.clock import Clock
from kvobj.metrics import Metrics
from kvobj.wire.body_handover import ReceiveMode, Wire
from kvobj.wire.plain_listener import PlainListener
from kvobj.wire.receive_check import choose_receive_mode

_WIRE: Final = HttpSettings()
"""Buffers, low water and the sweep's interval are those of the HTTP server, which tells why."""
_KEEPALIVE_SECONDS: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LmLimits:
    """`allow`: who may connect; `connections` at once, each of which holds up to 128 KiB beside what the store reserves for a PUT;
    `stall_seconds` as in `LmServing`."""

    allow: tuple[Network, ...]
    connections: int = 256
    stall_seconds: float = 60.0


class LmServer:
    """See the module's text. Make it anywhere; everything else on one running event loop."""

    def __init__(
        self,
        commands: LmCommands,
        *,
        limits: LmLimits,
        metrics: Metrics,
        clock: Clock,
        log: logging.Logger,
        receive_mode: ReceiveMode | None = None,
    ) -> None:
        """`receive_mode` None: found out at start."""
        self._limits = limits
        self._clock = clock
        self._log = log
        self._instruments = LmInstruments(metrics, clock, log, connections=lambda: float(len(self._connections)))
        self._serving = LmServing(
            commands=commands,
            instruments=self._instruments,
            clock=clock,
            stall_seconds=limits.stall_seconds,
        )
        self._receive_mode = receive_mode
        self._shared = memoryview(bytearray(_WIRE.receive_buffer_bytes))
        self._connections: dict[LmConnection, asyncio.Task[None]] = {}
        self._listener: PlainListener | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._is_draining = False

    async def start(self, bound: socket.socket) -> None:
        """Listen on a duplicate of a bound stream socket. Call it once."""
        loop = asyncio.get_running_loop()
        mode = self._receive_mode or await choose_receive_mode(self._log)
        # Inherited by what the listener accepts (Linux). A client that vanished is noticed after some minutes.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._listener = PlainListener(
            bound.dup(),
            lambda connected: Wire(loop, connected, shared=self._shared, mode=mode),
            self._connected,
            backlog=_WIRE.listen_backlog,
            waited=self._instruments.accept_waits.inc,
            log=self._log,
        )
        await self._listener.start()
        self._schedule_sweep()

    async def drain(self, timeout_seconds: float) -> bool:
        """Accept no more and finish what is in flight; True when all was finished in time."""
        self._is_draining = True
        self._stop_accepting()
        for connection in self._connections:
            connection.drain()
        tasks = list(self._connections.values())
        if not tasks:
            return True
        _, pending = await asyncio.wait(tasks, timeout=timeout_seconds)
        return not pending

    async def aclose(self) -> None:
        """Stop at once: what is still open is reset, and nothing stays of a PUT that is not whole. Idempotent."""
        if self._listener is not None:
            await self._listener.aclose()
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        connections = dict(self._connections)
        for connection, task in connections.items():
            connection.wire.reset()
            task.cancel()
        await asyncio.gather(*connections.values(), return_exceptions=True)
        for connection in connections:
            await connection.wire.wait_closed()

    def sweep(self) -> None:
        """Check every connection's deadline now; runs by itself once a second."""
        now = self._clock.monotonic()
        for connection in self._connections:
            connection.sweep(now)
        if self._listener is not None:
            self._listener.look()

    def _schedule_sweep(self) -> None:
        loop = asyncio.get_running_loop()

        def sweep_again() -> None:
            self._sweeping = loop.call_later(_WIRE.sweep_seconds, sweep_again)
            self.sweep()

        self._sweeping = loop.call_later(_WIRE.sweep_seconds, sweep_again)

    def _stop_accepting(self) -> None:
        if self._listener is not None:
            self._listener.stop()

    def _connected(self, wire: Wire) -> None:
        try:
            self._take_in(wire)
        except Exception:  # noqa: BLE001 - event loops would log it and leave the socket open, its client waiting for ever
            self._log.exception("a connection could not be taken in")
            wire.reset()

    def _take_in(self, wire: Wire) -> None:
        reason = self._refusal(wire.remote)
        if reason:
            self._instruments.refused(reason, wire.remote)
            wire.reset()
            return
        if wire.is_local:
            wire.tune(send_bytes=_WIRE.local_send_bytes, low_water_bytes=_WIRE.local_low_water_bytes)
        connection = LmConnection(wire, self._serving)
        task = asyncio.get_running_loop().create_task(connection.serve())
        self._connections[connection] = task
        task.add_done_callback(lambda done: self._ended(connection, done))

    def _refusal(self, remote: str) -> str:
        """Why a connection from there is refused, or nothing."""
        address = parse_address(remote)
        if address is None or not any(address in network for network in self._limits.allow):
            return "address"
        if len(self._connections) >= self._limits.connections:
            return "too many"
        return "stopping" if self._is_draining else ""

    def _ended(self, connection: LmConnection, task: asyncio.Task[None]) -> None:
        del self._connections[connection]
        if not task.cancelled() and task.exception() is not None:
            self._log.error("a connection's task failed", exc_info=task.exception())
            connection.wire.reset()
