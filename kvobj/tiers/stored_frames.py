"""Frames as tiers hold them, undecoded: for readers that decode them themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvobj.arena import PinnedFrame
from kvobj.errors import CorruptionError, UnavailableError
from kvobj.ids import BlobId
from kvobj.tiers.coded import CodedIndex
from kvobj.tiers.coded_blobs import CodedBlob
from kvobj.tiers.protocol import Tier


@dataclass(frozen=True, slots=True)
class StoredTier:
    """A tier that checks what it hands out and decodes nothing, and who knows which of its blobs lie coded. `known` is asked
    instead of the tier what it holds, where that may have to ask somebody far away."""

    tier: Tier
    index: CodedIndex
    known: Tier | None = None


@dataclass(frozen=True, slots=True)
class DemotedCopy:
    """What a held frame becomes in a coarser codec: that frame's length, BLAKE3 of what it decodes to, its certificate."""

    codec: str
    frame_bytes: int
    digest: bytes
    max_error: float


class StoredFrames:
    """Over some tiers, fast before slow. Event-loop-only."""

    __slots__ = ("_tiers",)

    def __init__(self, tiers: Sequence[StoredTier]) -> None:
        self._tiers = tuple(tiers)

    async def lies(self, blob_id: BlobId) -> list[CodedBlob | None]:
        """How the blob lies in each tier that holds it, fast before slow; None stands for as it was put. A tier that does not
        answer is passed over."""
        found: list[CodedBlob | None] = []
        for each in self._tiers:
            try:
                if not await (each.known or each.tier).missing([blob_id]):
                    found.append(each.index.find(blob_id))
            except UnavailableError:
                continue
        return found

    async def get(self, blob_id: BlobId, codec: str) -> PinnedFrame | None:
        """The whole frame from the first tier that holds the blob in this codec, as `Tier.get` gives it; None where none does."""
        for each in self._tiers:
            coded = each.index.find(blob_id)
            if coded is None or coded.codec != codec:
                continue
            try:
                frame = await each.tier.get(blob_id)
            except (UnavailableError, CorruptionError):
                continue
            if frame is not None:
                return frame
        return None

    async def demoted(self, blob_id: BlobId, held: str, codec: str) -> DemotedCopy | None:
        """What the blob, which lies in the codec `held`, is in a coarser one of the same ladder, in which `get` then gives it. None
        where nobody makes it."""
        del blob_id, held, codec
        return None
