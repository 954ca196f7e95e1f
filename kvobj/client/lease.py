"""How long a holder may rely on its session: counted on its own clock, from before it asked. Pure.

The server never expires a session before its TTL has passed since it answered; the holder stops relying on it earlier than that,
by its own clock's rate error and half a second, so that no two clocks need agree. Who reads what it pinned checks before it uses
the bytes and again after the last of them came; expired means a miss. Source: `gc-protocol` §2.4.
"""

from __future__ import annotations

import time
from typing import Final

CLOCK_RATE_ERROR: Final = 200e-6
"""How much faster the server's clock may run than the holder's."""
SLACK_SECONDS: Final = 0.5

_NEVER: Final = float("-inf")


def boot_seconds() -> float:
    """Seconds on the clock that leases are counted on: CLOCK_BOOTTIME, which runs while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def holder_deadline(sent_at: float, ttl_ms: int) -> float:
    """Until when a lease of so many milliseconds holds; `sent_at`: when the request that was answered with it was sent."""
    return sent_at + ttl_ms / 1000 * (1 - CLOCK_RATE_ERROR) - SLACK_SECONDS


class Lease:
    """One session's lease as its holder counts it. Times are `boot_seconds`.

    One thread extends or loses it, any may ask. A lease that has run out on the holder's clock may be extended again: the server
    that still renews the session has not let go of its pins. A lost one stays lost.
    """

    __slots__ = ("_deadline", "_is_lost")

    def __init__(self) -> None:
        self._deadline = _NEVER
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether the server has said that the session is gone, or its holder gave it up."""
        return self._is_lost

    def extend(self, sent_at: float, ttl_ms: int) -> None:
        """Note an answer. Answers may come out of order: the latest deadline counts."""
        self._deadline = max(self._deadline, holder_deadline(sent_at, ttl_ms))

    def lose(self) -> None:
        """Rely on it no more."""
        self._is_lost = True

    def is_valid(self, now: float) -> bool:
        """Whether what the session pins may be relied on at this moment."""
        return not self._is_lost and now < self._deadline

    def left_seconds(self, now: float) -> float:
        """How much longer; 0.0 where it is not valid."""
        return max(0.0, self._deadline - now) if not self._is_lost else 0.0
