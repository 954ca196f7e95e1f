"""Pages of mapped memory, made ready in the background: whoever copies first would pay for them, as much again as the copy costs.

One thread for all mappings of a process, step by step, without the interpreter's lock and resting a quarter of the time; much
longer while something is copied, which it would take a core and the memory's bandwidth from. A mapping that nobody has any more is
left alone. What a copy needs before its turn it makes ready itself.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvobj.same_host.mapping import Mapping

_STEP_BYTES: Final = 4 * 1024 * 1024
"""Half a millisecond: a thread that maps or unmaps something else waits so long at most."""
_STEPS_A_REST: Final = 3
_QUICK_SECONDS: Final = 0.000_2
"""A step that takes less is of huge pages, or was made ready by somebody else: 64 of them take less than a rest does."""
_BUSY_SECONDS: Final = 0.05
"""Who has copied a moment ago may go on copying."""
_BUSY_REST_SECONDS: Final = 0.01


class Toucher:
    """See the module's text. Thread-safe."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[weakref.ref[Mapping]] = deque()
        self._thread: threading.Thread | None = None
        self._copied_at = float("-inf")

    def forget(self) -> None:
        """In a forked child: the thread is the parent's."""
        self._begin()

    def note_copy(self) -> None:
        """Something is being copied."""
        self._copied_at = time.monotonic()

    def add(self, mapping: Mapping) -> None:
        """Have all of a mapping's pages ready soon, or once a thread can be started again."""
        with self._lock:
            self._waiting.append(weakref.ref(mapping))
            if self._thread is not None and self._thread.is_alive():
                return
            self._thread = threading.Thread(target=self._run, name="kvobj-pages", daemon=True)
            with suppress(RuntimeError):  # no thread can be started: the next mapping's turn, and copies until then
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                known = self._waiting.popleft()
            offset = 0
            while (mapping := known()) is not None and offset < mapping.size_bytes:
                began = time.monotonic()
                mapping.touch(offset, min(_STEP_BYTES, mapping.size_bytes - offset))
                offset += _STEP_BYTES
                del mapping
                ended = time.monotonic()
                if ended - began < _QUICK_SECONDS:
                    continue
                is_busy = ended - self._copied_at < _BUSY_SECONDS
                time.sleep(_BUSY_REST_SECONDS if is_busy else (ended - began) / _STEPS_A_REST)


toucher: Final = Toucher()
os.register_at_fork(after_in_child=toucher.forget)
