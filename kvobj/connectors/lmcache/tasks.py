"""Tasks of one kind: numbered, run by threads of their own, their results kept until somebody asks for them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Generic, NamedTuple, TypeVar

from kvobj.client.call_scope import CallScope
from kvobj.client.forking import forget_in_child
from kvobj.connectors.ending_threads import end_threads

_LOG: Final = logging.getLogger(__name__)

T = TypeVar("T")


class _Task(NamedTuple, Generic[T]):
    number: int
    size: int
    run: Callable[[], T]
    then: Callable[[], None] | None


class TaskRunner(Generic[T]):
    """Runs what is submitted, in order of its coming, on a fixed number of threads. Thread-safe.

    Each idle thread waits by itself, and the one that ran last is woken: of several that wait for one queue each task wakes two,
    and the second asks the first for the interpreter.

    Each task has its result: what it returned, or `failure(task's size)` where it raised, which is logged. `notify` is called once
    the result can be had. Tasks that have not begun when it closes fail, and calls to a store that still run by its deadline are
    ended (`CallScope`): who closes it may take back the memory that tasks came with. What is to be done `then`, by the same thread
    once the result was told of, is left out where other tasks wait or the task has failed.

    In a forked child, which has no such threads, every task fails.
    """

    def __init__(self, name: str, *, threads: int, failure: Callable[[int], T], notify: Callable[[], None]) -> None:
        self._failure = failure
        self._notify = notify
        self._waiting: deque[_Task[T]] = deque()
        self._wakers: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(threads)]
        self._idle: list[SimpleQueue[None]] = []
        self._results: dict[int, T] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._is_closed = False
        self._scopes = [CallScope() for _ in range(threads)]
        self._running: set[CallScope] = set()
        """Of the threads that run a task."""
        forget_in_child(self)
        self._threads = [
            threading.Thread(target=self._run, args=(waker, scope), name=f"kvobj-{name}-{number}", daemon=True)
            for number, (waker, scope) in enumerate(zip(self._wakers, self._scopes, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def forget(self) -> None:
        """See `ForgetsInChild`: what was submitted is the parent's."""
        self._lock = threading.Lock()
        self._is_closed = True
        self._waiting.clear()
        self._running.clear()
        self._scopes = [CallScope() for _ in self._scopes]  # those have locks that threads may hold which are not here
        self._results = {}

    def submit(self, size: int, run: Callable[[], T], *, then: Callable[[], None] | None = None) -> int:
        """The number of the task. `size`: how many chunks it is about. `then` raises nothing."""
        task = _Task(next(self._numbers), size, run, then)
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                # A signal's handler may raise between any two of these: a thread woken for nothing waits again, and one that is
                # still among the idle takes itself out.
                if self._idle:
                    self._idle[-1].put(None)
                self._waiting.append(task)
                if self._idle:
                    self._idle.pop()
        if is_closed:
            self._end(task.number, self._failure(size))
        return task.number

    def take(self, number: int) -> T | None:
        """A task's result, once; None while it is not there, and after it was taken."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """All results that are there, each once."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self, deadline: float) -> None:
        """Begin no further task, wait for those that are running until this moment of `time.monotonic`, then end their calls and
        wait until they have returned. Idempotent. Takes no lock that its caller may hold: a signal's handler may call it over any
        other method here."""
        self._is_closed = True
        for waker in self._wakers:
            waker.put(None)
        # Of those that run nothing one may wait for who was interrupted.
        end_threads(self._threads, self._scopes, deadline, is_calling=self._running.__contains__)

    def _run(self, waker: SimpleQueue[None], scope: CallScope) -> None:
        with scope.entered():
            self._run_tasks(waker, scope)

    def _run_tasks(self, waker: SimpleQueue[None], scope: CallScope) -> None:
        while (task := self._next(waker)) is not None:
            then = task.then
            self._running.add(scope)
            try:
                result = self._failure(task.size) if self._is_closed else task.run()
            except Exception:  # noqa: BLE001 - a bug is a task that failed, and not a thread less
                _LOG.exception("a task of LMCache failed")
                result, then = self._failure(task.size), None
            self._running.discard(scope)
            self._end(task.number, result)
            if then is not None and not self._is_closed and not self._waiting:
                then()
            del task, then  # they hold the engine's memory

    def _next(self, waker: SimpleQueue[None]) -> _Task[T] | None:
        """What this thread is to run; None once nothing comes any more. `waker`: where it waits."""
        while True:
            with self._lock:
                if waker in self._idle:
                    self._idle.remove(waker)
                if self._waiting:
                    return self._waiting.popleft()
                if self._is_closed:
                    return None
                self._idle.append(waker)
            waker.get()

    def _end(self, number: int, result: T) -> None:
        with self._lock:
            self._results[number] = result
        try:
            self._notify()
        except (OSError, ValueError):  # the adapter is closed (LMCache's event is -1 then), and nobody waits any more
            return
