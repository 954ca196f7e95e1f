"""What calls have on loan, so that one which is interrupted keeps nothing for good.

The handler of a signal (Ctrl-C, for one) raises between any two steps of Python code: also in the first line of what a `finally`
calls, or of an `__exit__`. So nothing that is written in Python is sure to run at the end of a call. Two things are:

- `with` on a `threading.Lock`. It takes and leaves the lock in C: CPython (read at 3.11) looks for signals behind a call, at a
  function's beginning and where a loop goes back, but not between the lock's `__enter__` (BEFORE_WITH) and the block, and behind
  its `__exit__` the lock is free. A `threading.Condition` is entered in Python: an interrupt behind its acquire leaves the lock
  held for ever, for later calls that have no deadline there. So a condition is made over a lock that is entered itself, and
  serves for waiting alone.
- The callback of a weak reference where it is C code: it runs when the last reference to an object has gone, with the frames of
  the call that was interrupted.

So what is lent is an object of the call's, and counts for as long as it is there.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Final, Generic, TypeVar

from kvobj.client.call_scope import current_scope

LOOK_SECONDS: Final = 0.1
"""Who waits for a place looks so often by itself: what an interrupted call had comes back without a word, and so does the end of
the call by another thread."""

T = TypeVar("T")


class Loans(Generic[T]):
    """Who has something on loan: those that were added, not removed, and are still referenced. To be changed under a lock."""

    __slots__ = ("_references",)

    def __init__(self) -> None:
        self._references: set[weakref.ref[T]] = set()

    def __len__(self) -> int:
        return len(self._references)

    def add(self, loan: T) -> None:
        """Count it."""
        self._references.add(weakref.ref(loan, self._references.discard))

    def remove(self, loan: T) -> None:
        """Count it no more. Idempotent."""
        self._references.discard(weakref.ref(loan))

    def alive(self) -> list[T]:
        """Those that are counted."""
        return [loan for reference in tuple(self._references) if (loan := reference()) is not None]


class Place:
    """One of a number of places, until it is left or nobody refers to it any more."""

    __slots__ = ("__weakref__", "_places")

    def __init__(self, places: Places) -> None:
        self._places = places

    def leave(self) -> None:
        """Give it back. Idempotent."""
        self._places.leave(self)


class Places:
    """So many may be taken at once. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._taken: Loans[Place] = Loans()

    def take(self, seconds: float) -> Place | None:
        """A place; None where none is free within so many seconds, or the call was ended meanwhile."""
        place = Place(self)
        until = time.monotonic() + seconds
        with self._lock:
            while len(self._taken) >= self._count:
                left = until - time.monotonic()
                scope = current_scope()
                if left <= 0 or (scope is not None and scope.is_cancelled):
                    return None
                self._changed.wait(min(left, LOOK_SECONDS))
            self._taken.add(place)
        return place

    def leave(self, place: Place) -> None:
        """See `Place.leave`."""
        with self._lock:
            self._taken.remove(place)
            self._changed.notify()
