"""One node: everything from the arena to the store, opened in order and closed in the reverse of it.

Order of a start: arena and database (adopting what an earlier process left), tiers, a session epoch, recovery of class
`memory`, the store. A clean stop writes down what is only in memory and then removes the arena; whatever else ends the
process leaves it for the next start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple

from kvobj.app.arena_ending import decide
from kvobj.app.collection import Upkeep, make_collection, make_upkeep
from kvobj.app.declared import declare
from kvobj.app.hbm import check_hbm
from kvobj.app.kv_api import KvApi, check_wrapping_key, make_kv_api, register_events, wrapping_key_of
from kvobj.app.media import open_media, watched_readers
from kvobj.app.placement_choice import ArenaChoice, NvmeChoice, choose_arena, choose_nvme
from kvobj.app.remote import (
    Remote,
    RemoteWriting,
    last_epochs,
    make_remote_writing,
    open_remote,
)
from kvobj.app.room_notes import lost_segment_notes
from kvobj.app.store_hooks import StoreHooks
from kvobj.app.tier_claim import arena_kept, claimed
from kvobj.app.tiering import make_tiering
from kvobj.arena import Arena
from kvobj.arena.geometry import current_boot_id
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.rows import ObjectRow
from kvobj.clock import Clock
from kvobj.config.settings import Settings
from kvobj.data_directory import DataDirectory
from kvobj.database import Database, ReaderWatch
from kvobj.errors import KvobjError
from kvobj.gc.collector import Collector
from kvobj.gc.reaper import Reaper
from kvobj.ids import BlobIdAllocator, epoch_of, new_epoch
from kvobj.manifests.signing import Signing
from kvobj.metrics import Metrics
from kvobj.native import status as native_status
from kvobj.policy.chunk_policy import ChunkPolicy
from kvobj.record_log import RecordLog
from kvobj.store.arriving import ArrivingKeys
from kvobj.store.commit import CommitStep
from kvobj.store.host_reads import HostReads
from kvobj.store.lossy_namespaces import LossyNamespaces
from kvobj.store.placement import Placement
from kvobj.store.prepared import PreparedRooms
from kvobj.store.profile_shelf import ProfileShelf
from kvobj.store.recovery import Recovery, RecoveryReport
from kvobj.store.sealing import Sealing
from kvobj.store.split import BlobSplit
from kvobj.store.store import Store
from kvobj.store.transcoding import Transcoder
from kvobj.store.transcoding_dram import DramTranscoding
from kvobj.store.transcoding_home import HomeTranscoding
from kvobj.store.transcoding_ladder import HomeDemotion
from kvobj.store.transcoding_rules import CodingRules
from kvobj.store.write_behind import WriteBehind
from kvobj.tiers.cascade import Cascade
from kvobj.tiers.coded_blobs import CodedBlobs
from kvobj.tiers.corrupt_blobs import CorruptBlobs
from kvobj.tiers.dram import DramTier
from kvobj.tiers.hbm import HbmTier
from kvobj.tiers.in_use import BlobsInUse
from kvobj.tiers.instruments import HotHits, TierInstruments
from kvobj.tiers.nvme import NvmeTier
from kvobj.tiers.nvme.rebuild import live_inline_entries
from kvobj.tiers.protocol import Tier
from kvobj.tiers.verified import RunOnPool

HASH_THREADS: Final = 2
PREPARED_SHARE: Final = 16
"""Of the arena one byte in so many may be room for what writers on the same host store next."""
LONGEST_LEASE_TTLS: Final = 20
"""A holder may ask for a lease of so many times `[gc] lease_ttl`, which is what it gets if it asks for none."""
UNHASHED_SHARE: Final = 3
UNHASHED_BYTES_MIN: Final = 256 * 1024 * 1024
UNHASHED_BYTES_MAX: Final = 4 * 1024 * 1024 * 1024
"""Of dram one byte in so many may be acknowledged and not hashed yet, within these bounds: a burst of large stores is as long as
the memory that it goes to, and a start after a crash hashes no more than this (ADR 4)."""

T = TypeVar("T")
A = TypeVarTuple("A")


@dataclass(frozen=True, slots=True)
class Node:
    """The parts of a running store that the servers and the admin view need."""

    settings: Settings
    data: DataDirectory
    arena: Arena
    database: Database
    readers: ReaderWatch
    record_log: RecordLog
    catalog: LmdbCatalog
    hbm: HbmTier | None
    remote: Remote | None
    writing: RemoteWriting | None
    dram: DramTier
    nvme: NvmeTier
    nvme_directory: Path
    read_tier: Cascade
    instruments: TierInstruments
    checked_tiers: tuple[Tier, ...]
    coded_blobs: CodedBlobs
    coding_rules: CodingRules
    profiles: ProfileShelf
    dram_transcoding: DramTranscoding
    home_demotion: HomeDemotion
    lossy: LossyNamespaces
    transcoder: Transcoder
    store: Store
    prepared: PreparedRooms
    sealing: Sealing
    host_reads: HostReads
    write_behind: WriteBehind
    reaper: Reaper
    policy: ChunkPolicy
    collector: Collector
    upkeep: Upkeep
    on_asked: Callable[[ObjectRow], None]
    kv: KvApi
    in_use: BlobsInUse
    corrupt: CorruptBlobs
    hash_executor: ThreadPoolExecutor
    recovery: RecoveryReport
    notes: tuple[str, ...]

    def on_pool(self, work: Callable[[*A], T], *arguments: *A) -> asyncio.Future[T]:
        """Run blocking work on the hash pool."""
        return asyncio.get_running_loop().run_in_executor(self.hash_executor, work, *arguments)


@asynccontextmanager
async def open_node(
    settings: Settings, data: DataDirectory, *, clock: Clock, metrics: Metrics, log: logging.Logger
) -> AsyncIterator[Node]:
    """Open everything, yield it, and stop cleanly. Raises typed errors where a part cannot be opened."""
    data.require_whole()
    await check_hbm(settings.hbm)
    boot_id = current_boot_id()
    arena_choice = choose_arena(settings.dram, data, boot_id=boot_id)
    nvme_choice = choose_nvme(settings.nvme, data)
    async with AsyncExitStack() as stack:
        is_new = not data.catalog_path.exists() and not data.record_log_path.exists()
        stack.enter_context(claimed(nvme_choice.directory, data.store_id, data.path, is_new=is_new))
        stack.enter_context(arena_kept(arena_choice.directory))
        node = await _compose(
            stack, settings, data, arena_choice, nvme_choice, boot_id=boot_id, clock=clock, metrics=metrics, log=log
        )
        yield node


async def _compose(  # noqa: PLR0915 - the composition root is one list of parts, in order
    stack: AsyncExitStack,
    settings: Settings,
    data: DataDirectory,
    arena_choice: ArenaChoice,
    nvme_choice: NvmeChoice,
    *,
    boot_id: str,
    clock: Clock,
    metrics: Metrics,
    log: logging.Logger,
) -> Node:
    hash_executor = ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="hash")
    stack.callback(hash_executor.shutdown)
    media = await open_media(
        stack, settings, data, arena_choice, nvme_choice, boot_id=boot_id, clock=clock, metrics=metrics
    )
    arena, database, catalog, dram, nvme = media.arena, media.database, media.catalog, media.dram, media.nvme
    instruments = TierInstruments(metrics)
    run = _on_pool(hash_executor)
    coded_blobs = CodedBlobs(database)
    await coded_blobs.settle(nvme)
    epoch, earlier_epochs = new_epoch(), last_epochs(database)
    blob_ids = BlobIdAllocator(epoch)
    remote: Remote | None = None
    if settings.remote is not None:
        remote = await open_remote(
            stack,
            settings.remote,
            data=data,
            database=database,
            catalog=catalog,
            arena=arena,
            epoch=epoch,
            wrapping_key=wrapping_key_of(settings, data.store_key),
            signing=Signing.under(settings.security.wrapping_key),
            run=run,
            clock=clock,
            metrics=metrics,
            log=log,
        )

    corrupt = CorruptBlobs()

    async def read_object(row: ObjectRow) -> bytes | None:
        return await _whole(store, row)

    tiering = await make_tiering(
        stack,
        settings,
        arena=arena,
        dram=dram,
        nvme=nvme,
        coded_blobs=coded_blobs,
        corrupt=corrupt,
        catalog=catalog,
        read_object=read_object,
        run=run,
        instruments=instruments,
        clock=clock,
        metrics=metrics,
        log=log,
        remote=None if remote is None else remote.tier,
    )
    read_tier, cache, home = tiering.read, tiering.cache, tiering.home
    rules, profiles, transcoder = tiering.rules, tiering.profiles, tiering.transcoder
    in_use = BlobsInUse()
    placement = Placement(
        cache=cache,
        home=home,
        early=nvme,
        coded=HomeTranscoding(home=home, transcoder=transcoder, rules=rules, allocate=blob_ids.allocate, log=log),
        read=read_tier,
        dirty_bytes_max=arena.capacity_bytes // 2,
        wait_seconds=settings.limits.reserve_timeout_seconds,
    )

    async def upload_now(rows: Sequence[ObjectRow]) -> Sequence[ObjectRow]:
        return () if writing is None else await writing.uploads.upload_now(rows)

    async def is_told() -> bool:
        return remote is None or await remote.manifests.is_told()

    collection = make_collection(
        settings,
        catalog=catalog,
        home=nvme if remote is None else home,
        home_capacity_bytes=nvme_choice.capacity_bytes,
        tiers=read_tier,
        policy=media.policy,
        in_use=in_use,
        clock=clock,
        on_freed=placement.note_room,
        refused=lambda: write_behind.refused(),  # noqa: PLW0108 - it is made below
        name_blob=media.dram_view.note,
        is_cached=media.dram_view.__contains__,
        stored_bytes=partial(_stored_bytes, coded_blobs),
        local=tiering.local,
        remote=tiering.remote,
        upload_now=upload_now,
        is_told=is_told,
        log=log,
    )
    collector, reaper = collection.collector, collection.reaper
    catalog.on_queued = reaper.kick
    dram_transcoding = DramTranscoding(
        memory=dram, arena=arena, transcoder=transcoder, rules=rules, catalog=catalog, clock=clock, log=log
    )

    lossy = LossyNamespaces()
    home_demotion = HomeDemotion(
        catalog=catalog,
        home=home,
        read=read_tier,
        transcoder=transcoder,
        rules=rules,
        in_use=in_use,
        allocate=blob_ids.allocate,
        on_queued=reaper.kick,
        clock=clock,
        log=log,
        lossy=lossy,
    )

    hooks = StoreHooks(
        collector=collector,
        reaper=reaper,
        dram=dram,
        dram_transcoding=dram_transcoding,
        home_demotion=home_demotion,
        hbm_codings=None if tiering.hbm is None else tiering.hbm_codings,
        hits=HotHits(instruments),
    )
    write_behind = WriteBehind(
        catalog=catalog,
        placement=placement,
        clock=clock,
        make_room=collector.make_room,
        on_written=hooks.written,
        on_refused=dram_transcoding.note,
        on_judged=collector.judged,
        admits=collector.admits,
        remove=collector.remove_now,
        on_queued=reaper.kick,
        log=log,
    )
    arriving = ArrivingKeys()
    host_reads = HostReads()
    sealing = Sealing(
        catalog=catalog,
        placement=placement,
        write_behind=write_behind,
        arriving=arriving,
        host_reads=host_reads,
        clock=clock,
        hash_executor=hash_executor,
        unhashed_bytes_max=min(UNHASHED_BYTES_MAX, max(UNHASHED_BYTES_MIN, arena.capacity_bytes // UNHASHED_SHARE)),
        log=log,
    )
    settled = partial(sealing.settled, wait=True)
    await catalog.open_epoch(epoch)

    async def has_sound_copy(row: ObjectRow) -> bool:
        return (await upkeep.copies.check(row)).problem is None

    writing: RemoteWriting | None = None
    if remote is not None:
        writing = make_remote_writing(
            remote,
            catalog=catalog,
            local=tiering.local,
            read=read_tier,
            coded_blobs=coded_blobs,
            arena_bytes=arena.capacity_bytes,
            in_use=in_use,
            settle=settled,
            write_down=write_behind.write_down_now,
            has_sound_copy=has_sound_copy,
            on_queued=reaper.kick,
            on_shared=lambda row: collector.shared([row]),
            wait_seconds=settings.limits.reserve_timeout_seconds,
            waiting_max=max(1, settings.limits.concurrent_requests // 2),
            clock=clock,
            metrics=metrics,
            log=log,
        )
        catalog.on_settings_changed = writing.rules.look
        hooks.note_read_remotely = writing.note_read
    shared = None if writing is None else writing.shared
    commit_step = CommitStep(
        arena=arena,
        catalog=catalog,
        placement=placement,
        write_behind=write_behind,
        sealing=sealing,
        arriving=arriving,
        clock=clock,
        hash_executor=hash_executor,
        make_room=collector.make_room,
        on_written=hooks.written,
        reserve_timeout_seconds=settings.limits.reserve_timeout_seconds,
        shared=shared,
    )

    split = BlobSplit.for_tiers(
        arena_bytes=arena.capacity_bytes,
        region_bytes=arena_choice.region_bytes,
        segment_bytes=nvme_choice.segment_bytes,
    )
    prepared = PreparedRooms(
        arena=arena,
        catalog=catalog,
        placement=placement,
        sealing=sealing,
        arriving=arriving,
        blob_ids=blob_ids,
        split=split,
        clock=clock,
        bytes_max=arena.capacity_bytes // PREPARED_SHARE,
        on_asked=hooks.asked,
    )
    store = Store(
        catalog=catalog,
        placement=placement,
        commit_step=commit_step,
        arriving=arriving,
        blob_ids=blob_ids,
        clock=clock,
        hash_executor=hash_executor,
        split=split,
        in_use=in_use,
        on_read=hooks.read,
        on_asked=hooks.asked,
        on_removed=hooks.removed,
        corrupt=corrupt,
        hot_frame=hooks.hot_frame,
        hot_bytes=hooks.hot_bytes,
        on_hot_read=hooks.hot_read,
        named_profiles=profiles.named,
        shared=shared,
    )

    kv = make_kv_api(
        settings,
        catalog=catalog,
        store=store,
        store_key=data.store_key,
        policy=collector,
        dram=dram,
        coded_blobs=coded_blobs,
        lossy=lossy,
        in_use=in_use,
        arena_bytes=arena.capacity_bytes,
        executor=hash_executor,
        hold=hooks.asked,
        on_removed=hooks.removed,
        clock=clock,
        pace=collection.pace,
        on_namespace_changed=hooks.namespace_changed,
        check_profile=profiles.check,
    )
    await check_wrapping_key(kv.book, catalog)
    register_events(metrics, catalog.history)
    metrics.gauge_of("kvobj_upload_followers", "readers that follow an upload now", lambda: store.following.followers)

    async def compact() -> None:
        if catalog.log_needs_compaction():
            await catalog.compact_log([live_inline_entries])

    upkeep = make_upkeep(
        settings,
        collection,
        catalog=catalog,
        cache=cache,
        home=home,
        tiers=read_tier,
        policy=media.policy,
        in_use=in_use,
        corrupt=corrupt,
        settled=settled,
        being_written=lambda blob_id: epoch_of(blob_id) == epoch,
        on_removed=hooks.removed,
        compact=compact,
        run=run,
        directory=data.path,
        clock=clock,
        metrics=metrics,
        log=log,
        remote=tiering.remote,
        leftovers=None if remote is None else remote.leftovers,
        earlier_epochs=earlier_epochs,
        is_uncommitted=None if writing is None else writing.uploads.is_uncommitted,
        removed=store.removed,
    )
    await upkeep.state_files.load()
    recovery = await Recovery(
        catalog=catalog,
        cache=cache,
        home=nvme if tiering.remote is None else tiering.remote.layered,
        write_behind=write_behind,
        hash_executor=hash_executor,
        clock=clock,
        memory_is_lost=database.volatile_fresh,
    ).run()
    declared_notes = await declare(settings, data, catalog, clock)
    if settings.remote is not None:
        catalog.outbox.bound(settings.remote.outbox_bytes)  # what is declared is declared
    node = Node(
        settings=settings,
        data=data,
        arena=arena,
        database=database,
        readers=watched_readers(database, clock=clock, metrics=metrics, log=log),
        record_log=media.record_log,
        catalog=catalog,
        hbm=tiering.hbm,
        remote=remote,
        writing=writing,
        dram=dram,
        nvme=nvme,
        nvme_directory=nvme_choice.directory,
        read_tier=read_tier,
        instruments=instruments,
        checked_tiers=tiering.checked,
        coded_blobs=coded_blobs,
        coding_rules=rules,
        profiles=profiles,
        dram_transcoding=dram_transcoding,
        home_demotion=home_demotion,
        lossy=lossy,
        transcoder=transcoder,
        store=store,
        prepared=prepared,
        sealing=sealing,
        host_reads=host_reads,
        write_behind=write_behind,
        reaper=reaper,
        policy=media.policy,
        collector=collector,
        upkeep=upkeep,
        on_asked=hooks.asked,
        kv=kv,
        in_use=in_use,
        corrupt=corrupt,
        hash_executor=hash_executor,
        recovery=recovery,
        notes=(
            *arena_choice.notes,
            *lost_segment_notes(nvme_choice.directory, nvme.lost_segments),
            *_native_notes(),
            *_wrapping_notes(settings),
            *declared_notes,
        ),
    )
    stack.push_async_callback(partial(decide, media.ending, dram=dram, catalog=catalog, log=log))
    _start_workers(stack, node)
    return node


def _native_notes() -> tuple[str, ...]:
    native = native_status()
    return () if native.is_loaded else (f"policy and chain sums run in Python: native code is {native.detail}",)


def _wrapping_notes(settings: Settings) -> tuple[str, ...]:
    if settings.remote is None or settings.security.wrapping_key is not None:
        return ()
    told = (
        "without [security] wrapping_key_env a rebuild from the remote tier, this node lost, lacks users and namespaces' keys, and "
        "believes whatever lies there"
    )
    return (told,)


def _stored_bytes(coded: CodedBlobs, row: ObjectRow) -> int:
    """What a chunk takes in the home tier."""
    if row.lossy is not None:
        return row.lossy.frame_bytes
    found = coded.find(row.blobs[0].blob_id) if len(row.blobs) == 1 else None
    return row.size_bytes if found is None else found.stored_bytes


async def _whole(store: Store, row: ObjectRow) -> bytes | None:
    """An object's bytes in memory of their own; None where they are lost."""
    reader = await store.open(row, 0, row.size_bytes)
    if reader is None:
        return None
    try:
        data = bytearray()
        async for view in reader.views():
            data += view
        return bytes(data)
    finally:
        await reader.aclose()


