"""The longest run of live chunks at the head of a list (`gc-protocol` §2.4): pure, over a probe that gives a key's live row.

A run goes on with a chunk whose parent is the element before it (the namespace's root for the first) or that has no parent.
A chain is found by binary search: a probe hits only where the row has the list's depth and running sum there, which no other
chain has, so the hits are one run from 0 on, whatever the list. What is behind it, or is no chain, goes one by one, each row
against its neighbour. Both give the same run (the reference driver only walks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvobj.catalog.chunk_heads import ChunkHead
from kvobj.catalog.chunk_list import ChunkList
from kvobj.ids.chain_sums import SUM_BYTES

Probe = Callable[[str], ChunkHead | None]
"""Gives the live row of a key."""


@dataclass(slots=True)
class Run:
    """What was found so far. `targets` protect the whole of it: each element that the next one is no child of."""

    matched: int = 0
    tokens: int = 0
    size_bytes: int = 0
    targets: list[ChunkHead] = field(default_factory=list)


def begins_chain(chunks: ChunkList, probe: Probe) -> bool:
    """Whether the list begins with a live chain: one from the root, or a loose chunk before a child of its own."""
    first = probe(chunks.key(0)) if len(chunks) else None
    if first is None or first.parent is not None:
        return first is not None and first.parent == ""
    second = probe(chunks.key(1)) if len(chunks) > 1 else None
    return second is not None and second.parent == first.key


def match_chain(chunks: ChunkList, probe: Probe, sums: bytes) -> Run:
    """As much of the run as is one chain, given the list's running sums: ~log2 of its length probes."""
    tail = probe(chunks.key(0))
    if tail is None or tail.parent:
        return Run()
    # All before `low` hit, `high` and all behind it do not. The last element first: most lists are stored almost whole.
    low, high = 1, len(chunks)
    middle = high - 1
    while low < high:
        head = probe(chunks.key(middle))
        if head is not None and _is_at(head, middle, sums):
            low, tail = middle + 1, head
        else:
            high = middle
        middle = (low + high) // 2
    return Run(low, tail.chain_tokens, tail.chain_bytes, [tail])


def _is_at(head: ChunkHead, depth: int, sums: bytes) -> bool:
    return (
        head.parent is not None
        and head.depth == depth
        and head.chain_sum == sums[depth * SUM_BYTES : (depth + 1) * SUM_BYTES]
    )


def walk(run: Run, chunks: ChunkList, probe: Probe, *, limit: int) -> bool:
    """Take a run on one by one, by `limit` elements at most; whether its end was reached."""
    stop = min(len(chunks), run.matched + limit)
    while run.matched < stop:
        head = probe(chunks.key(run.matched))
        if head is None or not _goes_on(run, head):
            return True
        run.matched += 1
        run.tokens += head.tokens
        run.size_bytes += head.size_bytes
        if head.parent:
            run.targets[-1] = head
        else:
            run.targets.append(head)
    return stop == len(chunks)


def _goes_on(run: Run, head: ChunkHead) -> bool:
    """Whether a row may stand behind the run. The last target is always the element before."""
    if head.parent is None:
        return True
    if not run.matched:
        return head.parent == ""
    return head.parent == run.targets[-1].key
