"""Reading an object: what is known of it, the bytes that its reader gets, and those that lie in memory as they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

from kvobj.arena import PinnedFrame
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BlobRef, BucketKind, BucketRow, ObjectRow
from kvobj.codec.frame import CODEC_RAW, raw_payload_offset
from kvobj.errors import CorruptionError, UnavailableError
from kvobj.ids import BlobId
from kvobj.store.at_once import at_once
from kvobj.store.lost_rows import LostRows
from kvobj.store.placement import Placement
from kvobj.store.reader import BlobSlice, HotRead, ObjectReader, fetch, slices_of
from kvobj.store.representation import Accepted, choose, choose_demoted, coarser_wanted, stored_codec, would_give
from kvobj.tiers.coded_blobs import CodedBlob
from kvobj.tiers.in_use import BlobsInUse

COPIED_BYTES_MAX: Final = 16 * 1024
"""Up to here a hot read copies: a pin, its frame and a reader over it cost more."""


def plain_blob(row: ObjectRow, bucket: BucketRow) -> BlobRef | None:
    """The blob of an object that is read at once where it lies in memory: not empty, in one blob, of plain bytes, and known by all
    that a reply says of it. None for all else."""
    if not row.size_bytes or len(row.blobs) != 1 or (bucket.kind is BucketKind.KV and row.digest is None):
        return None
    (blob,) = row.blobs
    return blob if blob.codec == CODEC_RAW else None


class ObjectReads:
    """Of one store. Event loop only."""

    __slots__ = (
        "_catalog",
        "_hot_bytes",
        "_hot_frame",
        "_in_use",
        "_lost",
        "_on_asked",
        "_on_hot_read",
        "_on_read",
        "_placement",
    )

    def __init__(
        self,
        *,
        catalog: Catalog,
        placement: Placement,
        lost: LostRows,
        in_use: BlobsInUse,
        on_asked: Callable[[ObjectRow], None],
        on_read: Callable[[ObjectRow], None],
        on_hot_read: Callable[[ObjectRow], None],
        hot_frame: Callable[[BlobId], PinnedFrame | None],
        hot_bytes: Callable[[BlobId, int, int], bytes | None],
    ) -> None:
        """`on_hot_read`: `on_asked` and `on_read` in one."""
        self._catalog = catalog
        self._placement = placement
        self._lost = lost
        self._in_use = in_use
        self._on_asked = on_asked
        self._on_read = on_read
        self._on_hot_read = on_hot_read
        self._hot_frame = hot_frame
        self._hot_bytes = hot_bytes

    async def look_up(self, bucket: str, key: str) -> ObjectRow | None:
        """A client asks for the chunk: it is live again if policy has condemned it, and held against policy for the grace time."""
        (row,) = await self._catalog.lookup(bucket, [key], rescue=True)
        if row is not None:
            self._on_asked(row)
        return row

    async def pinned(self, bucket: str, key: str, pin: bytes, *, user_id: str) -> ObjectRow | None:
        """The row that the user's pin lets it read, also where DELETE has hidden it; None: no such pin, or it does not cover it."""
        row = await self._catalog.leases.pin(pin, user=user_id, bucket=bucket)
        if row is None or not await self._catalog.leases.covers(row, key):
            return None
        (live,) = await self._catalog.lookup(bucket, [key])
        return live if live is not None else await self._catalog.lookup_hidden(bucket, key)

    async def represent(self, row: ObjectRow, accepts: Sequence[Accepted]) -> ObjectRow | None:
        """What a reader that takes these codecs gets of the object: a row to `open` (`representation.choose`); None: nothing
        will do. A lossy copy may be made coarser for it, which it waits for. `BusyError`: no room for that."""
        lies: list[CodedBlob | None] = []
        if len(row.blobs) == 1:
            lies = await self._placement.read.lies(BlobId(row.blobs[0].blob_id))
            if not lies and row.lossy is None:
                await self._lost.forget_if_lost(row)
        chosen = choose(row, lies, accepts)
        if row.lossy is not None:
            for codec in coarser_wanted(row, chosen, accepts):
                demoted = await self._placement.read.demoted(BlobId(row.lossy.blob_id), row.lossy.codec, codec)
                found = None if demoted is None else choose_demoted(row, demoted, accepts)
                if found is not None:
                    return found
        return chosen

    async def would_give(self, row: ObjectRow, accepts: Sequence[Accepted]) -> bool:
        """Whether `represent` would find something (`representation.would_give`). Nothing is read or made for it, and no row is
        taken for lost: that is for who reads to find."""
        lies: list[CodedBlob | None] = []
        if len(row.blobs) == 1:
            lies = await self._placement.read.lies(BlobId(row.blobs[0].blob_id))
        return would_give(row, lies, accepts)

    async def open(self, row: ObjectRow, start: int, stop: int) -> ObjectReader | None:
        """A reader over the object's bytes `[start, stop)`; None when no tier has them any more (a miss).

        The caller closes the reader. `TierUnavailableError`: they are on the remote, which does not answer; of a chunk that is a
        miss like any other. `FrameCorruptError` cannot come from here: a corrupt copy is a miss in its tier.
        """
        reader = self.open_hot(row, start, stop)
        if reader is not None:
            return reader
        reader = await self.open_blobs(row.blobs, start, stop)
        if reader is None:
            await self._lost.forget_if_lost(row)
            await self._lost.refuse_if_away(row)
            return None
        self._on_read(row)
        return reader

    def open_hot(self, row: ObjectRow, start: int, stop: int) -> ObjectReader | None:
        """See `ObjectStore.open_hot`."""
        reader = self._open_hot(row, start, stop)
        if reader is not None:
            self._on_read(row)
        return reader

    def read_hot(self, bucket: BucketRow, key: str, *, only_short: bool = False) -> HotRead | None:
        """See `ObjectStore.read_hot`. What is hidden by a mark of policy's is live again, as `look_up` has it."""
        is_kv = bucket.kind is BucketKind.KV
        rows = at_once(self._catalog.lookup(bucket.name, [key], rescue=is_kv))
        row = rows[0] if rows else None
        blob = None if row is None else plain_blob(row, bucket)
        if row is None or blob is None:
            return None
        body: bytes | ObjectReader | None
        if row.size_bytes <= COPIED_BYTES_MAX:
            start = raw_payload_offset(row.size_bytes)
            body = self._hot_bytes(cast("BlobId", blob.blob_id), start, start + row.size_bytes)
        else:
            body = None if only_short else self._open_hot(row, 0, row.size_bytes)
        if body is None:
            return None
        self._on_hot_read(row)
        return HotRead(row, body)

    def look_up_hot(self, bucket: BucketRow, key: str) -> HotRead | None:
        """See `ObjectStore.look_up_hot`."""
        is_kv = bucket.kind is BucketKind.KV
        rows = at_once(self._catalog.lookup(bucket.name, [key], rescue=is_kv))
        row = rows[0] if rows else None
        if row is None or (is_kv and row.digest is None):
            return None
        if is_kv:
            self._on_asked(row)
        return HotRead(row, b"")

    async def frame_of(self, row: ObjectRow) -> PinnedFrame | None:
        """The whole frame of an object of one blob, every byte of it there, pinned for the caller; None as from `open`, as which it
        counts. `BusyError`: no room to read it into."""
        frame = await self._placement.read.get(BlobId(row.blobs[0].blob_id))
        if frame is not None and frame.progress is not None:
            try:
                await frame.complete()
            except (UnavailableError, CorruptionError):
                frame.release()
                frame = None
            except BaseException:
                frame.release()
                raise
        if frame is None:
            await self._lost.forget_if_lost(row)
            await self._lost.refuse_if_away(row)
            return None
        self._on_read(row)
        return frame

    def _open_hot(self, row: ObjectRow, start: int, stop: int) -> ObjectReader | None:
        """A reader of one blob that lies in memory as it is to be read; None for all else. Where nothing has to be waited for, the
        tiers' layers cost more than the read."""
        if len(row.blobs) != 1 or start >= stop:
            return None
        (blob,) = row.blobs
        frame = None if stored_codec(blob) is not None else self._hot_frame(cast("BlobId", blob.blob_id))
        if frame is None:
            return None
        self._in_use.hold((blob.blob_id,))
        return ObjectReader([BlobSlice(blob, start, stop)], frame, tier=self._placement.read, in_use=self._in_use)

    async def open_blobs(self, blobs: Sequence[BlobRef], start: int, stop: int) -> ObjectReader | None:
        """`open` of the bytes of these blobs, whoever's row names them: nothing is told of it, and a miss is only that."""
        slices = slices_of(blobs, start, stop)
        held = [part.blob.blob_id for part in slices]
        self._in_use.hold(held)
        try:
            first = await fetch(self._placement.read, slices[0]) if slices else None
        except BaseException:
            self._in_use.release(held)
            raise
        if slices and first is None:
            self._in_use.release(held)
            return None
        return ObjectReader(slices, first, tier=self._placement.read, in_use=self._in_use)
