"""A few named threads that make blocking calls for an event loop. Bounded: who finds all of them busy waits, up to a deadline."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from kvobj.client.call_scope import CallScope
from kvobj.client.forking import forget_in_child
from kvobj.errors import UnavailableError

T = TypeVar("T")

Jobs = SimpleQueue["_Job[object] | None"]
"""What the threads of one event loop, and of no other, are given to do."""


class _Job(Generic[T]):
    """One call, from the loop to a thread and back. `is_done` and `waiter` belong to the loop."""

    __slots__ = ("call", "error", "is_done", "loop", "result", "running", "scope", "waiter")

    def __init__(
        self, call: Callable[[], T], scope: CallScope, loop: asyncio.AbstractEventLoop, running: set[CallScope]
    ) -> None:
        self.call = call
        self.scope = scope
        self.loop = loop
        self.running = running
        self.result: T | None = None
        self.error: BaseException | None = None
        self.is_done = False
        self.waiter: asyncio.Future[None] = loop.create_future()

    def run(self) -> None:
        """In the thread."""
        try:
            with self.scope.entered():
                self.result = self.call()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where the call is awaited
            self.error = error
        del self.call  # with the caller's memory
        self.running.discard(self.scope)  # before the loop hears of it: a stream's next step has the same scope
        try:
            self.loop.call_soon_threadsafe(self._finish)
        except RuntimeError:  # the loop was closed meanwhile: nobody awaits this
            return

    def _finish(self) -> None:
        self.is_done = True
        if not self.waiter.done():
            self.waiter.set_result(None)


class CallThreads:
    """Runs blocking calls on at most so many threads, which are started as they are needed. For one event loop at a time; another
    may follow it."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._threads = threads
        self._is_closed = False
        self._begin()
        forget_in_child(self)

    def _begin(self) -> None:
        self._jobs: Jobs = SimpleQueue()
        self._running: set[CallScope] = set()
        """Of the calls that threads make, or are about to."""
        self._started = 0
        self._taken = 0
        self._waiting: dict[asyncio.Future[None], None] = {}  # in the order in which they came
        self._loop: asyncio.AbstractEventLoop | None = None

    def forget(self) -> None:
        """See `ForgetsInChild`: the threads stayed in the parent."""
        self._begin()

    async def run(self, call: Callable[[], T], scope: CallScope, *, undo: Callable[[T], object] | None = None) -> T:
        """Make a call in a thread and wait for it. `UnavailableError` where no thread comes free by the scope's deadline, and after
        `close`. Where the awaiting task is cancelled, the call is ended first; `undo` takes back what it did all the same."""
        taken = await self.take(scope.deadline)
        try:
            return await self.run_taken(call, scope, undo=undo)
        finally:
            self.give(taken)

    async def run_taken(
        self, call: Callable[[], T], scope: CallScope, *, undo: Callable[[T], object] | None = None
    ) -> T:
        """`run` of who has taken a thread: one call at a time."""
        if self._is_closed:
            raise _closed()
        job = _Job(call, scope, asyncio.get_running_loop(), self._running)
        self._submit(job)
        cancelled = await _end_of(job)
        # The traceback of what is raised has this frame, and that of the thread, which has the job: neither may have what is
        # raised, or it keeps the caller's memory until the interpreter looks for cycles.
        error, job.error = job.error, None
        result, job.result = job.result, None
        try:
            if cancelled is not None:
                if undo is not None and error is None:
                    undo(result)  # type: ignore[arg-type]  # without an error there is a result
                raise cancelled
            if error is not None:
                if self._is_closed and scope.is_cancelled:
                    raise _closed() from error
                raise error
        finally:
            del cancelled, error
        return result  # type: ignore[return-value]  # as above

    def close(self, *, ends_calls: bool = True) -> None:
        """Make no call any more: who waits for a thread, or has one, is told so. Calls that threads make are ended; where
        `ends_calls` is False they come to their own end. The threads end with them. Idempotent."""
        self._is_closed = True
        if ends_calls:
            self._end_calls()
        self._end_threads()
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)

    def _end_calls(self) -> None:
        for scope in list(self._running):
            scope.cancel()

    def _end_threads(self) -> None:
        """Each ends once it comes free."""
        started, self._started = self._started, 0
        for _ in range(started):
            self._jobs.put(None)
        self._jobs = SimpleQueue()
        self._taken = 0

    def __del__(self) -> None:
        self._end_threads()

    async def take(self, deadline: float) -> Jobs:
        """Have a thread for calls to come, until what this answers is given to `give`: first come, first served.
        `UnavailableError` where none comes free by the deadline, of `time.monotonic`, and after `close`."""
        loop = asyncio.get_running_loop()
        if self._is_closed:
            raise _closed()
        if loop is not self._loop:
            if self._loop is not None and self._loop.is_closed():
                # With whatever ran in it, which gives nothing back: of calls that are under way nobody hears, and the threads that
                # make them are none of those that there may be for this loop.
                self._end_calls()
                self._end_threads()
                self._waiting.clear()
            self._loop = loop
        jobs = self._jobs
        if self._taken < self._threads:
            self._taken += 1
            return jobs
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting[waiter] = None
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await waiter
        except BaseException as error:
            self._waiting.pop(waiter, None)
            if waiter.done() and not waiter.cancelled():
                self.give(jobs)  # it came, and nobody wants it any more
            if isinstance(error, TimeoutError):
                raise UnavailableError("all threads of this client are in use", threads=self._threads) from error
            raise
        if self._is_closed:
            raise _closed()
        return jobs

    def give(self, taken: Jobs) -> None:
        """Give back a thread that was taken: to who waits longest for one."""
        if taken is not self._jobs:  # a close, a fork or the end of its loop has taken it back already
            return
        while self._waiting:
            waiter = next(iter(self._waiting))
            del self._waiting[waiter]
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)
                return
        self._taken -= 1

    def _submit(self, job: _Job[T]) -> None:
        if self._started < self._taken:
            name = f"{self._name}-{self._started + 1}"
            threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()
            self._started += 1
        self._running.add(job.scope)
        self._jobs.put(job)  # type: ignore[arg-type]  # of whatever type: the queue hands it on


async def _end_of(job: _Job[T]) -> asyncio.CancelledError | None:
    """Wait for the end of a call, also of one that is cancelled meanwhile; how it was."""
    cancelled: asyncio.CancelledError | None = None
    while not job.is_done:
        try:
            await job.waiter
        except asyncio.CancelledError as error:
            cancelled = cancelled or error.with_traceback(None)  # which would have this frame, and so keep itself
            job.scope.cancel()
            if not job.is_done:
                job.waiter = job.loop.create_future()
    return cancelled


def _closed() -> UnavailableError:
    return UnavailableError("the client is closed")


def _work(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # what it holds is not kept while there is nothing to do
