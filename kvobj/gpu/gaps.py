"""The free part of one span of device memory: best fit, and neighbours that are free are one gap.

Pure bookkeeping. Best fit and not the arena's good fit, since device memory is the scarcest there is and extents are few: an
`allocate` is a binary search and a shift of a list, 5 µs at ten thousand gaps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

ALIGNMENT: Final = 256
"""Of device extents: what tensors of every dtype, kernels and frames' blocks ask for."""


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to `ALIGNMENT`."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


class Gaps:
    """Extents in `[0, size_bytes)`, which is a multiple of `ALIGNMENT`. Not thread-safe."""

    __slots__ = ("_ends", "_lengths", "_sorted", "free_bytes", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        if size_bytes <= 0 or size_bytes % ALIGNMENT:
            raise ValueError(f"not a multiple of {ALIGNMENT}: {size_bytes}")
        self.size_bytes = size_bytes
        self.free_bytes = 0
        self._lengths: dict[int, int] = {}  # offset of a gap -> its length
        self._ends: dict[int, int] = {}  # end of a gap -> its offset
        self._sorted: list[tuple[int, int]] = []  # (length, offset), ascending
        self.free(0, size_bytes)

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the span is in use."""
        return self.free_bytes == self.size_bytes

    @property
    def largest(self) -> int:
        """Length of the largest gap."""
        return self._sorted[-1][0] if self._sorted else 0

    def best(self, length: int) -> int | None:
        """Length of the smallest gap that holds `length`, None where none does: for who chooses among spans."""
        at = bisect_left(self._sorted, (length, 0))
        return self._sorted[at][0] if at < len(self._sorted) else None

    def allocate(self, length: int) -> int | None:
        """Offset of a new extent in the smallest gap that holds it, the lowest of several; `length` is aligned."""
        at = bisect_left(self._sorted, (length, 0))
        if at == len(self._sorted):
            return None
        room, offset = self._sorted[at]
        self._remove(offset)
        if room > length:
            self._insert(offset + length, room - length)
        self.free_bytes -= length
        return offset

    def free(self, offset: int, length: int) -> None:
        """Give `[offset, offset + length)` back. The caller knows that it was allocated."""
        self.free_bytes += length
        before = self._ends.get(offset)
        if before is not None:
            length += self._remove(before)
            offset = before
        if offset + length in self._lengths:
            length += self._remove(offset + length)
        self._insert(offset, length)

    def _insert(self, offset: int, length: int) -> None:
        self._lengths[offset] = length
        self._ends[offset + length] = offset
        insort(self._sorted, (length, offset))

    def _remove(self, offset: int) -> int:
        length = self._lengths.pop(offset)
        del self._ends[offset + length]
        del self._sorted[bisect_left(self._sorted, (length, offset))]
        return length
