"""What the admin API shows of a running node: implements `api.admin_view.AdminView`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from time import process_time

from kvobj import __version__
from kvobj.api.admin_view import (
    BlobStatus,
    CatalogStatus,
    FlushOutcome,
    FrameStatus,
    StoreStatus,
    TierStatus,
    VerifiedObject,
)
from kvobj.app.node import Node, flush
from kvobj.app.rates import Rates
from kvobj.app.worker_pool import WorkerPool
from kvobj.arena import orphaned_arenas
from kvobj.catalog.rows import BlobRef, ObjectRow
from kvobj.clock import Clock
from kvobj.codec.frame import frame_head_bytes, parse_frame
from kvobj.errors import KvobjError, UnavailableError
from kvobj.gc.plan import GcPlan, GcReport
from kvobj.gc.recall import RecallQuery, RecallReport
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.tiers.protocol import Tier

FLUSH_SECONDS = 600.0


class NodeView:
    """See `AdminView`. Event-loop-only."""

    def __init__(
        self,
        node: Node,
        *,
        clock: Clock,
        metrics: Metrics,
        receive_mode: Callable[[], str],
        workers: WorkerPool | None = None,
    ) -> None:
        self._node = node
        self._receive_mode = receive_mode
        self._workers = workers
        self._clock = clock
        self._metrics = metrics
        self._started = clock.monotonic()
        self._rates = Rates()
        self._orphans = tuple(f"an arena whose data directory is gone: {path}" for path in orphaned_arenas())
        self.ready = False

    def note_ready(self) -> None:
        """From here on requests are answered."""
        self.ready = True

    def is_ready(self) -> bool:
        """See `AdminView.is_ready`."""
        return self.ready

    async def status(self) -> StoreStatus:
        """See `AdminView.status`."""
        node = self._node
        workers = self._workers
        if workers is not None:
            await workers.refresh()
        backlog = node.write_behind.backlog
        due = await node.catalog.due(now_ms=self._clock.now_ms(), limit=1000)
        tiers = (
            await self._tier_status(node.dram, str(node.arena.directory), is_home=False),
            await self._tier_status(node.nvme, str(node.nvme_directory), is_home=True),
        )
        return StoreStatus(
            version=__version__,
            store_id=node.data.store_id.hex(),
            uptime_seconds=self._clock.monotonic() - self._started,
            is_ready=self.ready,
            receive_mode=self._receive_mode(),
            tiers=tiers,
            arena=node.arena.usage(),
            catalog=await self._catalog_status(),
            queues={
                "delete": len(due),
                "write_behind": backlog.objects,
                "write_behind_bytes": backlog.size_bytes,
                "write_behind_oldest_seconds": int(backlog.oldest_seconds),
                "blobs_in_use": len(node.in_use),
                "reaped_blobs": node.reaper.reaped_blobs,
                "leftover_blobs": node.upkeep.sweep.leftover_blobs,
                "refused": backlog.refused_objects,
                "removed_for_room_objects": node.collector.counts.claimed,
                "recovered_rows": node.recovery.rows,
                "dropped_rows": node.recovery.dropped_rows,
                "corrupt_blobs": node.corrupt.found,
                "write_behind_failures": node.write_behind.failures,
            },
            gc=node.upkeep.parts.figures(),
            leases=node.upkeep.parts.leases(),
            rates=self._rates.update(self._clock.monotonic(), self._counters()),
            notes=node.notes
            + self._orphans
            + self._mode_notes(tiers)
            + node.readers.notes()
            + (() if workers is None else workers.notes()),
            cpu_seconds=process_time(),
            workers=() if workers is None else workers.status(),
        )

    @staticmethod
    def _mode_notes(tiers: tuple[TierStatus, ...]) -> tuple[str, ...]:
        return tuple(
            f"{tier.name} does buffered I/O: its file system refuses O_DIRECT"
            for tier in tiers
            if tier.mode == "buffered"
        )

    async def _tier_status(self, tier: Tier, location: str, *, is_home: bool) -> TierStatus:
        usage = await tier.usage()
        hits = self._sample("kvobj_tier_gets_total", tier=tier.name, outcome="hit")
        misses = self._sample("kvobj_tier_gets_total", tier=tier.name, outcome="miss")
        return TierStatus(
            name=tier.name,
            capacity_bytes=usage.capacity_bytes,
            used_bytes=usage.used_bytes,
            blobs=usage.blobs,
            mode=usage.mode,
            location=location,
            is_home=is_home,
            hit_ratio=hits / (hits + misses) if hits + misses else None,
            dirty_bytes=0 if is_home else self._node.dram.dirty_bytes,
        )

    async def _catalog_status(self) -> CatalogStatus:
        node = self._node
        buckets = await node.catalog.buckets()
        objects = size_bytes = 0
        for bucket in buckets:
            usage = await node.catalog.bucket_usage(bucket.name)
            objects += usage.objects
            size_bytes += usage.size_bytes
        durable_bytes, volatile_bytes = node.database.used_bytes()
        return CatalogStatus(
            kind="lmdb",
            buckets=len(buckets),
            objects=objects,
            size_bytes=size_bytes,
            map_bytes=node.settings.catalog.map_bytes,
            map_used_bytes=durable_bytes,
            volatile_map_bytes=node.settings.catalog.volatile_map_bytes,
            volatile_map_used_bytes=volatile_bytes,
            record_log_bytes=node.database.log_bytes,
        )

    def _counters(self) -> dict[str, float]:
        counters = {
            "received_bytes_per_second": self._sample("kvobj_s3_received_bytes_total"),
            "sent_bytes_per_second": self._sample("kvobj_s3_sent_bytes_total"),
            "written_behind_bytes_per_second": float(self._node.write_behind.written_bytes),
        }
        for name in ("dram", "nvme"):
            counters[f"{name}_hits_per_second"] = self._sample("kvobj_tier_gets_total", tier=name, outcome="hit")
        return counters

    def _sample(self, name: str, **labels: str) -> float:
        return self._metrics.registry.get_sample_value(name, labels) or 0.0

    async def inspect(self, row: ObjectRow) -> tuple[BlobStatus, ...]:
        """See `AdminView.inspect`."""
        return tuple([await self._inspect_blob(blob) for blob in row.blobs])

    async def _inspect_blob(self, blob: BlobRef) -> BlobStatus:
        blob_id = BlobId(blob.blob_id)
        holding: list[str] = []
        frame_status: FrameStatus | None = None
        for tier in (self._node.dram, self._node.nvme):
            try:
                if await tier.missing([blob_id]):
                    continue
                holding.append(tier.name)
                if frame_status is None:
                    frame_status = await _frame_status(tier, blob)
            except KvobjError:
                continue
        return BlobStatus(tiers=tuple(holding), frame=frame_status)

    async def verify(self, bucket: str | None) -> AsyncGenerator[VerifiedObject, None]:
        """See `AdminView.verify`."""
        rows: AsyncIterator[ObjectRow] = self._node.catalog.scan_objects()
        async for row in rows:
            if bucket is None or row.bucket == bucket:
                problem = (await self._node.upkeep.copies.check(row)).problem
                if problem is not None and not await self._is_current(row):
                    continue  # deleted or replaced while it was being read
                yield VerifiedObject(row.bucket, row.key, row.size_bytes, problem)

    async def _is_current(self, row: ObjectRow) -> bool:
        (now,) = await self._node.catalog.lookup(row.bucket, [row.key])
        return now is not None and now.blobs == row.blobs

    async def gc_plan(self, limit: int) -> GcPlan:
        """See `AdminView.gc_plan`."""
        plan = await self._node.collector.plan(limit=limit)
        expired = await self._node.upkeep.lifecycle.plan()
        return replace(
            plan,
            victims=(*plan.victims, *expired)[:limit],
            chunks=plan.chunks + len(expired),
            size_bytes=plan.size_bytes + sum(victim.size_bytes for victim in expired),
        )

    async def collect(self) -> GcReport:
        """See `AdminView.collect`."""
        return await self._node.collector.collect()

    async def start_recall(self, query: RecallQuery, *, dry_run: bool) -> RecallReport:
        """See `AdminView.start_recall`."""
        return await self._node.upkeep.recall.start(query, dry_run=dry_run)

    def recall_report(self) -> RecallReport:
        """See `AdminView.recall_report`."""
        return self._node.upkeep.recall.report()

    async def cancel_recall(self) -> RecallReport:
        """See `AdminView.cancel_recall`."""
        return await self._node.upkeep.recall.cancel()

    async def flush(self) -> FlushOutcome:
        """See `AdminView.flush`."""
        worker = self._node.write_behind
        objects, size_bytes = worker.written_objects, worker.written_bytes
        if not await flush(self._node, timeout_seconds=FLUSH_SECONDS):
            raise UnavailableError("not everything could be written down in time", left=worker.backlog.objects)
        return FlushOutcome(worker.written_objects - objects, worker.written_bytes - size_bytes)


async def _frame_status(tier: Tier, blob: BlobRef) -> FrameStatus | None:
    frame = await tier.get(BlobId(blob.blob_id))
    if frame is None:
        return None
    try:
        await frame.complete()
        header = parse_frame(frame.view[: frame_head_bytes(blob.plain_bytes)], blob.frame_bytes)
    finally:
        frame.release()
    return FrameStatus(
        codec=header.codec,
        plain_bytes=header.plain_bytes,
        frame_bytes=header.frame_bytes,
        blocks=header.block_count,
        digest=header.digest.hex(),
    )
