"""Grouped flushes of one file: blobs whose writes end while a flush runs share the next one.

The thread that finds no flush running leads; others leave their callback and go on with other work, so no thread ever waits
for another's flush. Guarantees that a callback told of success had its bytes written before that flush began, and that
after one failed flush no other is tried: every later request fails with the same error.
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
        with self._lock:
            self._waiting.append(done)
            if self._running:
                return
            self._running = True
        while True:
            with self._lock:
                group, self._waiting = self._waiting, []
                if not group:
                    self._running = False
                    return
            error = self._failed or self._flush_once()
            for flushed in group:
                flushed(error)

    def _flush_once(self) -> OSError | None:
        try:
            self._flush()
        except OSError as error:
            self._failed = error
            return error
        return None
