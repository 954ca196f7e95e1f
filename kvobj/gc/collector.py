"""The collector: condemns what policy no longer wants in the home tier, and claims it once the grace time has passed (`claims`).

What goes, first to go first: chunks of namespaces at their quota, chunks unused for their time to live, and above the high
watermark whatever the policy ranks lowest; leaf first, and never what a pin, a child or a hold protects (on the first two the
catalog's guards decide, in the same step as the change). A mark hides nothing: whoever asks for the chunk before its claim
keeps it. Objects of ordinary buckets are never removed here.

Where there is a remote tier, copies that it has leave nvme before anything is condemned (`eviction`), those of objects in ordinary
buckets too; and chunks of buckets whose rule is to upload what has to make room are not condemned for it at all.

Grace is for clients that lease nothing: what a HEAD told of stays for a while. Where somebody waits for room there is no time
for it: then chunks that nobody asked for within the grace time (`holds`) are condemned and claimed at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from kvobj.background import BackgroundWorker
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, ChunkName, Claimed, Durability, ObjectRow
from kvobj.clock import Clock, boot_ms
from kvobj.errors import KvobjError, NoSuchBucketError
from kvobj.gc.choice import Choice
from kvobj.gc.claims import Claims
from kvobj.gc.dry_run import DryRun
from kvobj.gc.eviction import EvictionCounts, Evictions, RemoteSide
from kvobj.gc.holds import Holds
from kvobj.gc.home_chunks import HomeChunk, HomeChunks, parent_name, plain_size
from kvobj.gc.home_loading import HomeLoading
from kvobj.gc.home_objects import HomeObjects
from kvobj.gc.pacing import BATCH_MAX, Pace
from kvobj.gc.plan import CollectorCounts, GcPlan, GcReport
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
CONDEMN_MAX: Final = 1000
"""Of one call of the catalog's."""
SHARED_EARLY_MAX: Final = 4096
"""Rows that became `shared` last are remembered, so many of them."""


@dataclass(frozen=True, slots=True)
class CollectorLimits:
    """`grace_ms`: from condemned to claimed. `chunk_ttl_ms`: None where chunks have no time to live. `interval_seconds`: the
    longest between two cycles."""

    grace_ms: int
    high_watermark: float
    interval_seconds: float
    chunk_ttl_ms: int | None = None


