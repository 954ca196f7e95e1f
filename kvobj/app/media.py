"""What a node keeps bytes and rows in: arena, database, the two tiers that are always there, and the catalog over them, opened in
order. Each is closed by the stack that it was opened on, in the reverse."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvobj.app.arena_ending import ArenaEnding
from kvobj.app.declared import ROOT_USER_ID
from kvobj.app.placement_choice import ArenaChoice, NvmeChoice
from kvobj.app.remote import remote_tables
from kvobj.app.tier_claim import cannot_be_used
from kvobj.arena import Arena
from kvobj.catalog.encoding import CATALOG_TABLES
from kvobj.catalog.lease_protocol import LeaseLimits
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.unfinished import UnfinishedBytes
from kvobj.clock import Clock, boot_ms
from kvobj.config.settings import Settings
from kvobj.data_directory import DataDirectory
from kvobj.database import Database, ReaderWatch
from kvobj.errors import TierUnavailableError, UnavailableError
from kvobj.metrics import Family, Metrics
from kvobj.policy.choose import chunk_policy
from kvobj.policy.chunk_policy import CacheTier, ChunkPolicy
from kvobj.policy.dram_view import DramView
from kvobj.record_log import RecordLog
from kvobj.tiers.coded_blobs import CODED_BLOBS
from kvobj.tiers.dram import DRAM_BLOBS, DramTier
from kvobj.tiers.nvme import KERNEL, NVME_TABLES, NvmeTier
from kvobj.tiers.nvme.segment_file import is_out_of_room

LONGEST_LEASE_TTLS: Final = 20
"""A holder may ask for a lease of so many times `[gc] lease_ttl`, which is what it gets if it asks for none."""


@dataclass(frozen=True, slots=True)
class Media:
    """See the module's text. `ending` decides at a clean stop whether the arena goes; one `policy` ranks chunks of both tiers, and
    `dram_view` is dram's side of it."""

    arena: Arena
    ending: ArenaEnding
    record_log: RecordLog
    database: Database
    policy: ChunkPolicy
    dram_view: DramView
    dram: DramTier
    nvme: NvmeTier
    catalog: LmdbCatalog


