"""Which tiers a blob goes to for a durability class, and what may be dirty meanwhile.

`memory`: dram alone, dirty until write-behind has put it into the home tier. `local`: the home tier first, then dram as a
cache. Dirty bytes are at most half of dram: above that, writers of class `memory` wait and then get a BusyError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from kvobj.arena import Pin, PinnedFrame
from kvobj.database import WriteView
from kvobj.errors import BusyError, CapacityError
from kvobj.ids import BlobId
from kvobj.store.transcoding_home import HomeTranscoding
from kvobj.tiers.coded_blobs import CodedBlob
from kvobj.tiers.coded_frames import Coding
from kvobj.tiers.protocol import BlobNames, Tier
from kvobj.tiers.stored_frames import DemotedCopy

T = TypeVar("T")


class DirtyTier(Tier, Protocol):
    """A cache tier that can be told that it holds the only copy of a blob."""

    @property
    def dirty_bytes(self) -> int:
        """Bytes of frames that are held here and nowhere below."""
        ...

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames, *, dirty: bool = False) -> None:
        """As `Tier.put`. `dirty`: nothing below holds the blob, so it is not evicted."""
        ...

    def mark_dirty(self, blob_id: BlobId) -> None:
        """From now on the blob is not evicted."""
        ...

    def mark_clean(self, blob_id: BlobId, *, remember: bool = False) -> None:
        """The blob has a copy below: it may be evicted. Unknown ids are fine. `remember`: after a restart too, though the home tier
        does not hold it."""
        ...

    async def put_unsealed(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames, *, dirty: bool = True) -> None:
        """Like put, for a frame whose header is written later: after a crash it is hashed before it is served."""
        ...

    def put_within(
        self,
        blob_id: BlobId,
        pin: Pin,
        frame_bytes: int,
        commit: Callable[[Callable[[WriteView], None]], T | None],
        *,
        sealed: bool,
    ) -> T | None:
        """`put` or `put_unsealed` of a dirty, complete frame within a commit of somebody else's (`DramTier.put_within`)."""
        ...

    def put_unsealed_many(self, blobs: Sequence[tuple[BlobId, PinnedFrame]]) -> None:
        """`put_unsealed` of many dirty ones, whose frames are complete, at once."""
        ...

    def mark_sealed(self, blob_id: BlobId) -> None:
        """The frame's header and directory are in place now."""
        ...


class EarlyPut(Protocol):
    """A put that has begun while the frame still arrives. The home tier's `put` of the blob ends it, or `abandon` does."""

    def advance(self, ready_bytes: int) -> None:
        """The frame's bytes up to there, but for its head, are final."""
        ...

    def abandon(self) -> None:
        """There will be no put. Nothing after one."""
        ...


class EarlyTier(Protocol):
    """A home tier that can begin before a frame is complete."""

    def begin_put(self, blob_id: BlobId, frame: PinnedFrame, *, head_bytes: int) -> EarlyPut | None:
        """Begin; the frame's first `head_bytes` come last. None: the put does it all."""
        ...

    def riding(self, blob_id: BlobId) -> AbstractContextManager[None]:
        """Within it, a put may leave what the tier notes of the blob to the catalog's next durable change (`NvmeTier.riding`)."""
        ...


class ReadTier(Tier, Protocol):
    """All tiers as one, for reads (`tiers.cascade.Cascade`)."""

    async def get_stored(self, blob_id: BlobId, codec: str) -> PinnedFrame | None:
        """The whole frame as a tier holds it in this codec."""
        ...

    async def demoted(self, blob_id: BlobId, held: str, codec: str) -> DemotedCopy | None:
        """What a blob that lies in the codec `held` is in a coarser one, in which `get_stored` then gives it."""
        ...

    async def lies(self, blob_id: BlobId) -> list[CodedBlob | None]:
        """How the blob lies in each tier that holds it, fast before slow; None stands for as it was put."""
        ...


