"""Frames of coarser steps than tiers hold, made of the finer ones when readers ask for them: fewer bytes on the wire.

Whoever answers a reader has to say how long and how exact a frame is before it is sent, so it is made when it is looked at, and
kept for a moment for the read that follows. What was found is remembered: the same frame always becomes the same.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvobj.arena import PinnedFrame
from kvobj.codec.frame import MAX_HEAD_BYTES
from kvobj.errors import CorruptionError, UnavailableError
from kvobj.ids import BlobId
from kvobj.tiers.coded_frames import head_of
from kvobj.tiers.decode_turns import DecodeTurns
from kvobj.tiers.stored_frames import DemotedCopy, StoredFrames, StoredTier

KEPT_MAX: Final = 8
"""Frames that wait for their read at once; the oldest goes first."""
KEPT_SECONDS: Final = 2.0
_REMEMBERED_MAX: Final = 4096
_AT_ONCE: Final = 2
"""Finer frames held at a time while a coarser one is made: who waits longer for a turn is told that the store is busy."""

Demote: TypeAlias = Callable[[PinnedFrame, str], Awaitable[PinnedFrame]]
"""A whole, complete frame to one of a coarser codec, under a pin of its own. `CapacityError`, `FrameCorruptError`."""


@dataclass(frozen=True, slots=True)
class _Known:
    held: str
    copy: DemotedCopy


class DemotingFrames(StoredFrames):
    """See the module's text. Event-loop-only; whoever closes the tiers closes it before."""

    __slots__ = ("_demote", "_is_closed", "_kept", "_known", "_turns")

    def __init__(self, tiers: Sequence[StoredTier], *, demote: Demote) -> None:
        super().__init__(tiers)
        self._demote = demote
        self._turns = DecodeTurns(at_once=_AT_ONCE)
        self._known: OrderedDict[tuple[BlobId, str], _Known] = OrderedDict()
        self._kept: OrderedDict[tuple[BlobId, str], tuple[PinnedFrame, asyncio.TimerHandle]] = OrderedDict()
        self._is_closed = False

    async def demoted(self, blob_id: BlobId, held: str, codec: str) -> DemotedCopy | None:
        """See `StoredFrames.demoted`."""
        name = (blob_id, codec)
        known = self._known.get(name)
        if known is not None:
            self._known.move_to_end(name)
            return known.copy
        frame = await self._made(blob_id, held, codec)
        if frame is None:
            return None
        head = head_of(frame.view[:MAX_HEAD_BYTES], frame.frame_bytes)
        copy = DemotedCopy(head.codec, frame.frame_bytes, head.digest, head.max_error)
        self._known[name] = _Known(held, copy)
        if len(self._known) > _REMEMBERED_MAX:
            self._known.popitem(last=False)
        self._keep(name, frame)
        return copy

    async def get(self, blob_id: BlobId, codec: str) -> PinnedFrame | None:
        """See `StoredFrames.get`; what was looked at by `demoted` too."""
        frame = await super().get(blob_id, codec)
        name = (blob_id, codec)
        known = self._known.get(name)
        if frame is not None or known is None:
            return frame
        kept = self._kept.pop(name, None)
        if kept is None:
            return await self._made(blob_id, known.held, codec)
        kept[1].cancel()
        return kept[0]

    async def _made(self, blob_id: BlobId, held: str, codec: str) -> PinnedFrame | None:
        async with self._turns.turn():
            return await self._made_in_turn(blob_id, held, codec)

    async def _made_in_turn(self, blob_id: BlobId, held: str, codec: str) -> PinnedFrame | None:
        finer = await super().get(blob_id, held)
        if finer is None:
            return None
        try:
            await finer.complete()
            return await self._demote(finer, codec)
        except (UnavailableError, CorruptionError):
            return None  # no kernels, or what lies there is not what it says: nothing can be had of it
        finally:
            finer.release()

    def _keep(self, name: tuple[BlobId, str], frame: PinnedFrame) -> None:
        if self._is_closed or name in self._kept:
            frame.release()
            return
        self._kept[name] = (frame, asyncio.get_running_loop().call_later(KEPT_SECONDS, self._drop, name))
        if len(self._kept) > KEPT_MAX:
            self._drop(next(iter(self._kept)))

    def _drop(self, name: tuple[BlobId, str]) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            kept[1].cancel()
            kept[0].release()

    def close(self) -> None:
        """Let go of what is kept, and keep nothing more."""
        self._is_closed = True
        for name in list(self._kept):
            self._drop(name)
