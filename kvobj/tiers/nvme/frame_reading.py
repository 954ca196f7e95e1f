"""Reads a frame from a segment into an arena extent, piece by piece, so that its first bytes are sent before the last are read.

Two lanes of pieces: those of a short frame go through the kernel's queue, those of a long one, and what the kernel refuses, run on
the pool's threads and report to the event loop. Readers see only the gapless start. Guarantees that progress ends, in `advance` to
the end or in `fail`, by the deadline at the latest, and that `on_ended` is called once neither a thread nor the kernel touches the
extent any more. A whole frame's record page is read along and must name the blob; the frame itself is not checked here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final

from kvobj.arena import Progress
from kvobj.errors import TierUnavailableError
from kvobj.tiers.nvme.kernel_queue import Kind, Slot, TransferQueue, is_for_threads
from kvobj.tiers.nvme.record import RECORD_BYTES
from kvobj.tiers.nvme.segment_file import SegmentFile
from kvobj.tiers.nvme.space import unavailable

# One lane of 1 MiB pieces read 1.7 GB/s of a 32 MiB frame, two lanes of 1 or 2 MiB 2.0, as much as one single read; four
# lanes or 8 MiB pieces were no faster.
_LANES: Final = 2
_PIECE_BYTES: Final = 2 << 20
_FIRST_PIECE_BYTES: Final = 512 << 10
# Up to here one read is quicker than two: a 1 MiB object's frame is one piece.
_SINGLE_PIECE_BYTES: Final = (1 << 20) + (64 << 10)
# Beginning a transfer costs the loop itself 25 to 50 µs, which is too much of what a long frame's reading takes from others. After
# the first piece the rest is one: of 4 MiB, pieces of 1 MiB took 1.46 ms, of 2 MiB 1.28, two of 0.5 and 3.5 MiB 1.22.
_QUEUED_BYTES_MAX: Final = (4 << 20) + (64 << 10)


def pieces_of(length: int, piece_bytes: int = _PIECE_BYTES) -> list[tuple[int, int]]:
    """Half-open spans that make up `[0, length)`, the first one small; `length` and all bounds are multiples of 4096."""
    if length <= _SINGLE_PIECE_BYTES:
        return [(0, length)]
    starts = [0, *range(_FIRST_PIECE_BYTES, length, piece_bytes)]
    return list(zip(starts, [*starts[1:], length], strict=True))


class FrameReading:
    """One read in flight. Made and told of on the event loop.

    `view` is the extent's part to fill, `offset` where in the segment its first byte is. With `check_first` the record page in
    front of it is read with the first piece, and given to it before anything is told; it may raise. It runs on a thread, with the
    page that `page` gives there, or on the event loop.
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
        page: Callable[[], memoryview],
        check_first: Callable[[memoryview], None] | None = None,
        executor: Executor,
        queue: TransferQueue | None,
    ) -> None:
        self._segment = segment
        self._offset = offset
        self._view = view
        self._progress = progress
        self._on_ended = on_ended
        self._page = page
        self._check_first = check_first
        self._executor = executor
        self._queue = queue
        self._pieces: list[tuple[int, int]] = []
        self._lanes_left = 0
        self._filled: set[int] = set()
        self._next = 0
        self._begun = 0
        self._stopped = False
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.call_later(timeout_seconds, self._time_out)

    def start(self) -> None:
        """Let the lanes run."""
        queue = self._queue
        length = len(self._view)
        is_queued = queue is not None and self._segment.queued and length <= _QUEUED_BYTES_MAX
        self._pieces = pieces_of(length, _QUEUED_BYTES_MAX if is_queued else _PIECE_BYTES)
        lanes = self._lanes_left = min(_LANES, len(self._pieces))
        for lane in range(lanes):
            if queue is not None and is_queued:
                self._begin_next(queue)
            else:
                self._executor.submit(self._run_lane, range(lane, len(self._pieces), lanes))

    def _begin_next(self, queue: TransferQueue) -> None:
        """Have this lane's next piece read by the kernel, or by a thread where that is refused."""
        if self._stopped or self._begun == len(self._pieces):
            self._end_lane([], None)
            return
        index = self._begun
        self._begun += 1
        start, stop = self._pieces[index]
        segment = self._segment
        offset, length = self._span(index)
        slot = queue.take() if segment.may_queue(offset, length, writes=False) else None
        if slot is None:
            self._executor.submit(self._read_on_thread, index)
            return
        error = queue.begin(
            slot,
            Kind.READ,
            segment.descriptor,
            partial(self._read, index, slot, offset, length),
            view=self._view[start:stop],
            offset=offset,
            with_page=length > stop - start,
        )
        if error:
            segment.note_outcome(offset, length, -error, writes=False)
            self._executor.submit(self._read_on_thread, index)

    def _span(self, index: int) -> tuple[int, int]:
        """Offset and length in the segment of a piece with the record page that is read along."""
        start, stop = self._pieces[index]
        page_bytes = RECORD_BYTES if index == 0 and self._check_first is not None else 0
        return self._offset + start - page_bytes, stop - start + page_bytes

    def _read(self, index: int, slot: Slot, offset: int, wanted: int, result: int) -> None:
        """The kernel is done with a piece."""
        self._segment.note_outcome(offset, wanted, result, writes=False)
        failure: Exception | None = None
        if result != wanted:
            if is_for_threads(Kind.READ, result, wanted):
                self._executor.submit(self._read_on_thread, index)
                return
            failure = OSError(-result, os.strerror(-result))
        elif index == 0 and self._check_first is not None:
            try:
                self._check_first(slot.page)
            except Exception as error:  # noqa: BLE001 - readers wait for it: whatever it was must reach them
                failure = error
        self._go_on(index, failure)

    def _read_on_thread(self, index: int) -> None:
        failure: Exception | None = None
        try:
            self._read_piece(index)
        except Exception as error:  # noqa: BLE001 - readers wait for this thread: whatever ended it must reach them
            failure = error
        self._loop.call_soon_threadsafe(self._go_on, index, failure)

    def _go_on(self, index: int, failure: Exception | None) -> None:
        if failure is not None:
            self._stopped = True
            self._end_lane([], failure)
            return
        self._advance([index])
        if self._queue is not None:
            self._begin_next(self._queue)

    def _run_lane(self, indexes: Sequence[int]) -> None:
        failure: Exception | None = None
        filled: list[int] = []
        try:
            for index in indexes:
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
        if index == 0 and self._check_first is not None:
            page = self._page()
            self._segment.read([page, self._view[start:stop]], self._offset + start - RECORD_BYTES)
            self._check_first(page)
        else:
            self._segment.read([self._view[start:stop]], self._offset + start)

    def _advance(self, filled: Sequence[int]) -> None:
        if not filled:
            return
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
