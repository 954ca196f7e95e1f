"""Composes gc: the collector that writers ask for room, and the workers that look after what lies there."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvobj.app.tiering import RemoteReading
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import ObjectRow
from kvobj.clock import Clock
from kvobj.config.settings import Settings
from kvobj.gc.collector import Collector, CollectorLimits
from kvobj.gc.copies import Copies, MarkedTier, RemoteCopies
from kvobj.gc.eviction import RemoteSide, UploadNow
from kvobj.gc.expiry import Expiry
from kvobj.gc.holds import Holds
from kvobj.gc.home_chunks import plain_size
from kvobj.gc.instruments import GcParts, register
from kvobj.gc.lifecycle import Lifecycle
from kvobj.gc.lost import LostObjects
from kvobj.gc.pacing import Pace
from kvobj.gc.reaper import Reaper
from kvobj.gc.recall import Recall
from kvobj.gc.reconcile import Reconcile
from kvobj.gc.remote_reaping import RemoteReaping
from kvobj.gc.remote_sweep import RemoteLeftovers, RemoteSweep
from kvobj.gc.scrub import Scrub
from kvobj.gc.state_files import StateFiles
from kvobj.gc.sweep import Sweep
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.policy.chunk_policy import ChunkPolicy
from kvobj.store.profile_shelf import is_profile
from kvobj.tiers.corrupt_blobs import CorruptBlobs
from kvobj.tiers.in_use import BlobsInUse
from kvobj.tiers.protocol import Tier
from kvobj.tiers.verified import RunOnPool

# At most this share of the home tier's bytes is held against policy because clients asked for them a moment ago.
HELD_SHARE: Final = 0.2


@dataclass(frozen=True, slots=True)
class Collection:
    """What writers and readers are connected to."""

    collector: Collector
    reaper: Reaper
    holds: Holds
    pace: Pace


async def _uploads_nothing(_: Sequence[ObjectRow]) -> Sequence[ObjectRow]:
    return ()


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Workers in the background, and the jobs that an operator starts."""

    sweep: Sweep
    scrub: Scrub
    expiry: Expiry
    state_files: StateFiles
    copies: Copies
    recall: Recall
    lost: LostObjects
    lifecycle: Lifecycle
    parts: GcParts


def make_collection(
    settings: Settings,
    *,
    catalog: Catalog,
    home: Tier,
    home_capacity_bytes: int,
    tiers: Tier,
    policy: ChunkPolicy,
    in_use: BlobsInUse,
    clock: Clock,
    on_freed: Callable[[], None],
    refused: Callable[[], Iterable[tuple[str, str, int]]],
    is_told: Callable[[], Awaitable[bool]],
    log: logging.Logger,
    name_blob: Callable[[BlobId, bytes, bytes | None], None] = lambda *_: None,
    is_cached: Callable[[BlobId], bool] = lambda _: False,
    stored_bytes: Callable[[ObjectRow], int] = plain_size,
    local: Sequence[Tier] = (),
    remote: RemoteReading | None = None,
    upload_now: UploadNow = _uploads_nothing,
) -> Collection:
    """The collector with its reaper. `tiers` is all of them as one; `on_freed` is told when blobs were deleted from them;
    `refused`, `name_blob`, `is_cached` and `stored_bytes`: see `Collector`. Where there is a `remote`, `home` is nvme as it is
    written to (coded or not), `local` are the tiers of this node, `upload_now` makes rows of class `local` shared, and for
    `is_told` see `RemoteReaping`."""
    gc = settings.gc
    grace_ms = int(gc.grace_seconds * 1000)
    pace = Pace(clock, chunks_per_second=gc.chunks_per_second)
    reaping, side = None, None
    if remote is not None:
        reaping = RemoteReaping(
            remote.tier, catalog=catalog, tiers=tiers, local=local, is_told=is_told, clock=clock, log=log
        )
        side = RemoteSide(remote.tier, remote.directory, remote.corrupt, upload_now)
    reaper = Reaper(
        catalog=catalog,
        tiers=tiers,
        in_use=in_use,
        clock=clock,
        interval_seconds=gc.sweep_interval_seconds,
        on_freed=on_freed,
        log=log,
        pace=pace,
        remote=reaping,
    )
    holds = Holds(grace_ms=grace_ms, bytes_max=int(HELD_SHARE * home_capacity_bytes))
    collector = Collector(
        catalog=catalog,
        home=home,
        reaper=reaper,
        policy=policy,
        holds=holds,
        pace=pace,
        clock=clock,
        limits=CollectorLimits(
            grace_ms=grace_ms,
            high_watermark=settings.nvme.high_watermark,
            interval_seconds=gc.sweep_interval_seconds,
            chunk_ttl_ms=None if gc.chunk_ttl_seconds is None else int(gc.chunk_ttl_seconds * 1000),
        ),
        log=log,
        refused=refused,
        name_blob=name_blob,
        is_cached=is_cached,
        stored_bytes=stored_bytes,
        spares=is_profile,
        remote=side,
    )
    if remote is not None:
        remote.promotions.connect(collector)
    return Collection(collector, reaper, holds, pace)


