"""The real parts that the lease machine drives: an LMDB catalog on directories that outlive it, two tiers, and gc.

`dram` outlives the process and not power, `home` both; they hold sizes and no bytes. The durable writer can be held up, so
that what runs beside it really does. Collector and reaper work on a catalog that tells the reference of each of their steps.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fakes import ManualClock
from gc_world import LOG, SizedTier
from lease_reference import Reference, Version

from kvobj.catalog.encoding import CATALOG_TABLES
from kvobj.catalog.lease_protocol import LeaseLimits
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.rows import BlobRef, BucketKind, BucketRow, ChunkName, Claimed, Durability, ObjectRow
from kvobj.clock import boot_ms
from kvobj.database import Database, remove_volatile
from kvobj.gc.collector import Collector, CollectorLimits
from kvobj.gc.expiry import Expiry
from kvobj.gc.holds import Holds
from kvobj.gc.pacing import Pace
from kvobj.gc.reaper import Reaper
from kvobj.gc.sweep import Sweep
from kvobj.ids import BlobId, BlobIdAllocator, new_epoch
from kvobj.policy.chunk_policy import CacheTier
from kvobj.policy.lru_chunks import LruChunks
from kvobj.record_log import RecordLog
from kvobj.tiers.in_use import BlobsInUse

if TYPE_CHECKING:
    from collections.abc import Coroutine

BUCKET = "cache"
USER = "main"
GRACE_MS = 3_000
HOME_BYTES = 1_000
LIMITS = LeaseLimits(ttl_ms_min=1_000, ttl_ms_max=60_000)


class _BothTiers:
    """What the reaper deletes from."""

    def __init__(self, *tiers: SizedTier) -> None:
        self._tiers = tiers

    async def delete(self, blob_ids: Sequence[BlobId]) -> None:
        for tier in self._tiers:
            await tier.delete(blob_ids)


class Told:
    """The catalog as gc sees it: what it condemns, claims, rescues and reaps the reference does too, and both must agree."""

    def __init__(self, catalog: LmdbCatalog, reference: Reference) -> None:
        self._catalog = catalog
        self._reference = reference
        self.leftovers: set[bytes] = set()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - all other verbs are the catalog's
        return getattr(self._catalog, name)

    async def lookup(self, bucket: str, keys: Sequence[str], *, rescue: bool = False) -> list[ObjectRow | None]:
        if rescue:
            self._reference.rescue(keys)
        return await self._catalog.lookup(bucket, keys, rescue=rescue)

    async def condemn(self, chunks: Sequence[ChunkName], *, not_before_boot_ms: int) -> list[bool]:
        done = await self._catalog.condemn(chunks, not_before_boot_ms=not_before_boot_ms)
        named = [(chunk.key, chunk.blob_id) for chunk in chunks]
        assert done == self._reference.condemn(named, due_ms=not_before_boot_ms)
        return done

    async def claim(self, *, now_boot_ms: int, limit: int = 1000, now_ms: int) -> Claimed:
        claimed = await self._catalog.claim(now_boot_ms=now_boot_ms, limit=limit, now_ms=now_ms)
        blobs = [chunk.blob_id for chunk in claimed.chunks] + [row.blobs[0].blob_id for row in claimed.hidden]
        assert frozenset(blobs) == self._reference.claim(now_ms=now_boot_ms)
        return claimed

    async def reap(self, entries: Sequence[Any]) -> None:
        await self._catalog.reap(entries)
        self._reference.reap(entry.blob_id for entry in entries)

    async def queue_blobs(self, blob_ids: Sequence[bytes], *, now_ms: int) -> None:
        await self._catalog.queue_blobs(blob_ids, now_ms=now_ms)
        self._reference.queue_leftovers(bytes(blob_id) for blob_id in blob_ids)
        self.leftovers |= {bytes(blob_id) for blob_id in blob_ids}


class LeaseWorld:
    """See the module's text. One event loop, turned from outside by `run`."""

    def __init__(self) -> None:
        self.sound = True  # until something runs, and again when what it left was found right
        self.directory = Path(tempfile.mkdtemp(prefix="kvobj-machine-", dir="/dev/shm"))
        self.runner = asyncio.Runner()
        self.reference = Reference()
        self.clock = ManualClock()
        self.holder_ms = 0
        self.dram = SizedTier(HOME_BYTES * 10, name="dram")
        self.home = SizedTier(HOME_BYTES)
        self._random = count(1)
        self._boots = count(1)
        self._boot = next(self._boots)
        self.reference.alive_ms = self.now_ms
        self._open()
        self.run(self.catalog.create_bucket(BucketRow(BUCKET, BucketKind.KV, USER, 1, Durability.LOCAL)))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - what the work returns
        self.sound = False
        return self.runner.run(work)

    @property
    def now_ms(self) -> int:
        """On the catalog's clock."""
        return boot_ms(self.clock)

    def advance(self, ms: int) -> None:
        """Time passes, for the holders too, whose clocks are slow by 100 ppm."""
        self.clock.advance(ms / 1000)
        self.holder_ms += ms - ms // 10_000

    # -- starts and ends -------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.database = Database.open(
            durable=self.directory / "durable",
            volatile=self.directory / "volatile",
            tables=CATALOG_TABLES,
            map_bytes=1 << 26,
            volatile_map_bytes=1 << 26,
            record_log=RecordLog.open(self.directory / "log", rotate_bytes=4096),
            sync=False,
            boot_id=str(self._boot),
        )
        self.run(self._start())

    async def _start(self) -> None:
        self.catalog = await LmdbCatalog.open(self.database, limits=LIMITS, now_boot_ms=self.now_ms)
        epoch = new_epoch(lambda size: next(self._random).to_bytes(size, "big"))
        self.blob_ids = BlobIdAllocator(epoch)
        self.uploads: set[bytes] = set()
        await self.catalog.open_epoch(epoch)
        self.reference.epoch = epoch.to_bytes(8, "big")
        if self.database.volatile_fresh:
            await self.catalog.drop_orphans(now_ms=self.clock.now_ms())
        self._make_gc()
        await self.collector.load()

    def _make_gc(self) -> None:
        told: Any = Told(self.catalog, self.reference)
        both: Any = _BothTiers(self.dram, self.home)
        clock, nothing = self.clock, lambda: None
        self.in_use = BlobsInUse()
        self.reaper = Reaper(
            catalog=told, tiers=both, in_use=self.in_use, clock=clock, interval_seconds=10, on_freed=nothing, log=LOG
        )
        self.collector = Collector(
            catalog=told,
            home=self.home,
            reaper=self.reaper,
            policy=LruChunks({CacheTier.NVME: HOME_BYTES}),
            holds=Holds(grace_ms=GRACE_MS, bytes_max=HOME_BYTES // 5),
            pace=Pace(clock, chunks_per_second=1000, sleep=_no_sleep),
            clock=clock,
            limits=CollectorLimits(grace_ms=GRACE_MS, high_watermark=0.3, interval_seconds=10),
            log=LOG,
        )
        self.expiry = Expiry(catalog=told, clock=clock, on_freed=nothing, log=LOG)

    async def _close(self) -> None:
        await self.catalog.aclose()
        await self.database.aclose()

    def kill(self, *, away_ms: int) -> None:
        """The process dies and another starts, in the same boot."""
        self.run(self._close())
        self.advance(away_ms)
        self.reference.restart(now_ms=self.now_ms)
        self._open()

    def lose_power(self, *, away_ms: int) -> None:
        """The machine dies and boots: its clock begins anew, what was only in memory is gone."""
        self.run(self._close())
        self._boot = next(self._boots)
        self._come_back(away_ms)

    def stop(self, *, away_ms: int) -> None:
        """A clean stop: everything that is live is written down, the volatile environment removed, another start follows."""

        async def end() -> None:
            await self.write_down([row async for row in self.catalog.scan_objects(volatile_only=True)])
            await self.catalog.leases.stopped_cleanly()
            await self._close()

        self.run(end())
        reference = self.reference
        if not reference.quiet and not reference.sessions:
            reference.marked_ttl_ms = 0
        for key, row in list(reference.volatile.items()):
            if not row.hidden:
                reference.raise_durability(reference.volatile[key])
        remove_volatile(self.directory / "volatile")
        self._come_back(away_ms, same_boot=True)

    def _come_back(self, away_ms: int, *, same_boot: bool = False) -> None:
        self.advance(away_ms)
        if not same_boot:
            self.clock = ManualClock(now_ms=self.clock.now_ms(), monotonic=5.0)
        self.dram.sizes.clear()
        self.reference.lose_volatile(now_ms=self.now_ms)
        self._open()

    def end(self) -> None:
        """Remove everything."""
        self.run(self._close())
        self.runner.close()
        shutil.rmtree(self.directory)

    # -- bytes -----------------------------------------------------------------------------------------------------

    def upload(self, *, in_memory: bool) -> BlobId:
        """Bytes under a new name, which no row names yet."""
        blob_id = self.blob_ids.allocate()
        (self.dram if in_memory else self.home).sizes[blob_id] = 100
        self.uploads.add(blob_id)
        return blob_id

    def has(self, blob_id: bytes) -> bool:
        """Whether some tier has the blob."""
        return BlobId(blob_id) in self.dram.sizes or BlobId(blob_id) in self.home.sizes

    def lose(self, blob_id: bytes) -> None:
        """All tiers lose the blob."""
        for tier in (self.dram, self.home):
            tier.sizes.pop(BlobId(blob_id), None)

    def stored(self) -> set[bytes]:
        """What the tiers hold, but for what is being written."""
        return {bytes(blob_id) for tier in (self.dram, self.home) for blob_id in tier.sizes} - self.uploads

    async def write_down(self, rows: Sequence[ObjectRow]) -> list[ObjectRow]:
        """What write-behind does: copies first, then the class. Which rows stood still."""
        rows = [row for row in rows if self.has(row.blobs[0].blob_id)]
        for row in rows:
            self.home.sizes[BlobId(row.blobs[0].blob_id)] = 100
        raised = [msgspec.structs.replace(row, durability=Durability.LOCAL) for row in rows]
        done = await self.catalog.raise_durability(raised)
        for row, is_done in zip(raised, done, strict=True):
            if is_done:
                await self.collector.written(row)
        return [row for row, is_done in zip(raised, done, strict=True) if is_done]

    # -- the background --------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """What nobody names is queued, and nothing else."""
        named = self.reference.blobs() | {entry.blob for entry in self.reference.queue}
        told: Any = Told(self.catalog, self.reference)
        expected = self.stored() - named
        sweep = Sweep(
            catalog=told,
            tiers=(self.dram, self.home),
            reaper=self.reaper,
            being_written=lambda blob_id: bytes(blob_id) in self.uploads,
            clock=self.clock,
            upload_ttl_seconds=60,
            interval_seconds=10,
            compact=_nothing,
            log=LOG,
        )
        await sweep.sweep()
        assert told.leftovers == expected

    async def reap_all(self) -> None:
        while await self.reaper.reap_batch():
            pass

    def take_reference(self, reference: Reference) -> None:
        """Go on with this one."""
        for each in fields(Reference):
            setattr(self.reference, each.name, getattr(reference, each.name))

    def hold_writer(self) -> tuple[threading.Event, asyncio.Future[None]]:
        """Keep the durable writer from going on until the event is set; everything enqueued after this waits."""
        gate = threading.Event()

        def wait(_: object) -> None:
            assert gate.wait(30)

        return gate, self.database.submit(wait)

    def hold_reader(self) -> threading.Event:
        """Keep the catalog's reading thread from going on until the event is set."""
        gate = threading.Event()
        self.catalog._readers.submit(gate.wait, 30)
        return gate

    def let_go(self, *, writer: threading.Event, reader: threading.Event, writer_first: bool) -> None:
        """Let both threads finish what they have while the event loop stands still: it learns of all of it in one turn."""
        both = [(writer, self.database._executor), (reader, self.catalog._readers)]
        for gate, thread in both if writer_first else reversed(both):
            gate.set()
            thread.submit(lambda: None).result(30)

    def wait_for_reader(self) -> None:
        """The reading thread has done what it was asked, and the event loop is told of it next."""
        self.catalog._readers.submit(lambda: None).result(30)

    async def pump(self, rounds: int) -> None:
        """Let what runs go on as far as it can in so many rounds of loop and reading thread."""
        for _ in range(rounds):
            for _ in range(4):
                await asyncio.sleep(0)
            await self.catalog._on_thread(lambda: None)


def row_of(version: Version) -> ObjectRow:
    """What a commit is given."""
    return ObjectRow(
        bucket=BUCKET,
        key=version.key,
        blobs=(BlobRef(version.blob, version.size_bytes, version.size_bytes, b"d" * 32),),
        size_bytes=version.size_bytes,
        etag=version.blob.hex(),
        modified_ms=1,
        owner=version.owner,
        durability=Durability.MEMORY if version.in_memory else Durability.LOCAL,
        parent=version.parent,
        tokens=16,
    )


async def _no_sleep(_: float) -> None:
    return


async def _nothing() -> None:
    return
