"""How batches of chunks are cut: to the API's bounds, and for several threads. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

MOVED_AT_ONCE: Final = 1000
"""Chunks of one call of the API that moves them."""


def cut(sizes: Sequence[int], bytes_max: int, count_max: int) -> Iterator[tuple[int, int]]:
    """Where to cut a batch: pieces of some chunks and some bytes, each of at least one chunk."""
    start, size_bytes = 0, 0
    for index, size in enumerate(sizes):
        if index > start and (index - start >= count_max or size_bytes + size > bytes_max):
            yield start, index
            start, size_bytes = index, 0
        size_bytes += size
    if sizes:
        yield start, len(sizes)


def bytes_for(sizes: Sequence[int], pieces: int) -> int:
    """The `bytes_max` by which `cut` makes so many pieces at most, of about as many bytes where all chunks are of a size: a third
    of 32 chunks is no whole number of them, and what is left over would be a piece more."""
    return -(-sum(sizes) // pieces) + max(0, max(sizes, default=0) - 1)


def shared_out(sizes: Sequence[int], start: int, stop: int, parts: int) -> list[int]:
    """Where to cut a piece into so many parts of about as many bytes, each of at least one chunk, or fewer."""
    share = sum(sizes[start:stop]) / parts
    bounds, done = [start], 0
    for index in range(start, stop):
        if index > bounds[-1] and len(bounds) < parts and done >= share * len(bounds):
            bounds.append(index)
        done += sizes[index]
    return [*bounds, stop]
