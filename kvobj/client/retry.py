"""When a failed call is made again: a few times, after growing pauses, and only while most calls succeed. Pure but for its lock."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from typing import Final

from kvobj.errors import KvobjError

_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 2.0
_TOLD_SECONDS_MAX: Final = 10.0
_CHANCE: Final = random.SystemRandom()
"""Not the module's own: whoever seeds that, as engines do to repeat a run, would find it drawn from by retries on other threads."""


@dataclass(frozen=True, slots=True)
class RetryRule:
    """Bounds: tries of one call, and how many retries all calls of a client share.

    A client may retry `burst` times at once; each call that it makes gives it `share` of a retry back. So a server that refuses
    everything is asked 1 + `share` times a call and not `tries` times.
    """

    tries: int = 5
    burst: float = 20.0
    share: float = 0.2


class RetryBudget:
    """The retries that are left. Thread-safe."""

    __slots__ = ("_left", "_lock", "rule")

    def __init__(self, rule: RetryRule) -> None:
        self.rule = rule
        self._left = rule.burst
        self._lock = threading.Lock()

    def note_call(self) -> None:
        """A call is made for the first time."""
        if self._left >= self.rule.burst:  # as it is but after failures
            return
        with self._lock:
            self._left = min(self.rule.burst, self._left + self.rule.share)

    def take(self) -> bool:
        """Whether one retry may be made; it is then counted."""
        with self._lock:
            if self._left < 1:
                return False
            self._left -= 1
            return True


def told_seconds(error: KvobjError) -> float:
    """How long at least the server asks to wait (Retry-After), but no longer than a client lets itself be told; 0.0 if it says
    nothing."""
    told = error.data.get("retry_after_seconds")
    return float(min(max(told, 0), _TOLD_SECONDS_MAX)) if isinstance(told, int) else 0.0


def pause_seconds(tries: int, *, fraction: float | None = None) -> float:
    """How long to wait after so many failed tries: doubling, spread over its upper half so that clients do not come in step.
    `fraction`: where in that half, by chance if None."""
    longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * float(2**tries))
    where = _CHANCE.random() if fraction is None else fraction
    return longest * (1 + where) / 2
