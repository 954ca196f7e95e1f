"""When a server that does not answer is asked again: after a rest that doubles, by one call at a time. Pure but for its lock.

While it rests every call is a miss at once. The first call after the rest is the probe: where it is answered the outage is over,
else the next rest begins. So an engine loses at most one deadline a rest, and nothing is ever given up for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from enum import Enum, auto
from typing import Final

from kvobj.connectors.notes import Notes

PROBE_SECONDS: Final = 60.0
"""A probe that says nothing for so long was interrupted where nobody could note it, and another is made."""


class Turn(Enum):
    """What a call may do, and what its outcome then says."""

    ASK = auto()
    PROBE = auto()
    REST = auto()


class Outage:
    """Whether the server answers. Thread-safe. Who was told ASK or PROBE by `turn` ends it with `answered`, `failed` or `left`."""

    def __init__(self, *, rest: float, rest_max: float, now: Callable[[], float] = time.monotonic) -> None:
        self._rest_first = rest
        self._rest_max = max(rest, rest_max)
        self._now = now
        self._lock = threading.Lock()
        self._rest = rest
        self._until: float | None = None
        self._probed_until = 0.0
        self._began = 0.0
        self._reason: tuple[Hashable, ...] = ()
        self._reasons = Notes(now)

    @property
    def is_up(self) -> bool:
        """Whether the last that was heard of the server was an answer."""
        return self._until is None

    def turn(self) -> Turn:
        """What a call that is about to be made may do."""
        if self._until is None:
            return Turn.ASK
        with self._lock:
            if self._until is None:
                return Turn.ASK
            now = self._now()
            if now < max(self._until, self._probed_until):
                return Turn.REST
            self._probed_until = now + PROBE_SECONDS
            return Turn.PROBE

    def answered(self, turn: Turn) -> float | None:
        """The server answered, whatever it said: seconds that the outage lasted, where this ended one."""
        if turn is not Turn.PROBE:
            return None
        with self._lock:
            self._probed_until = 0.0
            self._until = None
            self._rest = self._rest_first
            return self._now() - self._began

    def failed(self, turn: Turn, reason: tuple[Hashable, ...] = ("",)) -> bool:
        """Nobody answered: whether that is to be told, since an outage began with this, or goes on for another reason than was told
        last. Reasons that take turns are told seldom (`Notes`)."""
        with self._lock:
            if turn is Turn.PROBE:
                self._probed_until = 0.0
                self._rest = min(self._rest_max, self._rest * 2)
            elif self._until is not None:
                return False  # one of several calls that were under way when it began
            else:
                self._began = self._now()
                self._reason, self._reasons = (), Notes(self._now)
            self._until = self._now() + self._rest
            is_told = reason != self._reason and self._reasons.happened(reason) > 0
            if is_told:
                self._reason = reason
            return is_told

    def left(self, turn: Turn) -> None:
        """The call ended without a word of the server, or its caller was interrupted: another one may probe."""
        if turn is Turn.PROBE:
            with self._lock:
                self._probed_until = 0.0
