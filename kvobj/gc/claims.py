"""What the collector has condemned, until it is claimed: marks, who takes one away again, and the claim.

The catalog's marks decide; `Marked` is this side's list of them, with what policy forgot at the choice and gets back where a chunk
stays. A chunk stays that somebody used, that a client was told of while it was chosen, that the catalog would not give up, or that
the remote has by now, so that only its copy need go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import ChunkName, Claimed, ObjectRow
from kvobj.clock import Clock, boot_ms
from kvobj.errors import StoreFullError
from kvobj.gc.choice import Choice
from kvobj.gc.home_chunks import HomeChunk, HomeChunks
from kvobj.gc.marked import Marked
from kvobj.gc.pacing import BATCH_MAX, Pace, Portions
from kvobj.gc.plan import CollectorCounts
from kvobj.policy.chunk_policy import chunk_name


class Claims:
    """See the module's text. `marked` is for looking on; `on_claimed` is told of what is gone from the catalog, whose marks
    it lets `forget`. Adds to `counts`. Event-loop-only; whoever claims for a cycle and whoever waits for room may do so at once.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        chunks: HomeChunks,
        choice: Choice,
        pace: Pace,
        clock: Clock,
        counts: CollectorCounts,
        on_claimed: Callable[[Claimed], None],
    ) -> None:
        self._catalog = catalog
        self._chunks = chunks
        self._choice = choice
        self._pace = pace
        self._clock = clock
        self._counts = counts
        self._on_claimed = on_claimed
        self._shared: list[ObjectRow] = []
        self._portions = Portions()
        self._first_due_ms = 0
        self.marked = Marked()

    # -- marks -----------------------------------------------------------------------------------------------------
    async def condemn(self, chunks: Sequence[HomeChunk], *, due_ms: int) -> None:
        """Mark chunks that were taken; those that the catalog does not give up come back, but for those that are gone."""
        outcomes = await self._catalog.condemn([chunk.chunk for chunk in chunks], not_before_boot_ms=due_ms)
        if all(outcomes):
            self.marked.add_all(chunks, due_ms=due_ms)
            self._counts.condemned += len(chunks)
            return
        kept: list[HomeChunk] = []
        for chunk, is_marked in zip(chunks, outcomes, strict=True):
            if is_marked:
                self.marked.add(chunk, due_ms=due_ms)
                self._counts.condemned += 1
            else:
                kept.append(chunk)
        for chunk in reversed(await self._still_live(kept)):  # each goes before all others: children end up first again
            self._put_back(chunk)
            self._choice.spare(chunk.name)
            self._counts.spared += 1

    async def condemn_untaken(self, chunks: Sequence[ChunkName]) -> int:
        """Mark chunks that policy goes on following, to be claimed at once; how many the catalog gave up, those included that were
        rescued since."""
        condemned = 0
        for start in range(0, len(chunks), BATCH_MAX):
            batch = chunks[start : start + BATCH_MAX]
            condemned += sum(await self._catalog.condemn(batch, not_before_boot_ms=boot_ms(self._clock)))
        await self.rescue_held(chunks)
        self._counts.condemned += condemned
        return condemned

    async def take_later(self, limit: int) -> list[HomeChunk]:
        """Chunks whose grace time goes on and that nobody asked for since: they were to go anyway. Their marks are taken away,
        since a mark's time stands."""
        names = self.marked.later(boot_ms(self._clock), limit)
        free = [name for name in names if not self._choice.is_held(name)]
        chunks = [chunk for name in free if (chunk := self.marked.pop(name)) is not None]
        by_bucket: dict[str, list[str]] = {}
        for chunk in chunks:
            by_bucket.setdefault(chunk.chunk.bucket, []).append(chunk.chunk.key)
        for bucket, keys in by_bucket.items():
            await self._catalog.lookup(bucket, keys, rescue=True)
        return chunks

    def forget(self, name: bytes) -> None:
        """The chunk is gone, or another one has its name: its mark is nobody's."""
        self.marked.pop(name)

    # -- who stays -------------------------------------------------------------------------------------------------
    def used(self, name: bytes) -> None:
        """Somebody asked for the chunk, which the catalog has noticed: if it was condemned, policy follows it again."""
        if self._unmark(name):
            self._counts.rescued += 1

    async def rescue_held(self, chunks: Iterable[ChunkName]) -> None:
        """Somebody may have been told of a chunk between its choice and its mark: before a claim without grace, look again."""
        names = {chunk_name(chunk.bucket, chunk.key): chunk for chunk in chunks}
        while held := [name for name in names if self._choice.is_held(name)]:
            for name in held:
                chunk = names.pop(name)
                await self._catalog.lookup(chunk.bucket, [chunk.key], rescue=True)
                self._unmark(name)

    def note_shared(self, row: ObjectRow) -> bool:
        """The row is of class `shared` now; whether it is condemned. If so it is rescued before the next claim."""
        is_marked = self.marked.is_blob(chunk_name(row.bucket, row.key), row.blobs[0].blob_id)
        if is_marked:
            self._shared.append(row)
        return is_marked

    async def _rescue_shared(self) -> None:
        """Chunks that were condemned for their room, and may leave now instead."""
        while self._shared:
            row = self._shared.pop()
            if self.marked.is_blob(chunk_name(row.bucket, row.key), row.blobs[0].blob_id):
                await self._catalog.lookup(row.bucket, [row.key], rescue=True)
                self.used(chunk_name(row.bucket, row.key))
            self._chunks.shared(row)

    # -- claims ----------------------------------------------------------------------------------------------------
    async def claim(self, *, paced: bool = False) -> int:
        """Claim everything that is due; the bytes that went. On an idle store also what becomes due meanwhile, of no more chunks
        than are condemned by now: beside other work nothing is condemned until this is done. What was due and stays was rescued,
        or is protected by now. `StoreFullError` where the database has no room even for a claim of one."""
        await self._rescue_shared()
        now_ms = boot_ms(self._clock)
        claimed_bytes, may_follow = 0, sum(self._catalog.condemned())
        while any(self._catalog.condemned()):
            started = self._clock.monotonic()
            if may_follow > 0 and self._pace.is_idle:
                now_ms = boot_ms(self._clock)
            claimed = await self._claim_batch(self._pace.claim_batch if paced else BATCH_MAX, now_ms=now_ms)
            if not claimed:
                break
            claimed_bytes += claimed.size_bytes
            may_follow -= len(claimed)
            if paced:
                await self._pace.after(len(claimed), seconds=self._clock.monotonic() - started)
        for name in self.marked.due(now_ms):
            self.used(name)
            self._choice.spare(name)  # else who waits for room would choose it again and again
        return claimed_bytes

    async def claim_some(self, limit: int) -> None:
        """Claim at most so many of what is due."""
        await self._claim_batch(limit, now_ms=boot_ms(self._clock))

    async def _claim_batch(self, limit: int, *, now_ms: int) -> Claimed:
        while True:
            some = self._portions.of(limit)
            try:
                claimed = await self._catalog.claim(now_boot_ms=now_ms, limit=some, now_ms=self._clock.now_ms())
            except StoreFullError:
                if not self._portions.refused(some):
                    raise
                await self._mark_again(some, now_ms=now_ms)
                continue
            break
        self._portions.removed(len(claimed))
        if claimed:
            self._counts.claimed += len(claimed)
            self._counts.claimed_bytes += claimed.size_bytes
            self._on_claimed(claimed)
        return claimed

    async def _mark_again(self, count: int, *, now_ms: int) -> None:
        """A claim of so many failed, which took their marks away. They are due before all others again, as children of these may be
        among them: also before those that were marked again before."""
        self._first_due_ms -= 1
        names = self.marked.due(now_ms)[:count]
        chunks = [chunk.chunk for name in names if (chunk := self.marked.get(name)) is not None]
        for start in range(0, len(chunks), BATCH_MAX):
            await self._catalog.condemn(chunks[start : start + BATCH_MAX], not_before_boot_ms=self._first_due_ms)

    @property
    def lag_seconds(self) -> float:
        """How long the oldest mark has been due: 0 while claims keep up."""
        oldest_ms = self.marked.oldest_due_ms
        return 0.0 if oldest_ms is None else max(0.0, (boot_ms(self._clock) - oldest_ms) / 1000)

    # -- policy and marks ------------------------------------------------------------------------------------------
    async def _still_live(self, chunks: Sequence[HomeChunk]) -> list[HomeChunk]:
        by_bucket: dict[str, list[HomeChunk]] = {}
        for chunk in chunks:
            by_bucket.setdefault(chunk.chunk.bucket, []).append(chunk)
        live: list[HomeChunk] = []
        for bucket, members in by_bucket.items():
            rows = await self._catalog.lookup(bucket, [chunk.chunk.key for chunk in members])
            live += [
                chunk
                for chunk, row in zip(members, rows, strict=True)
                if row is not None and row.blobs[0].blob_id == chunk.chunk.blob_id
            ]
        return live

    def _unmark(self, name: bytes) -> bool:
        """The chunk stays: policy follows it again."""
        chunk = self.marked.pop(name)
        if chunk is None:
            return False
        self._put_back(chunk)
        return True

    def _put_back(self, chunk: HomeChunk) -> None:
        self._chunks.put_back(chunk, boot_ms=boot_ms(self._clock))
