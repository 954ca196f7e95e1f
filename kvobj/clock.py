"""The only door to time. Everything that compares times takes a `Clock`, so tests can turn it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for records and people, monotonic time for deadlines; the two are never compared."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch. May jump; no safety rests on it."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back and runs while the machine is suspended."""
        ...


class SystemClock:
    """The machine's clocks; monotonic time is CLOCK_BOOTTIME, which counts suspended time too."""

    def now_ms(self) -> int:
        """See `Clock.now_ms`."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_ms(clock: Clock) -> int:
    """Monotonic time in whole milliseconds: the one clock of leases and grace. Never compared with `now_ms`."""
    return int(clock.monotonic() * 1000)