def _start_workers(stack: AsyncExitStack, node: Node) -> None:
    upkeep = node.upkeep
    stack.push_async_callback(node.catalog.leases.stopped_cleanly)
    for worker in (
        node.write_behind, node.dram_transcoding, node.home_demotion, node.reaper, node.collector, upkeep.expiry,
        upkeep.state_files, node.readers,
    ):  # fmt: skip
        worker.start()
        stack.push_async_callback(worker.aclose)
    if node.writing is not None:
        node.writing.start(stack)
    for later in (upkeep.sweep, upkeep.scrub, upkeep.lifecycle):
        stack.push_async_callback(later.aclose)
    stack.push_async_callback(upkeep.recall.cancel)
    stack.push_async_callback(node.kv.feed.aclose)


@asynccontextmanager
async def housekeeping(node: Node) -> AsyncIterator[None]:
    """What a start does once requests are being answered: populate the arena, learn what is at home, sweep,
    scrub, expire.

    Before that it would take seconds from the first answer where there are many objects.
    """
    node.upkeep.sweep.start()
    node.upkeep.scrub.start()
    node.upkeep.lifecycle.start()
    node.home_demotion.look()
    background = [
        asyncio.create_task(node.arena.populate(), name="populate"),
        asyncio.create_task(node.collector.load(), name="load-home-chunks"),
        asyncio.create_task(node.dram_transcoding.load(), name="load-plain-chunks"),
    ]
    try:
        yield
    finally:
        for task in background:
            task.cancel()
        await asyncio.wait(background)
        for task in background:
            if not task.cancelled():
                with suppress(KvobjError):
                    task.result()


async def flush(node: Node, *, timeout_seconds: float) -> bool:
    """Write down everything that is only in memory; False if the deadline came first."""
    await node.sealing.drain()
    return await node.write_behind.flush(timeout_seconds=timeout_seconds)


def _on_pool(executor: ThreadPoolExecutor) -> RunOnPool:
    def run(work: Callable[[*A], T], /, *arguments: *A) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(executor, work, *arguments)

    return run
