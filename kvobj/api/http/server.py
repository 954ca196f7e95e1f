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

from kvobj.api.http.admission import Admission, Place
from kvobj.api.http.connection import Connection, Serving
from kvobj.api.http.gathering import Gathering
from kvobj.api.http.instruments import HttpInstruments
from kvobj.api.http.limits import HttpSettings, RequestGate
from kvobj.api.http.reply_writer import ReplyWriter
from kvobj.api.http.request_head import HeadReader, require_compiled_parser
from kvobj.api.http.request_log import RequestLog
from kvobj.api.http.tls_listener import TlsListener, TlsServing
from kvobj.api.message import Handler, Refusal, RenderRefusal, RepeatedRequests, Reply
from kvobj.clock import Clock
from kvobj.metrics import Metrics
from kvobj.wire.body_handover import ReceiveMode, Wire
from kvobj.wire.body_receivers import BodyReceivers, make_receivers
from kvobj.wire.body_senders import BodySenders, make_senders
from kvobj.wire.plain_listener import PlainListener
from kvobj.wire.receive_check import choose_receive_mode


def plain_refusal(refusal: Refusal) -> Reply:
    """A refusal as plain text, for servers that speak no S3."""
    name, status = refusal.fault.value
    body = f"{name}: {refusal.detail} (request {refusal.request_id})\n".encode()
    return Reply(
        status,
        (("content-type", "text/plain; charset=utf-8"),),
        b"" if refusal.method == "HEAD" else body,
        log={"error": name, "cause": refusal.detail},
    )


