"""What calls have on loan, so that one which is interrupted keeps nothing for good.

The handler of a signal (Ctrl-C, for one) raises between any two steps of Python code: also in the first line of what a `finally`
calls, or of an `__exit__`. So nothing that is written in Python is sure to run at the end of a call. Two things are:

- `with` on a `threading.Lock`, or an `RLock`. It takes and leaves the lock in C: CPython (read at 3.11) looks for signals behind a
  call, at a function's beginning and where a loop goes back, but not between the lock's `__enter__` (BEFORE_WITH) and the block,
  and behind its `__exit__` the lock is free. A `threading.Condition` is entered in Python: an interrupt behind its acquire leaves
  the lock held for ever, for later calls that have no deadline there; and one that comes as it waits may leave the lock free,
  which the end of a `with` around it then leaves once more, or leaves for another who has it. So nobody waits within such a
  block: `Bell`.
- The callback of a weak reference where it is C code: it runs when the last reference to an object has gone, with the frames of
  the call that was interrupted.

So what is lent is an object of the call's, and counts for as long as it is there.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from contextlib import suppress
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
        while True:
            try:
                references = tuple(self._references)
            except RuntimeError:  # a search for cycles ended one of them meanwhile
                continue
            return [loan for reference in references if (loan := reference()) is not None]


class Bell:
    """Wakes who waits for a change, the first that came first. A ticket is drawn under the lock under which one has looked, and
    waited with when that has been left. What a ring was for may be gone by then, and a ring may be lost with its waiter: all look
    again, also by themselves after `LOOK_SECONDS`."""

    __slots__ = ("_tickets",)

    def __init__(self) -> None:
        self._tickets: deque[threading.Lock] = deque()

    def __len__(self) -> int:
        return len(self._tickets)

    def ticket(self) -> threading.Lock:
        """For `wait`."""
        ticket = threading.Lock()
        ticket.acquire()
        self._tickets.append(ticket)
        return ticket

    def wait(self, ticket: threading.Lock, seconds: float) -> None:
        """Return when it rings for the ticket, after so many seconds at the latest; under no lock."""
        ticket.acquire(timeout=max(0.0, min(seconds, LOOK_SECONDS)))
        self.drop(ticket)

    def drop(self, ticket: threading.Lock) -> None:
        """Nobody waits with it any more. Idempotent."""
        with suppress(ValueError):
            self._tickets.remove(ticket)

    def ring(self) -> None:
        """Wake one."""
        with suppress(IndexError):
            wake(self._tickets.popleft())

    def ring_all(self) -> None:
        """Wake all."""
        for _ in range(len(self._tickets)):
            self.ring()


def wake(ticket: threading.Lock) -> None:
    """Have who waits with it look again. Idempotent, and takes no lock."""
    with suppress(RuntimeError):  # it was woken
        ticket.release()


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
        self._left = Bell()
        self._taken: Loans[Place] = Loans()

    @property
    def is_full(self) -> bool:
        """Whether none is free at this moment."""
        return len(self._taken) >= self._count

    def take(self, seconds: float) -> Place | None:
        """A place; None where none is free within so many seconds and the call's own time, or the call was ended meanwhile."""
        place = Place(self)
        until = time.monotonic() + seconds
        scope = current_scope()
        if scope is not None:
            until = min(until, scope.deadline)
        while True:
            with self._lock:
                if len(self._taken) < self._count:
                    self._taken.add(place)
                    return place
                ticket = self._left.ticket()
            self._left.wait(ticket, until - time.monotonic())
            if time.monotonic() >= until or (scope is not None and scope.is_cancelled):
                return None

    def leave(self, place: Place) -> None:
        """See `Place.leave`."""
        with self._lock:
            self._taken.remove(place)
            self._left.ring()
