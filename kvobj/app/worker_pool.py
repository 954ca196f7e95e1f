"""The worker processes of a node, as the store process has them: started, watched, replaced, drained; and their figures.

A worker that dies is replaced at once, one that dies again within seconds after a pause that doubles; one that answers nothing for
`SILENT_SECONDS` is killed first. One process is kept idle for the next that dies. What a worker held is given back when its process
is gone, so that nobody writes into memory that is given to others. Event-loop-only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from msgspec.structs import replace as replace_struct

from kvobj.api.admin_view import WorkerStatus
from kvobj.app.worker_orders import ENDS, TlsPair, WorkerOrders, send_orders
from kvobj.errors import KvobjError, UnavailableError
from kvobj.metrics import Family, summed
from kvobj.store.upstream.health import UpstreamHealth
from kvobj.workers.calls import WorkerFigures
from kvobj.workers.channel import Silence
from kvobj.workers.desk import Desk, StoreParts
from kvobj.workers.shared_words import SharedWords

START_SECONDS: Final = 60.0
"""So long one worker may take to be ready, and the next after it: all of them share the cores, so that many take longer in all."""
STARTING_MAX: Final = 2 * len(os.sched_getaffinity(0))
"""So many start at once: more would each take as much longer, and the first be as late as the last."""
SILENT_SECONDS: Final = 10.0
QUIET_SECONDS: Final = 5.0
"""Who has said nothing for so long, and is asked every second, stands still: it counts as serving no longer."""
REPLACING_SECONDS: Final = 2.0
"""For so long after the last that served has ended, the next is taken to be on its way: the idle process takes a tenth of it, one
that is started from nothing half."""
_LOOK_SECONDS: Final = 1.0
_FIGURES_SECONDS: Final = 2.0
_END_SECONDS: Final = 5.0
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 5.0
_CALM_SECONDS: Final = 10.0
"""Who lived for so long is replaced at once."""
_SHORT_LIVES: Final = 2
"""So many in a row are no accident any more: an operator is told."""


@dataclass(frozen=True, slots=True)
class _Past:
    """What processes of one place did that have ended."""

    cpu_seconds: float = 0.0
    requests: int = 0
    metrics: tuple[Family, ...] = ()


class _Process:
    """One worker process, from when it was told what to do until it is reaped. `tls`: the pair that it was told to use."""

    def __init__(self, desk: Desk, launched: _Launched, can_accept: asyncio.Future[None], tls: TlsPair | None) -> None:
        self.desk = desk
        self.tls = tls
        self.pid = launched.process.pid
        self.started_at = asyncio.get_running_loop().time()
        self.can_accept = can_accept
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.figures = WorkerFigures(0.0, 0, 0, [])
        self._silence = Silence(self.started_at)
        self._process = launched.process
        self._pidfd = launched.pidfd
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.ended.set_result(self._process.wait())

    @property
    def is_accepting(self) -> bool:
        """It was told to accept connections, and lives."""
        return self.ready.done() and not self.ended.done()

    @property
    def is_heard(self) -> bool:
        """It has said something lately. What ended is judged as of now: ask at once."""
        return self.silent_seconds(self.desk.channel.heard_at) <= QUIET_SECONDS

    @property
    def is_serving(self) -> bool:
        """It accepts connections, and does not stand still."""
        return self.is_accepting and self.is_heard

    def silent_seconds(self, since: float) -> float:
        """For how long it has said nothing, if it spoke then the last time; while this process stood still itself nobody could
        have heard it. To be asked every few seconds (`Silence`), which who watches it does."""
        return self._silence.seconds(asyncio.get_running_loop().time(), since)

    def kill(self) -> None:
        """SIGKILL, if it lives."""
        if not self.ended.done():
            self._process.kill()

    async def look(self) -> None:
        """Ask how it is doing; what does not answer in time keeps the figures of before."""
        self.desk.count_hits()
        with suppress(KvobjError, TimeoutError):
            async with asyncio.timeout(_FIGURES_SECONDS):
                self.figures = await self.desk.worker.figures()


@dataclass(frozen=True, slots=True)
class _Launched:
    """A process, this end of its pair, and what tells of its end, before it is told what to do."""

    process: subprocess.Popen[bytes]
    pair: socket.socket
    pidfd: int

    def end(self) -> None:
        """It is not needed."""
        self.pair.close()
        os.close(self.pidfd)
        self.process.kill()
        self.process.wait()


class _Place:
    """One of the node's workers: the process that is it now, and those that were."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: _Process | None = None
        self.past = _Past()
        self.restarts = 0
        self.short_lives = 0
        """In a row, up to the last."""
        self.last_end = ""

    @property
    def is_failing(self) -> bool:
        """Its processes end soon, one after the other, and none accepts connections now."""
        return self.short_lives >= _SHORT_LIVES and (self.process is None or not self.process.is_accepting)

    def note_end(self, process: _Process, status: int, *, is_calm: bool) -> None:
        """The process has ended with this status; `is_calm`: after some time."""
        self.short_lives = 0 if is_calm else self.short_lives + 1
        figures = process.figures
        self.past = _Past(
            self.past.cpu_seconds + figures.cpu_seconds,
            self.past.requests + figures.requests,
            tuple(summed([*self.past.metrics, *_families(figures)], counters_only=True)),
        )
        if status < 0:
            self.last_end = signal.Signals(-status).name
        else:
            self.last_end = f"status {status}: {ENDS[status]}" if status in ENDS else f"status {status}"

    def status(self) -> WorkerStatus:
        """As `status` shows it."""
        process = self.process
        figures = WorkerFigures(0.0, 0, 0, []) if process is None else process.figures
        return WorkerStatus(
            pid=0 if process is None else process.pid,
            is_ready=process is not None and process.is_serving,
            requests=self.past.requests + figures.requests,
            connections=figures.connections,
            cpu_seconds=self.past.cpu_seconds + figures.cpu_seconds,
            restarts=self.restarts,
            last_end=self.last_end,
        )


