"""`kvobj serve`: two HTTP servers around a node, from the first signal to the last flush.

SIGTERM and SIGINT drain: no new connections, requests in flight finish, what is only in memory is written down, exit 0. A
second interrupt from the keyboard ends at once (a second SIGTERM changes nothing); nothing that was acknowledged is lost
then either, since a start adopts what is in memory. SIGUSR2 counts on that: it drains and ends, and the next start has it all,
dram still warm. SIGHUP reads the TLS certificates and their keys again; worker processes are given what was checked here.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

import uvloop

from kvobj import __version__
from kvobj.announcement import announcement
from kvobj.api.admin_api import AdminService
from kvobj.api.admin_authentication import AdminAuthentication
from kvobj.api.exchange import S3Settings
from kvobj.api.http import HttpServer
from kvobj.api.message import Handler, Reply, RequestBody, RequestHead
from kvobj.api.sigv4 import SignatureVerifier
from kvobj.api.users import UserDirectory
from kvobj.app import cycles
from kvobj.app.admin_state import NodeView
from kvobj.app.front import Front, OneProcess, worker_processes
from kvobj.app.fronting import http_settings
from kvobj.app.hbm import check_hbm
from kvobj.app.listening import Listeners, address_of
from kvobj.app.lm_listener import start_lm
from kvobj.app.log import start_logging
from kvobj.app.node import Node, flush, housekeeping, open_node
from kvobj.app.open_files import allow_open_files
from kvobj.app.readiness import READY, STOPPING, tell
from kvobj.app.same_host import start_same_host
from kvobj.app.signals import ServerSignals
from kvobj.app.upstream_state import upstream_statuses
from kvobj.app.upstreams import Fronted, check_upstreams, make_upstreams
from kvobj.app.worker_orders import TlsPair
from kvobj.app.worker_pool import WorkerPool
from kvobj.app.worker_view import WorkersView
from kvobj.app.zmq_events import ZmqEvents, require_zmq
from kvobj.clock import Clock, SystemClock
from kvobj.config.settings import Settings, TlsSettings
from kvobj.data_directory import DataDirectory
from kvobj.errors import ConfigurationError
from kvobj.ids import new_request_id
from kvobj.metrics import Metrics
from kvobj.tiers.remote.bucket import access_to
from kvobj.workers.shared_words import SharedWords

if TYPE_CHECKING:
    from kvobj.app.tls import ServedCertificate

FLUSH_SECONDS = 600.0
_REMOTE_SHARE = 4.0
"""One part in so many of the drain's time is for who waits for the remote."""


def run(settings: Settings, environment: Mapping[str, str]) -> int:
    """Serve until a signal says to stop; the process's exit status. `environment` may name sockets to take over."""
    log = start_logging(settings.log)
    allow_open_files(settings.limits, log, workers=settings.server.workers)
    gc.disable()  # until the start is done: see `cli`, which has done so too where it was the one that called
    with DataDirectory.open(settings.server.data) as data, uvloop_runner() as runner:
        runner.run(_serve(settings, data, environment, log))
    return 0


def check(settings: Settings) -> None:
    """What a start finds wrong with its configuration alone, beside what parsing it found: certificates and CA bundles that cannot
    be used, extras and devices that are missing. `ConfigurationError`; nothing is logged, and no server is asked anything."""
    quiet = logging.getLogger("kvobj.check")
    quiet.setLevel(logging.CRITICAL + 1)
    _Certificates.load(settings, SystemClock(), Metrics(), quiet)
    if settings.remote is not None:
        access_to(settings.remote)
    check_upstreams(settings.upstreams)
    if settings.events.zmq is not None:
        require_zmq()
    asyncio.run(check_hbm(settings.hbm))


