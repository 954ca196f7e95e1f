"""Least recently used, leaves first: the plain policy over chunks, and the baseline that GIPE is measured against.

A request counts as a use of its chain tail first, so a parent is never older than its child and the oldest chunk is a leaf; only
chunks read by themselves upset that, and then a parent waits until its last child has gone. Everything is admitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from kvobj.policy.chunk_policy import NAME_BYTES, CacheTier

SCAN_MAX: Final = 10_000
"""How many chunks one call of `victims` looks at."""


SAME_REQUEST_MS: Final = 60_000
"""A chunk stored so long after its parent was used is of the request that used the parent."""


class _Held:
    """A chunk in one tier, in a ring from the least recently used on."""

    __slots__ = ("name", "older", "parent", "size_bytes", "used_ms", "younger")

    def __init__(self, name: bytes, parent: bytes | None, size_bytes: int, used_ms: int) -> None:
        self.name = name
        self.parent = parent
        self.size_bytes = size_bytes
        self.used_ms = used_ms
        self.older = self.younger = self

    def put_before(self, younger: _Held) -> None:
        """Become the next older one of it, wherever this was."""
        self.leave()
        self.older, self.younger = younger.older, younger
        self.older.younger = self.younger.older = self

    def leave(self) -> None:
        """Close the ring behind it."""
        self.older.younger, self.younger.older = self.younger, self.older


class _Tier:
    """Chunks of one tier in the order of their use; and how many children each name has among them."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.held: dict[bytes, _Held] = {}
        self.children: dict[bytes, int] = {}
        self.end = _Held(b"", None, 0, 0)

    def oldest_first(self, most: int) -> Iterator[bytes]:
        """At most so many names. The tier must not change meanwhile."""
        at = self.end.younger
        while at is not self.end and most:
            yield at.name
            at = at.younger
            most -= 1


