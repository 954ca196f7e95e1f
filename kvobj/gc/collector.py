"""The collector: condemns what policy no longer wants in the home tier, and claims it once the grace time has passed.

What goes, first to go first: chunks of namespaces at their quota, chunks unused for their time to live, and above the high
watermark whatever the policy ranks lowest; leaf first, and never what a pin, a child or a hold protects (on the first two the
catalog's guards decide, in the same step as the change). A mark hides nothing: whoever asks for the chunk before its claim
keeps it. Objects of ordinary buckets are never removed here.

Grace is for clients that lease nothing: what a HEAD told of stays for a while. Where somebody waits for room there is no time
for it: then chunks that nobody asked for within the grace time (`holds`) are condemned and claimed at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvobj.background import BackgroundWorker
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, ChunkName, Durability, ObjectRow
from kvobj.clock import Clock, boot_ms
from kvobj.errors import KvobjError, NoSuchBucketError
from kvobj.gc.choice import Choice
from kvobj.gc.dry_run import DryRun
from kvobj.gc.holds import Holds
from kvobj.gc.home_chunks import HomeChunk, HomeChunks, parent_name, plain_size
from kvobj.gc.marked import Marked
from kvobj.gc.pacing import BATCH_MAX, Pace
from kvobj.gc.plan import GcPlan, GcReport
from kvobj.gc.quotas import Excess, over_quota
from kvobj.gc.reaper import Reaper
from kvobj.ids import BlobId
from kvobj.policy.chunk_policy import NAME_BYTES, CacheTier, ChunkPolicy, chunk_name
from kvobj.tiers.protocol import Tier

# Removing goes on to this share of the watermark, so that a full store does not collect at every PUT.
LOW_SHARE: Final = 0.95
# At most so many marks are out at once (0.4 KB of memory each).
MARKS_MAX: Final = 200_000
CYCLE_SECONDS_MIN: Final = 0.1


@dataclass(frozen=True, slots=True)
class CollectorLimits:
    """`grace_ms`: from condemned to claimed. `chunk_ttl_ms`: None where chunks have no time to live. `interval_seconds`: the
    longest between two cycles."""

    grace_ms: int
    high_watermark: float
    interval_seconds: float
    chunk_ttl_ms: int | None = None


@dataclass(slots=True)
class CollectorCounts:
    """Since the start. `spared`: the catalog would not give them up. `pressed_bytes`: removed because somebody waited."""

    condemned: int = 0
    claimed: int = 0
    claimed_bytes: int = 0
    rescued: int = 0
    spared: int = 0
    pressed_bytes: int = 0
    admitted: int = 0
    refused: int = 0


class Collector(BackgroundWorker):
    """See the module's text. `refused` gives (bucket, key, bytes) of the chunks that policy keeps from the home tier. `name_blob`
    is told the policy's names of a blob's chunk and of its parent, `is_cached` answers whether memory holds a blob, `stored_bytes`
    what a chunk takes in the home tier; what `spares` says is never condemned.

    Hooks: `written` and `removed` tell what lies at home; `touched`, `request` and `hold` what is used; `admits`, `remove_now`
    and `make_room` are asked by writers. Event-loop-only.
    """

    worker_name = "collector"

    def __init__(
        self,
        *,
        catalog: Catalog,
        home: Tier,
        reaper: Reaper,
        policy: ChunkPolicy,
        holds: Holds,
        pace: Pace,
        clock: Clock,
        limits: CollectorLimits,
        log: logging.Logger,
        refused: Callable[[], Iterable[tuple[str, str, int]]] = tuple,
        name_blob: Callable[[BlobId, bytes, bytes | None], None] = lambda *_: None,
        is_cached: Callable[[BlobId], bool] = lambda _: False,
        stored_bytes: Callable[[ObjectRow], int] = plain_size,
        spares: Callable[[ObjectRow], bool] = lambda _: False,
    ) -> None:
        super().__init__()
        self._catalog = catalog
        self._home = home
        self._reaper = reaper
        self._policy = policy
        self._holds = holds
        self._pace = pace
        self._clock = clock
        self._limits = limits
        self._log = log
        self._name_blob = name_blob
        self._is_cached = is_cached
        self._spares = spares
        self._chunks = HomeChunks(policy, tracks_use=limits.chunk_ttl_ms is not None, stored_bytes=stored_bytes)
        self._choice = Choice(policy, self._chunks, holds, clock, chunk_ttl_ms=limits.chunk_ttl_ms)
        self._dry_run = DryRun(catalog, self._chunks, self._choice, clock, refused=refused)
        self._marked = Marked()
        self._kinds: dict[str, BucketKind] = {}
        self._making_room = asyncio.Lock()
        self._collecting = asyncio.Lock()
        self._wanted = asyncio.Event()
        self.counts = CollectorCounts()

    # -- what lies at home, and what is used -----------------------------------------------------------------------
    async def written(self, row: ObjectRow) -> None:
        """An object has reached the home tier. Only those of KV buckets may ever be removed."""
        self._pace.note_request()
        if row.durability is Durability.MEMORY or not row.blobs or not await self._is_chunk(row.bucket):
            return
        if self._spares(row):
            return
        self._tell_names(row)
        self._forget(chunk_name(row.bucket, row.key))  # of another blob id: its mark and place are not this chunk's
        self._chunks.add(row, boot_ms=boot_ms(self._clock))
        self._wanted.set()

    def _tell_names(self, row: ObjectRow, name: bytes | None = None) -> None:
        name, parent = name or chunk_name(row.bucket, row.key), parent_name(row)
        for blob in row.blobs[:1]:
            self._name_blob(BlobId(blob.blob_id), name, parent)

    def _tell_names_of_cached(self, row: ObjectRow) -> None:
        if self._is_cached(BlobId(row.blobs[0].blob_id)):
            self._tell_names(row)

    async def _is_chunk(self, bucket: str) -> bool:
        row = await self._catalog.bucket(bucket)
        if row is None:
            self._kinds.pop(bucket, None)
            return False
        self._kinds[bucket] = row.kind
        return row.kind is BucketKind.KV

    def touched(self, row: ObjectRow) -> None:
        """An object was read by itself, by a client that tells no chain."""
        self._pace.note_request()
        if self._kinds.get(row.bucket) is BucketKind.KV:
            name = chunk_name(row.bucket, row.key)
            self._tell_names(row)
            self._policy.access(name, now_ms=boot_ms(self._clock))
            self._note_use(name)

    def request(self, chain: bytes, *, now_ms: int, partial_last: bool = False, hint: int = 0) -> int:
        """A whole request: the policy's names of its chunks end to end, head first, stored or not. As `ChunkPolicy.request`."""
        self._pace.note_request()
        known = self._policy.request(chain, now_ms=now_ms, partial_last=partial_last, hint=hint)
        if len(self._marked) or self._limits.chunk_ttl_ms is not None:
            for start in range(len(chain) - NAME_BYTES, -1, -NAME_BYTES):  # tail first: a chain's end is unused longest
                self._note_use(chain[start : start + NAME_BYTES])
        return known

    def hold(self, row: ObjectRow) -> None:
        """A client was told that the chunk is there: policy leaves it alone for the grace time."""
        self._pace.note_request()
        if self._kinds.get(row.bucket) is not BucketKind.ORDINARY:
            name = chunk_name(row.bucket, row.key)
            self._holds.hold(name, row.size_bytes, now_boot_ms=boot_ms(self._clock))
            self._note_use(name)

    def held_and_touched(self, row: ObjectRow) -> None:
        """`hold` and `touched` of one read, in two thirds of their time."""
        self._pace.note_request()
        kind = self._kinds.get(row.bucket)
        if kind is BucketKind.ORDINARY:
            return
        name, now_ms = chunk_name(row.bucket, row.key), boot_ms(self._clock)
        self._holds.hold(name, row.size_bytes, now_boot_ms=now_ms)
        if kind is BucketKind.KV:
            self._tell_names(row, name)
            self._policy.access(name, now_ms=now_ms)
        if self._unmark(name):
            self.counts.rescued += 1
        self._chunks.used(name, boot_ms=now_ms)

    def _note_use(self, name: bytes) -> None:
        if self._unmark(name):
            self.counts.rescued += 1
        self._chunks.used(name, boot_ms=boot_ms(self._clock))

    def removed(self, rows: Iterable[ObjectRow]) -> None:
        """Objects were hidden: by DELETE, recall, loss, or by a claim."""
        for row in rows:
            name = chunk_name(row.bucket, row.key)
            is_marked = bool(row.blobs) and self._marked.is_blob(name, row.blobs[0].blob_id)
            if is_marked or self._chunks.is_row(row, name):
                self._forget(name)
            self._holds.drop(name)

    def _forget(self, name: bytes) -> None:
        self._marked.pop(name)
        self._chunks.take(name)

    async def load(self) -> None:
        """Follow what the catalog holds already; lazily, beside requests."""
        for bucket in await self._catalog.buckets():
            self._kinds[bucket.name] = bucket.kind
        await self._chunks.load(
            self._catalog,
            boot_ms=lambda: boot_ms(self._clock),
            on_row=self._tell_names_of_cached,
            spares=self._spares,
        )
        self._wanted.set()

    # -- asked by writers ------------------------------------------------------------------------------------------
    async def admits(self, row: ObjectRow) -> bool:
        """Whether the home tier should take the object: always one of an ordinary bucket, a chunk if policy says so."""
        if self._spares(row) or not await self._is_chunk(row.bucket):
            return True
        self._tell_names(row)
        name = chunk_name(row.bucket, row.key)
        is_admitted = self._policy.admits(
            name, CacheTier.NVME, size_bytes=row.size_bytes, now_ms=boot_ms(self._clock), parent=parent_name(row)
        )
        if is_admitted:
            self.counts.admitted += 1
        else:
            self.counts.refused += 1
        return is_admitted

    async def remove_now(self, rows: Sequence[ObjectRow]) -> int:
        """Condemn and claim the given chunks at once, children before parents; how many bytes went, other claims included.

        Those stay that are held, pinned, or have children that stay; in quiet time all of them.
        """
        free = [row for row in rows if not self._choice.is_held(chunk_name(row.bucket, row.key))]
        if not free or self.is_quiet:
            return 0
        names = [ChunkName(row.bucket, row.key, row.blobs[0].blob_id) for row in free]
        condemned = 0
        for start in range(0, len(names), BATCH_MAX):
            batch = names[start : start + BATCH_MAX]
            condemned += sum(await self._catalog.condemn(batch, not_before_boot_ms=boot_ms(self._clock)))
        await self._rescue_held(names)
        self.counts.condemned += condemned
        return sum(row.size_bytes for row in await self._claim()) if condemned else 0

    async def make_room(self, needed_bytes: int) -> int:
        """Somebody waits for room in the home tier: remove chunks until so much fits below the watermark; bytes removed.

        No grace time, but what is held is left alone. 0: nothing could be removed.
        """
        async with self._making_room:
            if self.is_quiet:
                return 0
            wanted_bytes = await self._excess(needed_bytes)
            removed_bytes = 0
            while removed_bytes < wanted_bytes:
                chunks = await self._take_marked() or self._take(
                    self._choice.for_space(wanted_bytes - removed_bytes, BATCH_MAX)
                )
                if not chunks:
                    break
                await self._condemn(chunks, due_ms=boot_ms(self._clock))
                await self._rescue_held([chunk.chunk for chunk in chunks])
                removed_bytes += sum(row.size_bytes for row in await self._claim())
                while await self._reaper.reap_batch():
                    pass
            self.counts.pressed_bytes += removed_bytes
            return removed_bytes

    async def _excess(self, needed_bytes: int) -> int:
        """How many bytes have to go: down to the low mark once the high one is passed, else none."""
        usage = await self._home.usage()
        limit = self._limits.high_watermark * usage.capacity_bytes
        excess = usage.used_bytes + needed_bytes - limit
        if needed_bytes:
            # The tier refused: whatever its accounts say, this much has to go.
            excess = max(excess, needed_bytes)
        return int(excess + (1 - LOW_SHARE) * limit) if excess > 0 else 0

    # -- the background --------------------------------------------------------------------------------------------
    def wake(self) -> None:
        """Something may have become free: look soon."""
        self._wanted.set()

    @property
    def is_quiet(self) -> bool:
        """Whether lease state was lost a moment ago, so that policy removes nothing."""
        return self._catalog.leases.usage().quiet

    @property
    def lag_seconds(self) -> float:
        """How long the oldest mark has been due: 0 while claims keep up."""
        oldest_ms = self._marked.oldest_due_ms
        return 0.0 if oldest_ms is None else max(0.0, (boot_ms(self._clock) - oldest_ms) / 1000)

    async def _run(self) -> None:
        quotas_at = self._clock.monotonic()
        while True:
            try:
                async with asyncio.timeout(self._wait_seconds()):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            now = self._clock.monotonic()
            try:
                await self.collect(with_quotas=now >= quotas_at)
            except KvobjError as error:
                self._log.warning("collecting failed, will retry: %s", error)
            if now >= quotas_at:
                quotas_at = now + self._limits.interval_seconds
            await asyncio.sleep(CYCLE_SECONDS_MIN)  # every object that is written wakes the collector

    def _wait_seconds(self) -> float:
        due_ms = self._marked.oldest_due_ms
        if due_ms is None:
            return self._limits.interval_seconds
        return min(max((due_ms - boot_ms(self._clock)) / 1000, 0.05), self._limits.interval_seconds)

    async def collect(self, *, with_quotas: bool = True) -> GcReport:
        """One cycle: claim what is due, condemn what should go. `with_quotas`: look at every namespace's usage too, and at what
        ordinary buckets leave to chunks."""
        async with self._collecting:
            if with_quotas:
                await self._fit_policy()
            if self.is_quiet:
                return GcReport(quiet=True)
            counts = self.counts
            before = (counts.condemned, counts.claimed, counts.claimed_bytes, counts.rescued)
            await self._claim(paced=True)
            excesses = await over_quota(self._catalog, self._marked.by_place()) if with_quotas else []
            begun_with = counts.condemned
            while max(len(self._marked), counts.condemned - begun_with) < MARKS_MAX:
                started = self._clock.monotonic()
                chunks = await self._next_victims(excesses, self._pace.batch)
                if not chunks:
                    break
                await self._condemn(chunks, due_ms=boot_ms(self._clock) + self._limits.grace_ms)
                # Where a rate is kept, what is due goes meanwhile: were it to wait for all marks, the rate would be spent twice.
                # One after the other, since a chunk is not condemned while the claim of its child is on its way.
                if self.lag_seconds > 0 and not self._pace.is_idle:
                    await self._claim_batch(self._pace.batch, now_ms=boot_ms(self._clock))
                await self._pace.after(len(chunks), seconds=self._clock.monotonic() - started)
            await self._claim(paced=True)  # where the grace time is nothing
            return GcReport(
                condemned=counts.condemned - before[0],
                claimed=counts.claimed - before[1],
                claimed_bytes=counts.claimed_bytes - before[2],
                rescued=counts.rescued - before[3],
            )

    async def _fit_policy(self) -> None:
        """Tell the policy what chunks may take of the home tier: what objects of ordinary buckets do not."""
        objects_bytes = 0
        for bucket in await self._catalog.buckets():
            if bucket.kind is BucketKind.ORDINARY:
                with suppress(NoSuchBucketError):
                    objects_bytes += (await self._catalog.bucket_usage(bucket.name)).size_bytes
        limit_bytes = int(self._limits.high_watermark * (await self._home.usage()).capacity_bytes)
        self._policy.set_capacity(CacheTier.NVME, max(0, limit_bytes - objects_bytes))

    async def _next_victims(self, excesses: list[Excess], limit: int) -> list[HomeChunk]:
        """The next chunks to condemn, taken from what the policy follows."""
        while excesses:
            chunks = self._take(self._choice.of_namespace(excesses[0], limit))
            excesses[0].take(chunks=len(chunks), size_bytes=sum(chunk.size_bytes for chunk in chunks))
            if chunks:
                return chunks
            excesses.pop(0)
        expired = self._take(self._choice.expired(limit))
        if expired:
            return expired
        lacking = await self._excess(0) - self._marked.size_bytes
        return self._take(self._choice.for_space(lacking, limit)) if lacking > 0 else []

    def _take(self, names: Iterable[bytes]) -> list[HomeChunk]:
        return [chunk for name in names if (chunk := self._chunks.take(name)) is not None]

    async def _take_marked(self) -> list[HomeChunk]:
        """Chunks whose grace time goes on and that nobody asked for since: they were to go anyway. Their marks are taken away,
        since a mark's time stands."""
        names = self._marked.later(boot_ms(self._clock), BATCH_MAX)
        free = [name for name in names if not self._choice.is_held(name)]
        chunks = [chunk for name in free if (chunk := self._marked.pop(name)) is not None]
        by_bucket: dict[str, list[str]] = {}
        for chunk in chunks:
            by_bucket.setdefault(chunk.chunk.bucket, []).append(chunk.chunk.key)
        for bucket, keys in by_bucket.items():
            await self._catalog.lookup(bucket, keys, rescue=True)
        return chunks

    # -- condemn and claim -----------------------------------------------------------------------------------------
    async def _condemn(self, chunks: Sequence[HomeChunk], *, due_ms: int) -> None:
        """Mark chunks that were taken; those that the catalog does not give up come back, but for those that are gone."""
        outcomes = await self._catalog.condemn([chunk.chunk for chunk in chunks], not_before_boot_ms=due_ms)
        kept: list[HomeChunk] = []
        for chunk, is_marked in zip(chunks, outcomes, strict=True):
            if is_marked:
                self._marked.add(chunk, due_ms=due_ms)
                self.counts.condemned += 1
            else:
                kept.append(chunk)
        for chunk in reversed(await self._still_live(kept)):  # each goes before all others: children end up first again
            self._put_back(chunk)
            self._choice.spare(chunk.name)
            self.counts.spared += 1

    async def _rescue_held(self, chunks: Iterable[ChunkName]) -> None:
        """Somebody may have been told of a chunk between its choice and its mark: before a claim without grace, look again."""
        names = {chunk_name(chunk.bucket, chunk.key): chunk for chunk in chunks}
        while held := [name for name in names if self._choice.is_held(name)]:
            for name in held:
                chunk = names.pop(name)
                await self._catalog.lookup(chunk.bucket, [chunk.key], rescue=True)
                self._unmark(name)

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

    async def _claim(self, *, paced: bool = False) -> list[ObjectRow]:
        """Claim everything that is due. What was due and stays was rescued, or is protected by now."""
        now_ms = boot_ms(self._clock)
        rows: list[ObjectRow] = []
        while any(self._catalog.condemned()):
            started = self._clock.monotonic()
            claimed = await self._claim_batch(self._pace.batch if paced else BATCH_MAX, now_ms=now_ms)
            if not claimed:
                break
            rows += claimed
            if paced:
                await self._pace.after(len(claimed), seconds=self._clock.monotonic() - started)
        for name in self._marked.due(now_ms):
            self._unmark(name)
            self._choice.spare(name)  # else who waits for room would choose it again and again
            self.counts.rescued += 1
        return rows

    async def _claim_batch(self, limit: int, *, now_ms: int) -> list[ObjectRow]:
        """Claim some of what is due; what went."""
        claimed = await self._catalog.claim(now_boot_ms=now_ms, limit=limit, now_ms=self._clock.now_ms())
        if claimed:
            self.counts.claimed += len(claimed)
            self.counts.claimed_bytes += sum(row.size_bytes for row in claimed)
            self.removed(claimed)
            self._reaper.kick()
        return claimed

    def _unmark(self, name: bytes) -> bool:
        """The chunk stays: policy follows it again."""
        chunk = self._marked.pop(name)
        if chunk is None:
            return False
        self._put_back(chunk)
        return True

    def _put_back(self, chunk: HomeChunk) -> None:
        self._chunks.put_back(chunk, boot_ms=boot_ms(self._clock))

    # -- looking on ------------------------------------------------------------------------------------------------
    async def plan(self, *, limit: int = BATCH_MAX) -> GcPlan:
        """What the next cycle would condemn, and why: the first `limit` of it. Changes nothing."""
        usage = await self._home.usage()
        lacking = await self._excess(0) - self._marked.size_bytes
        victims = await self._dry_run.victims(self._marked.by_place(), lacking_bytes=lacking)
        marked, waiting = self._catalog.condemned()
        return GcPlan(
            victims=tuple(victims[:limit]),
            chunks=len(victims),
            size_bytes=sum(victim.size_bytes for victim in victims),
            quiet=self.is_quiet,
            home_used_bytes=usage.used_bytes,
            home_limit_bytes=int(self._limits.high_watermark * usage.capacity_bytes),
            marked=marked,
            waiting_for_pins=waiting,
        )
