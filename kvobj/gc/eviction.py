"""What leaves nvme and loses nothing, because the remote has it: copies of class `shared`, and what a bucket's rule has uploaded
for it.

Eviction is never deletion. A row, its children, its pins and its holds are not touched: the copy in nvme goes, reads come from the
remote from then on, and policy is told. So it goes before anything is condemned, in any order of a chain, and in quiet time too.

A copy goes only if the remote is known to hold every blob that it stands for, and none of them is known to be corrupt there.
While the remote does not answer, what is in nvme is what can be read: then copies go only where a writer waits for their room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketRow, Durability, ObjectRow
from kvobj.catalog.setting_rows import RemoteRule
from kvobj.clock import Clock
from kvobj.errors import KvobjError
from kvobj.gc.choice import Choice
from kvobj.gc.home_chunks import HomeChunks
from kvobj.gc.home_objects import HomeObject, HomeObjects
from kvobj.ids import BlobId
from kvobj.policy.chunk_policy import chunk_name
from kvobj.tiers.corrupt_blobs import CorruptBlobs
from kvobj.tiers.layered_home import RemoteBlobs
from kvobj.tiers.protocol import Tier

BATCH: Final = 128
"""Rows whose copies go in one step."""
UPLOADS_MAX: Final = 32
UPLOAD_BYTES_MAX: Final = 64 * 1024 * 1024
"""What is uploaded in one step for the room that it takes, so that who waits for some gets it soon."""
RETRY_SECONDS: Final = 5.0
"""After uploads that came to nothing no other is tried for so long: who waits for room is told instead."""
RULES_SECONDS: Final = 1.0
_EVICTED_RULES: Final = frozenset({RemoteRule.EVICTED, RemoteRule.ALWAYS})

UploadNow = Callable[[Sequence[ObjectRow]], Awaitable[Sequence[ObjectRow]]]
"""Uploads rows of class `local` at once; those that are `shared` now. Raises nothing for a remote that does not answer."""


class RemoteState(Protocol):
    """The remote tier, as much of it as is asked for here (`remote.tier.RemoteTier`)."""

    @property
    def is_available(self) -> bool:
        """Whether a request has a chance just now."""
        ...

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        """See `Tier.missing`: what the directory does not know is asked for."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteSide:
    """What gc needs to know of the remote. `corrupt`: blobs whose bytes there did not check out."""

    state: RemoteState
    blobs: RemoteBlobs
    corrupt: CorruptBlobs
    upload_now: UploadNow


@dataclass(slots=True)
class EvictionCounts:
    """Since the start. `uploaded`: rows that were uploaded for the room that they took; `kept`: copies that could not go, because
    the remote does not have them whole."""

    objects: int = 0
    size_bytes: int = 0
    uploaded: int = 0
    kept: int = 0


