"""The chunk policy that the configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from kvobj.policy.chunk_policy import CacheTier, ChunkPolicy
from kvobj.policy.gipe import DUPLICATE_FACTOR, GipePolicy
from kvobj.policy.lru_chunks import LruChunks


def chunk_policy(
    kind: Literal["gipe", "lru"],
    capacities: Mapping[CacheTier, int],
    *,
    history: int,
    write_margin: float,
    duplicate_factor: float = DUPLICATE_FACTOR,
) -> ChunkPolicy:
    """A policy without contents. `capacities` in bytes; the other arguments are gipe's (`gipe_core.CoreSettings`)."""
    if kind == "lru":
        return LruChunks(capacities)
    return GipePolicy(capacities, log_factor=history, write_margin=write_margin, duplicate_factor=duplicate_factor)
