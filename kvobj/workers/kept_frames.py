"""Frames that a worker keeps for a moment after it has read them, so that what is read again and again is not asked for each time.

A frame is kept from the second time on that it is opened within a moment: what is read once is given back at once. While it is kept
the store process has it pinned and in use, and holds the chunk against policy since it was opened; so until `keep_seconds` later,
which is a small part of that hold, a row that this worker finds live and that names the blob may be read here without a word. What
was deleted or replaced is not found, or names another blob. Bounded in bytes: what is kept cannot be evicted. Event-loop-only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple, Self

import msgspec

from kvobj.arena import PinnedFrame
from kvobj.catalog.rows import ObjectRow, ObjectState
from kvobj.store.representation import stored_codec

KEEP_SECONDS_MAX: Final = 0.5
"""How long after it was opened a frame is read without asking: the store process is asked twice a second for what is hot."""
GRACE_SHARE: Final = 10
"""It is at most this share of the grace time, which is what a hold against policy lasts."""
DRAM_SHARE: Final = 8
"""All workers of a node together keep at most this share of dram."""
_SEEN_MAX: Final = 4096


class Keeping(msgspec.Struct, frozen=True, array_like=True):
    """How much one worker keeps, and for how long."""

    bytes_max: int
    seconds: float

    @classmethod
    def of(cls, *, dram_bytes: int, grace_seconds: float, workers: int) -> Self:
        """Where policy's grace time is this, and so many workers share dram."""
        return cls(dram_bytes // DRAM_SHARE // workers, min(KEEP_SECONDS_MAX, grace_seconds / GRACE_SHARE))


class _Kept(NamedTuple):
    frame: PinnedFrame
    until: float


class KeptFrames:
    """See the module's text. `count_hits(reads, bytes)` is told of what was read here, some time after."""

    __slots__ = (
        "_bytes_max",
        "_count_hits",
        "_hit_bytes",
        "_hits",
        "_kept",
        "_loop",
        "_seconds",
        "_seen",
        "_timer",
        "size_bytes",
    )

    def __init__(self, keeping: Keeping, *, count_hits: Callable[[int, int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._bytes_max = keeping.bytes_max
        self._seconds = keeping.seconds
        self._count_hits = count_hits
        self._kept: dict[bytes, _Kept] = {}
        """By blob id, in the order in which they end."""
        self._seen: dict[bytes, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._hits = 0
        self._hit_bytes = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        """How many frames are kept."""
        return len(self._kept)

    def note(self, row: ObjectRow, frame: PinnedFrame, asked_at: float) -> None:
        """The row's first frame, which the store process was asked for at `asked_at` (the loop's clock) and has opened. It is kept
        where that may help, under a pin of its own."""
        if self._seconds <= 0 or not _is_readable(row) or not frame.is_whole or frame.progress is not None:
            return
        blob_id, size_bytes = row.blobs[0].blob_id, frame.pin.extent.length
        if frame.tier != "dram" or size_bytes > self._bytes_max:
            return
        seen = self._seen.pop(blob_id, None)
        if seen is None or asked_at - seen > 2 * self._seconds:
            while len(self._seen) >= _SEEN_MAX:
                del self._seen[next(iter(self._seen))]
            self._seen[blob_id] = asked_at
            return
        self._seen[blob_id] = asked_at
        if blob_id in self._kept:
            self._drop(blob_id)
        while self.size_bytes + size_bytes > self._bytes_max:
            self._drop(next(iter(self._kept)))
        self._kept[blob_id] = _Kept(frame.share(), asked_at + self._seconds)
        self.size_bytes += size_bytes
        if self._timer is None:
            self._timer = self._loop.call_at(asked_at + self._seconds, self._end_due)

    def find(self, row: ObjectRow) -> PinnedFrame | None:
        """The kept frame of a row that was looked up just now, which is then counted as read; the pin stays here. None: ask."""
        kept = self._kept.get(row.blobs[0].blob_id) if self._kept and _is_readable(row) else None
        return None if kept is None or kept.until <= self._loop.time() else kept.frame

    def count(self, size_bytes: int) -> None:
        """So much was read of a frame that was found."""
        self._hits += 1
        self._hit_bytes += size_bytes

    def clear(self) -> None:
        """Give all of them back."""
        for blob_id in list(self._kept):
            self._drop(blob_id)
        self._end_due()

    def _end_due(self) -> None:
        """Give back what nobody may read here any more."""
        self._timer = None
        now = self._loop.time()
        while self._kept:
            blob_id, kept = next(iter(self._kept.items()))
            if kept.until > now:
                self._timer = self._loop.call_at(kept.until, self._end_due)
                break
            self._drop(blob_id)
        if self._hits:
            hits, size_bytes, self._hits, self._hit_bytes = self._hits, self._hit_bytes, 0, 0
            self._count_hits(hits, size_bytes)

    def _drop(self, blob_id: bytes) -> None:
        frame = self._kept.pop(blob_id).frame
        self.size_bytes -= frame.pin.extent.length
        frame.release()


def _is_readable(row: ObjectRow) -> bool:
    """Whether the row is of a live object whose bytes are one blob, read as it was stored."""
    return row.state is ObjectState.LIVE and len(row.blobs) == 1 and stored_codec(row.blobs[0]) is None
