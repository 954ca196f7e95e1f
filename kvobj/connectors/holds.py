"""What a link has pinned, by name: an engine unlocks the names it looked up, not the pins that they got."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from kvobj.client.kv_values import Name, Namespace
from kvobj.client.session import Pin, Session
from kvobj.errors import PinLimitExceededError


class _Hold:
    """A pin and how many names that it was granted for are still held."""

    __slots__ = ("count", "pin")

    def __init__(self, pin: Pin, count: int) -> None:
        self.pin = pin
        self.count = count


class Holds:
    """Names and their pins. Thread-safe. A name that was held twice is there twice; the oldest is let go of first."""

    def __init__(self) -> None:
        self._by_name: dict[Name, deque[_Hold]] = {}
        self._count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def add(self, pin: Pin, names: Sequence[Name]) -> None:
        """These names are held by this pin, which ends with the last of them."""
        hold = _Hold(pin, len(names))
        with self._lock:
            for name in names:
                self._by_name.setdefault(name, deque()).append(hold)
            self._count += len(names)

    def pin_of(self, name: Name) -> Pin | None:
        """What holds the name longest; None for one that is not held."""
        with self._lock:
            holds = self._by_name.get(name)
            return holds[-1].pin if holds else None

    def take(self, names: Sequence[Name]) -> list[Pin]:
        """Let go of each name once: the pins that hold nothing any more. Names that are not held are passed over."""
        ended: list[Pin] = []
        with self._lock:
            for name in names:
                holds = self._by_name.get(name)
                if holds is None:
                    continue
                hold = holds.popleft()
                if not holds:
                    del self._by_name[name]
                self._count -= 1
                hold.count -= 1
                if not hold.count:
                    ended.append(hold.pin)
        return ended


def pin_what_fits(session: Session, space: Namespace, names: Sequence[Name], pins: list[Pin | None]) -> bool:
    """Append a pin for each name, or as many as the session may hold: whether that was all."""
    try:
        pins += session.pin(names, namespace=space)
    except PinLimitExceededError:
        half = len(names) // 2
        return (
            half > 0
            and pin_what_fits(session, space, names[:half], pins)
            and pin_what_fits(session, space, names[half:], pins)
        )
    return True


def live_as_far_as_it_fits(session: Session, space: Namespace, names: Sequence[Name], at_once: int) -> list[bool]:
    """Which names are live, of as many of the first ones as the session has room to pin; none stays pinned."""
    live: list[bool] = []
    is_whole = True
    while is_whole and len(live) < len(names):
        pins: list[Pin | None] = []
        try:
            is_whole = pin_what_fits(session, space, names[len(live) : len(live) + at_once], pins)
        finally:
            let_go(pins)
        live += [pin is not None for pin in pins]
    return live


def let_go(pins: Sequence[Pin | None]) -> None:
    """Release pins, those that were granted."""
    for pin in pins:
        if pin is not None:
            pin.release()
