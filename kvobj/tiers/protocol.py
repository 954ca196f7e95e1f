"""What a tier is: a place that holds frames by blob id, and nothing else knows what is behind it.

Frames live in the arena when they are in memory, so what crosses this line are pinned views of extents, never copies.
Behaviour that is not storage (retry, limits, verification, metering, single flight, cascade) is a tier around a
tier, composed in `app/tiering.py`. All tiers and all wrappers pass `tests/contract/tier_contract.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvobj.arena import PinnedFrame
from kvobj.ids import BlobId


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Half-open range `[start, stop)` of a frame's encoded bytes."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a range: [{self.start}, {self.stop})")


@dataclass(frozen=True, slots=True)
class BlobNames:
    """The names that travel with a blob to a medium, for rebuild and for people; never used to find it."""

    bucket: str
    key: str


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Occupancy of a tier in bytes and blobs; `capacity_bytes` is what it may hold, `mode` says how it does its I/O."""

    capacity_bytes: int
    used_bytes: int
    blobs: int
    mode: str = ""


class Tier(Protocol):
    """A home or cache for frames. Calls come from one event loop; calls for different ids run concurrently."""

    @property
    def name(self) -> str:
        """`dram`, `nvme`, `remote`, or the name of what a wrapper wraps."""
        ...

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """The frame, or the given encoded bytes of it, pinned for the caller; None if this tier does not hold it.

        The result may still be filling: await its progress before reading. The caller releases it exactly once.
        A range past the end raises `InvalidRangeError`; a medium that fails raises `TierUnavailableError`.
        """
        ...

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        """Hold the complete frame under the id. Idempotent, atomic: after an error nothing is held. The tier takes a pin of
        its own if it keeps the extent; the caller's pin stays the caller's. Returns when the bytes have the durability
        that this tier gives (dram: survives the process; nvme: synced). `StoreFullError` when there is no room."""
        ...

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        """Those of the ids that this tier does not hold."""
        ...

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        """Forget the blobs; absent is fine. Room comes back once the removal is as durable as the tier is and the last
        reader is gone."""
        ...

    def scan(self) -> AsyncIterator[BlobId]:
        """All ids held, ascending; ids put or deleted meanwhile may or may not be among them."""
        ...

    async def usage(self) -> TierUsage:
        """Present occupancy."""
        ...

    async def aclose(self) -> None:
        """Finish what was accepted and close. Idempotent."""
        ...
