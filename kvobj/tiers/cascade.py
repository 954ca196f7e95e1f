"""A fast tier in front of a slow one: reads fall through and promote, and a tier that fails is passed over.

Guarantees: no copy (a promoted frame is the same extent under one more pin); a failing tier makes a read slower or a
miss, never an error (design §4.8), which is counted; what was deleted is not promoted after the delete returns.
Promotion is a favour: bounded, in the background, and given up when there is no room. Does not decide which tiers a
durability class needs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Protocol

from kvobj.arena import PinnedFrame
from kvobj.errors import CapacityError, CorruptionError, KvobjError, UnavailableError
from kvobj.ids import BlobId
from kvobj.tiers.coded_blobs import CodedBlob
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.protocol import BlobNames, ByteRange, Tier, TierUsage
from kvobj.tiers.stored_frames import DemotedCopy, StoredFrames

PROMOTIONS_MAX: Final = 64
"""How many frames may be on their way up at once; each holds an extent until it has filled."""

_UNNAMED: Final = BlobNames(bucket="", key="")


def admit_all(_blob_id: BlobId, _frame_bytes: int) -> bool:
    """Admission that promotes every frame that is read whole."""
    return True


class Admission(Protocol):
    """Who decides what rises into a fast tier that is more than memory: its room is somebody's to give, and what lies there is
    written under its names."""

    async def admit(self, blob_id: BlobId, frame_bytes: int) -> BlobNames | None:
        """The names to put the blob under; None: it is not worth a place, or is nobody's any more."""
        ...

    async def promoted(self, blob_id: BlobId) -> None:
        """The fast tier holds the blob from now on."""
        ...


