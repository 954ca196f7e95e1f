"""Reads a frame from a segment into an arena extent, piece by piece, so that its first bytes are sent before the last are read.

Two lanes of pieces run on the pool's threads and report to the event loop; readers see only the gapless start. Guarantees that
progress ends, in `advance` to the end or in `fail`, by the deadline at the latest, and that `on_ended` is called once no
thread touches the extent any more. A whole frame's record page is read along and must name the blob; the frame itself is
not checked here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final

from kvobj.arena import Progress
from kvobj.errors import TierUnavailableError
from kvobj.tiers.nvme.segment_file import SegmentFile
from kvobj.tiers.nvme.space import unavailable

# One lane of 1 MiB pieces read 1.7 GB/s of a 32 MiB frame, two lanes of 1 or 2 MiB 2.0, as much as one single read; four
# lanes or 8 MiB pieces were no faster.
_LANES: Final = 2
_PIECE_BYTES: Final = 2 << 20
_FIRST_PIECE_BYTES: Final = 512 << 10
# Up to here one read is quicker than two: a 1 MiB object's frame is one piece.
_SINGLE_PIECE_BYTES: Final = (1 << 20) + (64 << 10)


def pieces_of(length: int) -> list[tuple[int, int]]:
    """Half-open spans that make up `[0, length)`, the first one small; `length` and all bounds are multiples of 4096."""
    if length <= _SINGLE_PIECE_BYTES:
        return [(0, length)]
    starts = [0, *range(_FIRST_PIECE_BYTES, length, _PIECE_BYTES)]
    return list(zip(starts, [*starts[1:], length], strict=True))


class FrameReading:
    """One read in flight. Made and told of on the event loop; `check_first` runs on a thread behind the first piece.

    `view` is the extent's part to fill, `offset` where in the segment its first byte is. `before` is read in front of the first
    piece (a record page, that `check_first` then looks at and raises a KvobjError about).
    """

    def __init__(
        self,
        segment: SegmentFile,
        offset: int,
        view: memoryview,
        *,
        progress: Progress,
        timeout_seconds: float,
        on_ended: Callable[[], None],
        first: Callable[[SegmentFile, int, memoryview], None] | None = None,
    ) -> None:
        self._segment = segment
        self._offset = offset
        self._view = view
        self._progress = progress
        self._on_ended = on_ended
        self._first = first
        self._pieces = pieces_of(len(view))
        self._lanes = min(_LANES, len(self._pieces))
        self._lanes_left = self._lanes
        self._filled: set[int] = set()
        self._next = 0
        self._stopped = False
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.call_later(timeout_seconds, self._time_out)

    def start(self, executor: Executor) -> None:
        """Let the lanes run."""
        for lane in range(self._lanes):
            executor.submit(self._run_lane, lane)

    def _run_lane(self, lane: int) -> None:
        failure: Exception | None = None
        filled: list[int] = []
        try:
            for index in range(lane, len(self._pieces), self._lanes):
                if filled:
                    self._loop.call_soon_threadsafe(self._advance, filled)
                    filled = []
                if self._stopped:
                    break
                self._read_piece(index)
                filled = [index]
        except Exception as error:  # noqa: BLE001 - readers wait for this thread: whatever ended it must reach them
            failure = error
            self._stopped = True
        self._loop.call_soon_threadsafe(self._end_lane, filled, failure)

    def _read_piece(self, index: int) -> None:
        start, stop = self._pieces[index]
        if index == 0 and self._first is not None:
            self._first(self._segment, self._offset, self._view[start:stop])
        else:
            self._segment.read([self._view[start:stop]], self._offset + start)

    def _advance(self, filled: Sequence[int]) -> None:
        self._filled.update(filled)
        while self._next in self._filled:
            self._filled.remove(self._next)
            self._next += 1
        if self._next and not self._stopped:
            # The padding behind a frame's end is no part of it.
            self._progress.advance(min(self._pieces[self._next - 1][1], self._progress.total))

    def _end_lane(self, filled: Sequence[int], failure: Exception | None) -> None:
        self._advance(filled)
        if isinstance(failure, OSError):
            self._progress.fail(unavailable(failure, "segment cannot be read"))
        elif failure is not None:
            self._progress.fail(failure)
        self._lanes_left -= 1
        if self._lanes_left == 0:
            self._deadline.cancel()
            del self._view
            self._on_ended()

    def _time_out(self) -> None:
        self._stopped = True
        self._progress.fail(TierUnavailableError("segment read missed its deadline", path=self._segment.path))
