"""A small store without bytes for tests of gc: the memory catalog, a home tier of sizes, the real policy and collector."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from fakes import ManualClock

from kvobj.arena import PinnedFrame
from kvobj.catalog.encoding import CATALOG_TABLES
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.memory import MemoryCatalog
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BlobRef, BucketKind, BucketRow, CommitMode, Durability, ObjectRow
from kvobj.clock import boot_ms
from kvobj.database import Database
from kvobj.errors import TierUnavailableError
from kvobj.gc.collector import Collector, CollectorLimits
from kvobj.gc.eviction import RemoteSide
from kvobj.gc.holds import Holds
from kvobj.gc.pacing import Pace
from kvobj.gc.reaper import Reaper
from kvobj.ids import BlobId, BlobIdAllocator
from kvobj.policy.chunk_policy import CacheTier
from kvobj.policy.gipe import GipePolicy
from kvobj.record_log import RecordLog
from kvobj.store.commit import kv_etag
from kvobj.tiers.corrupt_blobs import CorruptBlobs
from kvobj.tiers.in_use import BlobsInUse
from kvobj.tiers.protocol import BlobNames, ByteRange, TierUsage

LOG = logging.getLogger("test")
GRACE_SECONDS = 30
CHUNK = 100


class SizedRemote:
    """What gc sees of a remote tier, without a byte of it: blobs by size, and whether it answers."""

    def __init__(self) -> None:
        self.sizes: dict[BlobId, int] = {}
        self.is_available = True
        self.asked: list[BlobId] = []

    @property
    def name(self) -> str:
        return "remote"

    def find(self, blob_id: BlobId) -> object | None:
        return self.sizes.get(blob_id)

    def may_hold(self, blob_ids: Sequence[BlobId]) -> set[BlobId]:
        return {blob_id for blob_id in blob_ids if blob_id in self.sizes}

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        self.asked += blob_ids
        return [blob_id for blob_id in blob_ids if blob_id not in self.sizes]

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        if not self.is_available and self.may_hold(blob_ids):
            raise TierUnavailableError("the remote is away")
        for blob_id in blob_ids:
            self.sizes.pop(blob_id, None)


class SizedTier:
    """A tier that knows how large its blobs are, and holds no byte of them."""

    def __init__(self, capacity_bytes: int, *, name: str = "nvme") -> None:
        self.capacity_bytes = capacity_bytes
        self.sizes: dict[BlobId, int] = {}
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    async def get(self, blob_id: BlobId, byte_range: ByteRange | None = None) -> PinnedFrame | None:
        raise AssertionError(f"no bytes here: {blob_id.hex()} {byte_range}")

    async def put(self, blob_id: BlobId, frame: PinnedFrame, names: BlobNames) -> None:  # noqa: ARG002
        self.sizes[blob_id] = frame.frame_bytes

    async def missing(self, blob_ids: Sequence[BlobId]) -> list[BlobId]:
        return [blob_id for blob_id in blob_ids if blob_id not in self.sizes]

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        for blob_id in blob_ids:
            self.sizes.pop(blob_id, None)

    async def scan(self) -> AsyncIterator[BlobId]:
        for blob_id in sorted(self.sizes):
            yield blob_id

    async def usage(self) -> TierUsage:
        return TierUsage(self.capacity_bytes, sum(self.sizes.values()), len(self.sizes), "sizes")

    async def aclose(self) -> None:
        self.sizes.clear()


@asynccontextmanager
async def open_catalog(
    driver: str, directory: Path, clock: ManualClock, *, map_bytes: int = 1 << 26
) -> AsyncIterator[Catalog]:
    """A new catalog of the driver: `memory`, or `lmdb` in the directory."""
    if driver == "memory":
        yield MemoryCatalog()
        return
    database = Database.open(
        durable=directory / "durable",
        volatile=directory / "volatile",
        tables=CATALOG_TABLES,
        map_bytes=map_bytes,
        volatile_map_bytes=1 << 26,
        record_log=RecordLog.open(directory / "log"),
        sync=False,
    )
    catalog = await LmdbCatalog.open(database, now_boot_ms=boot_ms(clock))
    try:
        yield catalog
    finally:
        await catalog.aclose()
        await database.aclose()


class GcWorld:
    """Everything that a collector works with, on a clock that is turned by hand. `open` makes the bucket `cache`."""

    def __init__(
        self,
        catalog: Catalog,
        clock: ManualClock,
        *,
        capacity_bytes: int = 10 * CHUNK,
        held_bytes_max: int = 10 * CHUNK,
        chunk_ttl_seconds: float | None = None,
        remote: SizedRemote | None = None,
    ) -> None:
        self.clock = clock
        self.remote = remote
        self.remote_corrupt = CorruptBlobs()
        self.uploaded: list[list[str]] = []
        self.catalog = catalog
        self.home = SizedTier(capacity_bytes)
        self.in_use = BlobsInUse()
        self.policy = GipePolicy({CacheTier.NVME: capacity_bytes}, use_native=False)
        self.slept: list[float] = []
        self.pace = Pace(self.clock, chunks_per_second=1000, sleep=self._sleep)
        self.reaper = Reaper(
            catalog=self.catalog,
            tiers=self.home,
            in_use=self.in_use,
            clock=self.clock,
            interval_seconds=10,
            on_freed=lambda: None,
            log=LOG,
        )
        self.holds = Holds(grace_ms=GRACE_SECONDS * 1000, bytes_max=held_bytes_max)
        self.refused: list[tuple[str, str, int]] = []
        self.collector = Collector(
            catalog=self.catalog,
            home=self.home,
            reaper=self.reaper,
            policy=self.policy,
            holds=self.holds,
            pace=self.pace,
            clock=self.clock,
            limits=CollectorLimits(
                grace_ms=GRACE_SECONDS * 1000,
                high_watermark=0.9,
                interval_seconds=10,
                chunk_ttl_ms=None if chunk_ttl_seconds is None else int(chunk_ttl_seconds * 1000),
            ),
            log=LOG,
            refused=lambda: self.refused,
            remote=None if remote is None else RemoteSide(remote, remote, self.remote_corrupt, self.upload_now),
        )
        self._blob_ids = BlobIdAllocator(7)
        self._numbers = itertools.count()

    async def upload_now(self, rows: Sequence[ObjectRow]) -> list[ObjectRow]:
        """What the uploader does for rows whose room is wanted."""
        self.uploaded.append([row.key for row in rows])
        return [await self.share(row) for row in rows] if self.remote is not None and self.remote.is_available else []

    async def share(self, row: ObjectRow) -> ObjectRow:
        """The remote has the row's blobs from now on, and the catalog says so."""
        assert self.remote is not None
        for blob in row.blobs:
            self.remote.sizes[BlobId(blob.blob_id)] = blob.frame_bytes
        shared = msgspec.structs.replace(row, durability=Durability.SHARED)
        assert await self.catalog.raise_durability([shared]) == [True]
        self.collector.shared([shared])
        return shared

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def open(self) -> None:
        """Make the buckets: `cache` of chunks, `objects` of ordinary objects."""
        await self.catalog.open_epoch(7)
        for name, kind in (("cache", BucketKind.KV), ("objects", BucketKind.ORDINARY)):
            await self.catalog.create_bucket(BucketRow(name, kind, "root", 0, Durability.LOCAL))

    async def commit(
        self,
        key: str,
        *,
        parent: str | None = None,
        bucket: str = "cache",
        size_bytes: int = CHUNK,
        namespace: str = "",
        owner: str = "root",
        durability: Durability = Durability.LOCAL,
    ) -> ObjectRow:
        """A row whose blob is in the home tier; the collector is not told."""
        blob_id = self._blob_ids.allocate()
        self.home.sizes[blob_id] = size_bytes
        row = ObjectRow(
            bucket=bucket,
            key=key,
            blobs=(BlobRef(bytes(blob_id), size_bytes, size_bytes, b"\1" * 32),),
            size_bytes=size_bytes,
            etag=kv_etag(blob_id),
            modified_ms=self.clock.now_ms(),
            owner=owner,
            durability=durability,
            parent=parent,
            namespace=namespace,
        )
        mode = CommitMode.FIRST_WRITER_WINS if bucket == "cache" else CommitMode.REPLACE
        return (await self.catalog.commit(row, mode=mode, now_ms=self.clock.now_ms())).row

    async def put(
        self, key: str, *, parent: str | None = None, namespace: str = "", bucket: str = "cache"
    ) -> ObjectRow:
        """A chunk at home, of which the collector knows; a second later than the one before."""
        self.clock.advance(1)
        row = await self.commit(key, parent=parent, namespace=namespace, bucket=bucket)
        await self.collector.written(row)
        return row

    async def chain(self, name: str, length: int) -> list[ObjectRow]:
        """A chain of so many chunks: NAME0 is the first."""
        return [
            await self.put(f"{name}{number}", parent=f"{name}{number - 1}" if number else "")
            for number in range(length)
        ]

    async def live(self) -> set[str]:
        """The keys of `cache` that are live."""
        page = await self.catalog.list_objects("cache")
        return {row.key for row in page.rows}

    async def after_grace(self) -> None:
        """Let the grace time pass, and collect."""
        self.clock.advance(GRACE_SECONDS)
        await self.collector.collect()
        while await self.reaper.reap_batch():
            pass
