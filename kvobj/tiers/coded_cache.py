"""The dram tier as it is written through: marks and puts are its own, and a blob that lies coded is handed out decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvobj.arena import Arena, Pin, PinnedFrame
from kvobj.database import WriteView
from kvobj.ids import BlobId
from kvobj.tiers.coded import Coded, ProfileOf, no_profile
from kvobj.tiers.decode_turns import DecodeTurns
from kvobj.tiers.dram import DramTier
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.protocol import BlobNames
from kvobj.tiers.verified import RunOnPool

T = TypeVar("T")


class CodedCache(Coded):
    """See the module's text and `DramTier`. What does not decode is raised as `FrameCorruptError`."""

    __slots__ = ("_dram",)

    def __init__(
        self,
        dram: DramTier,
        *,
        arena: Arena,
        run: RunOnPool,
        instruments: TierInstruments,
        profile_of: ProfileOf = no_profile,
        turns: DecodeTurns | None = None,
    ) -> None:
        super().__init__(
            dram, index=dram, arena=arena, run=run, instruments=instruments, profile_of=profile_of, turns=turns
        )
        self._dram = dram

    @property
    def dirty_bytes(self) -> int:
        """See `DramTier.dirty_bytes`."""
        return self._dram.dirty_bytes

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames, *, dirty: bool = False) -> None:
        """See `DramTier.put`."""
        await self._dram.put(blob_id, frame, names, dirty=dirty)

    async def put_unsealed(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames, *, dirty: bool = True) -> None:
        """See `DramTier.put_unsealed`."""
        await self._dram.put_unsealed(blob_id, frame, names, dirty=dirty)

    def put_within(
        self,
        blob_id: BlobId,
        pin: Pin,
        frame_bytes: int,
        commit: Callable[[Callable[[WriteView], None]], T | None],
        *,
        sealed: bool,
    ) -> T | None:
        """See `DramTier.put_within`."""
        return self._dram.put_within(blob_id, pin, frame_bytes, commit, sealed=sealed)

    def put_unsealed_many(self, blobs: Sequence[tuple[BlobId, PinnedFrame]]) -> None:
        """See `DramTier.put_unsealed_many`."""
        self._dram.put_unsealed_many(blobs)

    def mark_sealed(self, blob_id: BlobId) -> None:
        """See `DramTier.mark_sealed`."""
        self._dram.mark_sealed(blob_id)

    def mark_dirty(self, blob_id: BlobId) -> None:
        """See `DramTier.mark_dirty`."""
        self._dram.mark_dirty(blob_id)

    def mark_clean(self, blob_id: BlobId, *, remember: bool = False) -> None:
        """See `DramTier.mark_clean`."""
        self._dram.mark_clean(blob_id, remember=remember)

    def mark_written_down(self, blob_ids: Iterable[BlobId]) -> None:
        """See `DramTier.mark_written_down`."""
        self._dram.mark_written_down(blob_ids)

    def is_sealed(self, blob_id: BlobId) -> bool:
        """See `DramTier.is_sealed`."""
        return self._dram.is_sealed(blob_id)

    def unsealed(self) -> frozenset[BlobId]:
        """See `DramTier.unsealed`."""
        return self._dram.unsealed()

    def dirty(self) -> list[BlobId]:
        """See `DramTier.dirty`."""
        return self._dram.dirty()
