"""What the admin API shows of a running node: implements `api.admin_view.AdminView`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from time import process_time

from kvobj import __version__, gpu
from kvobj.api.admin_view import (
    BlobStatus,
    CatalogStatus,
    CodecStatus,
    FlushOutcome,
    FrameStatus,
    StoreStatus,
    TierStatus,
    UpstreamStatus,
    VerifiedObject,
)
from kvobj.app.node import Node, flush
from kvobj.app.rates import Rates
from kvobj.app.remote_state import remote_place, remote_status
from kvobj.app.room_notes import room_notes
from kvobj.app.worker_pool import WorkerPool
from kvobj.arena import orphaned_arenas
from kvobj.catalog.rows import BlobRef, ObjectRow
from kvobj.clock import Clock
from kvobj.codec.frame import MAX_HEAD_BYTES, block_count
from kvobj.errors import KvobjError, NoSuchBucketError
from kvobj.gc.plan import GcPlan, GcReport
from kvobj.gc.recall import RecallQuery, RecallReport
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.tensors.kernels.load import status as kernels_status
from kvobj.tiers.coded_blobs import CodecUsage
from kvobj.tiers.coded_frames import head_of, spoken_name
from kvobj.tiers.protocol import Tier, TierUsage


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
        upstreams: Callable[[], tuple[UpstreamStatus, ...]] = tuple,
    ) -> None:
        self._node = node
        self._receive_mode = receive_mode
        self._workers = workers
        self._upstreams = upstreams
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
        backlog, demotion = node.write_behind.backlog, node.home_demotion.counts
        due = await node.catalog.due(now_ms=self._clock.now_ms(), limit=1000)
        dram, nvme, remote = node.dram, node.nvme, node.remote
        tiers: tuple[TierStatus, ...] = (
            replace(
                await self._tier_status(dram, str(node.arena.directory), dram.coded_totals.usage()),
                dirty_bytes=dram.dirty_bytes,
            ),
            replace(
                await self._tier_status(nvme, str(node.nvme_directory), node.coded_blobs.totals.usage()),
                is_home=True,
                transfers=nvme.transfers,
            ),
        )
        if remote is not None:
            tiers = (*tiers, await self._tier_status(remote.tier, remote_place(remote), remote.directory.usage()))
        if node.hbm is not None:
            tiers = (
                await self._tier_status(node.hbm, "device memory", node.hbm.coded_totals.usage()),
                *tiers,
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
                "demotion": demotion.waiting,
                "demoted_copies": demotion.done,
                "demotion_failures": demotion.failed,
            },
            gc=node.upkeep.parts.figures(),
            leases=node.upkeep.parts.leases(),
            rates=self._rates.update(self._clock.monotonic(), self._counters()),
            notes=self._notes(tiers),
            cpu_seconds=process_time(),
            workers=() if workers is None else workers.status(),
            gpu=await asyncio.to_thread(_gpu_status),
            unfinished_limit_bytes=node.catalog.unfinished.limit_bytes or 0,
            unfinished=dict(node.catalog.unfinished.of_users),
            remote=remote_status(node.remote, node.writing, node.catalog.outbox, self._metrics),
            upstreams=self._upstreams(),
        )

    async def notes(self) -> tuple[str, ...]:
        """The notes of `status` without the rest of it."""
        node = self._node
        return self._notes((await self._tier_status(node.nvme, str(node.nvme_directory), ()),))

    def _notes(self, tiers: tuple[TierStatus, ...]) -> tuple[str, ...]:
        node = self._node
        segments = sum(segment.capacity_bytes for segment in node.nvme.segments)
        return (
            *node.notes,
            *self._orphans,
            *self._mode_notes(tiers),
            *room_notes(
                data=node.data.path,
                nvme=node.nvme_directory,
                growth_bytes=node.nvme.capacity_bytes - segments,
            ),
            *node.coding_rules.notes(),
            *node.readers.notes(),
            *(() if self._workers is None else self._workers.notes()),
        )

    @staticmethod
    def _mode_notes(tiers: tuple[TierStatus, ...]) -> tuple[str, ...]:
        return tuple(
            f"{tier.name} does buffered I/O: its file system refuses O_DIRECT"
            for tier in tiers
            if tier.mode == "buffered"
        )

    async def _tier_status(self, tier: Tier, location: str, coded: Sequence[CodecUsage]) -> TierStatus:
        usage = await tier.usage()
        codecs = _codec_statuses(usage, coded)
        hits = self._sample("kvobj_tier_gets_total", tier=tier.name, outcome="hit")
        misses = self._sample("kvobj_tier_gets_total", tier=tier.name, outcome="miss")
        return TierStatus(
            name=tier.name,
            capacity_bytes=usage.capacity_bytes,
            used_bytes=usage.used_bytes,
            blobs=usage.blobs,
            mode=usage.mode,
            location=location,
            hit_ratio=hits / (hits + misses) if hits + misses else None,
            plain_bytes=sum(each.plain_bytes for each in codecs),
            codecs=codecs,
        )

    async def _catalog_status(self) -> CatalogStatus:
        node = self._node
        buckets = objects = size_bytes = 0
        for bucket in await node.catalog.buckets():
            try:
                usage = await node.catalog.bucket_usage(bucket.name)
            except NoSuchBucketError:  # deleted since the listing
                continue
            buckets += 1
            objects += usage.objects
            size_bytes += usage.size_bytes
        durable_bytes, volatile_bytes = node.database.used_bytes()
        return CatalogStatus(
            kind="lmdb",
            buckets=buckets,
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
        for name in ("dram", "nvme") if self._node.remote is None else ("dram", "nvme", "remote"):
            counters[f"{name}_hits_per_second"] = self._sample("kvobj_tier_gets_total", tier=name, outcome="hit")
        return counters

    def _sample(self, name: str, **labels: str) -> float:
        return self._metrics.value(name, **labels)

    async def inspect(self, row: ObjectRow) -> tuple[BlobStatus, ...]:
        """See `AdminView.inspect`."""
        return tuple([await self._inspect_blob(blob) for blob in row.blobs])

    async def _inspect_blob(self, blob: BlobRef) -> BlobStatus:
        blob_id = BlobId(blob.blob_id)
        holding: list[str] = []
        frame_status: FrameStatus | None = None
        node = self._node
        tiers: list[Tier | None] = [node.hbm, node.dram, node.nvme, None if node.remote is None else node.remote.tier]
        for tier in tiers:
            if tier is None:
                continue
            try:
                if await tier.missing([blob_id]):
                    continue
                holding.append(tier.name)
                if frame_status is None:
                    frame_status = await _frame_status(tier, blob_id)
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

    async def user_removed(self) -> None:
        """See `AdminView.user_removed`."""
        await self._node.store.removed(None)

    async def flush(self, *, local: bool, timeout_seconds: float) -> FlushOutcome:
        """See `AdminView.flush`."""
        worker, remote = self._node.write_behind, self._node.remote
        uploads = None if self._node.writing is None else self._node.writing.uploads
        objects, size_bytes = worker.written_objects, worker.written_bytes
        uploaded = (0, 0) if uploads is None else (uploads.uploaded_objects, uploads.uploaded_bytes)
        until = self._clock.monotonic() + timeout_seconds
        is_done = await flush(self._node, timeout_seconds=timeout_seconds)
        if is_done and not local and uploads is not None:
            is_done = await uploads.flush(timeout_seconds=max(0.0, until - self._clock.monotonic()))
        left = worker.backlog
        outcome = FlushOutcome(
            worker.written_objects - objects,
            worker.written_bytes - size_bytes,
            is_done=is_done,
            left_in_memory=left.objects,
            left_in_memory_bytes=left.size_bytes,
        )
        if uploads is None or remote is None:
            return outcome
        to_upload = uploads.backlog
        return replace(
            outcome,
            uploaded_objects=uploads.uploaded_objects - uploaded[0],
            uploaded_bytes=uploads.uploaded_bytes - uploaded[1],
            left_to_upload=to_upload.objects,
            left_to_upload_bytes=to_upload.size_bytes,
            left_to_tell=remote.manifests.lag.entries,
            held_by=uploads.state or remote.manifests.lag.problem,
        )


def _gpu_status() -> dict[str, str]:
    found = gpu.status()
    return {
        "gpu": found.detail,
        "compiler": found.compiler,
        "torch": "installed" if found.torch else "not installed",
        "CPU kernels": kernels_status().detail,
    }


def _codec_statuses(usage: TierUsage, coded: Sequence[CodecUsage]) -> tuple[CodecStatus, ...]:
    """How a tier's blobs lie; what lies as it was put is the rest."""
    found = [
        CodecStatus(spoken_name(each.codec), each.blobs, each.plain_bytes, each.stored_bytes, each.ratio)
        for each in coded
    ]
    plain_blobs = usage.blobs - sum(each.blobs for each in coded)
    plain_bytes = max(0, usage.used_bytes - sum(each.stored_bytes for each in coded))
    if plain_blobs > 0:
        found.insert(0, CodecStatus("raw", plain_blobs, plain_bytes, plain_bytes, 1.0))
    return tuple(found)


async def _frame_status(tier: Tier, blob_id: BlobId) -> FrameStatus | None:
    frame = await tier.get(blob_id)
    if frame is None:
        return None
    try:
        await frame.complete()
        head = head_of(frame.view[:MAX_HEAD_BYTES], frame.frame_bytes)
        frame_bytes = frame.frame_bytes
    finally:
        frame.release()
    return FrameStatus(
        codec=spoken_name(head.codec),
        plain_bytes=head.plain_bytes,
        frame_bytes=frame_bytes,
        blocks=block_count(head.plain_bytes) if head.tensor is None else len(head.tensor.blocks),
        digest=head.digest.hex(),
    )
