"""Who serves HTTP for a node: this process alone, or its worker processes. One of the two is made by `serve`."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvobj.api.errors import refusal_reply
from kvobj.api.http import HttpServer
from kvobj.api.kv.events import register_followers
from kvobj.api.service import S3Service
from kvobj.app.fronting import http_settings, s3_settings
from kvobj.app.log import LineWriter
from kvobj.app.node import Node
from kvobj.app.same_host import SameHost
from kvobj.app.upstreams import Fronted
from kvobj.app.worker_orders import S3Orders, TlsPair, WorkerOrders
from kvobj.app.worker_pool import WorkerPool
from kvobj.catalog.rows import ObjectRow
from kvobj.clock import Clock
from kvobj.ids import new_request_id
from kvobj.metrics import Metrics
from kvobj.workers.desk import StoreParts
from kvobj.workers.kept_frames import Keeping
from kvobj.workers.shared_words import SharedWords

if TYPE_CHECKING:
    from kvobj.app.tls import ServedCertificate


class Front(Protocol):
    """Accepts S3's connections from `start` to `drain`."""

    @property
    def receive_mode(self) -> str:
        """How bodies are received (`HttpServer.receive_mode`)."""
        ...

    async def start(self, before_accepting: Callable[[], None]) -> None:
        """Returns when connections are accepted; by all processes, where there are several. `before_accepting` is called when
        nothing else can fail, so that nobody is answered before it."""
        ...

    async def drain(self, timeout_seconds: float) -> bool:
        """Accept no more and finish what is in flight; True when all was finished in time."""
        ...

    async def aclose(self) -> None:
        """End at once. Idempotent."""
        ...


class OneProcess:
    """Implements `Front`: HTTP and the store in one event loop."""

    def __init__(
        self,
        node: Node,
        listeners: Sequence[socket.socket],
        *,
        upstreams: Fronted,
        same_host: SameHost | None,
        tls: ServedCertificate | None,
        clock: Clock,
        metrics: Metrics,
        log: logging.Logger,
    ) -> None:
        metrics.add_families(upstreams.metrics.families)
        register_followers(metrics, node.kv.events)
        self._listeners = listeners
        self._context = None if tls is None else tls.context
        host_id = node.data.store_id.hex()
        self._lines = LineWriter()
        service = S3Service(
            upstreams.store,
            s3_settings(node.settings, host_id=host_id, dram_bytes=node.arena.capacity_bytes),
            clock=clock,
            log=log,
            chunks=upstreams.chunks,
            read_events=node.kv.events.stream,
            same_host=None if same_host is None else (same_host.grants, same_host.levels),
            renews=node.catalog.leases,
            executor=node.hash_executor,
        )
        self._http = HttpServer(
            upstreams.handler(service.handle),
            settings=http_settings(node.settings, "s3"),
            metrics=metrics,
            clock=clock,
            new_request_id=new_request_id,
            log=log.getChild("s3"),
            render_refusal=partial(refusal_reply, host_id=host_id),
            write_line=self._lines,
            repeated=service.repeated,
            hot=service.hot,
        )

    @property
    def receive_mode(self) -> str:
        """See `Front.receive_mode`."""
        return str(self._http.receive_mode)

    async def start(self, before_accepting: Callable[[], None]) -> None:
        """See `Front.start`."""
        before_accepting()
        await self._http.start(self._listeners, self._context)

    async def drain(self, timeout_seconds: float) -> bool:
        """See `Front.drain`."""
        return await self._http.drain(timeout_seconds)

    async def aclose(self) -> None:
        """See `Front.aclose`."""
        await self._http.aclose()
        self._lines.flush()


def worker_processes(
    node: Node,
    listeners: Sequence[socket.socket],
    words: SharedWords,
    *,
    upstreams: Fronted,
    same_host: SameHost | None,
    tls: TlsPair | None,
    clock: Clock,
    metrics: Metrics,
    log: logging.Logger,
) -> WorkerPool:
    """A pool of `[server] workers` processes, which implements `Front`. `words` outlive it. `upstreams` are this
    process's own: workers make theirs. `tls` is a pair that was checked."""
    settings = node.settings
    workers = settings.server.workers
    look = node.catalog.on_settings_changed

    def on_settings_changed() -> None:
        words.note_settings_changed()
        look()

    node.catalog.on_settings_changed = on_settings_changed
    durable, volatile = node.database.directories
    orders = WorkerOrders(
        listeners=(),
        s3=S3Orders.of(
            s3_settings(
                settings,
                host_id=node.data.store_id.hex(),
                dram_bytes=node.arena.capacity_bytes,
                workers=workers,
            )
        ),
        http=http_settings(settings, "s3", workers=workers),
        log=settings.log,
        tls=tls,
        arena=node.arena.directory,
        huge_pages=settings.dram.huge_pages,
        durable=durable,
        volatile=volatile,
        map_bytes=settings.catalog.map_bytes,
        volatile_map_bytes=settings.catalog.volatile_map_bytes,
        wrapping_key=node.kv.wrapping_key,
        levels=None if same_host is None else same_host.levels,
        keeping=Keeping.of(
            dram_bytes=node.arena.capacity_bytes, grace_seconds=settings.gc.grace_seconds, workers=workers
        ),
        upstreams=settings.upstreams,
    )
    hits, hit_bytes = node.instruments.gets.labels("dram", "hit"), node.instruments.bytes.labels("dram", "out")

    def count_hits(reads: int, size_bytes: int) -> None:
        hits.inc(reads)
        hit_bytes.inc(size_bytes)

    writing = node.writing

    def on_read(row: ObjectRow) -> None:
        node.collector.touched(row)
        node.dram_transcoding.touched(row)
        if writing is not None:
            writing.note_read(row)

    def on_hot_read(row: ObjectRow) -> None:
        node.collector.held_and_touched(row)
        node.dram_transcoding.touched(row)
        if writing is not None:
            writing.note_read(row)

    parts = StoreParts(
        catalog=node.catalog,
        store=node.store,
        chunks=node.kv.chunks,
        gate=node.kv.gate,
        tiers=node.read_tier,
        dram=node.dram,
        in_use=node.in_use,
        clock=clock,
        on_asked=node.on_asked,
        on_read=on_read,
        on_hot_read=on_hot_read,
        count_hits=count_hits,
        prepared=node.prepared,
        workers=workers,
        granting=None if same_host is None else same_host.grants,
    )
    pool = WorkerPool(
        workers, parts, orders, listeners=listeners, words=words, log=log, beside=upstreams.metrics.families
    )
    metrics.add_families(pool.families)
    return pool