class Evictions:
    """See the module's text. `home` is the tier that copies leave. Event-loop-only."""

    def __init__(
        self,
        remote: RemoteSide,
        *,
        catalog: Catalog,
        home: Tier,
        chunks: HomeChunks,
        objects: HomeObjects,
        choice: Choice,
        clock: Clock,
        log: logging.Logger,
    ) -> None:
        self._remote = remote
        self._catalog = catalog
        self._home = home
        self._chunks = chunks
        self._objects = objects
        self._choice = choice
        self._clock = clock
        self._log = log
        self._uploading: dict[str, bool] = {}
        self.must_look = False
        """Whether more buckets than before let their objects be uploaded, since all that lies at home was last looked through."""
        self._rules_until = float("-inf")
        self._uploads_from = float("-inf")
        # Uploads are not waited for under it: who can be served by a copy that may go at once need not.
        self._evicting = asyncio.Lock()
        self.counts = EvictionCounts()

    @property
    def evictable_bytes(self) -> int:
        """What copies of class `shared` take in nvme."""
        return self._chunks.shared_bytes + self._objects.shared_bytes

    async def learn_rules(self) -> None:
        """Look at the buckets' rules, unless that was a moment ago."""
        now = self._clock.monotonic()
        if now < self._rules_until:
            return
        self._rules_until = now + RULES_SECONDS
        for bucket in await self._catalog.buckets():
            self.note_bucket(bucket)

    def note_bucket(self, bucket: BucketRow) -> None:
        """The bucket's rule as it is now."""
        uploads_first = bucket.remote in _EVICTED_RULES or bucket.durability is Durability.SHARED
        before = self._uploading.get(bucket.name)
        self._uploading[bucket.name] = uploads_first
        if before is False and uploads_first:
            self.must_look = True

    def uploads_first(self, bucket: str) -> bool:
        """Whether what lies in the bucket is uploaded when its room is wanted, and so never condemned for it."""
        return self._uploading.get(bucket, False)

    async def make_room(self, wanted_bytes: int, *, is_waited_for: bool) -> int:
        """Let copies of so many bytes go, if there are; how many bytes that were. `is_waited_for`: a writer needs the room."""
        if wanted_bytes <= 0 or not (is_waited_for or self._remote.state.is_available):
            return 0
        await self.learn_rules()
        freed = await self._evict_shared(wanted_bytes)
        if freed < wanted_bytes:
            freed += await self._upload_and_evict(wanted_bytes - freed)
        return freed

    async def _evict_shared(self, wanted_bytes: int) -> int:
        freed = 0
        async with self._evicting:
            while freed < wanted_bytes and self.evictable_bytes:
                rows = await self._shared_rows(wanted_bytes - freed)
                if rows is None:
                    break
                freed += await self._evict(rows)
        return freed

    async def _shared_rows(self, wanted_bytes: int) -> list[ObjectRow] | None:
        """Rows of class `shared` whose copies go next; None: there are none. Chunks and objects give in proportion to what they
        have, chunks by policy's ranking, objects by their use."""
        of_objects = wanted_bytes * self._objects.shared_bytes // self.evictable_bytes
        objects = self._objects.evictable(of_objects, BATCH)
        names = self._choice.evictable(wanted_bytes - sum(each.size_bytes for each in objects), BATCH)
        if not names and not objects:
            objects = self._objects.evictable(wanted_bytes, BATCH)
        if not names and not objects:
            return None
        rows: list[ObjectRow] = []
        for chunk in [self._chunks.chunk(name) for name in names]:
            if chunk is None:
                continue
            row = await self._current(chunk.chunk.bucket, chunk.chunk.key, chunk.chunk.blob_id)
            if row is not None and row.durability is Durability.SHARED:
                rows.append(row)
            else:
                self._chunks.take(chunk.name)  # gone since; whoever removed it has told of another row
        rows += await self._of_objects(objects, Durability.SHARED)
        return rows

    async def _of_objects(self, objects: Sequence[HomeObject], durability: Durability) -> list[ObjectRow]:
        rows: list[ObjectRow] = []
        for each in objects:
            row = await self._current(each.bucket, each.key, each.blob_id)
            if row is not None and row.durability is durability:
                rows.append(row)
            else:
                self._objects.drop((each.bucket, each.key), each.blob_id)
                if row is not None:
                    self._objects.add(row)
        return rows

    async def _current(self, bucket: str, key: str, blob_id: bytes) -> ObjectRow | None:
        (row,) = await self._catalog.lookup(bucket, [key])
        return row if row is not None and row.blobs and row.blobs[0].blob_id == blob_id else None

    async def _evict(self, rows: Sequence[ObjectRow]) -> int:
        """Delete the copies of these rows from nvme, where the remote has them; how many bytes went."""
        lasting = [(row, lasting_ids(row)) for row in rows]
        unknown = [
            blob_id for _, blob_ids in lasting for blob_id in blob_ids if self._remote.blobs.find(blob_id) is None
        ]
        absent: set[BlobId] = set(unknown)
        if unknown:
            try:
                absent = set(await self._remote.state.missing(unknown))
            except KvobjError as error:
                self._log.warning("the remote was not asked for %d blobs: %s", len(unknown), error)
        going: list[ObjectRow] = []
        leaving: list[BlobId] = []
        for row, blob_ids in lasting:
            if any(blob_id in absent or blob_id in self._remote.corrupt for blob_id in blob_ids):
                self._keep(row)
            else:
                going.append(row)
                leaving += blob_ids
        if not going:
            return 0
        gone = set(await self._home.missing(leaving))
        await self._home.delete([blob_id for blob_id in leaving if blob_id not in gone])
        freed = 0
        for row in going:
            chunk = self._chunks.chunk(chunk_name(row.bucket, row.key))
            if not gone.issuperset(lasting_ids(row)):
                freed += row.size_bytes if chunk is None else chunk.size_bytes
                self.counts.objects += 1
            self._chunks.left(row)
            self._objects.drop((row.bucket, row.key), row.blobs[0].blob_id)
        self.counts.size_bytes += freed
        return freed

    def _keep(self, row: ObjectRow) -> None:
        """The copy here is the only sound one: leave it alone, until the scrub has put that right or a start looks again."""
        self.counts.kept += 1
        self._log.error(
            "a shared object is not whole on the remote, so its copy here stays bucket=%s key=%s", row.bucket, row.key
        )
        self._chunks.keep(row)
        self._objects.drop((row.bucket, row.key), row.blobs[0].blob_id)

    async def _upload_and_evict(self, wanted_bytes: int) -> int:
        """Upload what the rules of its buckets allow to go, and let the copies go; how many bytes went."""
        freed = 0
        while freed < wanted_bytes and self._clock.monotonic() >= self._uploads_from:
            rows = await self._local_rows(min(wanted_bytes - freed, UPLOAD_BYTES_MAX))
            if not rows:
                break
            if not self._remote.state.is_available:
                self._uploads_from = self._clock.monotonic() + RETRY_SECONDS
                break
            shared = await self._remote.upload_now(rows)
            self.counts.uploaded += len(shared)
            done = {(row.bucket, row.key) for row in shared}
            for row in rows:
                if (row.bucket, row.key) not in done:
                    self._choice.spare(chunk_name(row.bucket, row.key))
            if not shared:
                self._uploads_from = self._clock.monotonic() + RETRY_SECONDS
                break
            async with self._evicting:
                freed += await self._evict(shared)
        return freed

    async def _local_rows(self, wanted_bytes: int) -> list[ObjectRow]:
        """Rows of class `local` in buckets that let them be uploaded, next to go first."""
        names = self._choice.uploadable(
            wanted_bytes,
            UPLOADS_MAX,
            eligible=lambda name: self.uploads_first(self._chunks.bucket_of(name)),
        )
        rows: list[ObjectRow] = []
        size_bytes = 0
        for chunk in [self._chunks.chunk(name) for name in names]:
            if chunk is None or size_bytes >= wanted_bytes:
                continue
            row = await self._current(chunk.chunk.bucket, chunk.chunk.key, chunk.chunk.blob_id)
            if row is None:
                self._chunks.take(chunk.name)
            elif row.durability is Durability.SHARED:
                self._chunks.shared(row)
            else:
                rows.append(row)
                size_bytes += chunk.size_bytes
        if rows:
            return rows
        found = self._objects.uploadable(
            wanted_bytes,
            UPLOADS_MAX,
            eligible=lambda each: (
                self.uploads_first(each.bucket) and not self._choice.is_spared(chunk_name(each.bucket, each.key))
            ),
        )
        return await self._of_objects(found, Durability.LOCAL)


def lasting_ids(row: ObjectRow) -> list[BlobId]:
    """The blobs that have to last somewhere: of a chunk with a lossy copy that copy (its bytes are in memory alone)."""
    if row.lossy is not None:
        return [BlobId(row.lossy.blob_id)]
    return [BlobId(blob.blob_id) for blob in row.blobs]
