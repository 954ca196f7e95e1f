"""Grouped flushes of one file: blobs whose writes end while a flush runs share the next one.

Who finds no flush running leads; others leave their callback and go on with other work, so nobody ever waits for another's flush.
A thread leads by `request`; who flushes by other means, by `join`, `next_group` and `settle`. A write that flushes itself
(`begin_alone`) counts as a running flush. Guarantees that a callback told of success had its bytes written before that flush
began, that no two flushes run at once, and that after one failed flush no other is tried: every later request fails with the
same error. Where a write that flushes itself finds no room, that may have been its flush, and then nobody knows what became of
the bytes that were written and not flushed yet: `give_up` tells all who wrote them so, and later writes are flushed as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Flushed = Callable[[OSError | None], None]


class GroupFlush:
    """Runs `flush` for whoever asks, once for all who asked meanwhile. Any thread may call."""

    __slots__ = ("_failed", "_flush", "_given_up", "_lock", "_running", "_waiting", "times_given_up")

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._lock = threading.Lock()
        self._waiting: list[Flushed] = []
        self._running = False
        self._failed: OSError | None = None
        self._given_up: OSError | None = None
        self.times_given_up = 0
        """What was written, in part or whole, while this was another number, no flush covers."""

    @property
    def failed(self) -> OSError | None:
        """The error of the flush that failed, if one did."""
        return self._failed

    def request(self, done: Flushed, *, since: int) -> None:
        """Have `done` called, on some thread, once what this thread has written is durable, or with the error if it never
        will be. `since`: `times_given_up` of before the first byte was written. Returns at once if a flush is running, else when
        all groups that gathered meanwhile are flushed."""
        if self.join(done, since=since):
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

    def join(self, done: Flushed, *, since: int) -> bool:
        """Have `done` called, on some thread, as by `request`. True: the caller leads now."""
        with self._lock:
            is_covered = since == self.times_given_up
            leads = is_covered and not self._running
            if is_covered:
                self._waiting.append(done)
                self._running = True
        if not is_covered:
            done(self._given_up)
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

    def give_up(self, error: OSError) -> None:
        """Tell the error to all who have written, or began to, and are not flushed yet. For who leads."""
        with self._lock:
            self.times_given_up += 1
            self._given_up = error
            group, self._waiting = self._waiting, []
        self.settle(group, error)

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
