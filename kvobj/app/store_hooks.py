"""Who is told what happens to objects, and what a hot read asks of dram: the store and its workers know these calls, not the parts
behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvobj.arena import PinnedFrame
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import ObjectRow
from kvobj.gc.collector import Collector
from kvobj.gc.reaper import Reaper
from kvobj.ids import BlobId
from kvobj.store.transcoding_dram import DramTranscoding
from kvobj.store.transcoding_hbm import HbmCodings
from kvobj.store.transcoding_ladder import HomeDemotion
from kvobj.tiers.dram import DramTier
from kvobj.tiers.instruments import HotHits


class StoreHooks:
    """See the module's text. Event loop only; of what a read calls nothing waits."""

    __slots__ = (
        "_collector",
        "_dram",
        "_dram_transcoding",
        "_hbm_codings",
        "_hits",
        "_home_demotion",
        "_reaper",
        "asked",
        "note_read_remotely",
    )

    def __init__(
        self,
        *,
        collector: Collector,
        reaper: Reaper,
        dram: DramTier,
        dram_transcoding: DramTranscoding,
        home_demotion: HomeDemotion,
        hbm_codings: HbmCodings | None,
        hits: HotHits,
    ) -> None:
        """`hbm_codings`: None where there is no device memory."""
        self._collector = collector
        self._reaper = reaper
        self._dram = dram
        self._dram_transcoding = dram_transcoding
        self._home_demotion = home_demotion
        self._hbm_codings = hbm_codings
        self._hits = hits
        self.asked: Callable[[ObjectRow], None] = collector.hold if hbm_codings is None else self._asked
        """Somebody asks for an object, and may read it next."""
        self.note_read_remotely: Callable[[ObjectRow], None] | None = None
        """Who else is told of reads: what writes to the remote, where there is one."""

    async def written(self, row: ObjectRow) -> None:
        """An object lies in its home tier."""
        await self._collector.written(row)
        await self._dram_transcoding.note(row)

    def read(self, row: ObjectRow) -> None:
        """An object was read."""
        self._collector.touched(row)
        self._was_read(row)

    def hot_read(self, row: ObjectRow) -> None:
        """An object was asked for and read in one."""
        if self._hbm_codings is not None:
            self._hbm_codings.note(row)
        self._collector.held_and_touched(row)
        self._was_read(row)

    def removed(self, rows: Sequence[ObjectRow]) -> None:
        """Objects are gone, or are others now; their blobs are queued."""
        self._collector.removed(rows)
        for row in rows:
            self._dram_transcoding.removed(row)
        self._reaper.kick()

    def namespace_changed(self, namespace: NamespaceRow) -> None:
        """A namespace has other limits, or is to be stored in another way."""
        if namespace.codecs:  # else no copy could be made coarser, and this looks through the whole catalog
            self._home_demotion.look()
        self._collector.look_at_quotas()

    def hot_frame(self, blob_id: BlobId) -> PinnedFrame | None:
        """The blob's frame, pinned, if dram has it now; the caller releases it."""
        frame = self._dram.get_hot(blob_id)
        if frame is not None:
            self._hits.reads += 1
            self._hits.size_bytes += frame.size
        return frame

    def hot_bytes(self, blob_id: BlobId, start: int, stop: int) -> bytes | None:
        """A copy of the frame's bytes `[start, stop)`, if dram has them now: `DramTier.copy_hot`."""
        found = self._dram.copy_hot(blob_id, start, stop)
        if found is not None:
            self._hits.reads += 1
            self._hits.size_bytes += stop
        return found

    def _asked(self, row: ObjectRow) -> None:
        assert self._hbm_codings is not None
        self._hbm_codings.note(row)
        self._collector.hold(row)

    def _was_read(self, row: ObjectRow) -> None:
        self._dram_transcoding.touched(row)
        if self.note_read_remotely is not None:
            self.note_read_remotely(row)
