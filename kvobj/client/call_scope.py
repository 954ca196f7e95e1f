"""A call that another thread may end: what the async client cancels a blocking call by.

The thread that makes the call carries the scope; whatever that call waits for then is guarded by a function that ends the wait.
Ending a call ends it for good: what it waits for next fails at once, and nothing is retried.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvobj.errors import InvalidRequestError, UnavailableError

SECONDS_MAX: Final = 86_400.0
"""The longest timeout: what the system's calls take ends at some weeks."""
SLICE_SECONDS: Final = 0.1
"""A call that another thread may end looks so often whether it was, where nobody can wake it."""


class _OfThread(threading.local):
    """What a thread carries. The class has the default: a look for what is not there is an exception inside, ten times as long."""

    scope: CallScope | None = None


_local: Final = _OfThread()


class CallScope:
    """One call, or one stream of answers. `deadline` (of `time.monotonic`) bounds every wait of it beside its own."""

    __slots__ = ("_abort", "_lock", "deadline", "is_cancelled")

    def __init__(self, deadline: float = float("inf")) -> None:
        self.deadline = deadline
        self.is_cancelled = False
        self._abort: Callable[[], object] | None = None
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """End the call. From any thread; the call itself ends moments later, with `UnavailableError`."""
        with self._lock:
            self.is_cancelled = True
            if self._abort is not None:
                self._abort()

    def guard(self, abort: Callable[[], object]) -> None:
        """`abort` ends what the call waits for from now on, until `unguard` or another guard: who waits more than once guards each
        wait. It must not block and is called under the scope's lock, so never after `unguard` has returned. `UnavailableError` if
        the call has been ended."""
        with self._lock:
            if self.is_cancelled:
                raise UnavailableError("the call was cancelled")
            self._abort = abort

    def unguard(self) -> None:
        """Nothing is waited for. Idempotent."""
        with self._lock:
            self._abort = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Calls that this thread makes within the block are the scope's."""
        before = current_scope()
        _local.scope = self
        try:
            yield
        finally:
            _local.scope = before


def bounded_seconds(seconds: float) -> float:
    """A timeout as the system takes one: for ever is a day. `InvalidRequestError` for what is no number."""
    if math.isnan(seconds):
        raise InvalidRequestError("a timeout is a number of seconds", timeout_seconds=seconds)
    return min(seconds, SECONDS_MAX)


def current_scope() -> CallScope | None:
    """The scope of the call that this thread makes; None where nobody can end it."""
    return _local.scope


@contextmanager
def ends_by(deadline: float) -> Iterator[None]:
    """Calls that this thread makes within the block end by the deadline, of `time.monotonic`, all of them together."""
    scope = current_scope()
    if scope is None:
        with CallScope(deadline).entered():
            yield
        return
    before, scope.deadline = scope.deadline, min(scope.deadline, deadline)
    try:
        yield
    finally:
        scope.deadline = before


def wait_by(deadline: float, wait: Callable[[float], bool]) -> bool:
    """Wait for what nobody can be woken from, by the deadline and until the call is ended. `wait` waits for so many seconds at
    most and says whether it has what it waits for: the answer is what it said last."""
    scope = current_scope()
    if scope is None:
        return wait(min(max(0.0, deadline - time.monotonic()), SECONDS_MAX))
    deadline = min(deadline, scope.deadline)
    while not scope.is_cancelled:
        left = deadline - time.monotonic()
        if wait(min(max(0.0, left), SLICE_SECONDS)):
            return True
        if left <= 0:
            break
    return False


def pause(seconds: float) -> None:
    """Sleep, unless the call is ended. `UnavailableError` then."""
    scope = current_scope()
    if scope is None:
        time.sleep(seconds)
        return
    woken = threading.Event()
    scope.guard(woken.set)
    woken.wait(seconds)
    scope.guard(_nothing)


def _nothing() -> None:
    """What ends the wait for nothing."""
