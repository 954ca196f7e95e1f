"""References on device memory, and when memory is free: once its last pin is gone and the work queued before that is over.

A pin may be let go by a finalizer, which may run inside any call of ours on the same thread: it can wait for no lock. So what is
let go is noted, and counted by whoever has the lock, or takes it next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, Self, TypeVar

from kvobj.errors import DeviceError
from kvobj.gpu.device import Event


class MemoryPin(Protocol):
    """One reference on device memory. Thread-safe; `release` may come from a finalizer at any point of the program."""

    @property
    def address(self) -> int:
        """Where its first byte is on the device, 256-aligned."""
        ...

    @property
    def size_bytes(self) -> int:
        """How many bytes may be used."""
        ...

    def share(self) -> MemoryPin:
        """Another pin on the same memory, to be released on its own. RuntimeError once this one is released."""
        ...

    def release(self, after: Event | None = None) -> None:
        """Let go; the memory is used again once `after`, too, is done. A second release raises RuntimeError."""
        ...


class Held:
    """Memory that pins count on. Its owner's subclass says which."""

    __slots__ = ("events", "pins")

    def __init__(self) -> None:
        self.pins = 0
        self.events: list[Event] = []


H = TypeVar("H", bound=Held)


class PinCounts(Generic[H]):
    """One lock, and the pins under it. `on_free` is called under the lock for memory that nobody uses any more. Thread-safe."""

    def __init__(self, on_free: Callable[[H], None]) -> None:
        self._on_free = on_free
        self._lock = threading.Lock()
        self._let_go: deque[tuple[H, Event | None]] = deque()
        # Without pins, but work on the device may still read or write it.
        self._leaving: list[H] = []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The lock, and everything counted that was let go by then."""
        with self._lock:
            self._settle()
            yield
            self._settle()

    @property
    def leaving(self) -> Sequence[H]:
        """What waits for work on the device alone; under the lock."""
        return self._leaving

    def let_go(self, held: H, after: Event | None) -> None:
        """A pin is gone. Never blocks: where another call is at work, this is counted by it or by the next."""
        self._let_go.append((held, after))
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._let_go:
            held, after = self._let_go.popleft()
            held.pins -= 1
            if after is not None:
                held.events.append(after)
            if not held.pins:
                self._leaving.append(held)
        leaving, self._leaving = self._leaving, []
        for held in leaving:
            held.events = [event for event in held.events if not _is_over(event)]
            if held.events:
                self._leaving.append(held)
            else:
                self._on_free(held)


class CountedPin(Generic[H]):
    """What pins have in common: see `MemoryPin`. Made under the lock of its counts."""

    __slots__ = ("_counts", "_held", "_is_released")

    def __init__(self, counts: PinCounts[H], held: H) -> None:
        self._counts = counts
        self._held = held
        self._is_released = False
        held.pins += 1

    @property
    def pins(self) -> int:
        """How many pins the memory has now, releases counted that came so far."""
        with self._counts.locked():
            return self._held.pins

    def share(self) -> Self:
        """See `MemoryPin.share`."""
        with self._counts.locked():
            if self._is_released:
                raise RuntimeError("share of a released device pin")
            return type(self)(self._counts, self._held)

    def release(self, after: Event | None = None) -> None:
        """See `MemoryPin.release`."""
        if self._is_released:
            raise RuntimeError("device pin released twice")
        self._is_released = True
        self._counts.let_go(self._held, after)


def _is_over(event: Event) -> bool:
    """Whether memory may be used again that work before the event uses; never, where that work failed."""
    try:
        return event.is_done()
    except DeviceError:
        return False  # nobody knows what the device still does to the memory: it stays out of use
