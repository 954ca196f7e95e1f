"""What GIPE's two implementations have in common: what they are asked, and what they are made with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvobj.policy.chunk_policy import NAME_BYTES


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Capacities in bytes by tier (to begin with), and how much of the past is kept.

    The log of accesses is `log_factor` times as long as the number of chunks that the tiers can hold (by the mean size of those
    they hold), within `log_least` and `log_most` entries. A chunk that is not held is remembered for as long as it is in the log.
    An nvme copy whose chunk is in dram too is ranked at `duplicate_factor` times its worth. A chunk is written to nvme only if it
    is worth more than `write_margin` times what would go for it.
    """

    capacities: tuple[int, int]
    log_factor: int
    log_least: int
    log_most: int
    duplicate_factor: float
    write_margin: float


@dataclass(frozen=True, slots=True)
class CoreTotals:
    """What a core knows: chunks, of which some are held; and the bytes that its tables take (0: not counted)."""

    known_chunks: int
    log_entries: int
    log_limit: int
    allocated_bytes: int


class GipeCore(Protocol):
    """See `ChunkPolicy`; tiers are their numbers here. Two cores given the same calls answer the same."""

    def request(self, chain: bytes, now_ms: int, *, partial_last: bool, hint: int) -> int:
        """See `ChunkPolicy.request`."""
        ...

    def access(self, name: bytes, now_ms: int) -> None:
        """See `ChunkPolicy.access`."""
        ...

    def admits(self, name: bytes, tier: int, size_bytes: int, parent: bytes | None, now_ms: int) -> bool:
        """See `ChunkPolicy.admits`."""
        ...

    def stored(self, name: bytes, tier: int, size_bytes: int, parent: bytes | None, now_ms: int) -> None:
        """See `ChunkPolicy.stored`."""
        ...

    def stored_many(self, chunks: Sequence[tuple[bytes, int]], tier: int, now_ms: int) -> None:
        """See `ChunkPolicy.stored_many`."""
        ...

    def dropped(self, name: bytes, tier: int) -> None:
        """See `ChunkPolicy.dropped`."""
        ...

    def dropped_many(self, names: Sequence[bytes], tier: int) -> None:
        """`dropped` of each, in this order."""
        ...

    def set_capacity(self, tier: int, capacity_bytes: int) -> None:
        """See `ChunkPolicy.set_capacity`."""
        ...

    def walk(self, tier: int, now_ms: int) -> Walk:
        """Look at victims; see `Walk`."""
        ...

    def offer(self, chain: bytes, first: int, tier: int, size_bytes: int, now_ms: int) -> tuple[int, list[bytes]]:
        """Store a chain's chunks from `first` on as `admits`, `victims`, `dropped` and `stored` would: how many were taken before
        the first refusal, and the names of what went for them."""
        ...

    def locate(self, chain: bytes) -> bytes:
        """Which tiers hold each chunk: a byte each, bit 0 dram, bit 1 nvme."""
        ...

    def used_bytes(self, tier: int) -> int:
        """Sum of the sizes that the tier holds."""
        ...

    def count(self, tier: int) -> int:
        """How many chunks the tier holds."""
        ...

    def totals(self) -> CoreTotals:
        """How much is known."""
        ...

    def counts(self) -> bytes:
        """The counts that the index is made of: CLASSES x BUCKETS u32 of intervals that entered, as many of those that ended."""
        ...

    def set_counts(self, raw: bytes) -> None:
        """Take up what `counts` gave."""
        ...


class Walk(Protocol):
    """Victims of one tier, first to go first, as if each one taken had gone. Nothing else may be asked of the core until `end`,
    which puts all back."""

    def next(self, *, take: bool) -> tuple[bytes, int] | None:
        """The next one's name and size; `take`: the one named before goes, so that its parent may be the next. None: no more."""
        ...

    def some(self, bytes_needed: int, limit: int, *, take: bool) -> tuple[list[bytes], int]:
        """`next` up to `limit` times, each taken as the next is named, until their sizes sum to `bytes_needed`: their names, and
        what they sum to. `take`: as for the first `next`."""
        ...

    def end(self) -> None:
        """Put all back as it was."""
        ...


def names_of(chain: bytes) -> Iterator[bytes]:
    """The names of a chain, head first."""
    return (chain[at : at + NAME_BYTES] for at in range(0, len(chain), NAME_BYTES))
