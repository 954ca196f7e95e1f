"""The HTTP server: listening sockets, connections, their limits and deadlines, and an orderly end.

`HttpServer` runs on one event loop (uvloop or asyncio's own) and serves a `Handler` over HTTP/1.1, with or without TLS; the S3 port
and the admin port are two of them. It guarantees bounds on everything a client can make it hold. It does not own the sockets it is
given: it listens on duplicates, so that the caller may keep a port across a restart.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from kvobj.api.http.body_handover import ReceiveMode, Wire
from kvobj.api.http.connection import BadRequest, Connection, Serving
from kvobj.api.http.instruments import HttpInstruments
from kvobj.api.http.limits import HttpSettings, RequestGate
from kvobj.api.http.receive_check import choose_receive_mode
from kvobj.api.http.reply_writer import ReplyWriter
from kvobj.api.http.request_head import HeadReader, require_compiled_parser
from kvobj.api.http.request_log import RequestLog
from kvobj.api.message import Handler, Reply
from kvobj.clock import Clock
from kvobj.metrics import Metrics


def plain_bad_request(status: int, code: str, message: str, request_id: str) -> Reply:
    """A refusal as plain text, for servers that speak no S3."""
    body = f"{code}: {message} (request {request_id})\n".encode()
    return Reply(status, (("content-type", "text/plain; charset=utf-8"),), body)


class HttpServer:
    """Serves `handler`. Make it anywhere; everything else on one running event loop.

    `log` gets the request lines (INFO, JSON) and, as its child `errors`, what went wrong. `bad_request` renders what is refused
    before the handler sees it.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        settings: HttpSettings,
        metrics: Metrics,
        clock: Clock,
        new_request_id: Callable[[], str],
        log: logging.Logger,
        bad_request: BadRequest = plain_bad_request,
        receive_mode: ReceiveMode | None = None,
        write_line: Callable[[bytes], None] | None = None,
    ) -> None:
        """`receive_mode` None: found out at start. `write_line`: see `RequestLog`."""
        require_compiled_parser()
        self._settings = settings
        self._clock = clock
        self._errors = log.getChild("errors")
        self._instruments = HttpInstruments(
            metrics,
            settings.name,
            connections=lambda: float(len(self._connections)),
            in_flight=lambda: float(sum(connection.is_in_flight for connection in self._connections)),
        )
        self._serving = Serving(
            handler=handler,
            settings=settings,
            clock=clock,
            new_request_id=new_request_id,
            bad_request=bad_request,
            gate=RequestGate(
                running=settings.handler_requests, queued=settings.queued_requests, seconds=settings.queue_seconds
            ),
            writer=ReplyWriter(clock, self._errors),
            request_log=RequestLog(log, clock, write_line),
            instruments=self._instruments,
            log=self._errors,
        )
        self._receive_mode = receive_mode
        self._servers: list[asyncio.Server] = []
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._header_names: dict[bytes, str] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._shared = memoryview(bytearray(settings.receive_buffer_bytes))
        self._ports: tuple[int, ...] = ()

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports listened on, in the order of the sockets given to `start`."""
        return self._ports

    @property
    def receive_mode(self) -> ReceiveMode:
        """How bodies are received; COPIED before `start` has found out. TLS connections always copy."""
        return self._receive_mode or ReceiveMode.COPIED

    async def start(self, sockets: Sequence[socket.socket], ssl_context: ssl.SSLContext | None = None) -> None:
        """Listen on duplicates of bound stream sockets; all of them with TLS when a context is given. Call it once."""
        loop = asyncio.get_running_loop()
        if self._receive_mode is None:
            self._receive_mode = await choose_receive_mode(self._errors)
        for bound in sockets:
            self._tune(bound)
            server = await loop.create_server(
                lambda: Wire(loop, self._connected, shared=self._shared, mode=self.receive_mode),
                sock=bound.dup(),
                backlog=self._settings.listen_backlog,
                ssl=ssl_context,
                ssl_handshake_timeout=None if ssl_context is None else self._settings.header_seconds,
                ssl_shutdown_timeout=None if ssl_context is None else self._settings.linger_seconds,
            )
            self._servers.append(server)
        self._ports = tuple(bound.getsockname()[1] for bound in sockets)
        self._schedule_sweep()

    async def drain(self, timeout_seconds: float) -> bool:
        """Accept no more, close idle connections, finish what is in flight; True when all was finished in time."""
        self._stop_accepting()
        for connection in self._connections:
            connection.drain()
        tasks = list(self._connections.values())
        if not tasks:
            return True
        _, pending = await asyncio.wait(tasks, timeout=timeout_seconds)
        return not pending

    async def aclose(self) -> None:
        """Stop at once: what is still open is reset, handlers are cancelled. Idempotent."""
        self._stop_accepting()
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
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    def sweep(self) -> None:
        """Check every connection's deadline now; runs by itself every `sweep_seconds`."""
        now = self._clock.monotonic()
        for connection in self._connections:
            connection.sweep(now)

    def _schedule_sweep(self) -> None:
        loop = asyncio.get_running_loop()

        def sweep_again() -> None:
            self._sweeping = loop.call_later(self._settings.sweep_seconds, sweep_again)
            self.sweep()

        self._sweeping = loop.call_later(self._settings.sweep_seconds, sweep_again)

    def _stop_accepting(self) -> None:
        for server in self._servers:
            server.close()

    def _tune(self, bound: socket.socket) -> None:
        # Inherited by what the listener accepts (Linux).
        if bound.family in (socket.AF_INET, socket.AF_INET6):
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _connected(self, wire: Wire) -> None:
        loop = asyncio.get_running_loop()
        if wire.is_local:
            settings = self._settings
            wire.tune(send_bytes=settings.local_send_bytes, low_water_bytes=settings.local_low_water_bytes)
        connection = Connection(wire, HeadReader(loop, self._settings, names=self._header_names), self._serving)
        count = len(self._connections)
        if count < self._settings.connections:
            work = connection.serve()
        else:
            self._instruments.refused_connections.inc()
            if count >= self._settings.connections + self._settings.refused_connections:
                wire.reset()
                return
            work = connection.refuse()
        task = loop.create_task(work)
        self._connections[connection] = task
        task.add_done_callback(lambda done: self._ended(connection, done))

    def _ended(self, connection: Connection, task: asyncio.Task[None]) -> None:
        del self._connections[connection]
        if not task.cancelled() and task.exception() is not None:
            self._errors.error("a connection's task failed", exc_info=task.exception())
            connection.wire.reset()