class Cascade:
    """See `Tier`. `admit(blob_id, frame_bytes)` says whether a frame read from the slow tier is worth a place in the
    fast one.

    `stored` is where frames are read undecoded. Only whole frames are promoted, once they are filled. `put` writes to both; what
    it was told to be called travels to both, while a promoted blob has no names, since a cache in memory needs none, unless
    `admission` gives it some: that is asked for every frame that `admit` lets pass, once it is filled.
    """

    __slots__ = (
        "_admission",
        "_admit",
        "_deleted_while_read",
        "_fast",
        "_passed_over",
        "_promoted",
        "_promotions",
        "_promotions_max",
        "_reading",
        "_risen",
        "_slow",
        "_stored",
    )

    def __init__(
        self,
        fast: Tier,
        slow: Tier,
        *,
        instruments: TierInstruments,
        admit: Callable[[BlobId, int], bool] = admit_all,
        promotions_max: int = PROMOTIONS_MAX,
        stored: StoredFrames | None = None,
        admission: Admission | None = None,
    ) -> None:
        self._fast = fast
        self._slow = slow
        self._admit = admit
        self._admission = admission
        self._stored = stored
        self._promotions_max = promotions_max
        self._promotions: dict[BlobId, asyncio.Task[None]] = {}
        self._reading: Counter[BlobId] = Counter()
        self._deleted_while_read: set[BlobId] = set()
        self._passed_over = {tier: instruments.passed_over.labels(tier.name) for tier in (fast, slow)}
        self._promoted = instruments.promotions
        self._risen = instruments.promoted_blobs.labels(fast.name)

    @property
    def name(self) -> str:
        """Both names, the fast one first."""
        return f"{self._fast.name}+{self._slow.name}"

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        """See `Tier.get`. A tier that fails counts as a miss there; no room to read into (`BusyError`) is no miss."""
        frame = await self._get_from(self._fast, blob_id, byte_range)
        if frame is not None:
            return frame
        if byte_range is not None:
            return await self._get_from(self._slow, blob_id, byte_range)
        self._reading[blob_id] += 1
        try:
            frame = await self._get_from(self._slow, blob_id, None)
            if frame is not None and blob_id not in self._deleted_while_read:
                self._promote(blob_id, frame)
            return frame
        finally:
            self._reading[blob_id] -= 1
            if not self._reading[blob_id]:
                del self._reading[blob_id]
                self._deleted_while_read.discard(blob_id)

    async def get_stored(self, blob_id: BlobId, codec: str) -> PinnedFrame | None:
        """The whole frame as a tier holds it in this codec, undecoded; None where none does. Promotes nothing."""
        return None if self._stored is None else await self._stored.get(blob_id, codec)

    async def demoted(self, blob_id: BlobId, held: str, codec: str) -> DemotedCopy | None:
        """What a blob is in a coarser codec than it lies in (`StoredFrames.demoted`)."""
        return None if self._stored is None else await self._stored.demoted(blob_id, held, codec)

    async def lies(self, blob_id: BlobId) -> list[CodedBlob | None]:
        """How the blob lies in the tiers (`StoredFrames.lies`)."""
        return [] if self._stored is None else await self._stored.lies(blob_id)

    async def _get_from(self, tier: Tier, blob_id: BlobId, byte_range: ByteRange | None) -> PinnedFrame | None:
        try:
            return await tier.get(blob_id, byte_range)
        except (UnavailableError, CorruptionError):
            self._passed_over[tier].inc()
            return None

    def _promote(self, blob_id: BlobId, frame: PinnedFrame) -> None:
        if blob_id in self._promotions:
            return
        if len(self._promotions) >= self._promotions_max:
            self._promoted.labels("skipped").inc()
            return
        if not self._admit(blob_id, frame.frame_bytes):
            self._promoted.labels("refused").inc()
            return
        rising = frame.share()
        task = asyncio.create_task(self._promote_filled(blob_id, rising))
        self._promotions[blob_id] = task
        task.add_done_callback(lambda _: self._end_promotion(blob_id, rising))

    async def _promote_filled(self, blob_id: BlobId, frame: PinnedFrame) -> None:
        outcome = "done"
        try:
            await frame.complete()
            admission = self._admission
            if admission is None:
                await self._fast.put(blob_id, frame, _UNNAMED)
            elif (names := await admission.admit(blob_id, frame.frame_bytes)) is not None:
                await self._fast.put(blob_id, frame, names)
                await admission.promoted(blob_id)
            else:
                outcome = "refused"
        except KvobjError:
            outcome = "failed"
        if outcome == "done":
            self._risen.inc()
        self._promoted.labels(outcome).inc()

    def _end_promotion(self, blob_id: BlobId, frame: PinnedFrame) -> None:
        # Here and not in the task: one that is cancelled before its first step never gets to its `finally`.
        frame.release()
        del self._promotions[blob_id]

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:
        """See `Tier.put`. Home first: were the fast copy there alone, a reader could see what is then refused.

        A fast tier that fails or is full is passed over, since it is a cache.
        """
        await self._slow.put(blob_id, frame, names)
        try:
            await self._fast.put(blob_id, frame, names)
        except (CapacityError, UnavailableError):
            self._passed_over[self._fast].inc()

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        """See `Tier.missing`. Errors are raised: to call a blob missing because its tier is silent would lose it."""
        return await self._slow.missing(await self._fast.missing(blob_ids))

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        """See `Tier.delete`. Home first: after that nothing can bring a blob up again, so the fast tier is emptied
        for good.

        A crash between the two leaves a copy in the cache, which is evicted in time or deleted when the delete is
        repeated; the other order would let a read between the two promote the dead blob once more.
        """
        await self._slow.delete(blob_ids)
        self._deleted_while_read.update(blob_id for blob_id in blob_ids if blob_id in self._reading)
        ending = [self._promotions[blob_id] for blob_id in blob_ids if blob_id in self._promotions]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)
        await self._fast.delete(blob_ids)

    async def scan(self) -> AsyncIterator[BlobId]:
        """See `Tier.scan`. The two scans merged; an id that both hold comes once."""
        fast, slow = self._fast.scan(), self._slow.scan()
        first, second = await anext(fast, None), await anext(slow, None)
        while first is not None or second is not None:
            if second is None or (first is not None and first < second):
                assert first is not None
                yield first
                first = await anext(fast, None)
            else:
                yield second
                if first == second:
                    first = await anext(fast, None)
                second = await anext(slow, None)

    async def usage(self) -> TierUsage:
        """See `Tier.usage`. Sums over both: a blob that both hold is two copies."""
        fast, slow = await self._fast.usage(), await self._slow.usage()
        return TierUsage(
            capacity_bytes=fast.capacity_bytes + slow.capacity_bytes,
            used_bytes=fast.used_bytes + slow.used_bytes,
            blobs=fast.blobs + slow.blobs,
            mode=f"{fast.mode}+{slow.mode}",
        )

    async def promotions_done(self) -> None:
        """Return once every promotion that is on its way now has ended; they end by the slow tier's own deadline."""
        if self._promotions:
            await asyncio.wait(tuple(self._promotions.values()))

    async def aclose(self) -> None:
        """See `Tier.aclose`. Waits for promotions, then closes both."""
        await self.promotions_done()
        await self._fast.aclose()
        await self._slow.aclose()
