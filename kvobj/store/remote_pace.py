"""How uploads that nobody waits for keep out of readers' way: while much is read they go one after the other at a bounded rate.

An upload costs the cores that serve readers: its checksum, the copies into the socket, and the remote itself where that is on the
same machine. The rate grows with the queue, so that this lags behind writers by about a minute at most and never for ever. Pure but
for its counts; times are the event loop's.
"""

from __future__ import annotations

from typing import Final

BUSY_BYTES_PER_SECOND: Final = 128 * 2**20
"""From here on reading counts as much. One local reader is given ten times as much (docs/benchmarks.md)."""

REQUEST_WEIGHT_BYTES: Final = 256 * 1024
"""What a read or an upload of nothing weighs: serving 64 KiB takes as long as copying five times as much."""

PACED_BYTES_PER_SECOND: Final = 24 * 2**20
"""What goes up while much is read, at least: 8 MiB take 30 to 100 ms of two cores that the remote shares, and come every 330 ms, so
that most reads meet none."""

DRAIN_SECONDS: Final = 60.0
"""What is queued goes up in about so long, however much is read."""

_LOOK_SECONDS: Final = 0.05
_OLD_SECONDS: Final = 0.5


class UploadPace:
    """See the module's text. Event-loop-only."""

    __slots__ = ("_is_busy", "_looked_at", "_may_at", "_read_bytes")

    def __init__(self) -> None:
        self._read_bytes = 0
        self._looked_at = float("-inf")
        self._may_at = float("-inf")
        self._is_busy = False

    def note_read(self, size_bytes: int) -> None:
        """So much was read by a client. Costs a tenth of a microsecond."""
        self._read_bytes += size_bytes + REQUEST_WEIGHT_BYTES

    def wait_seconds(self, now: float) -> float:
        """How long to wait before an upload that nobody waits for is begun, or this is asked again; 0: not at all."""
        self._look(now)
        if not self._is_busy:
            return 0.0
        return min(max(self._may_at - now, 0.0), _LOOK_SECONDS)

    def begun(self, size_bytes: int, now: float, *, queued_bytes: int, queued: int) -> None:
        """Such an upload was begun, of so much; so much and so many are in the queue."""
        if not self._is_busy:
            return
        rate = max(PACED_BYTES_PER_SECOND, (queued_bytes + queued * REQUEST_WEIGHT_BYTES) / DRAIN_SECONDS)
        # What a late timer has lost is made up for: of small uploads many go in one look.
        self._may_at = max(self._may_at, now - _LOOK_SECONDS) + (size_bytes + REQUEST_WEIGHT_BYTES) / rate

    def _look(self, now: float) -> None:
        since = now - self._looked_at
        if since < _LOOK_SECONDS:
            return
        # Whether it was much is known only of a short time; after a long one the next look tells, and a single upload goes first.
        self._is_busy = self._read_bytes > (BUSY_BYTES_PER_SECOND * since if since < _OLD_SECONDS else 0)
        self._read_bytes = 0
        self._looked_at = now
