"""`kvobj serve`: two HTTP servers around a node, from the first signal to the last flush.

SIGTERM and SIGINT drain: no new connections, requests in flight finish, what is only in memory is written down, exit 0. A
second interrupt from the keyboard ends at once (a second SIGTERM changes nothing); nothing that was acknowledged is lost
then either, since a start adopts what is in memory.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import ssl
import sys
from contextlib import AsyncExitStack

import uvloop

from kvobj.announcement import announcement
from kvobj.api.admin_api import AdminService
from kvobj.api.admin_authentication import AdminAuthentication
from kvobj.api.errors import bad_request
from kvobj.api.exchange import S3Settings
from kvobj.api.http import HttpServer, HttpSettings
from kvobj.api.request import HostRules
from kvobj.api.service import S3Service
from kvobj.api.sigv4 import SignatureVerifier
from kvobj.api.users import UserDirectory
from kvobj.app.admin_state import NodeView
from kvobj.app.log import line_writer, start_logging
from kvobj.app.node import Node, flush, housekeeping, open_node
from kvobj.app.zmq_events import ZmqEvents
from kvobj.clock import Clock, SystemClock
from kvobj.config.settings import ListenAddress, Settings, TlsSettings
from kvobj.data_directory import DataDirectory
from kvobj.errors import ConfigurationError
from kvobj.ids import new_request_id
from kvobj.metrics import Metrics

FLUSH_SECONDS = 600.0


def run(settings: Settings) -> int:
    """Serve until a signal says to stop; the process's exit status."""
    log = start_logging(settings.log)
    # A start makes a million objects that all stay: collections that walk them again and again took a third of its time.
    gc.disable()
    with DataDirectory.open(settings.server.data) as data, uvloop_runner() as runner:
        runner.run(_serve(settings, data, log))
    return 0


def uvloop_runner() -> asyncio.Runner:
    """An asyncio runner on uvloop."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _serve(settings: Settings, data: DataDirectory, log: logging.Logger) -> None:
    clock, metrics = SystemClock(), Metrics()
    stop = _stop_on_signals()
    sockets = _Sockets.bind(settings)
    try:
        async with open_node(settings, data, clock=clock, metrics=metrics, log=log) as node:
            await _serve_node(node, sockets, stop=stop, clock=clock, metrics=metrics, log=log)
            if not await flush(node, timeout_seconds=FLUSH_SECONDS):
                log.warning("not everything could be written down before the stop")
    finally:
        sockets.close()


async def _serve_node(
    node: Node, sockets: _Sockets, *, stop: asyncio.Event, clock: Clock, metrics: Metrics, log: logging.Logger
) -> None:
    settings = node.settings
    async with AsyncExitStack() as stack:
        s3 = HttpServer(
            _s3_service(node, clock, log).handle,
            settings=_http_settings(settings, "s3"),
            metrics=metrics,
            clock=clock,
            new_request_id=new_request_id,
            log=log.getChild("s3"),
            bad_request=bad_request,
            write_line=line_writer(),
        )
        stack.push_async_callback(s3.aclose)
        if settings.events.zmq is not None:
            publisher = ZmqEvents.open(node.catalog.history, settings.events, clock=clock, log=log)
            stack.push_async_callback(publisher.aclose)
            publisher.start()
        view = NodeView(node, clock=clock, metrics=metrics, receive_mode=lambda: str(s3.receive_mode))
        admin_service = AdminService(
            view=view,
            catalog=node.catalog,
            authenticate=AdminAuthentication(
                UserDirectory(node.catalog, clock), SignatureVerifier(clock), regions=_regions(settings)
            ),
            metrics=metrics,
            clock=clock,
            region=settings.server.region,
            logger=log,
        )
        stack.push_async_callback(admin_service.aclose)
        admin = HttpServer(
            admin_service.handle,
            settings=_http_settings(settings, "admin"),
            metrics=metrics,
            clock=clock,
            new_request_id=new_request_id,
            log=log.getChild("admin"),
        )
        stack.push_async_callback(admin.aclose)
        await admin.start([sockets.admin])
        await s3.start([sockets.s3], _tls(settings.server.tls))
        # Start-up's objects live as long as the process: collections need not walk them again.
        gc.freeze()
        gc.enable()
        _announce(node, sockets)
        view.ready = True
        async with housekeeping(node):
            await stop.wait()
            view.ready = False
        log.info("stopping: finishing requests in flight")
        await node.kv.events.aclose()  # readers that follow would hold up the drain until its deadline
        await s3.drain(settings.limits.drain_timeout_seconds)


def _announce(node: Node, sockets: _Sockets) -> None:
    settings = node.settings
    scheme = "http" if settings.server.tls is None else "https"
    url = f"{scheme}://{_address(sockets.s3)}"
    node.data.write_endpoints(s3=url, admin=f"http://{_address(sockets.admin)}")
    sys.stdout.write(announcement(settings, url, node.data.credentials_path) + "\n")
    sys.stdout.flush()


def _s3_service(node: Node, clock: Clock, log: logging.Logger) -> S3Service:
    server = node.settings.server
    rules = HostRules(
        hosts=dict(server.hosts),
        domains=server.domains,
        path_style=frozenset({"localhost", server.listen.host.lower()}),
        default_bucket=server.default_bucket,
    )
    settings = S3Settings(region=server.region, host_rules=rules, host_id=node.data.store_id.hex())
    return S3Service(
        node.store,
        settings,
        clock=clock,
        log=log,
        chunks=node.kv.chunks,
        read_events=node.kv.events.stream,
        executor=node.hash_executor,
    )


def _regions(settings: Settings) -> frozenset[str]:
    return S3Settings(region=settings.server.region).regions


def _http_settings(settings: Settings, name: str) -> HttpSettings:
    limits = settings.limits
    return HttpSettings(
        name=name,
        request_line_bytes=limits.request_line_bytes,
        head_bytes=limits.request_line_bytes + limits.header_bytes,
        header_fields=limits.header_fields,
        header_seconds=limits.header_timeout_seconds,
        keep_alive_seconds=limits.idle_timeout_seconds,
        body_stall_seconds=limits.progress_timeout_seconds,
        send_stall_seconds=limits.progress_timeout_seconds,
        connections=limits.connections,
        handler_requests=limits.concurrent_requests,
        queue_seconds=limits.reserve_timeout_seconds,
    )


def _tls(settings: TlsSettings | None) -> ssl.SSLContext | None:
    if settings is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.certificate, settings.key)
    except OSError as error:
        raise ConfigurationError([f"server.tls_certificate: cannot be loaded: {error}"]) from error
    return context


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        if stop.is_set():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    return stop


class _Sockets:
    """Both listening sockets, bound before anything is opened, so that a port in use is told at once."""

    def __init__(self, s3: socket.socket, admin: socket.socket) -> None:
        self.s3 = s3
        self.admin = admin

    @classmethod
    def bind(cls, settings: Settings) -> _Sockets:
        s3 = _bound(settings.server.listen, "server.listen")
        try:
            return cls(s3, _bound(settings.admin.listen, "admin.listen"))
        except BaseException:
            s3.close()
            raise

    def close(self) -> None:
        self.s3.close()
        self.admin.close()


def _bound(address: ListenAddress, path: str) -> socket.socket:
    try:
        ((family, _, _, _, where), *_) = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(where)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise ConfigurationError([f"{path}: cannot listen on {address}: {error.strerror}"]) from error
    return bound


def _address(bound: socket.socket) -> ListenAddress:
    host, port = bound.getsockname()[:2]
    return ListenAddress(host, port)
