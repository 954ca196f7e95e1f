"""The LMDB catalog's collector side: policy's marks, claims, and the delete queue."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress, islice
from typing import Final

from kvobj.catalog import chain_rows
from kvobj.catalog.encoding import DELETE_QUEUE, DELETE_QUEUE_VOLATILE, decode_queue_entry, number_key
from kvobj.catalog.flight_keys import reliance_key, removal_keys
from kvobj.catalog.gc_changes import NOTHING_CLAIMED, ClaimChange, may_condemn, without_relied_on
from kvobj.catalog.lmdb_base import INLINE_ROWS, LmdbBase
from kvobj.catalog.numbers import NumberLine
from kvobj.catalog.queue_batches import entries_of, forget
from kvobj.catalog.rows import ChunkName, Claimed, QueueEntry
from kvobj.database import Database, WriteView
from kvobj.errors import BatchTooLargeError

_CONDEMN_MAX: Final = 1000
_LOOK_FACTOR: Final = 4


class LmdbGc(LmdbBase):
    """See the module's text and `protocol.Catalog`."""

    def __init__(self, database: Database, numbers: NumberLine) -> None:
        super().__init__(database, numbers)
        self._hidden_after = b""
        self.on_queued: Callable[[], None] = _nothing
        """Called when blobs were queued for deletion, by whatever change, once `due` tells of them: for who deletes them."""

    # -- chunks --------------------------------------------------------------------------------------------------

    async def condemn(self, chunks: Sequence[ChunkName], *, not_before_boot_ms: int) -> list[bool]:
        """See `Catalog.condemn`. Only marks: what changes between the look and the mark, the claim finds."""
        if len(chunks) > _CONDEMN_MAX:
            raise BatchTooLargeError("too many chunks to condemn at once", limit=_CONDEMN_MAX)
        if self._tables.guard.quiet:
            return [False] * len(chunks)
        if len(chunks) > INLINE_ROWS:
            allowed = await self._on_thread(self._may_condemn, chunks)
        else:
            allowed = self._may_condemn(chunks)
        granted = iter(self._marks.add(compress(chunks, allowed), not_before_boot_ms=not_before_boot_ms))
        return [may and next(granted) for may in allowed]

    def _may_condemn(self, chunks: Sequence[ChunkName]) -> list[bool]:
        with self._database.read() as view:
            return may_condemn(view, self._tables, chunks, self._marks.is_marked)

    async def claim(self, *, now_boot_ms: int, limit: int = 1000, now_ms: int) -> Claimed:
        """See `Catalog.claim`. Hidden rows, which somebody was promised to be rid of, come first, up to half of the limit."""
        if self._tables.guard.quiet or limit <= 0:
            return NOTHING_CLAIMED
        hidden = await self._on_thread(self._hidden_page, (limit + 1) // 2) if self._hides_any() else []
        # From here to the enqueue nothing may come in between: what is being claimed is absent to everybody.
        taken = self._marks.begin_claim(now_boot_ms=now_boot_ms, limit=limit - len(hidden))
        marked = self._without_relied_on(taken)
        if len(marked) < len(taken):
            claimable = set(marked)
            self._marks.end_claim([chunk for chunk in taken if chunk not in claimable])
        if not marked and not hidden:
            return NOTHING_CLAIMED
        names = [*((chunk.bucket, chunk.key) for chunk in marked), *hidden]
        try:
            claim = self._database.submit(ClaimChange(self._tables, marked, hidden, now_ms), removal_keys(names))
        except BaseException:
            self._marks.end_claim(marked)
            raise
        # Also where the caller is gone by then.
        claim.add_done_callback(lambda _: self._marks.end_claim(marked))
        return await asyncio.shield(claim)

    def _without_relied_on(self, chunks: Sequence[ChunkName]) -> list[ChunkName]:
        """Those whose children all go with them, and that no commit or pin on its way to the writer relies on.

        The claim would refuse the others as well, but until then look-ups would miss a parent and find its child.
        """
        if not chunks:
            return []

        def is_relied_on(chunk: ChunkName) -> bool:
            return self._database.is_in_flight([reliance_key(chunk.bucket, chunk.key)])

        with self._database.read() as view:
            return without_relied_on(view, chunks, None if self._database.is_idle else is_relied_on)

    def _hides_any(self) -> bool:
        with self._database.read() as view:
            return chain_rows.hidden_count(view) > 0

    def _hidden_page(self, limit: int) -> list[tuple[str, str]]:
        """Some hidden rows that no pin names, going round."""
        guard = self._tables.guard
        begun_after = self._hidden_after
        found: list[tuple[bytes, str, str]] = []
        with self._database.read() as view:
            later = chain_rows.hidden_names(view, begun_after)
            earlier = chain_rows.hidden_names(view, b"", until=begun_after)
            for place, bucket, key in islice(chain(later, earlier), _LOOK_FACTOR * limit):
                self._hidden_after = place
                if not guard.holds_row(view, bucket, key):
                    found.append((place, bucket, key))
                if len(found) == limit:
                    break
        found.sort()
        return [(bucket, key) for _, bucket, key in found]

    def condemned(self) -> tuple[int, int]:
        """See `Catalog.condemned`."""
        with self._database.read() as view:
            return len(self._marks), chain_rows.hidden_count(view)

    # -- the delete queue ----------------------------------------------------------------------------------------

    async def queue_blobs(self, blob_ids: Sequence[bytes], *, now_ms: int, pinned_by: bytes = b"") -> None:
        """See `Catalog.queue_blobs`."""

        def change(view: WriteView) -> None:
            for blob_id in blob_ids:
                holder = pinned_by or blob_id
                waits_for = holder if self._tables.guard.holds_blob(view, holder) else b""
                self._objects.queue(
                    view, [blob_id], bucket="", key="", volatile=False, now_ms=now_ms, waits_for=waits_for
                )

        await self._database.write(change, synced=False)

    async def due(self, *, now_ms: int, limit: int = 1000, after: int = 0) -> list[QueueEntry]:
        """See `Catalog.due`."""
        due, is_all = self._due(now_ms, limit, after, INLINE_ROWS)
        if not is_all:
            due, _ = await self._on_thread(self._due, now_ms, limit, after, None)
        return due

    def _due(self, now_ms: int, limit: int, after: int, look_at: int | None) -> tuple[list[QueueEntry], bool]:
        """What is due, and whether that is all that was asked for: not where it took a look at more stored entries."""
        guard, start = self._tables.guard, number_key(after + 1)
        due: list[QueueEntry] = []
        with self._database.read() as view:
            queued = view.range(DELETE_QUEUE, start)
            if not view.is_empty(DELETE_QUEUE_VOLATILE):
                queued = heapq.merge(queued, view.range(DELETE_QUEUE_VOLATILE, start))
            for looked_at, (_, value) in enumerate(queued):
                if looked_at == look_at:
                    return due, False
                entry = decode_queue_entry(value)
                if entry.not_before_ms > now_ms or (
                    entry.pinned and guard.holds_blob(view, entry.pinned_blob or entry.blob_id)
                ):
                    continue
                due += entries_of(entry)
                if len(due) >= limit:
                    break
        return due, True

    async def reap(self, entries: Sequence[QueueEntry]) -> None:
        """See `Catalog.reap`. Not synced: what power loss brings back is deleted once more, which does no harm."""
        for volatile in (True, False):
            gone = [entry for entry in entries if entry.volatile is volatile]
            change = partial(forget, table=DELETE_QUEUE_VOLATILE if volatile else DELETE_QUEUE, entries=gone)
            if gone and volatile:
                self._database.write_volatile(change)
            elif gone:
                await self._database.write(change, synced=False)


def _nothing() -> None:
    """Nobody deletes."""