def uvloop_runner() -> asyncio.Runner:
    """An asyncio runner on uvloop."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _serve(settings: Settings, data: DataDirectory, environment: Mapping[str, str], log: logging.Logger) -> None:
    clock, metrics = SystemClock(), Metrics()
    tls = _Certificates.load(settings, clock, metrics, log)
    signals = ServerSignals.listen(on_hangup=tls.reload)
    listeners = Listeners.open(settings, environment)
    try:
        async with open_node(settings, data, clock=clock, metrics=metrics, log=log) as node:
            await _serve_node(
                node,
                listeners,
                tls=tls,
                signals=signals,
                environment=environment,
                clock=clock,
                metrics=metrics,
                log=log,
            )
            if signals.keeps_memory:
                _end_as_it_is(log)
            is_written = await flush(node, timeout_seconds=FLUSH_SECONDS)
            if not is_written:
                log.warning("not everything could be written down before the stop")
        log.info("stopped%s", ": everything is written down" if is_written else "")
    finally:
        listeners.close()


@dataclass(frozen=True, slots=True)
class _Certificates:
    """Those of the two ports; None for one that speaks plain HTTP. `for_workers`: the pair that worker processes are given, None
    where there are none."""

    s3: ServedCertificate | None
    admin: ServedCertificate | None
    for_workers: TlsPair | None
    log: logging.Logger

    @classmethod
    def load(cls, settings: Settings, clock: Clock, metrics: Metrics, log: logging.Logger) -> Self:
        """Those that the configuration names. `ConfigurationError` where one cannot be used."""
        s3, admin = settings.server.tls, settings.admin.tls
        if s3 is None and admin is None:
            return cls(None, None, None, log)
        # Imported here: reading certificates takes 50 ms to load, which a start without TLS need not wait for.
        from kvobj.app.tls import ServedCertificate  # noqa: PLC0415 - see above

        return cls(
            None if s3 is None else ServedCertificate.load(s3, clock, metrics, log),
            None if admin is None else ServedCertificate.load(admin, clock, metrics, log, section="admin"),
            None if s3 is None or settings.server.workers == 1 else _pair_for_workers(s3),
            log,
        )

    def reload(self) -> None:
        """Read them again, on a hangup."""
        for each in (self.admin, self.s3):
            if each is not None:
                each.reload()
        if self.admin is None and self.s3 is None:
            self.log.info("hangup: there is no TLS certificate to read again")


def _pair_for_workers(settings: TlsSettings) -> TlsPair:
    from kvobj.app.worker_tls import is_usable  # noqa: PLC0415 - as in `_Certificates.load`

    pair = TlsPair.read(settings)
    if not is_usable(pair):  # it was a moment ago
        raise ConfigurationError([f"server.tls_certificate: {settings.certificate}: was replaced while it was read"])
    return pair


def _end_as_it_is(log: logging.Logger) -> NoReturn:
    """End as a crash does, which every start copes with: the arena stays, and nothing waits to be written down."""
    log.info("stopped: the next start takes over what is in memory")
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


async def _serve_node(
    node: Node,
    listeners: Listeners,
    *,
    tls: _Certificates,
    signals: ServerSignals,
    environment: Mapping[str, str],
    clock: Clock,
    metrics: Metrics,
    log: logging.Logger,
) -> None:
    settings = node.settings
    async with AsyncExitStack() as stack:
        upstreams = _with_upstreams(node, clock=clock, log=log)
        stack.push_async_callback(upstreams.aclose)
        same_host = start_same_host(node, upstreams.chunks, clock=clock, metrics=metrics, log=log)
        if same_host is not None:
            stack.push_async_callback(same_host.server.aclose)
        s3: Front
        pool: WorkerPool | None = None
        if settings.server.workers == 1:
            s3 = OneProcess(
                node,
                listeners.s3,
                upstreams=upstreams,
                same_host=same_host,
                tls=tls.s3,
                clock=clock,
                metrics=metrics,
                log=log,
            )
        else:
            words = SharedWords.make()
            stack.callback(words.close)
            s3 = pool = worker_processes(
                node,
                listeners.s3,
                words,
                upstreams=upstreams,
                same_host=same_host,
                tls=tls.for_workers,
                clock=clock,
                metrics=metrics,
                log=log,
            )
            if settings.server.tls is not None:
                signals.on_hangup = _Reloads(pool, tls, settings.server.tls).begin
        stack.push_async_callback(s3.aclose)
        if settings.events.zmq is not None:
            publisher = ZmqEvents.open(node.catalog.history, settings.events, clock=clock, log=log)
            stack.push_async_callback(publisher.aclose)
            publisher.start()
        view = (NodeView if pool is None else WorkersView)(
            node,
            clock=clock,
            metrics=metrics,
            receive_mode=lambda: s3.receive_mode,
            workers=pool,
            upstreams=lambda: upstream_statuses(
                settings.upstreams,
                [*upstreams.health(), *(() if pool is None else pool.upstreams())],
                upstreams.metrics.families if pool is None else pool.families,
            ),
        )
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
            has_remote=settings.remote is not None,
            chunks=node.kv.chunks,
        )
        stack.push_async_callback(admin_service.aclose)
        admin = HttpServer(
            admin_service.handle if pool is None else _refreshed(admin_service.handle, pool),
            settings=http_settings(settings, "admin"),
            metrics=metrics,
            clock=clock,
            new_request_id=new_request_id,
            log=log.getChild("admin"),
        )
        stack.push_async_callback(admin.aclose)
        await admin.start([listeners.admin], None if tls.admin is None else tls.admin.context)
        lm = None
        if listeners.lm is not None:
            lm = await start_lm(node, upstreams.store, listeners.lm, clock=clock, metrics=metrics, log=log)
            stack.push_async_callback(lm.aclose)
        await s3.start(view.note_ready)  # who is answered finds the node ready
        cycles.search_from_now_on()
        tell(environment, READY)  # before the ready line: who reads that may end the process at once
        await _announce(node, listeners, view, log)
        async with housekeeping(node):
            await signals.wait_for_stop()
            view.ready = False
        tell(environment, STOPPING)
        log.info("stopping: finishing requests in flight")
        # What connects from here on waits for the next process where another holds the sockets, and else is better refused.
        listeners.close_s3()
        listeners.close_lm()
        await node.kv.events.aclose()  # readers that follow would hold up the drain until its deadline
        node.store.following.stop()
        if node.writing is not None:
            # Who waits for the remote is told what was reached, while the drain has time for that.
            node.writing.shared.hurry(settings.limits.drain_timeout_seconds / _REMOTE_SHARE)
        parting = [server.drain(settings.limits.drain_timeout_seconds) for server in (s3, lm) if server is not None]
        await asyncio.gather(*parting)


def _with_upstreams(node: Node, *, clock: Clock, log: logging.Logger) -> Fronted:
    """Store and chunks as this process serves them. Their metrics are apart: workers have the same, and all are shown as one."""
    return make_upstreams(
        node.settings.upstreams,
        node.store,
        node.kv.chunks,
        store_id=node.data.store_id.hex(),
        has_remote=node.remote is not None,
        clock=clock,
        metrics=Metrics(),
        log=log,
    )


class _Reloads:
    """A new certificate, to the workers first: once this process says that it is read, it is in use. They are told of none that
    cannot be used."""

    def __init__(self, pool: WorkerPool, tls: _Certificates, settings: TlsSettings) -> None:
        self._pool = pool
        self._tls = tls
        self._settings = settings
        self._running: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """On a hangup."""
        task = asyncio.create_task(self._run(), name="reload")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self) -> None:
        from kvobj.app.worker_tls import is_usable  # noqa: PLC0415 - as in `_Certificates.load`

        read = None
        while read != (pair := TlsPair.read(self._settings)):  # again where the files changed while workers were told
            read = pair
            if is_usable(pair):
                await self._pool.reload(pair)
            self._tls.reload()


def _refreshed(handle: Handler, pool: WorkerPool) -> Handler:
    """The handler, with figures of workers that are of the moment of the request."""

    async def refreshed(head: RequestHead, body: RequestBody) -> Reply:
        if head.target.startswith("/metrics"):
            await pool.refresh()
        return await handle(head, body)

    return refreshed


async def _announce(node: Node, listeners: Listeners, view: NodeView, log: logging.Logger) -> None:
    """Tell whoever waits that requests are answered, and the log what this start found."""
    settings = node.settings
    scheme = "http" if settings.server.tls is None else "https"
    url = f"{scheme}://{address_of(listeners.s3[0])}"
    admin_scheme = "http" if settings.admin.tls is None else "https"
    admin_url = f"{admin_scheme}://{address_of(listeners.admin)}"
    node.data.write_endpoints(s3=url, admin=admin_url)
    sys.stdout.write(announcement(settings, url, node.data.credentials_path, command=_admin_command()) + "\n")
    sys.stdout.flush()
    memory = "new" if node.database.volatile_fresh else f"taken over, {node.recovery.rows} objects in it alone"
    log.info(
        "ready: kvobj %s on %s, admin port on %s, data in %s, memory %s",
        __version__,
        url,
        admin_url,
        node.data.path,
        memory,
    )
    lost = node.recovery.dropped_rows + node.recovery.dropped_orphans
    if lost:
        log.warning("%d objects are gone: they were only in memory, or followed on such a one", lost)
    for note in await view.notes():
        log.warning("%s", note)


def _admin_command() -> str:
    """How a shell finds `kvobj-admin`: by its name, or beside this interpreter where the environment is not activated."""
    name = "kvobj-admin"
    beside = Path(sys.executable).with_name(name)
    return name if shutil.which(name) is not None or not beside.exists() else str(beside)


def _regions(settings: Settings) -> frozenset[str]:
    return S3Settings(region=settings.server.region).regions