class Placement:
    """Puts frames where their class needs them. `read` is the cascade over all tiers that serves reads; `early` is the home tier
    again, if it can begin a put early; `coded` is how it takes chunks in the codec that their namespace says, if it can."""

    def __init__(
        self,
        *,
        cache: DirtyTier,
        home: Tier,
        read: ReadTier,
        dirty_bytes_max: int,
        wait_seconds: float,
        early: EarlyTier | None = None,
        coded: HomeTranscoding | None = None,
    ) -> None:
        self.cache = cache
        self.home = home
        self.read = read
        self.dirty_bytes_max = dirty_bytes_max
        self.coded = coded
        self._early = early
        self._wait_seconds = wait_seconds
        self._clean_event = asyncio.Event()
        self._reserved_bytes = 0
        self._waiting: list[int] = []

    async def reserve_dirty(self, size_bytes: int) -> None:
        """Wait until `size_bytes` more may be dirty; matched by one `unreserve_dirty`. Raises BusyError at the deadline."""
        if self.has_dirty_room(size_bytes):
            self._reserved_bytes += size_bytes
            return
        self._waiting.append(size_bytes)
        try:
            async with asyncio.timeout(self._wait_seconds):
                while not self.has_dirty_room(size_bytes):
                    self._clean_event.clear()
                    await self._clean_event.wait()
        except TimeoutError as error:
            raise BusyError("too much is waiting to be written down", dirty_bytes=self.cache.dirty_bytes) from error
        finally:
            self._waiting.remove(size_bytes)
        self._reserved_bytes += size_bytes

    def unreserve_dirty(self, size_bytes: int) -> None:
        """The bytes are counted by the cache as dirty now, or will never be."""
        self._reserved_bytes -= size_bytes
        self._clean_event.set()

    def has_dirty_room(self, size_bytes: int) -> bool:
        """Whether so many more bytes may be dirty at once."""
        return self.cache.dirty_bytes + self._reserved_bytes + size_bytes <= self.dirty_bytes_max

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody waits until more may be dirty; not who has room by now and only has to go on."""
        return any(not self.has_dirty_room(size_bytes) for size_bytes in self._waiting)

    @property
    def dirty_share(self) -> float:
        """Dirty bytes as a share of their bound."""
        return self.cache.dirty_bytes / self.dirty_bytes_max

    def may_stay_dirty(self, size_bytes: int) -> bool:
        """Whether a part that nobody writes down yet may stay in memory: only while dirty bytes are few."""
        return self.cache.dirty_bytes + size_bytes <= self.dirty_bytes_max // 2

    async def hold_dirty(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames, *, sealed: bool) -> None:
        """Class `memory`: the blob outlives the process from here on."""
        if sealed:
            await self.cache.put(blob_id, frame, names, dirty=True)
        else:
            await self.cache.put_unsealed(blob_id, frame, names, dirty=True)

    def hold_unsealed(self, blobs: Sequence[tuple[BlobId, PinnedFrame]]) -> None:
        """`hold_dirty` of many unsealed ones, at once."""
        self.cache.put_unsealed_many(blobs)

    def begin_home(self, blob_id: BlobId, frame: PinnedFrame, *, head_bytes: int) -> EarlyPut | None:
        """Begin what `hold_home` ends, while the frame still arrives. See `EarlyTier.begin_put`."""
        return None if self._early is None else self._early.begin_put(blob_id, frame, head_bytes=head_bytes)

    async def hold_home(
        self,
        blob_id: BlobId,
        frame: PinnedFrame,
        names: BlobNames,
        *,
        keep_cached: bool,
        coding: Coding | None = None,
        rides: bool = False,
    ) -> None:
        """Class `local`: durable when this returns, `rides` apart (`put_home`). A cache without room is no reason to fail."""
        await self.put_home(blob_id, frame, names, coding, rides=rides)
        if keep_cached:
            try:
                await self.cache.put(blob_id, frame, names)
            except CapacityError:
                return

    async def put_home(
        self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames, coding: Coding | None, *, rides: bool
    ) -> None:
        """Put a sealed frame into the home tier, coded so where that makes it smaller. Errors as of `Tier.put`.

        `rides`: the caller's next word about the blob, if any, is a durable change of the catalog, and with that it is durable.
        A volatile row must not name it: the tier may know of it in this process alone until then.
        """
        if rides and self._early is not None:
            with self._early.riding(blob_id):
                await self._put_home(blob_id, frame, names, coding)
        else:
            await self._put_home(blob_id, frame, names, coding)

    async def _put_home(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames, coding: Coding | None) -> None:
        if coding is None or self.coded is None or not await self.coded.put(blob_id, frame, names, coding):
            await self.home.put(blob_id, frame, names)

    def written_down(self, blob_id: BlobId, *, is_lossy: bool = False) -> None:
        """The blob has its home copy, or a lossy one in its place: it may be evicted from the cache."""
        self.cache.mark_clean(blob_id, remember=is_lossy)
        self._clean_event.set()

    def note_room(self) -> None:
        """Blobs were deleted: whoever waits for dirty room looks again."""
        self._clean_event.set()

    async def discard(self, blob_ids: list[BlobId]) -> None:
        """Delete blobs that never became visible."""
        if not blob_ids:
            return
        await self.cache.delete(blob_ids)
        self._clean_event.set()
        await self.home.delete(blob_ids)
