"""Tasks of one kind: numbered, run by threads of their own, their results kept until somebody asks for them."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

_LOG: Final = logging.getLogger(__name__)

T = TypeVar("T")


class TaskRunner(Generic[T]):
    """Runs what is submitted, in order of its coming, on a fixed number of threads. Thread-safe.

    Each task has its result: what it returned, or `failure(task's size)` where it raised, which is logged. `notify` is called once
    the result can be had. Tasks that have not begun when it closes fail. What is to be done `then`, by the same thread once the
    result was told of, is left out where other tasks wait or the task has failed.
    """

    def __init__(self, name: str, *, threads: int, failure: Callable[[int], T], notify: Callable[[], None]) -> None:
        self._failure = failure
        self._notify = notify
        self._waiting: SimpleQueue[tuple[int, int, Callable[[], T], Callable[[], None] | None] | None] = SimpleQueue()
        self._results: dict[int, T] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvobj-{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, size: int, run: Callable[[], T], *, then: Callable[[], None] | None = None) -> int:
        """The number of the task. `size`: how many chunks it is about. `then` raises nothing."""
        number = next(self._numbers)
        if self._is_closed:
            self._end(number, self._failure(size))
        else:
            self._waiting.put((number, size, run, then))
        return number

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
        """Begin no further task, and wait for those that are running until this moment of `time.monotonic`. Idempotent."""
        self._is_closed = True
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            number, size, run, then = task
            try:
                result = self._failure(size) if self._is_closed else run()
            except Exception:  # noqa: BLE001 - a bug is a task that failed, and not a thread less
                _LOG.exception("a task of LMCache failed")
                result, then = self._failure(size), None
            self._end(number, result)
            if then is not None and not self._is_closed and self._waiting.empty():
                then()

    def _end(self, number: int, result: T) -> None:
        with self._lock:
            self._results[number] = result
        try:
            self._notify()
        except OSError:  # the adapter is closed, and nobody waits any more
            return