async def open_media(
    stack: AsyncExitStack,
    settings: Settings,
    data: DataDirectory,
    arena_choice: ArenaChoice,
    nvme_choice: NvmeChoice,
    *,
    boot_id: str,
    clock: Clock,
    metrics: Metrics,
) -> Media:
    """Open all of it, adopting what an earlier process left. Typed errors where a part cannot be opened: `ConfigurationError` where
    the dram tier's directory cannot be used."""
    arena = await _open_arena(settings, data, arena_choice, boot_id=boot_id)
    ending = ArenaEnding(arena, arena_choice.volatile_path)
    stack.push_async_callback(ending.close_arena)
    record_log = RecordLog.open(data.record_log_path)
    database = Database.open(
        durable=data.catalog_path,
        volatile=arena_choice.volatile_path,
        tables=[*CATALOG_TABLES, DRAM_BLOBS, CODED_BLOBS, *NVME_TABLES, *remote_tables(settings)],
        map_bytes=settings.catalog.map_bytes,
        volatile_map_bytes=settings.catalog.volatile_map_bytes,
        record_log=record_log,
        store_id=data.store_id,
        boot_id=boot_id,
        outbox=None if settings.remote is None else clock,
    )
    stack.push_async_callback(database.aclose)
    policy = chunk_policy(
        settings.policy.kind,
        {
            CacheTier.DRAM: int(settings.dram.high_watermark * arena.capacity_bytes),
            CacheTier.NVME: int(settings.nvme.high_watermark * nvme_choice.capacity_bytes),
        },
        history=settings.policy.history,
        write_margin=settings.policy.write_margin,
    )
    dram_view = DramView(policy, now_ms=lambda: boot_ms(clock))
    dram = DramTier(arena, database, dram_view, metrics=metrics, high_watermark=settings.dram.high_watermark)
    stack.push_async_callback(dram.aclose)
    nvme = await NvmeTier.open(
        nvme_choice.directory,
        database=database,
        arena=arena,
        record_key=data.store_key,
        capacity_bytes=nvme_choice.capacity_bytes,
        segment_bytes=nvme_choice.segment_bytes,
    )
    stack.push_async_callback(nvme.aclose)
    if not nvme.lost_segments:  # else they are not here: the disk is not mounted, or this is another configuration
        data.note_nvme_path(nvme_choice.directory)
    metrics.gauge_of(
        "kvobj_nvme_kernel_transfers",
        "1 while the kernel moves nvme's short frames without a thread, 0 where threads do",
        lambda: nvme.transfers == KERNEL,
    )
    lease_ttl_ms = int(settings.gc.lease_ttl_seconds * 1000)
    catalog = await LmdbCatalog.open(
        database,
        limits=LeaseLimits(ttl_ms_max=lease_ttl_ms * LONGEST_LEASE_TTLS),
        max_events=settings.events.max_events,
        now_boot_ms=boot_ms(clock),
    )
    stack.push_async_callback(catalog.aclose)
    unfinished_max = settings.limits.unfinished_bytes_per_user
    catalog.unfinished.bound(
        nvme_choice.capacity_bytes // 4 if unfinished_max is None else unfinished_max, exempt=(ROOT_USER_ID,)
    )
    metrics.add_families(partial(_unfinished_families, catalog.unfinished))
    return Media(
        arena=arena,
        ending=ending,
        record_log=record_log,
        database=database,
        policy=policy,
        dram_view=dram_view,
        dram=dram,
        nvme=nvme,
        catalog=catalog,
    )


async def _open_arena(settings: Settings, data: DataDirectory, choice: ArenaChoice, *, boot_id: str) -> Arena:
    try:
        return await Arena.open(
            choice.directory,
            capacity_bytes=choice.capacity_bytes,
            region_bytes=choice.region_bytes,
            store_id=data.store_id,
            boot_id=boot_id,
            huge_pages=settings.dram.huge_pages,
            dedicated_buckets=frozenset(bucket.name for bucket in settings.buckets if bucket.regions == "own"),
            data_directory=data.path,
        )
    except UnavailableError as error:
        cause = error.__cause__
        # Room that is lacking, or that the file system does not give a region, is no fault of the path's.
        if isinstance(error, TierUnavailableError) or not isinstance(cause, OSError) or is_out_of_room(cause):
            raise
        raise cannot_be_used("dram", choice.directory, cause) from error


def watched_readers(database: Database, *, clock: Clock, metrics: Metrics, log: logging.Logger) -> ReaderWatch:
    """What looks after readers of the database that take long or are dead; not started."""
    readers = database.watch_readers(clock=clock, log=log)
    metrics.gauge_of(
        "kvobj_database_oldest_reader_seconds",
        "for how long the oldest reader has kept pages of the catalog from being used again",
        lambda: readers.oldest_seconds,
    )
    metrics.gauge_of(
        "kvobj_database_dead_readers",
        "readers whose process had died and whose slots were freed since the start",
        lambda: readers.dead_readers,
    )
    return readers


def _unfinished_families(unfinished: UnfinishedBytes) -> list[Family]:
    name, refused = "kvobj_unfinished_bytes", "kvobj_unfinished_refusals"
    samples = [(name, {"user": user}, float(held)) for user, held in unfinished.of_users.items()]
    return [
        Family(name, "bytes of parts of uploads in progress, and of chunks in parts, by user", "gauge", samples),
        Family(
            refused,
            "parts and uploads refused since their user's unfinished uploads held as much as they may",
            "counter",
            [(f"{refused}_total", {}, float(unfinished.refusals))],
        ),
    ]