class Collector(BackgroundWorker):
    """See the module's text. `refused` gives (bucket, key, bytes) of the chunks that policy keeps from the home tier. `name_blob`
    is told the policy's names of a blob's chunk and of its parent, `is_cached` answers whether memory holds a blob, `stored_bytes`
    what a chunk takes in the home tier; what `spares` says is never condemned. `remote`: what lies below the home tier, if anything
    does; then `home` is what copies are deleted from, coded or not.

    Hooks: `written` and `removed` tell what lies at home; `touched`, `request` and `hold` what is used; `admits`, `remove_now`
    and `make_room` are asked by writers. With a remote, `shared` tells what it has, `admits_copy` and `copied` are for what comes
    back from it. Event-loop-only.
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
        remote: RemoteSide | None = None,
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
        self._dry_run = DryRun(
            catalog,
            self._chunks,
            self._choice,
            clock,
            refused=refused,
            for_space=None if remote is None else self._is_condemned_for_space,
        )
        self.counts = CollectorCounts()
        self._claims = Claims(
            catalog=catalog,
            chunks=self._chunks,
            choice=self._choice,
            pace=pace,
            clock=clock,
            counts=self.counts,
            on_claimed=self._claimed,
        )
        self._kinds: dict[str, BucketKind] = {}
        self._objects: HomeObjects | None = None
        self._evictions: Evictions | None = None
        if remote is not None:
            self._objects = HomeObjects()
            self._evictions = Evictions(
                remote,
                catalog=catalog,
                home=home,
                chunks=self._chunks,
                objects=self._objects,
                choice=self._choice,
                clock=clock,
                log=log,
            )
        self._shared_early: OrderedDict[bytes, None] = OrderedDict()
        self._is_loaded = False
        self._must_look_at_quotas = False
        self._making_room = asyncio.Lock()
        self._collecting = asyncio.Lock()
        self._wanted = asyncio.Event()

    # -- what lies at home, and what is used -----------------------------------------------------------------------
    async def written(self, row: ObjectRow) -> None:
        """An object has reached the home tier. Only those of KV buckets may ever be removed."""
        self._pace.note_request()
        if row.durability is Durability.MEMORY or not row.blobs:
            return
        if self._shared_early and row.blobs[0].blob_id in self._shared_early:
            row = msgspec.structs.replace(row, durability=Durability.SHARED)
        if not await self._is_chunk(row.bucket):
            self._note_object(row)
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

    def _note_object(self, row: ObjectRow) -> None:
        """An object of an ordinary bucket is in the home tier: remembered only where its copy there may ever leave."""
        if self._objects is None or self._evictions is None:
            return
        if row.durability is Durability.SHARED or self._evictions.uploads_first(row.bucket):
            self._objects.add(row)
            self._wanted.set()
        else:
            self._objects.drop((row.bucket, row.key))  # of the object that it replaced

    def shared(self, rows: Iterable[ObjectRow]) -> None:
        """The rows are of class `shared` now: their copies in the home tier may leave it."""
        for row in rows:
            if self._objects is None or not row.blobs:
                continue
            # A small object may be on the remote before its writer has come to tell that it is here (`written`).
            self._shared_early[row.blobs[0].blob_id] = None
            if len(self._shared_early) > SHARED_EARLY_MAX:
                self._shared_early.popitem(last=False)
            if self._kinds.get(row.bucket) is BucketKind.ORDINARY:
                self._objects.shared(row)
            elif not self._claims.note_shared(row):
                self._chunks.shared(row)

    async def admits_copy(self, row: ObjectRow, frame_bytes: int) -> bool:
        """Whether the home tier should take a copy of a blob of the row that was read from below: of a chunk if policy says so, of
        anything else while the tier is not above its watermark."""
        if not self._spares(row) and await self._is_chunk(row.bucket):
            return self._policy.admits(
                chunk_name(row.bucket, row.key),
                CacheTier.NVME,
                size_bytes=frame_bytes,
                now_ms=boot_ms(self._clock),
                parent=parent_name(row),
            )
        usage = await self._home.usage()
        return usage.used_bytes + frame_bytes <= self._limits.high_watermark * usage.capacity_bytes

    async def copied(self, row: ObjectRow) -> None:
        """The home tier holds such a copy now."""
        if self._objects is None:
            return
        if not await self._is_chunk(row.bucket):
            self._note_object(row)
        elif not self._spares(row) and chunk_name(row.bucket, row.key) not in self._claims.marked:
            self._tell_names(row)
            self._chunks.add(row, boot_ms=boot_ms(self._clock))
        self._wanted.set()

    async def _is_chunk(self, bucket: str) -> bool:
        row = await self._catalog.bucket(bucket)
        if row is None:
            self._kinds.pop(bucket, None)
            return False
        self._kinds[bucket] = row.kind
        if self._evictions is not None:
            self._evictions.note_bucket(row)
        return row.kind is BucketKind.KV

    def touched(self, row: ObjectRow) -> None:
        """An object was read by itself, by a client that tells no chain."""
        self._pace.note_request()
        kind = self._kinds.get(row.bucket)
        if kind is BucketKind.KV:
            name, now_ms = chunk_name(row.bucket, row.key), boot_ms(self._clock)
            self._tell_names(row, name)
            self._policy.access(name, now_ms=now_ms)
            self._claims.used(name)
            self._chunks.used(name, boot_ms=now_ms)
        elif self._objects is not None:
            self._objects.used((row.bucket, row.key))

    def request(self, chain: bytes, *, now_ms: int, partial_last: bool = False, hint: int = 0) -> int:
        """A whole request: the policy's names of its chunks end to end, head first, stored or not. As `ChunkPolicy.request`."""
        self._pace.note_request()
        known = self._policy.request(chain, now_ms=now_ms, partial_last=partial_last, hint=hint)
        if len(self._claims.marked) or self._limits.chunk_ttl_ms is not None:
            for start in range(len(chain) - NAME_BYTES, -1, -NAME_BYTES):  # tail first: a chain's end is unused longest
                self._note_use(chain[start : start + NAME_BYTES])
        return known

    def hold(self, row: ObjectRow) -> None:
        """A client was told that the chunk is there: policy leaves it alone for the grace time."""
        self._pace.note_request()
        if self._kinds.get(row.bucket) is not BucketKind.ORDINARY:
            name, now_ms = chunk_name(row.bucket, row.key), boot_ms(self._clock)
            self._holds.hold(name, row.size_bytes, now_boot_ms=now_ms)
            self._claims.used(name)
            self._chunks.used(name, boot_ms=now_ms)

    def held_and_touched(self, row: ObjectRow) -> None:
        """`hold` and `touched` of one read, in two thirds of their time."""
        now_ms = int(1000 * self._pace.note_request())
        kind = self._kinds.get(row.bucket)
        if kind is BucketKind.ORDINARY:
            if self._objects is not None:
                self._objects.used((row.bucket, row.key))
            return
        name = chunk_name(row.bucket, row.key)
        self._holds.hold(name, row.size_bytes, now_boot_ms=now_ms)
        if kind is BucketKind.KV:
            self._tell_names(row, name)
            self._policy.access(name, now_ms=now_ms)
        self._claims.used(name)
        self._chunks.used(name, boot_ms=now_ms)

    def _note_use(self, name: bytes) -> None:
        self._claims.used(name)
        self._chunks.used(name, boot_ms=boot_ms(self._clock))

    def removed(self, rows: Iterable[ObjectRow]) -> None:
        """Objects were hidden: by DELETE, recall, loss, or by a claim."""
        for row in rows:
            self.gone(row.bucket, row.key, row.blobs[0].blob_id if row.blobs else b"")

    def gone(self, bucket: str, key: str, blob_id: bytes) -> None:
        """An object with this first blob (b"": none) was hidden."""
        if self._objects is not None and blob_id:
            self._objects.drop((bucket, key), blob_id)
        marked = self._claims.marked.name_of(blob_id)
        name = marked or chunk_name(bucket, key)
        if marked is not None or self._chunks.is_blob(name, blob_id):
            self._forget(name)
        self._holds.drop(name)

    def _claimed(self, claimed: Claimed) -> None:
        names = self._claims.marked.claimed([chunk.blob_id for chunk in claimed.chunks])
        if len(names) < len(claimed.chunks):
            for chunk in claimed.chunks:  # some were condemned while policy went on following them
                self.gone(chunk.bucket, chunk.key, chunk.blob_id)
        self.removed(claimed.hidden)
        for name in self._chunks.known(names):
            self._chunks.take(name)
        if len(self._holds):
            for name in names:
                self._holds.drop(name)
        self._reaper.kick()

    def _forget(self, name: bytes) -> None:
        self._claims.forget(name)
        self._chunks.take(name)

    async def load(self) -> None:
        """Follow what the catalog holds already; lazily, beside requests."""
        for bucket in await self._catalog.buckets():
            self._kinds[bucket.name] = bucket.kind
        if self._evictions is not None:
            await self._evictions.learn_rules()
        loading = HomeLoading(
            self._chunks,
            boot_ms=lambda: boot_ms(self._clock),
            on_chunk=self._tell_names_of_cached,
            spares=self._spares,
            absent=None if self._objects is None else self._home.missing,
            on_object=None if self._objects is None else self._note_object,
        )
        await loading.run(self._catalog)
        self._is_loaded = True
        self._wanted.set()

    async def look_again(self) -> None:
        """Look through the catalog once more if a bucket's rule came to say that its objects are uploaded for their room: of these
        nothing may be known yet."""
        if self._evictions is not None and self._evictions.must_look and self._is_loaded:
            self._evictions.must_look = False
            await self.load()

    # -- asked by writers ------------------------------------------------------------------------------------------
    async def admits(self, row: ObjectRow) -> bool:
        """Whether the home tier should take the object: always one of an ordinary bucket, a chunk if policy says so."""
        if self._spares(row) or not await self._is_chunk(row.bucket):
            return True
        self._tell_names(row)
        if self._evictions is not None and self._evictions.uploads_first(row.bucket):
            # What its bucket wants on the remote gets there through here, and makes room in time.
            return True
        name = chunk_name(row.bucket, row.key)
        return self._policy.admits(
            name, CacheTier.NVME, size_bytes=row.size_bytes, now_ms=boot_ms(self._clock), parent=parent_name(row)
        )

    def judged(self, row: ObjectRow, *, is_admitted: bool) -> None:
        """`admits` said so, of an object that it was not asked about before: counted where it is a chunk."""
        if self._spares(row) or self._kinds.get(row.bucket) is not BucketKind.KV:
            return
        if is_admitted:
            self.counts.admitted += 1
        else:
            self.counts.refused += 1

    async def remove_now(self, rows: Sequence[ObjectRow]) -> int:
        """Condemn and claim the given chunks at once, children before parents; how many bytes went, other claims included.

        Those stay that are held, pinned, or have children that stay; in quiet time all of them.
        """
        free = [row for row in rows if not self._choice.is_held(chunk_name(row.bucket, row.key))]
        if not free or self.is_quiet:
            return 0
        names = [ChunkName(row.bucket, row.key, row.blobs[0].blob_id) for row in free]
        if not await self._claims.condemn_untaken(names):
            return 0
        return await self._claims.claim()

    async def make_room(self, needed_bytes: int, *, is_waited_for: bool = True) -> int:
        """The home tier refused so much: reap what is queued for deletion, and where that is not enough remove chunks
        until so much fits below the watermark; bytes that went. 0: nothing could go, and nothing did since this was called.

        No grace time, but what is held is left alone. Of what is live, what the remote has goes first, and stays there. Unless
        somebody waits for the room nothing live goes where the tier has plenty by its accounts: then the disk is full, or the
        database, and what goes may be of no use there.
        """
        used_bytes, reaped_blobs = (await self._home.usage()).used_bytes, self._reaper.reaped_blobs
        async with self._making_room:
            freed_bytes = await self._reap_queued(used_bytes, needed_bytes)
            if freed_bytes >= needed_bytes > 0:
                return freed_bytes
            lacking_bytes = max(0, needed_bytes - freed_bytes)
            removed_bytes = await self._remove_for_room(await self._excess(lacking_bytes, is_waited_for=is_waited_for))
            # Another writer may have taken already what was reaped: this one is to try again all the same.
            has_reaped = self._reaper.reaped_blobs > reaped_blobs
            return max(freed_bytes + removed_bytes, 1 if has_reaped else 0)

    async def _reap_queued(self, used_bytes: int, needed_bytes: int) -> int:
        """Reap until so much has been freed, or nothing is left; how much that is, also what the reaper's own turn has freed since
        so many bytes were used. No row names these bytes: they go before anything that somebody may ask for."""
        freed_bytes, may_follow = 0, True
        while may_follow and freed_bytes < max(1, needed_bytes):
            try:
                may_follow = bool(await self._reaper.reap_batch())
            except KvobjError as error:
                self._log.warning("what is queued for deletion could not be reaped: %s", error)
                may_follow = False
            freed_bytes = max(0, used_bytes - (await self._home.usage()).used_bytes)
        return freed_bytes

    async def _remove_for_room(self, wanted_bytes: int) -> int:
        """Let copies and chunks go; bytes that went."""
        removed_bytes = evicted_bytes = await self._evict(wanted_bytes, is_waited_for=True)
        if not self.is_quiet:
            while removed_bytes < wanted_bytes:
                chunks = await self._claims.take_later(BATCH_MAX)
                chunks = chunks or self._take(self._for_space(wanted_bytes - removed_bytes, BATCH_MAX))
                if not chunks:
                    break
                await self._claims.condemn(chunks, due_ms=boot_ms(self._clock))
                await self._claims.rescue_held([chunk.chunk for chunk in chunks])
                removed_bytes += await self._claims.claim()
                while await self._reaper.reap_batch():
                    pass
            self.counts.pressed_bytes += removed_bytes - evicted_bytes
        return removed_bytes

    async def _evict(self, wanted_bytes: int, *, is_waited_for: bool) -> int:
        """Let copies go that the remote has; how many bytes that were."""
        if self._evictions is None:
            return 0
        try:
            return await self._evictions.make_room(wanted_bytes, is_waited_for=is_waited_for)
        except KvobjError as error:
            self._log.warning("no copies could leave the home tier: %s", error)
            return 0

    def _for_space(self, wanted_bytes: int, limit: int) -> list[bytes]:
        """What the policy ranks lowest, of what is condemned for the room that it takes."""
        if self._evictions is None:
            return self._choice.for_space(wanted_bytes, limit)
        return self._choice.for_space(wanted_bytes, limit, eligible=self._is_condemned_for_space)

    def _is_condemned_for_space(self, name: bytes) -> bool:
        """Where there is a remote: whether the chunk, which is known, may go for its room, and not only its copy."""
        assert self._evictions is not None
        return not self._chunks.is_evictable(name) and not self._evictions.uploads_first(self._chunks.bucket_of(name))

    async def _lacking(self) -> int:
        """How many bytes have to be condemned yet: what is above the watermark, less what is condemned already, and less what has
        only to be evicted."""
        lacking = await self._excess(0) - self._claims.marked.size_bytes
        return lacking if self._evictions is None else lacking - self._evictions.evictable_bytes

    async def _excess(self, needed_bytes: int, *, is_waited_for: bool = False) -> int:
        """How many bytes have to go: down to the low mark once the high one is passed, else none but what a tier refused that is
        above the low mark (its room may be in pieces), or that somebody waits for."""
        usage = await self._home.usage()
        limit = self._limits.high_watermark * usage.capacity_bytes
        excess = usage.used_bytes + needed_bytes - limit
        if needed_bytes and (is_waited_for or usage.used_bytes + needed_bytes > LOW_SHARE * limit):
            # The tier refused: whatever its accounts say, this much has to go.
            excess = max(excess, needed_bytes)
        return int(excess + (1 - LOW_SHARE) * limit) if excess > 0 else 0

    # -- the background --------------------------------------------------------------------------------------------
    def wake(self) -> None:
        """Something may have become free: look soon."""
        self._wanted.set()

    def look_at_quotas(self) -> None:
        """A namespace may have got another quota: what is above it goes now, and not at the next interval."""
        self._must_look_at_quotas = True
        self._wanted.set()

    @property
    def evictions(self) -> EvictionCounts:
        """What left the home tier for the remote alone, since the start."""
        return EvictionCounts() if self._evictions is None else self._evictions.counts

    @property
    def is_quiet(self) -> bool:
        """Whether lease state was lost a moment ago, so that policy removes nothing."""
        return self._catalog.leases.usage().quiet

    @property
    def lag_seconds(self) -> float:
        """How long the oldest mark has been due: 0 while claims keep up."""
        return self._claims.lag_seconds

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
            if self._must_look_at_quotas:
                self._must_look_at_quotas, quotas_at = False, now
            try:
                await self.look_again()
                await self.collect(with_quotas=now >= quotas_at)
            except KvobjError as error:
                self._log.warning("collecting failed, will retry: %s", error)
            if now >= quotas_at:
                quotas_at = now + self._limits.interval_seconds
            await asyncio.sleep(CYCLE_SECONDS_MIN)  # every object that is written wakes the collector

    def _wait_seconds(self) -> float:
        due_ms = self._claims.marked.oldest_due_ms
        if due_ms is None:
            return self._limits.interval_seconds
        return min(max((due_ms - boot_ms(self._clock)) / 1000, 0.05), self._limits.interval_seconds)

    async def collect(self, *, with_quotas: bool = True) -> GcReport:
        """One cycle: claim what is due, condemn what should go. `with_quotas`: look at every namespace's usage too, and at what
        ordinary buckets leave to chunks."""
        async with self._collecting:
            if with_quotas:
                await self._fit_policy()
            if self._evictions is not None:
                await self._evictions.learn_rules()
                await self._evict(await self._excess(0) - self._claims.marked.size_bytes, is_waited_for=False)
            if self.is_quiet:
                return GcReport(quiet=True)
            counts = self.counts
            before = (counts.condemned, counts.claimed, counts.claimed_bytes, counts.rescued)
            await self._claims.claim(paced=True)
            excesses = await over_quota(self._catalog, self._claims.marked.by_place()) if with_quotas else []
            begun_with = counts.condemned
            while max(len(self._claims.marked), counts.condemned - begun_with) < MARKS_MAX:
                started = self._clock.monotonic()
                chunks = await self._next_victims(excesses, min(self._pace.claim_batch, CONDEMN_MAX))
                if not chunks:
                    break
                await self._claims.condemn(chunks, due_ms=boot_ms(self._clock) + self._limits.grace_ms)
                # Where a rate is kept, what is due goes meanwhile: were it to wait for all marks, the rate would be spent twice.
                # One after the other, since a chunk is not condemned while the claim of its child is on its way.
                if self.lag_seconds > 0 and not self._pace.is_idle:
                    await self._claims.claim_some(self._pace.claim_batch)
                await self._pace.after(len(chunks), seconds=self._clock.monotonic() - started)
            await self._claims.claim(paced=True)  # where the grace time is nothing
            return GcReport(
                condemned=counts.condemned - before[0],
                claimed=counts.claimed - before[1],
                claimed_bytes=counts.claimed_bytes - before[2],
                rescued=counts.rescued - before[3],
            )

    async def _fit_policy(self) -> None:
        """Tell the policy what chunks may take of the home tier: what objects of ordinary buckets do not."""
        if self._objects is not None and self._is_loaded:
            # Objects that have left take nothing, and copies that may leave make way for chunks.
            used_bytes = (await self._home.usage()).used_bytes
            chunk_bytes = self._policy.size_bytes(CacheTier.NVME) + self._claims.marked.size_bytes
            others_bytes = max(0, used_bytes - chunk_bytes - self._objects.shared_bytes)
            limit_bytes = int(self._limits.high_watermark * (await self._home.usage()).capacity_bytes)
            self._policy.set_capacity(CacheTier.NVME, max(0, limit_bytes - others_bytes))
            return
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
        lacking = await self._lacking()
        return self._take(self._for_space(lacking, limit)) if lacking > 0 else []

    def _take(self, names: Sequence[bytes]) -> list[HomeChunk]:
        return self._chunks.take_many(names)

    # -- looking on ------------------------------------------------------------------------------------------------
    async def plan(self, *, limit: int = BATCH_MAX) -> GcPlan:
        """What the next cycle would condemn, and why: the first `limit` of it. Changes nothing."""
        usage = await self._home.usage()
        lacking = await self._lacking()
        victims = await self._dry_run.victims(self._claims.marked.by_place(), lacking_bytes=lacking)
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
