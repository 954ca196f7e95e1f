"""Grouped flushes of one file: blobs whose writes end while a flush runs share the next one.

Who finds no flush running leads; others leave their callback and go on with other work, so nobody ever waits for another's flush.
A thread leads by `request`; who flushes by other means, by `join`, `next_group` and `settle`. A write that flushes itself
(`begin_alone`) counts as a running flush. Guarantees that a callback told of success had its bytes written before that flush
began, that no two flushes run at once, and that after one failed flush no other is tried: every later request fails with the
same error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Flushed = Callable[[OSError | None], None]


class GroupFlush:
    """Runs `flush` for whoever asks, once for all who asked meanwhile. Any thread may call."""

    __slots__ = ("_failed", "_flush", "_lock", "_running", "_waiting")

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._lock = threading.Lock()
        self._waiting: list[Flushed] = []
        self._running = False
        self._failed: OSError | None = None

    @property
    def failed(self) -> OSError | None:
        """The error of the flush that failed, if one did."""
        return self._failed

    def request(self, done: Flushed) -> None:
        """Have `done` called, on some thread, once what this thread has written is durable, or with the error if it never
        will be. Returns at once if a flush is running, else when all groups that gathered meanwhile are flushed."""
        if self.join(done):
            self.lead()

    def lead(self, group: list[Flushed] | None = None) -> None:
        """Flush for this group and all others, until none is left. For who leads; blocks."""
        while group := group or self.next_group():
            self.settle(group, self._failed or self._flush_once())
            group = None

    def begin_alone(self) -> bool:
        """Count a write that flushes itself, and nothing else, as the running flush. False where a flush is running or one failed.
        Whoever got True leads once it is done (`next_group`), after `fail` if it was not."""
        with self._lock:
            if self._running or self._failed is not None:
                return False
            self._running = True
            return True

    def join(self, done: Flushed) -> bool:
        """Have `done` called, on some thread, as by `request`. True: the caller leads now."""
        with self._lock:
            self._waiting.append(done)
            leads = not self._running
            self._running = True
        return leads

    def next_group(self) -> list[Flushed]:
        """Whose bytes the next flush covers, if it begins after this; when there are none, the caller leads no more."""
        with self._lock:
            group, self._waiting = self._waiting, []
            if not group:
                self._running = False
        return group

    def fail(self, error: OSError) -> None:
        """A flush failed. For who leads."""
        self._failed = self._failed or error

    def settle(self, group: list[Flushed], error: OSError | None) -> None:
        """Tell a group how its flush ended. For who leads."""
        for flushed in group:
            flushed(error)

    def _flush_once(self) -> OSError | None:
        try:
            self._flush()
        except OSError as error:
            self._failed = error
            return error
        return None