class LruChunks:
    """See `ChunkPolicy`. Knows only what is held: there are no ghosts. `capacities`: bytes by tier."""

    def __init__(self, capacities: Mapping[CacheTier, int]) -> None:
        self._tiers = {tier: _Tier(capacities.get(tier, 0)) for tier in CacheTier}

    def request(self, chain: bytes, *, now_ms: int, partial_last: bool = False, hint: int = 0) -> int:  # noqa: ARG002 - order is all
        """See `ChunkPolicy.request`."""
        names = [chain[at : at + NAME_BYTES] for at in range(0, len(chain), NAME_BYTES)]
        for name in reversed(names):
            self._touch(name, now_ms)
        for known, name in enumerate(names):
            if not any(name in tier.held for tier in self._tiers.values()):
                return known
        return len(names)

    def access(self, name: bytes, *, now_ms: int) -> None:
        """See `ChunkPolicy.access`."""
        self._touch(name, now_ms)

    def _touch(self, name: bytes, now_ms: int) -> None:
        for tier in self._tiers.values():
            held = tier.held.get(name)
            if held is not None:
                held.used_ms = now_ms
                held.put_before(tier.end)

    def admits(
        self,
        name: bytes,  # noqa: ARG002
        tier: CacheTier,
        *,
        size_bytes: int,
        now_ms: int,  # noqa: ARG002
        parent: bytes | None = None,  # noqa: ARG002
    ) -> bool:
        """See `ChunkPolicy.admits`: whatever fits into the tier at all."""
        return size_bytes <= self._tiers[tier].capacity_bytes

    def stored(self, name: bytes, tier: CacheTier, *, parent: bytes | None, size_bytes: int, now_ms: int) -> None:
        """See `ChunkPolicy.stored`."""
        into = self._tiers[tier]
        held = into.held.get(name)
        if held is not None:
            into.used_bytes += size_bytes - held.size_bytes
            held.size_bytes = size_bytes
            return
        above = parent if parent != name else None
        held = into.held[name] = _Held(name, above, size_bytes, now_ms)
        into.used_bytes += size_bytes
        if above is None:
            held.put_before(into.end)
            return
        into.children[above] = into.children.get(above, 0) + 1
        ahead = into.held.get(above)
        if ahead is not None and now_ms - ahead.used_ms > SAME_REQUEST_MS:
            ahead.used_ms = now_ms
            ahead.put_before(into.end)
        held.put_before(into.end if ahead is None else ahead)

    def stored_many(self, chunks: Sequence[tuple[bytes, int]], tier: CacheTier, *, now_ms: int) -> None:
        """See `ChunkPolicy.stored_many`."""
        for name, size_bytes in chunks:
            self.stored(name, tier, parent=None, size_bytes=size_bytes, now_ms=now_ms)

    def dropped(self, name: bytes, tier: CacheTier) -> None:
        """See `ChunkPolicy.dropped`."""
        out_of = self._tiers[tier]
        held = out_of.held.pop(name, None)
        if held is None:
            return
        held.leave()
        out_of.used_bytes -= held.size_bytes
        if held.parent is not None:
            left = out_of.children[held.parent] - 1
            if left:
                out_of.children[held.parent] = left
            else:
                del out_of.children[held.parent]

    def dropped_many(self, names: Sequence[bytes], tier: CacheTier) -> None:
        """See `ChunkPolicy.dropped_many`."""
        for name in names:
            self.dropped(name, tier)

    def set_capacity(self, tier: CacheTier, capacity_bytes: int) -> None:
        """See `ChunkPolicy.set_capacity`."""
        self._tiers[tier].capacity_bytes = capacity_bytes

    def victims(
        self,
        tier: CacheTier,
        bytes_needed: int,
        *,
        now_ms: int,  # noqa: ARG002
        eligible: Callable[[bytes], bool],
        limit: int = 1000,
    ) -> list[bytes]:
        """See `ChunkPolicy.victims`. At most `SCAN_MAX` chunks are looked at."""
        among = self._tiers[tier]
        chosen: list[bytes] = []
        gone: Counter[bytes] = Counter()
        passed_over: set[bytes] = set()
        found_bytes = 0

        def take(name: bytes) -> None:
            nonlocal found_bytes
            # Up the chain for as long as parents that were passed over have lost their last child.
            following: bytes | None = name
            while following is not None and found_bytes < bytes_needed and len(chosen) < limit:
                if gone[following] < among.children.get(following, 0):
                    passed_over.add(following)
                    return
                if not eligible(following):
                    return
                held = among.held[following]
                chosen.append(following)
                found_bytes += held.size_bytes
                if held.parent is None:
                    return
                gone[held.parent] += 1
                following = held.parent if held.parent in passed_over else None

        for name in among.oldest_first(SCAN_MAX):
            if found_bytes >= bytes_needed or len(chosen) >= limit:
                break
            take(name)
        return chosen

    def offer(
        self, chain: bytes, first: int, tier: CacheTier, *, size_bytes: int, now_ms: int
    ) -> tuple[int, list[bytes]]:
        """See `GipePolicy.offer`: as a replay stores a chain's chunks."""
        into = self._tiers[tier]
        gone: list[bytes] = []
        for at in range(first, len(chain) // NAME_BYTES):
            name = chain[at * NAME_BYTES : (at + 1) * NAME_BYTES]
            if name in into.held:
                continue
            parent = chain[(at - 1) * NAME_BYTES : at * NAME_BYTES] if at else None
            excess = into.used_bytes + size_bytes - into.capacity_bytes
            if excess > 0:
                victims = self.victims(tier, excess, now_ms=now_ms, eligible=partial(_is_another, parent))
                if not victims:
                    return at - first, gone
                for victim in victims:
                    self.dropped(victim, tier)
                gone += victims
            self.stored(name, tier, parent=parent, size_bytes=size_bytes, now_ms=now_ms)
        return len(chain) // NAME_BYTES - first, gone

    def locate(self, chain: bytes) -> bytes:
        """Which tiers hold each chunk, a byte each: bit 0 dram, bit 1 nvme."""
        names = (chain[at : at + NAME_BYTES] for at in range(0, len(chain), NAME_BYTES))
        return bytes(sum((name in self._tiers[tier].held) << tier for tier in CacheTier) for name in names)

    def holds(self, name: bytes, tier: CacheTier) -> bool:
        """See `ChunkPolicy.holds`."""
        return name in self._tiers[tier].held

    def size_bytes(self, tier: CacheTier) -> int:
        """See `ChunkPolicy.size_bytes`."""
        return self._tiers[tier].used_bytes

    def count(self, tier: CacheTier) -> int:
        """How many chunks the tier holds."""
        return len(self._tiers[tier].held)

    def save(self) -> bytes:
        """See `ChunkPolicy.save`: nothing is learnt."""
        return b""

    def load(self, state: bytes) -> None:
        """See `ChunkPolicy.load`."""


def _is_another(name: bytes | None, other: bytes) -> bool:
    return name != other
