"""A worker process: `python -m kvobj.app.worker PARENT PAIR WORDS LISTENER...`, started by the store process (PARENT) with these
descriptors. It waits until it is told what to do, and may wait long: one is always kept ready for the next that dies.

One whose store process is of another version, or that cannot begin to serve, says so in one line of the log and ends with a status
of its own (`worker_orders`).

It serves HTTP over the store process's calls, its own reads of the catalog and its own mapping of the arena, until it is told to
drain or the pair ends. It lives no longer than the store process: the kernel kills it with that (PR_SET_PDEATHSIG), and the
end of the pair ends it at once. Signals are the store process's to answer: those that a terminal or a service manager sends to
all of a group are ignored here.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import uvloop

from kvobj.api.errors import refusal_reply
from kvobj.api.exchange import Exchange
from kvobj.api.http import HttpServer
from kvobj.api.kv.events import Events, register_followers
from kvobj.api.message import Reply
from kvobj.api.operations import ReadEvents
from kvobj.api.service import S3Service
from kvobj.app import cycles
from kvobj.app.log import LineWriter, start_logging
from kvobj.app.upstreams import make_upstreams
from kvobj.app.worker_orders import CANNOT_SERVE, OTHER_VERSION, TlsPair, WorkerOrders, receive_orders
from kvobj.catalog.encoding import CATALOG_TABLES
from kvobj.clock import SystemClock
from kvobj.config.settings import LogSettings
from kvobj.database import ReadDatabase
from kvobj.errors import KvobjError
from kvobj.ids import new_request_id
from kvobj.metrics import Metrics
from kvobj.store.key_wrapping import KeyWrapper
from kvobj.workers.calls import Figure, MetricFamily, Room, StoreCalls, WorkerCalls, WorkerFigures
from kvobj.workers.catalog import WorkerCatalog
from kvobj.workers.channel import LONG_STORE_CALLS, Channel
from kvobj.workers.chunks import RemoteGranting, WorkerChunks
from kvobj.workers.mapped_arena import MappedArena
from kvobj.workers.shared_words import SharedWords
from kvobj.workers.store import WorkerStore
from kvobj.workers.wire import Failure, error_from

if TYPE_CHECKING:
    from kvobj.app.worker_tls import GivenCertificate

HASH_THREADS: Final = 2
STORE_SILENT_SECONDS: Final = 60.0
"""A store process asks every second how a worker is doing: one that says nothing for so long stands still, and nobody knows for how
long. Requests are better answered with 503 then than left waiting."""
_SET_PARENT_DEATH_SIGNAL: Final = 1
_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_REQUESTS: Final = "kvobj_s3_requests_total"
_CONNECTIONS: Final = "kvobj_s3_connections"


def main(arguments: Sequence[str]) -> int:
    """Serve until told to end; the exit status."""
    for each in _IGNORED:
        signal.signal(each, signal.SIG_IGN)
    parent, pair_descriptor, words_descriptor, *listening = (int(argument) for argument in arguments)
    _die_with(parent)
    pair = socket.socket(fileno=pair_descriptor)
    try:
        orders = receive_orders(pair)
    except ConnectionError:
        return 0  # never needed
    if orders is None:
        log = start_logging(LogSettings()).getChild("worker")
        log.error("this worker process is of another version of kvobj than its store process: restart the server")
        return OTHER_VERSION
    listeners = [socket.socket(fileno=listening[number]) for number in orders.listeners]
    for number, descriptor in enumerate(listening):
        if number not in orders.listeners:
            os.close(descriptor)
    log = start_logging(orders.log)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(orders, pair, SharedWords.of(words_descriptor), listeners, log))
    except (KvobjError, OSError) as error:
        log.getChild("worker").error("a worker process cannot serve: %s", error)
        return CANNOT_SERVE
    except Exception:  # noqa: BLE001 - whatever it is, it goes to the log as all else
        log.getChild("worker").exception("a worker process met a defect")
        return 1
    return 0


def _die_with(parent_process: int) -> None:
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent_process:
        os._exit(1)


async def _serve(
    orders: WorkerOrders,
    pair: socket.socket,
    words: SharedWords,
    listeners: Sequence[socket.socket],
    log: logging.Logger,
) -> None:
    worker = Worker(orders, words, log)
    await asyncio.get_running_loop().create_connection(lambda: worker.channel, sock=pair)
    await worker.serve(listeners)


class Worker(WorkerCalls):
    """See the module's text; it serves the store process's calls. Event-loop-only."""

    def __init__(self, orders: WorkerOrders, words: SharedWords, log: logging.Logger) -> None:
        self._orders = orders
        self._log = log
        self._clock, self._metrics = SystemClock(), Metrics()
        self._executor = ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="hash")
        self._tls = _given_certificate(orders)
        self._is_over = asyncio.Event()
        self.channel = Channel(
            serves=self,
            interface=WorkerCalls,
            calls=StoreCalls,
            log=log.getChild("worker"),
            long_calls=LONG_STORE_CALLS,
            silent_seconds=STORE_SILENT_SECONDS,
            on_unwanted=self._unwanted,
            on_answer=self._answered,
            on_lost=_end_at_once,
        )
        self._calls = self.channel.proxy(StoreCalls)
        self._catalog = self._make_catalog(words)
        self._store = self._make_store()
        self._upstreams = make_upstreams(
            orders.upstreams,
            self._store,
            self._make_chunks(),
            store_id=orders.s3.host_id,
            has_remote=orders.s3.has_remote,
            clock=self._clock,
            metrics=self._metrics,
            log=log,
        )
        self._events = Events(self._catalog.as_catalog())
        register_followers(self._metrics, self._events)
        self._lines = LineWriter(is_shared=True)
        self._http = self._make_http(self._make_service())

    def _make_catalog(self, words: SharedWords) -> WorkerCatalog:
        orders = self._orders
        database = ReadDatabase.open_for_reading(
            durable=orders.durable,
            volatile=orders.volatile,
            tables=CATALOG_TABLES,
            map_bytes=orders.map_bytes,
            volatile_map_bytes=orders.volatile_map_bytes,
        )
        return WorkerCatalog(database, self._calls, words)

    def _make_store(self) -> WorkerStore:
        orders = self._orders
        return WorkerStore(
            catalog=self._catalog.as_catalog(),
            channel=self.channel,
            calls=self._calls,
            arena=MappedArena(orders.arena, huge_pages=orders.huge_pages),
            keeping=orders.keeping,
            executor=self._executor,
        )

    def _make_chunks(self) -> WorkerChunks:
        return WorkerChunks(
            catalog=self._catalog,
            store=self._store,
            channel=self.channel,
            calls=self._calls,
            wrapper=KeyWrapper(self._orders.wrapping_key),
            clock=self._clock,
            executor=self._executor,
        )

    def _make_service(self) -> S3Service:
        orders = self._orders
        return S3Service(
            self._upstreams.store,
            orders.s3.settings(),
            clock=self._clock,
            log=self._log,
            chunks=self._upstreams.chunks,
            read_events=self._read_events,
            same_host=None if orders.levels is None else (RemoteGranting(self._calls), orders.levels),
            executor=self._executor,
        )

    def _make_http(self, service: S3Service) -> HttpServer:
        return HttpServer(
            self._upstreams.handler(service.handle),
            settings=self._orders.http,
            metrics=self._metrics,
            clock=self._clock,
            new_request_id=new_request_id,
            log=self._log.getChild("s3"),
            render_refusal=partial(refusal_reply, host_id=self._orders.s3.host_id),
            write_line=self._lines,
        )

    async def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Accept connections from when it is told to, until it is told to drain."""
        self._listeners = listeners
        cycles.search_from_now_on()
        self.channel.tell("ready")
        await self._is_over.wait()
        await self._http.aclose()
        self._lines.flush()
        await self._upstreams.aclose()
        self._store.frames.kept.clear()
        self._store.spare.close()
        await self._store.later.drain()
        await self.channel.aclose()
        self._executor.shutdown(wait=False)

    # -- what the store process asks -----------------------------------------------------------------------------
    def filled(self, handle: int, filled: int) -> None:
        """See `WorkerCalls.filled`."""
        self._store.frames.filled(handle, filled)

    def frame_failed(self, handle: int, failure: Failure) -> None:
        """See `WorkerCalls.frame_failed`."""
        self._store.frames.failed(handle, error_from(failure))

    def transfer_failed(self, handle: int, failure: Failure) -> None:
        """See `WorkerCalls.transfer_failed`."""
        self._store.transfer_failed(handle, error_from(failure))

    def room(self, handle: int, blob: int, room: Room) -> None:
        """See `WorkerCalls.room`."""
        self._store.room(handle, blob, room)

    async def accept(self) -> str:
        """See `WorkerCalls.accept`."""
        await self._http.start(self._listeners, None if self._tls is None else self._tls.context)
        return str(self._http.receive_mode)

    async def reload(self, certificate: bytes, key: bytes) -> None:
        """See `WorkerCalls.reload`."""
        if self._tls is not None:
            self._tls.replace(TlsPair(certificate, key))

    async def figures(self) -> WorkerFigures:
        """See `WorkerCalls.figures`."""
        families = self._metrics.families()
        samples = [sample for family in families for sample in family.samples]
        return WorkerFigures(
            cpu_seconds=time.process_time(),
            requests=int(sum(value for name, _, value in samples if name == _REQUESTS)),
            connections=int(sum(value for name, _, value in samples if name == _CONNECTIONS)),
            metrics=[
                MetricFamily(
                    family.name,
                    family.documentation,
                    family.kind,
                    [Figure(name, labels, value) for name, labels, value in family.samples],
                )
                for family in families
            ],
            upstreams=self._upstreams.health(),
        )

    async def drain(self, timeout_seconds: float) -> bool:
        """See `WorkerCalls.drain`."""
        for each in self._listeners:
            each.close()
        await self._events.aclose()
        is_done = await self._http.drain(timeout_seconds)
        self._is_over.set()
        return is_done

    async def _read_events(self, exchange: Exchange, operation: ReadEvents) -> Reply:
        await self._catalog.history.freshen()
        return await self._events.stream(exchange, operation)

    def _answered(self, result: object) -> None:
        self._store.answered(result)

    def _unwanted(self, call: str, result: object) -> None:
        self._store.unwanted(call, result)


def _given_certificate(orders: WorkerOrders) -> GivenCertificate | None:
    if orders.tls is None:
        return None
    from kvobj.app.worker_tls import GivenCertificate  # noqa: PLC0415 - 50 ms, which a start without TLS need not wait for

    return GivenCertificate(orders.tls)


def _end_at_once() -> None:
    """The store process is gone, or has let this one go: nothing that is open here can be finished."""
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
