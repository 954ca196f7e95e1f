"""How old things are that carry a wall-clock time, where the wall clock may jump: never older than they are.

A jump is what the wall clock gained or lost against the boot clock since the last look. Within the life of a process a jump ahead
makes nothing old enough to be removed before its time: for as long as an age is asked about, the jump is taken off it. A clock
put back makes things younger, and they stay that much longer. What happened to the clock before the start is not known.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvobj.clock import Clock, boot_ms

JUMP_MS: Final = 1000
"""Less is drift, or the clock being steered."""
_JUMPS_MAX: Final = 1000


class WallAges:
    """See the module's text. Looks at the clocks when it is made and whenever it is asked."""

    __slots__ = ("_clock", "_jumps", "_offset_ms")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ms = self._offset()
        # (boot time of the look that found it, milliseconds), oldest first
        self._jumps: deque[tuple[int, int]] = deque(maxlen=_JUMPS_MAX)

    def cutoff_ms(self, seconds: float) -> int:
        """The wall time before which things are older than so many seconds for certain."""
        return self.now_ms(seconds) - int(seconds * 1000)

    def now_ms(self, seconds: float) -> int:
        """The wall time, less what it has jumped ahead within the last so many seconds: for who asks about ages of that size."""
        offset_ms = self._offset()
        if abs(offset_ms - self._offset_ms) >= JUMP_MS:
            self._jumps.append((boot_ms(self._clock), offset_ms - self._offset_ms))
        self._offset_ms = offset_ms
        since_ms = boot_ms(self._clock) - int(seconds * 1000)
        ahead_ms = gained_ms = 0
        for found_ms, jump_ms in reversed(self._jumps):
            if found_ms < since_ms:
                break
            gained_ms += jump_ms
            ahead_ms = max(ahead_ms, gained_ms)
        return self._clock.now_ms() - ahead_ms

    def _offset(self) -> int:
        return self._clock.now_ms() - boot_ms(self._clock)