class WorkerPool:
    """See the module's text. `orders` are the same for all; `listeners` are inherited by them. `beside`: metrics of this process
    that workers have too."""

    def __init__(
        self,
        count: int,
        parts: StoreParts,
        orders: WorkerOrders,
        *,
        listeners: Sequence[socket.socket],
        words: SharedWords,
        log: logging.Logger,
        beside: Callable[[], Iterable[Family]] = tuple,
    ) -> None:
        self._beside = beside
        self._parts = parts
        self._orders = orders
        self._listeners = listeners
        self._words = words
        self._log = log.getChild("workers")
        self._places = [_Place(number) for number in range(count)]
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._receive_mode = ""
        self._spare: _Launched | None = None
        self._spare_due = 0.0
        self._served_at = -REPLACING_SECONDS
        self._turns = asyncio.Semaphore(STARTING_MAX)
        self._start_limit: asyncio.Timeout | None = None
        self._progressed_at = 0.0
        """When a worker was ready last, of those that the node waits for at its start."""
        self._all_can: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._may_accept = asyncio.Event()
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def receive_mode(self) -> str:
        """How workers receive bodies (`HttpServer.receive_mode`)."""
        return self._receive_mode

    @property
    def is_serving(self) -> bool:
        """Whether connections are served, by one worker at least; still for a moment (`REPLACING_SECONDS`) after the last has
        ended, in which the next takes its place."""
        if any(process.is_serving for process in self._processes()):
            return True
        return asyncio.get_running_loop().time() - self._served_at < REPLACING_SECONDS

    async def start(self, before_accepting: Callable[[], None]) -> None:
        """See `Front.start`: all can accept before any does. `UnavailableError` where one ends before, or the next takes too long
        (`START_SECONDS`)."""
        for place in self._places:
            self._tasks.append(asyncio.create_task(self._keep(place), name=f"worker-{place.number}"))
        try:
            async with asyncio.timeout(START_SECONDS) as self._start_limit:
                await self._all_can
                before_accepting()
                self._may_accept.set()
                await self._first
        except TimeoutError as error:
            raise UnavailableError("a worker process does not start", seconds=START_SECONDS) from error
        finally:
            self._start_limit = None

    def _note_progress(self) -> None:
        """A worker is ready: the next has as long again."""
        if self._start_limit is not None and not self._start_limit.expired():
            self._progressed_at = asyncio.get_running_loop().time()
            self._start_limit.reschedule(self._progressed_at + START_SECONDS)

    # -- one worker ----------------------------------------------------------------------------------------------
    async def _keep(self, place: _Place) -> None:
        """Have a worker in this place until the node stops."""
        pause_seconds = 0.0
        loop = asyncio.get_running_loop()
        while True:
            await self._turns.acquire()
            if self._is_stopping:
                self._turns.release()
                return
            try:
                process = place.process = await self._spawn(place.number)
            except OSError as error:  # no process or descriptor to be had now
                self._turns.release()
                self._log.error("a worker process cannot be started, will retry: %s", error)
                await asyncio.sleep(_LONGEST_PAUSE_SECONDS)
                continue
            process.can_accept.add_done_callback(lambda _: self._turns.release())
            admitting = asyncio.create_task(self._admit(process), name=f"worker-{place.number}-admit")
            status = await self._watch(process)
            if process.ready.done() and process.is_heard:
                self._served_at = loop.time()
            admitting.cancel()
            process.can_accept.cancel()  # its turn is over, if it still had it
            is_calm = loop.time() - process.started_at >= _CALM_SECONDS
            await process.desk.aclose()
            place.note_end(process, status, is_calm=is_calm)
            place.process = None
            if self._is_stopping:
                return
            if not self._first.done() and not process.ready.done():
                for waiting in (self._all_can, self._first):
                    if not waiting.done():
                        waiting.set_exception(
                            UnavailableError("a worker process ended at its start", end=place.last_end)
                        )
                        return
            place.restarts += 1
            pause_seconds = (
                0.0 if is_calm else min(max(2 * pause_seconds, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
            )
            self._log.error(
                "worker process %d ended (%s); the next starts in %.1f s", process.pid, place.last_end, pause_seconds
            )
            await asyncio.sleep(pause_seconds)

    async def _spawn(self, number: int) -> _Process:
        spare, self._spare = self._spare, None
        if spare is not None and spare.process.poll() is not None:
            spare.end()
            spare = None
        launched = self._launch() if spare is None else spare
        orders = replace_struct(self._orders, listeners=self._sockets_of(number))
        with suppress(OSError):  # it has died this moment: that shows when it is watched
            send_orders(launched.pair, orders)
        launched.pair.setblocking(False)  # noqa: FBT003 - the standard library's own signature
        can_accept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        desk = Desk(self._parts, log=self._log, on_ready=partial(_set, can_accept))
        process = _Process(desk, launched, can_accept, orders.tls)
        await desk.connect(launched.pair)
        return process

    async def _admit(self, process: _Process) -> None:
        """Let a worker accept as soon as it can and all others could."""
        await process.can_accept
        self._note_progress()
        if all(place.process is not None and place.process.can_accept.done() for place in self._places):
            _set(self._all_can)
        await self._may_accept.wait()
        with suppress(KvobjError):  # it has ended; or it met a defect, and is found not to have become ready in time
            await _give(process, self._orders.tls)  # there may be a new pair since it had its orders
            self._receive_mode = await process.desk.worker.accept()
            _set(process.ready)
            self._note_progress()
            self._note_ready()

    def _launch(self) -> _Launched:
        """A process that waits for its orders. `OSError` where there is no process or descriptor to be had."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                passed = [theirs.fileno(), self._words.descriptor, *(each.fileno() for each in self._listeners)]
                arguments = [str(number) for number in (os.getpid(), *passed)]
                command = [sys.executable, "-m", "kvobj.app.worker", *arguments]
                process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL)  # noqa: S603 - this program again
            try:
                return _Launched(process, ours, os.pidfd_open(process.pid))
            except OSError:
                process.kill()
                process.wait()
                raise
        except OSError:
            ours.close()
            raise

    def _sockets_of(self, number: int) -> tuple[int, ...]:
        """A worker's share of the listening sockets; where they are fewer than workers, some of these share one. All stay open
        here, so that connections wait for the next worker of a place when one dies."""
        sockets = len(self._listeners)
        return tuple(range(number, sockets, len(self._places))) or (number % sockets,)

    def _note_ready(self) -> None:
        if not self._first.done() and all(
            place.process is not None and place.process.ready.done() for place in self._places
        ):
            self._first.set_result(None)
        self._keep_spare()

    def _keep_spare(self) -> None:
        """Have an idle process for the next that dies: to start one from nothing takes a second. Where there is none to be had, or
        it dies by itself, that is tried again after a while."""
        now = asyncio.get_running_loop().time()
        if self._spare is not None and self._spare.process.poll() is not None:
            self._drop_spare()
            self._spare_due = now + _LONGEST_PAUSE_SECONDS
        if self._spare is not None or self._is_stopping or not self._first.done() or now < self._spare_due:
            return
        try:
            self._spare = self._launch()
        except OSError as error:
            self._spare_due = now + _LONGEST_PAUSE_SECONDS
            self._log.error("no idle worker process can be started, will retry: %s", error)

    async def _watch(self, process: _Process) -> int:
        """Its exit status, once it has ended: by itself, or because it said nothing for too long or closed the pair."""
        channel = process.desk.channel
        while not process.ended.done():
            either: list[asyncio.Future[Any]] = [process.ended, channel.lost]
            await asyncio.wait(either, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if process.ended.done():
                break
            if channel.lost.done():
                await asyncio.wait([process.ended], timeout=_END_SECONDS)
                process.kill()
                await process.ended
                break
            since = channel.heard_at
            if not process.ready.done():  # it may wait for others, which still start
                since = max(process.started_at, self._progressed_at) + START_SECONDS
            if process.silent_seconds(since) > SILENT_SECONDS:
                self._log.error("worker process %d answers nothing and is killed", process.pid)
                process.kill()
            elif process.ready.done():
                self._keep_spare()
                await process.look()
        return await process.ended

    # -- all of them ---------------------------------------------------------------------------------------------
    async def reload(self, pair: TlsPair) -> None:
        """Let all use this TLS certificate, and those that are started later; returns when they do, or do not answer. The pair was
        checked."""
        self._orders = replace_struct(self._orders, tls=pair)
        with suppress(TimeoutError):
            async with asyncio.timeout(SILENT_SECONDS):
                calls = [_give(process, pair) for process in self._processes()]
                await asyncio.gather(*calls, return_exceptions=True)

    async def refresh(self) -> None:
        """Have figures of this moment, as far as workers answer."""
        await asyncio.gather(*(process.look() for process in self._processes()))

    def status(self) -> tuple[WorkerStatus, ...]:
        """All workers, by place."""
        return tuple(place.status() for place in self._places)

    def notes(self) -> tuple[str, ...]:
        """What an operator should know: workers that die again and again."""
        return tuple(
            f"worker {place.number} ends at its start again and again ({place.last_end})"
            for place in self._places
            if place.is_failing
        )

    def families(self) -> list[Family]:
        """Metrics of all workers, those included that are gone, and what is beside them, as one."""
        of_workers = [
            family
            for place in self._places
            for family in (*place.past.metrics, *(() if place.process is None else _families(place.process.figures)))
        ]
        return summed([*of_workers, *self._beside()])

    def upstreams(self) -> list[UpstreamHealth]:
        """How upstreams have been answering each of the workers."""
        return [health for process in self._processes() for health in process.figures.upstreams]

    async def drain(self, timeout_seconds: float) -> bool:
        """Accept no more and finish what is in flight, then end all; True when all was finished in time."""
        self._is_stopping = True
        self._drop_spare()
        processes = self._processes()
        drained = await asyncio.gather(*(self._drain(process, timeout_seconds) for process in processes))
        return all(drained)

    async def _drain(self, process: _Process, timeout_seconds: float) -> bool:
        is_done = False
        with suppress(KvobjError, TimeoutError):
            async with asyncio.timeout(timeout_seconds + _END_SECONDS):
                is_done = await process.desk.worker.drain(timeout_seconds)
        await asyncio.wait([process.ended], timeout=_END_SECONDS)
        process.kill()
        await process.ended
        return is_done

    async def aclose(self) -> None:
        """End all at once. Idempotent."""
        self._is_stopping = True
        self._drop_spare()
        for process in self._processes():
            process.kill()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * _END_SECONDS)
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.end()

    def _processes(self) -> list[_Process]:
        return [place.process for place in self._places if place.process is not None]


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _give(process: _Process, pair: TlsPair | None) -> None:
    """Tell the process of the pair, unless it has it."""
    if pair is not None and pair is not process.tls:
        process.tls = pair
        await process.desk.worker.reload(pair.certificate, pair.key)


def _families(figures: WorkerFigures) -> Iterable[Family]:
    for each in figures.metrics:
        yield Family(
            each.name, each.documentation, each.kind, [(one.name, one.labels, one.value) for one in each.figures]
        )
