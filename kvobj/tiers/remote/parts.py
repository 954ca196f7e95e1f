"""Into which parts a body is cut that goes in several requests. Pure.

A little more than one part is one request all the same: a frame of 8 MiB and its header is no multipart upload of two parts, of
which the second is a few KiB and costs four requests in all.
"""

from __future__ import annotations

from typing import Final

_FOURTH: Final = 4


def part_spans(size_bytes: int, part_bytes: int) -> list[range]:
    """The parts of `size_bytes`, one at least, in order and without a gap: all but the last of `part_bytes`, the last of up to 1.25
    times as much and, unless it is the only one, more than a fourth of it."""
    count = max(-(-(size_bytes - part_bytes // _FOURTH) // part_bytes), 1)
    starts = [number * part_bytes for number in range(count)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], size_bytes], strict=True)]


def read_spans(size_bytes: int, part_bytes: int) -> list[range]:
    """As `part_spans`, for who wants the first bytes early: where there are several, a fourth of a part comes first by itself."""
    spans = part_spans(size_bytes, part_bytes)
    if len(spans) == 1:
        return spans
    front = part_bytes // _FOURTH
    others = part_spans(size_bytes - front, part_bytes)
    return [range(front), *[range(front + span.start, front + span.stop) for span in others]]
