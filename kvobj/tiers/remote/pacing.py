"""When to repeat a request, when to ask a second time, and how much of either a failing server is spared. Pure but for their
counts.

The budgets are what keeps repeats from making an ailing server worse: they grow with requests that are asked for anyway, so that
the server never sees much more than those. Sources: Brooker, "Exponential Backoff And Jitter" (full jitter); Dean and Barroso, "The
Tail at Scale" (hedged requests, bounded share).
"""

from __future__ import annotations

import random
from collections import deque
from typing import Final

_BASE_SECONDS: Final = 0.05
_CAP_SECONDS: Final = 5.0
_WINDOW: Final = 256
_FRESH: Final = 16
_LEAST: Final = 16
_QUANTILE: Final = 0.95
_HEDGE_FACTOR: Final = 2.0
_HEDGE_FLOOR_SECONDS: Final = 0.02
_HEDGE_UNKNOWN_SECONDS: Final = 0.5


class TokenBudget:
    """Tokens that each first request adds a part of and each extra one takes a whole of: at most `burst` lie there."""

    __slots__ = ("_burst", "_share", "_tokens")

    def __init__(self, *, share: float, burst: float) -> None:
        self._share = share
        self._burst = burst
        self._tokens = burst

    def earn(self) -> None:
        """A request is made that would be made anyway."""
        self._tokens = min(self._tokens + self._share, self._burst)

    def spend(self) -> bool:
        """Whether an extra request may be made; then it is counted."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def backoff_seconds(attempt: int, retry_after_seconds: float | None, chance: random.Random) -> float:
    """How long to wait before repeat number `attempt` (from 1): full jitter, never less than what the server asked for."""
    drawn = chance.uniform(0, min(_CAP_SECONDS, _BASE_SECONDS * 2**attempt))
    return drawn if retry_after_seconds is None else retry_after_seconds + drawn


class FirstByteTimes:
    """The latest times to a first byte, for when an answer is late: twice their 95th percentile. Computed anew every few."""

    __slots__ = ("_fresh", "_late", "_times")

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._fresh = 0
        self._late = _HEDGE_UNKNOWN_SECONDS

    def add(self, seconds: float) -> None:
        """One more."""
        self._times.append(seconds)
        self._fresh += 1
        if self._fresh >= _FRESH and len(self._times) >= _LEAST:
            self._fresh = 0
            ordered = sorted(self._times)
            usual = ordered[int(len(ordered) * _QUANTILE)]
            self._late = max(usual * _HEDGE_FACTOR, _HEDGE_FLOOR_SECONDS)

    @property
    def late_seconds(self) -> float:
        """After how long an answer is late."""
        return self._late
