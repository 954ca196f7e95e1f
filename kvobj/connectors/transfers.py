"""Jobs of copying chunks, done by threads beside an engine's scheduler: loads before stores, what waited too long given up.

A full store lets each store wait, so of several threads one is left to loads.

A job is cut into pieces for several threads and is finished when all of them are; each piece says of each of its chunks whether it
was copied. Nothing that a piece raises leaves a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvobj.client.call_scope import CallScope
from kvobj.client.forking import forget_in_child
from kvobj.connectors.ending_threads import end_threads

_LOG: Final = logging.getLogger("kvobj.connectors")


@dataclass(frozen=True, slots=True)
class Piece:
    """Some chunks of a job. `run` tells of each whether it was copied."""

    chunks: int
    run: Callable[[], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that has ended. `seconds`: from its first piece's beginning to its last one's end."""

    job: int
    is_load: bool
    copied: list[bool]
    seconds: float


@dataclass(slots=True)
class _Job:
    job: int
    is_load: bool
    copied: list[list[bool]]
    left: int
    submitted: float
    began: float | None = field(default=None)


class Transfers:
    """A pool of threads, of which at most `store_threads` store at once (`store_threads_of`). Thread-safe. A store
    that waited longer than `store_wait_seconds` in the queue is given up, since it keeps rows of the engine's memory from being
    used; a load is always tried. In a forked child, which has no such threads, every job has failed, those that its parent goes on
    with too."""

    def __init__(self, *, threads: int, store_wait_seconds: float) -> None:
        self.threads = threads
        self.store_threads = store_threads_of(threads)
        self._storing = 0
        self._store_wait_seconds = store_wait_seconds
        self._loads: deque[tuple[_Job, int, Piece]] = deque()
        self._stores: deque[tuple[_Job, int, Piece]] = deque()
        self._finished: deque[Finished] = deque()
        self._unfinished: dict[int, _Job] = {}
        self._is_closed = False
        self._changed = threading.Condition()
        forget_in_child(self)
        self._scopes = [CallScope() for _ in range(threads)]
        self._threads = [
            threading.Thread(target=self._run, args=(scope,), name=f"kvobj-transfers-{number}", daemon=True)
            for number, scope in enumerate(self._scopes)
        ]
        for thread in self._threads:
            thread.start()

    def forget(self) -> None:
        """See `ForgetsInChild`."""
        self._changed = threading.Condition()
        self._scopes = [CallScope() for _ in self._scopes]  # those have locks that threads may hold which are not here
        self._is_closed = True
        self._loads.clear()
        self._stores.clear()
        self._finished.extend(map(_ended, self._unfinished.values()))
        self._unfinished.clear()

    def submit(self, job: int, pieces: Sequence[Piece], *, is_load: bool) -> None:
        """Queue a job. One without pieces, and one after `close`, is finished at once: nothing was copied."""
        made = _Job(
            job=job,
            is_load=is_load,
            copied=[[False] * piece.chunks for piece in pieces],
            left=len(pieces),
            submitted=time.monotonic(),
        )
        with self._changed:
            if self._is_closed or not pieces:
                self._finished.append(_ended(made))
                return
            self._unfinished[job] = made
            (self._loads if is_load else self._stores).extend(
                (made, index, piece) for index, piece in enumerate(pieces)
            )
            self._changed.notify(len(pieces))

    def finished(self) -> list[Finished]:
        """Jobs that have ended since the last call, each once."""
        with self._changed:
            ended = list(self._finished)
            self._finished.clear()
        return ended

    def drain(self) -> None:
        """Wait until no job is left; what each does has a deadline of its own."""
        with self._changed:
            while self._unfinished:
                self._changed.wait()

    def close(self, deadline: float | None = None) -> None:
        """Give up what is queued, and wait for what is being copied until this moment of `time.monotonic`, by default for
        `ending_threads.CLOSE_SECONDS`. Calls to a store that still run then are ended: who closes it may take back the memory that
        jobs came with. Idempotent."""
        with self._changed:
            self._is_closed = True
            while self._loads or self._stores:
                job, index, _piece = (self._loads or self._stores).popleft()
                self._done(job, index, None)
            self._changed.notify_all()
        end_threads(self._threads, self._scopes, deadline)

    # -- inside --------------------------------------------------------------------------------------------------
    def _run(self, scope: CallScope) -> None:
        with scope.entered():
            self._run_pieces()

    def _run_pieces(self) -> None:
        while True:
            with self._changed:
                while (queue := self._queue()) is None and not self._is_closed:
                    self._changed.wait()
                if queue is None:
                    return
                job, index, piece = queue.popleft()
                self._storing += not job.is_load
                now = time.monotonic()
                job.began = now if job.began is None else job.began
                is_late = not job.is_load and now - job.submitted > self._store_wait_seconds
            copied = None if is_late else _copied(piece)
            del piece  # it holds the engine's memory
            with self._changed:
                if not job.is_load:
                    self._storing -= 1
                    self._changed.notify_all()  # another thread may store now, and this one may come to a load
                self._done(job, index, copied)

    def _queue(self) -> deque[tuple[_Job, int, Piece]] | None:
        """From where a thread that is free takes its next piece; None where it has to wait."""
        if self._loads:
            return self._loads
        return self._stores if self._stores and self._storing < self.store_threads else None

    def _done(self, job: _Job, index: int, copied: list[bool] | None) -> None:
        if copied is not None:
            job.copied[index] = copied
        job.left -= 1
        if not job.left:
            del self._unfinished[job.job]
            self._finished.append(_ended(job))
            self._changed.notify_all()


def store_threads_of(threads: int) -> int:
    """How many of so many threads store at once: one is left to loads, where there are several."""
    return max(1, threads - 1)


def _copied(piece: Piece) -> list[bool] | None:
    try:
        copied = [bool(each) for each in piece.run()]
    except Exception:  # noqa: BLE001 - whatever it is, the job has ended and says so
        _LOG.exception("a transfer failed")
        return None
    return copied if len(copied) == piece.chunks else None


def _ended(job: _Job) -> Finished:
    seconds = 0.0 if job.began is None else time.monotonic() - job.began
    return Finished(job.job, job.is_load, [each for part in job.copied for each in part], seconds)
