"""A lane: a stream with a thread that gives it work and watches its events, so that nobody else ever waits for a device.

Work is given in order and bounded: so many bytes are on the device's way at once, the rest waits in the queue, whose length is
bounded too. Every wait has a deadline. What a device may still read or write when its deadline has passed is nobody's any more:
the lane is *stuck* then, and its caller keeps the memory out of use (`StuckError`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, NamedTuple

from kvobj.errors import BusyError, DeviceError, UnavailableError
from kvobj.gpu.device import Event, Stream

IN_FLIGHT_BYTES: Final = 256 * 2**20
QUEUED_MAX: Final = 4096
DEADLINE_SECONDS: Final = 30.0
_POLL_SHORTEST: Final = 20e-6
_POLL_LONGEST: Final = 500e-6
_POLL_PART: Final = 1 / 32
"""Of how long has been waited: what has ended is known a little later, and a long wait takes few looks."""
_JOIN_SECONDS: Final = 60.0

Work = Callable[[Stream], object]


class StuckError(DeviceError):
    """The device did not answer within the deadline, and may still use the memory that it was given."""


class _Job(NamedTuple):
    work: Work
    size_bytes: int
    future: Future[None]
    deadline: float


class _Running(NamedTuple):
    event: Event
    job: _Job


class Lane:
    """Runs jobs on `stream`, which becomes its own. `submit` may be called from any thread."""

    def __init__(
        self,
        stream: Stream,
        *,
        name: str,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
        queued_max: int = QUEUED_MAX,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self._stream = stream
        self._in_flight_max = in_flight_bytes
        self._queued_max = queued_max
        self._deadline_seconds = deadline_seconds
        self._queue: deque[_Job] = deque()
        self._running: deque[_Running] = deque()
        self._in_flight_bytes = 0
        self._is_closing = False
        self._stuck: StuckError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"lane {name}", daemon=True)
        self._thread.start()

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that the device is working on now."""
        return self._in_flight_bytes

    def submit(self, work: Work, size_bytes: int) -> Future[None]:
        """Have `work(stream)` called on the lane's thread; the future is done once the device has done what that gave it.

        `work` copies and launches and may wait for the device itself. `size_bytes` is what it counts against the bound. The
        future fails with what `work` raised, `DeviceError` where the device failed, `BusyError` where the deadline came before its
        turn, `StuckError` where the device has not done it a deadline after `work` returned. Raises `BusyError` where too much is
        queued, `UnavailableError` once closed.
        """
        job = _Job(work, size_bytes, Future(), time.monotonic() + self._deadline_seconds)
        with self._changed:
            if self._stuck is not None:
                raise self._stuck
            if self._is_closing:
                raise UnavailableError("the device is closed")
            if len(self._queue) >= self._queued_max:
                raise BusyError("too much is queued for the device", queued=len(self._queue))
            self._queue.append(job)
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Finish what was accepted and stop. Idempotent. Blocks, at most for the deadline."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_JOIN_SECONDS)
        self._stream.close()

    # -- the lane's thread -----------------------------------------------------------------------------------------------
    def _work(self) -> None:
        since = time.monotonic()
        while True:
            with self._changed:
                if not self._queue and not self._running:
                    if self._is_closing:
                        return
                    self._changed.wait()
                    continue
                job = self._next_job()
                if job is None:
                    waited = time.monotonic() - since
                    self._changed.wait(min(max(waited * _POLL_PART, _POLL_SHORTEST), _POLL_LONGEST))
            if job is not None:
                self._begin(job)
            if self._settle() or job is not None:
                since = time.monotonic()

    def _next_job(self) -> _Job | None:
        if not self._queue:
            return None
        job = self._queue[0]
        if self._running and self._in_flight_bytes + job.size_bytes > self._in_flight_max:
            return None
        return self._queue.popleft()

    def _begin(self, job: _Job) -> None:
        if time.monotonic() > job.deadline:
            job.future.set_exception(BusyError("the device was busy until the deadline"))
            return
        try:
            job.work(self._stream)
            error = None
        except Exception as raised:  # noqa: BLE001 - it is the caller's, who reads it from the future
            error = raised
        # Also after an error: some of it may be under way.
        try:
            event = self._stream.record()
        except Exception as raised:  # noqa: BLE001 - as above
            job.future.set_exception(error or raised)
            return
        # From here on it is the device that is waited for. That `work` took long on this thread, as where the first compiles the
        # kernels, says nothing about it.
        job = job._replace(deadline=max(job.deadline, time.monotonic() + self._deadline_seconds))
        if error is not None:
            job = job._replace(future=_failing(job.future, error))
        self._in_flight_bytes += job.size_bytes
        self._running.append(_Running(event, job))

    def _settle(self) -> bool:
        """Tell what has ended; whether anything had."""
        had_ended = False
        while self._running:
            event, job = self._running[0]
            try:
                if not event.is_done():
                    if time.monotonic() > job.deadline:
                        self._give_up()
                    return had_ended
                error: Exception | None = None
            except Exception as raised:  # noqa: BLE001 - a driver's error, told to who waits
                error = raised
            self._running.popleft()
            self._in_flight_bytes -= job.size_bytes
            had_ended = True
            if error is None:
                job.future.set_result(None)
            else:
                job.future.set_exception(error)
        return had_ended

    def _give_up(self) -> None:
        stuck = StuckError("the device did not answer in time", seconds=self._deadline_seconds)
        with self._changed:
            self._stuck = stuck
            queued = list(self._queue)
            self._queue.clear()
        for _, job in self._running:
            job.future.set_exception(stuck)
        self._running.clear()
        for job in queued:
            job.future.set_exception(UnavailableError("the device does not answer"))


def _failing(future: Future[None], error: Exception) -> Future[None]:
    """A future to be done when the device is: `future` then fails with `error`."""
    inner: Future[None] = Future()

    def fail(done: Future[None]) -> None:
        future.set_exception(error if done.exception() is None else done.exception())

    inner.add_done_callback(fail)
    return inner