def make_upkeep(
    settings: Settings,
    collection: Collection,
    *,
    catalog: Catalog,
    cache: MarkedTier,
    home: Tier,
    tiers: Tier,
    policy: ChunkPolicy,
    in_use: BlobsInUse,
    corrupt: CorruptBlobs,
    settled: Callable[[ObjectRow], Awaitable[ObjectRow]],
    being_written: Callable[[BlobId], bool],
    on_removed: Callable[[Sequence[ObjectRow]], None],
    compact: Callable[[], Awaitable[None]],
    run: RunOnPool,
    directory: Path,
    clock: Clock,
    metrics: Metrics,
    log: logging.Logger,
    remote: RemoteReading | None = None,
    leftovers: RemoteLeftovers | None = None,
    earlier_epochs: Sequence[int] = (),
    is_uncommitted: Callable[[BlobId], bool] | None = None,
    removed: Callable[[str], Awaitable[None]] | None = None,
) -> Upkeep:
    """Everything else of gc. `tiers` is all of them as one; `directory` keeps the policy's tables and how far
    scrub and lifecycle are. `leftovers`: what finds those on the `remote`; `earlier_epochs` are those of this node's last
    processes, whose leftovers a start looks for; `is_uncommitted`: whether a blob is on the remote for a row that comes yet;
    `removed`: see `Recall`."""
    gc = settings.gc
    lost = LostObjects(catalog=catalog, clock=clock, on_removed=on_removed, log=log)
    remote_copies, remote_sweep = None, None
    if remote is not None:
        remote_copies = RemoteCopies(remote.read, remote.directory, remote.corrupt, remote.tier.replace)
    if remote is not None and leftovers is not None:
        is_put = remote.tier.is_in_flight

        def under_way(blob_id: BlobId) -> bool:
            return is_put(blob_id) or (is_uncommitted is not None and is_uncommitted(blob_id))

        remote_sweep = RemoteSweep(
            leftovers,
            catalog=catalog,
            names_of=remote.names_of,
            being_written=under_way,
            is_putting=remote.tier.is_in_flight,
            earlier_epochs=earlier_epochs,
            knows_nothing=lambda: remote.directory.totals[0] == 0,
            log=log,
        )
    copies = Copies(
        cache=cache, home=home, run=run, in_use=in_use, corrupt=corrupt, settled=settled, remote=remote_copies
    )
    reconcile = Reconcile(catalog=catalog, tiers=tiers, lost=lost, clock=clock)
    scrub = Scrub(
        catalog=catalog, copies=copies, lost=lost, clock=clock, bytes_per_second=gc.scrub_bytes_per_second, log=log
    )
    expiry = Expiry(catalog=catalog, clock=clock, on_freed=collection.collector.wake, log=log)
    sweep = Sweep(
        catalog=catalog,
        tiers=(cache, home),
        reaper=collection.reaper,
        being_written=being_written,
        clock=clock,
        upload_ttl_seconds=gc.upload_ttl_seconds,
        interval_seconds=gc.sweep_interval_seconds,
        compact=compact,
        log=log,
        reconcile=reconcile,
        reconcile_interval_seconds=gc.reconcile_interval_seconds,
        history_retention_seconds=settings.events.retention_seconds,
        remote=remote_sweep,
    )
    lifecycle = Lifecycle(
        catalog=catalog,
        clock=clock,
        pace=collection.pace,
        day_seconds=settings.debug.lifecycle_day_seconds,
        on_removed=on_removed,
        log=log,
    )
    parts = GcParts(
        catalog=catalog,
        collector=collection.collector,
        reaper=collection.reaper,
        holds=collection.holds,
        expiry=expiry,
        scrub=scrub,
        reconcile=reconcile,
        lost=lost,
        lifecycle=lifecycle,
    )
    register(metrics, parts)
    return Upkeep(
        sweep=sweep,
        scrub=scrub,
        expiry=expiry,
        state_files=StateFiles(directory, {"policy": policy, "scrub": scrub, "lifecycle": lifecycle}, run=run, log=log),
        copies=copies,
        recall=Recall(catalog=catalog, clock=clock, pace=collection.pace, on_removed=on_removed, removed=removed),
        lost=lost,
        lifecycle=lifecycle,
        parts=parts,
    )