class HttpServer:
    """Serves `handler`. Make it anywhere; everything else on one running event loop.

    `log` gets the request lines (INFO, JSON) and, as its child `errors`, what went wrong. `render_refusal` words what
    this layer answers by itself.
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
        render_refusal: RenderRefusal = plain_refusal,
        receive_mode: ReceiveMode | None = None,
        write_line: Callable[[bytes], None] | None = None,
        repeated: RepeatedRequests | None = None,
        hot: RepeatedRequests | None = None,
    ) -> None:
        """`receive_mode` None: found out at start. `write_line`: see `RequestLog`. `repeated`: who answers such requests, if any
        are to be laid aside; `hot`: those that are answered where they arrive."""
        require_compiled_parser()
        self._settings = settings
        self._clock = clock
        self._errors = log.getChild("errors")
        self._admission = Admission(settings)
        self._instruments = HttpInstruments(
            metrics,
            settings.name,
            connections=lambda: float(self._admission.places),
            in_flight=lambda: float(sum(connection.is_in_flight for connection in self._connections)),
            handshakes=lambda: float(sum(len(listener.handshakes) for listener in self._tls_listeners)),
        )
        self._serving = Serving(
            handler=handler,
            settings=settings,
            clock=clock,
            new_request_id=new_request_id,
            render_refusal=render_refusal,
            gate=RequestGate(
                running=settings.handler_requests, queued=settings.queued_requests, seconds=settings.queue_seconds
            ),
            writer=ReplyWriter(clock, self._errors),
            request_log=RequestLog(log, clock, write_line),
            instruments=self._instruments,
            log=self._errors,
            repeated=repeated,
            hot=hot,
            gathering=Gathering(clock),
        )
        self._receive_mode = receive_mode
        self._plain_listeners: list[PlainListener] = []
        self._tls_listeners: list[TlsListener] = []
        self._is_draining = False
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._header_names: dict[str, str] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._shared = memoryview(bytearray(settings.receive_buffer_bytes))
        self._senders: BodySenders | None = None
        self._receivers: BodyReceivers | None = None
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
        if self._receive_mode is None:
            self._receive_mode = await choose_receive_mode(self._errors)
        self._senders = make_senders(asyncio.get_running_loop(), threads=self._settings.sender_threads)
        self._receivers = make_receivers(asyncio.get_running_loop(), threads=self._settings.receiver_threads)
        for bound in sockets:
            self._tune(bound)
            if ssl_context is None:
                await self._listen(bound)
            else:
                self._listen_with_tls(bound, ssl_context)
        self._ports = tuple(bound.getsockname()[1] for bound in sockets)
        self._schedule_sweep()

    async def _listen(self, bound: socket.socket) -> None:
        listener = PlainListener(
            bound.dup(),
            self._wire,
            self._connected,
            backlog=self._settings.listen_backlog,
            waited=self._instruments.accept_waits.inc,
            log=self._errors,
        )
        self._plain_listeners.append(listener)
        await listener.start()

    def _listen_with_tls(self, bound: socket.socket, context: ssl.SSLContext) -> None:
        serving = TlsServing(
            context=context,
            settings=self._settings,
            admission=self._admission,
            instruments=self._instruments,
            make_wire=self._wire,
            connected=self._connected,
            log=self._errors,
        )
        listener = TlsListener(bound.dup(), serving)
        self._tls_listeners.append(listener)
        listener.start()

    def _wire(self, connected: Callable[[Wire], None]) -> Wire:
        return Wire(
            asyncio.get_running_loop(),
            connected,
            shared=self._shared,
            mode=self.receive_mode,
            senders=self._senders,
            receivers=self._receivers,
        )

    async def drain(self, timeout_seconds: float) -> bool:
        """Accept no more and finish what is in flight; True when all was finished in time.

        Connections that were used lately, or just made, are kept for one more request (up to `parting_seconds`), whose reply
        says that the connection ends; others that are idle are closed at once.
        """
        self._is_draining = True
        self._stop_accepting()
        now = self._clock.monotonic()
        parting = min(self._settings.parting_seconds, timeout_seconds)
        for connection in self._connections:
            connection.drain(now, idle_seconds=self._settings.parting_seconds)
        if await self._ended_within(parting, and_handshakes=True):
            return True
        for connection in self._connections:
            connection.part()
        return await self._ended_within(timeout_seconds - parting)

    async def _ended_within(self, seconds: float, *, and_handshakes: bool = False) -> bool:
        """Wait for the end of all connections, also of those that are still in their TLS handshake where asked to."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while tasks := [*self._connections.values(), *(self._unconnected() if and_handshakes else ())]:
            _, pending = await asyncio.wait(tasks, timeout=max(deadline - loop.time(), 0))
            if pending:
                return False
        return True

    def _unconnected(self) -> list[asyncio.Task[None]]:
        """What was accepted and is no connection yet."""
        handshakes = [task for listener in self._tls_listeners for task in listener.handshakes]
        return [*(task for listener in self._plain_listeners for task in listener.unfinished), *handshakes]

    async def aclose(self) -> None:
        """Stop at once: what is still open is reset, handlers are cancelled. Idempotent."""
        self._stop_accepting()
        for plain in self._plain_listeners:
            await plain.aclose()
        for listener in self._tls_listeners:
            await listener.aclose()
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        self._serving.gathering.close()
        connections = dict(self._connections)
        for connection, task in connections.items():
            connection.wire.reset()
            task.cancel()
        await asyncio.gather(*connections.values(), return_exceptions=True)
        for connection in connections:
            await connection.wire.wait_closed()
        for threads in (self._senders, self._receivers):
            if threads is not None:
                threads.close()

    def sweep(self) -> None:
        """Check every connection's deadline now, and whether descriptors are short; runs by itself every `sweep_seconds`."""
        now = self._clock.monotonic()
        for connection in self._connections:
            connection.sweep(now)
        for listener in self._plain_listeners:
            listener.look()

    def _schedule_sweep(self) -> None:
        loop = asyncio.get_running_loop()

        def sweep_again() -> None:
            self._sweeping = loop.call_later(self._settings.sweep_seconds, sweep_again)
            self.sweep()

        self._sweeping = loop.call_later(self._settings.sweep_seconds, sweep_again)

    def _stop_accepting(self) -> None:
        for plain in self._plain_listeners:
            plain.stop()
        for listener in self._tls_listeners:
            listener.stop()

    def _tune(self, bound: socket.socket) -> None:
        # Inherited by what the listener accepts (Linux).
        if bound.family in (socket.AF_INET, socket.AF_INET6):
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _connected(self, wire: Wire, place: Place | None = None) -> None:
        """Serve a new connection, at the place that it has if it has one already."""
        try:
            if place is None:
                place = self._admission.admit(wire.remote, is_local=wire.is_local)
                if place is None or place.refusal:
                    self._instruments.refused_connections.inc()
            if place is None:
                wire.reset()
            else:
                self._take_in(wire, place)
        except Exception:  # noqa: BLE001 - event loops would log it and leave the socket open, its client waiting for ever
            self._errors.exception("a connection could not be taken in")
            if place is not None:
                self._admission.leave(place)
            wire.reset()

    def _take_in(self, wire: Wire, place: Place) -> None:
        loop = asyncio.get_running_loop()
        settings = self._settings
        if wire.is_local:
            wire.tune(
                send_bytes=settings.local_send_bytes,
                low_water_bytes=settings.local_low_water_bytes,
                welcome_bytes=settings.local_welcome_bytes,
            )
        connection = Connection(wire, HeadReader(loop, settings, names=self._header_names), self._serving)
        if self._is_draining:  # it was accepted, or its TLS handshake had begun, before
            connection.drain(self._clock.monotonic(), idle_seconds=settings.parting_seconds)
        serving = connection.refuse(place.refusal) if place.refusal else connection.serve()
        task = loop.create_task(serving, context=connection.context)
        # From here on nothing fails, so that the place is given back once.
        self._connections[connection] = task
        task.add_done_callback(lambda done: self._ended(connection, done, place))

    def _ended(self, connection: Connection, task: asyncio.Task[None], place: Place) -> None:
        del self._connections[connection]
        self._admission.leave(place)
        if not task.cancelled() and task.exception() is not None:
            self._errors.error("a connection's task failed", exc_info=task.exception())
            connection.wire.reset()
