"""What SGLang's pages are called in the store, and which prefixes of them can be restored. Pure, and free of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PARTS_MAX: Final = 4
"""A page in more buffers than these is one chunk, put together in memory."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one pool says of a prefix. `pages`: how far it reaches; `lengths`: the prefix lengths that it can restore, None where
    it has no say."""

    pages: int
    lengths: set[int] | None


def part_names(key: str, pool: str, rank: str, form: str, parts: int) -> list[str]:
    """The chunks of a page, in the order of its buffers: SGLang's key, then pool, rank and form where they are given, and
    which part of how many where there are several."""
    front = ".".join(each for each in (key, pool, rank, form) if each)
    return [front] if parts == 1 else [f"{front}.{index}of{parts}" for index in range(parts)]


def leading_verdict(run: int) -> Verdict:
    """Every page up to the end is needed."""
    return Verdict(run, set(range(1, run + 1)))


def trailing_verdict(pages: Sequence[bool], *, start: int, window: int) -> Verdict:
    """The last `window` pages before the end are needed, all pages where there are fewer. `pages` tells of those from page `start`
    on; what is before them counts as not stored."""
    lengths: set[int] = set()
    run = 0
    for index, is_there in enumerate(pages, start=start):
        run = run + 1 if is_there else 0
        if run >= min(window, index + 1):
            lengths.add(index + 1)
    return Verdict(max(lengths, default=0), lengths)


def group_verdict(run: int, *, block_pages: int, group_pages: int, pages: int) -> Verdict:
    """Blocks of pages in a second form, each a group of chunks: what the whole groups from the start cover. It decides nothing."""
    if block_pages < 1 or group_pages < 1:
        return Verdict(0, None)
    return Verdict(min(run // group_pages * block_pages, pages), None)
