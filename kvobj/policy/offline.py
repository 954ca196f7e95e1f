"""What no policy can beat: the best set of blocks to keep for somebody who knows the future.

All blocks of a request are used at once, so a parent's next use is never later than its child's. Belady's rule over whole
requests, with bypass and ties to the shallower block, therefore keeps sets without holes: for blocks of equal size it is the
optimum, not just a bound (`eviction.md` §1). Sequences of ids in, no clock, no I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

NEVER = 2**62


def next_uses(chains: Sequence[Sequence[int]]) -> list[array[int]]:
    """For each block of each chain, the number of the next chain that holds it; `NEVER` where none does."""
    following: dict[int, int] = {}
    result: list[array[int]] = []
    for number in range(len(chains) - 1, -1, -1):
        chain = chains[number]
        result.append(array("q", [following.get(block, NEVER) for block in chain]))
        following.update(dict.fromkeys(chain, number))
    result.reverse()
    return result


def best_prefix_hits(
    chains: Sequence[Sequence[int]], capacity: int, *, uses: Sequence[array[int]] | None = None
) -> Iterable[int]:
    """How many leading blocks of each chain the best cache of `capacity` blocks holds. `uses` is `next_uses`, made once."""
    if uses is None:
        uses = next_uses(chains)
    kept: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    for chain, following in zip(chains, uses, strict=True):
        hits = 0
        for block in chain:
            if block not in kept:
                break
            hits += 1
        yield hits
        for depth, (block, next_use) in enumerate(zip(chain, following, strict=True)):
            if next_use == NEVER:
                kept.pop(block, None)
            else:
                kept[block] = next_use
                heappush(farthest, (-next_use, -depth, block))
        while len(kept) > capacity:
            minus_use, _, block = heappop(farthest)
            if kept.get(block) == -minus_use:
                del kept[block]
