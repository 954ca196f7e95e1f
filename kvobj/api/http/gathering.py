"""Requests that nobody hurries for wait for each other: one that finds cold caches costs three to four times one behind another.

Renewals of sessions come a few milliseconds apart, each on another connection. They are laid aside where they arrive, unread, and
when a moment is over they are answered one after the other. Who comes right behind one that was answered finds warm caches and
does not wait, nor does who is alone: waiting brings company only where others came a moment ago.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from kvobj.clock import Clock

MOMENT_SECONDS: Final = 0.05
"""How long a request waits at most. A holder counts its lease from before it sent a renewal, and the server from when it arrived,
not from when it is answered, so that a renewal in time stays in time; pins outlive their session by ten times as much anyway."""
WARM_SECONDS: Final = 0.002
WAITING_MAX: Final = 64
_NEVER: Final = float("-inf")


class Laid(Protocol):
    """A connection whose bytes were laid aside."""

    def take_up(self) -> None:
        """Serve them now. Not called from a task."""
        ...


class Gathering:
    """Of one server. Event-loop-only."""

    __slots__ = ("_clock", "_latest", "_latest_at", "_other_at", "_timer", "_waiting")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[Laid, None] = {}
        self._latest: Laid | None = None
        self._latest_at = _NEVER
        # When one was served on another connection than on the latest.
        self._other_at = _NEVER
        self._timer: asyncio.TimerHandle | None = None

    def lays_aside(self, one: Laid, now: float) -> bool:
        """Whether what has come on this connection is to wait: `take_up` is called later. False: serve it now."""
        waiting = self._waiting
        if not waiting:
            company_at = self._other_at if self._latest is one else self._latest_at
            if now - self._latest_at < WARM_SECONDS or now - company_at > MOMENT_SECONDS:
                self._serves(one, now)
                return False
            self._timer = asyncio.get_running_loop().call_later(MOMENT_SECONDS, self._moment_is_over)
        elif len(waiting) >= WAITING_MAX:
            self._moment_is_over()
            self._serves(one, now)
            return False
        waiting[one] = None
        return True

    def forget(self, one: Laid) -> None:
        """Its bytes are being served, or nobody will."""
        self._waiting.pop(one, None)
        if not self._waiting:
            self._stop_timer()

    def close(self) -> None:
        """Forget all."""
        self._waiting.clear()
        self._latest = None
        self._stop_timer()

    def _serves(self, one: Laid, now: float) -> None:
        if one is not self._latest:
            self._latest, self._other_at = one, self._latest_at
        self._latest_at = now

    def _moment_is_over(self) -> None:
        """Take up all that wait."""
        self._stop_timer()
        waiting, self._waiting = self._waiting, {}
        for each in waiting:
            each.take_up()
        now = self._clock.monotonic()
        for each in waiting:
            self._serves(each, now)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
