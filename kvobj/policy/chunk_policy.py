"""What a policy over chunks is: one instance ranks what lies in dram and nvme, told whole requests, never bytes.

Names are 16 bytes each (`chunk_name` of bucket and key): they outlive blob ids, so that what was evicted and comes
back is known again. Pure: no I/O, decisions depend on nothing but what is passed in. Times are of one clock that does not jump
(`clock.boot_ms`; what goes back is ignored). Called from one thread, the event loop's; bounded work a call. `eviction.md` §3
to §5 is the source.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Final, Protocol

from blake3 import blake3

from kvobj.ids.chain_sums import key_lanes

NAME_BYTES: Final = 16


class CacheTier(IntEnum):
    """The tiers that a policy ranks, fast to slow."""

    DRAM = 0
    NVME = 1


_SALT: Final = secrets.token_bytes(32)
"""Drawn once a process, like the seed of Python's own hashes: nobody can choose a key whose name in one bucket is that of a chunk
in another. Names are never written down."""


@lru_cache(maxsize=4096)
def chunk_name(bucket: str, key: str) -> bytes:
    """What policies call the chunk under this key in this process: 16 bytes, the same whatever blob it names.

    A read asks three times, so the last few thousand are remembered.
    """
    return chunk_names(bucket, key_lanes(key))


def chunk_names(bucket: str, lanes: bytes) -> bytes:
    """`chunk_name` of many, end to end, from their lanes (`ids.chain_sums`, `ChunkList.lanes`). 4,096 of them take 30 µs; to
    hash bucket and key of each took 2.7 ms."""
    mask = _mask(bucket) * (len(lanes) // NAME_BYTES)
    return (int.from_bytes(lanes, "little") ^ int.from_bytes(mask, "little")).to_bytes(len(lanes), "little")


@lru_cache(maxsize=1024)
def _mask(bucket: str) -> bytes:
    return blake3(bucket.encode(), key=_SALT).digest(NAME_BYTES)


class ChunkPolicy(Protocol):
    """See the module's text. Names are `bytes` of 16; `chain` arguments are names end to end, head first."""

    def request(self, chain: bytes, *, now_ms: int, partial_last: bool = False, hint: int = 0) -> int:
        """One request's whole chain, stored or not: an access of every chunk. Returns how many leading chunks were known (cached
        or ghost). `hint` is 0..5: floor(log2(output tokens)/2)."""
        ...

    def access(self, name: bytes, *, now_ms: int) -> None:
        """One chunk read by itself, by a client that tells no chain. Soon after the last use it may count as the same one."""
        ...

    def admits(
        self, name: bytes, tier: CacheTier, *, size_bytes: int, now_ms: int, parent: bytes | None = None
    ) -> bool:
        """Whether the tier should take the chunk: there is room, or it is worth more than what would have to go, which its parent
        never is. A refused one is remembered as a ghost if a request or an access told of it."""
        ...

    def stored(self, name: bytes, tier: CacheTier, *, parent: bytes | None, size_bytes: int, now_ms: int) -> None:
        """The tier holds the chunk from now on (again: only its size is taken)."""
        ...

    def stored_many(self, chunks: Sequence[tuple[bytes, int]], tier: CacheTier, *, now_ms: int) -> None:
        """`stored` of each name and size, without parents, in this order."""
        ...

    def dropped(self, name: bytes, tier: CacheTier) -> None:
        """The tier holds it no longer. Unknown names are fine."""
        ...

    def dropped_many(self, names: Sequence[bytes], tier: CacheTier) -> None:
        """`dropped` of each, in this order."""
        ...

    def set_capacity(self, tier: CacheTier, capacity_bytes: int) -> None:
        """What the tier may hold from now on: whatever else lies there takes from it. Nothing goes by this alone."""
        ...

    def victims(
        self, tier: CacheTier, bytes_needed: int, *, now_ms: int, eligible: Callable[[bytes], bool], limit: int = 1000
    ) -> list[bytes]:
        """What should leave the tier, first to go first, leaves before their parents, whose sizes sum to `bytes_needed` or more.

        Changes nothing: the same are named until `dropped`. Fewer come back where the eligible ones do not suffice or a bound
        on the work is reached. `eligible` must not call the policy.
        """
        ...

    def holds(self, name: bytes, tier: CacheTier) -> bool:
        """Whether the tier holds the chunk, as the policy was told."""
        ...

    def size_bytes(self, tier: CacheTier) -> int:
        """Sum of the sizes of what the tier holds."""
        ...

    def save(self) -> bytes:
        """What is worth keeping over a restart: tables and counts, not contents. Bounded (1 MiB)."""
        ...

    def load(self, state: bytes) -> None:
        """Take up a saved state; one of another kind or version is ignored."""
        ...
