"""Puts of LMCache's in-process connector: LMCache begins them without waiting for any, and without a bound."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvobj.client.forking import forget_in_child

PUT_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class _Put:
    chunks: int
    size_bytes: int
    run: Callable[[], None]
    came: float
    future: Future[None]


class Puts:
    """Runs puts in order of their coming, on threads of their own: a full store lets each wait, and nothing else is to wait behind
    them. Thread-safe.

    What waits here keeps the engine's memory from being used. So a put that waited for longer than `wait_seconds` is given up, and
    so is one with which more than `waiting_bytes_max` would wait, unless none waits. `gave_up` is told of how many chunks, by
    whichever thread finds it, and raises nothing.

    Each put has a future, done once nothing reads its memory any more: whether it was run or given up. After `close` nothing is
    begun. In a forked child nothing waits. `now`: `time.monotonic` but in tests.
    """

    def __init__(
        self,
        *,
        wait_seconds: float,
        waiting_bytes_max: int,
        gave_up: Callable[[int], None],
        threads: int = PUT_THREADS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wait_seconds = wait_seconds
        self._bytes_max = waiting_bytes_max
        self._gave_up = gave_up
        self._count = threads
        self._now = now
        self.forget()
        forget_in_child(self)

    def forget(self) -> None:
        """See `ForgetsInChild`: the parent goes on with what waits, and its threads are not here."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiting: deque[_Put] = deque()
        self._waiting_bytes = 0
        self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="kvobj-lmcache-put")

    def submit(self, chunks: int, size_bytes: int, run: Callable[[], None]) -> Future[None]:
        """A put of so many chunks and bytes. Its future has what `run` raises."""
        put = _Put(chunks, size_bytes, run, self._now(), Future())
        with self._lock:
            given_up = self._late()
            if self._is_closed:
                put.future.set_result(None)
            elif self._waiting and self._waiting_bytes + size_bytes > self._bytes_max:
                given_up.append(put)
            else:
                self._waiting.append(put)
                self._waiting_bytes += size_bytes
        self._give_up(given_up)
        try:
            if not put.future.done():
                self._threads.submit(self._run_next)
        except RuntimeError:  # closed meanwhile, or the interpreter ends
            self._end(self._all())
        return put.future

    def close(self) -> None:
        """Begin nothing more, and wait for what is under way. Idempotent."""
        self._is_closed = True
        self._end(self._all())
        self._threads.shutdown(wait=True)

    # -- inside --------------------------------------------------------------------------------------------------
    def _run_next(self) -> None:
        """Run the next one; none, where others were given up."""
        with self._lock:
            given_up = self._late()
            put = self._taken() if self._waiting else None
        self._give_up(given_up)
        if put is not None and put.future.set_running_or_notify_cancel():
            try:
                put.run()
            except BaseException as error:  # noqa: BLE001 - as a pool does
                put.future.set_exception(error)
            else:
                put.future.set_result(None)

    def _late(self) -> list[_Put]:
        """Those that have waited for too long, with the lock."""
        due = self._now() - self._wait_seconds
        late: list[_Put] = []
        while self._waiting and self._waiting[0].came < due:
            late.append(self._taken())
        return late

    def _taken(self) -> _Put:
        put = self._waiting.popleft()
        self._waiting_bytes -= put.size_bytes
        return put

    def _all(self) -> list[_Put]:
        with self._lock:
            return [self._taken() for _ in range(len(self._waiting))]

    def _give_up(self, puts: Sequence[_Put]) -> None:
        if puts:
            self._gave_up(sum(put.chunks for put in puts))
        self._end(puts)

    @staticmethod
    def _end(puts: Sequence[_Put]) -> None:
        for put in puts:
            if put.future.set_running_or_notify_cancel():
                put.future.set_result(None)
