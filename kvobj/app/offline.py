"""`fsck` and `rebuild`: work on the data directory of a stopped store, which both lock.

`rebuild` makes both LMDB environments anew from the home tier: rows, buckets, users and small frames from the record log, the
places of large frames from the record pages in the segments. `fsck` compares catalog and tiers, reads every frame and
changes nothing. What a row of class `shared` needs may have left this node for the remote tier: that is no loss here, and is
counted (`kvobj-admin fsck --remote` looks there). What only an arena holds is not theirs to check or to bring back: after a
rebuild, chunks of class `memory` that had not been written down are gone, as they are after power loss.

Segments lie where the configuration says, and where none was given, where the last start had them. A rebuild from another place
would drop what it does not find there, and the store would then write over it, so that a place which is not this store's is
refused before anything is made or changed.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvobj.app.placement_choice import choose_arena, choose_nvme
from kvobj.app.tier_claim import CLAIM_FILE, arena_kept, cannot_be_used, claimed, owner_of
from kvobj.arena import Arena
from kvobj.arena.geometry import current_boot_id
from kvobj.catalog.encoding import CATALOG_TABLES
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.log_entries import RowRemoved
from kvobj.catalog.log_entries import decode_entry as decode_catalog_entry
from kvobj.catalog.rebuild import rebuild_catalog
from kvobj.catalog.rows import BlobRef, Durability, ObjectRow
from kvobj.codec.frame import MAX_HEAD_BYTES
from kvobj.config.settings import Settings
from kvobj.data_directory import DataDirectory
from kvobj.database import Database, remove_volatile
from kvobj.errors import ConfigurationError, FrameCorruptError, KvobjError
from kvobj.ids import BlobId
from kvobj.record_log import RecordLog
from kvobj.tiers.coded_blobs import CODED_BLOBS, CodedBlob, CodedBlobs
from kvobj.tiers.coded_frames import head_of
from kvobj.tiers.dram import DRAM_BLOBS
from kvobj.tiers.nvme import NVME_TABLES, NvmeTier
from kvobj.tiers.nvme.log_entries import BlobsRemoved, InlinePut
from kvobj.tiers.nvme.log_entries import decode_entry as decode_nvme_entry
from kvobj.tiers.nvme.rebuild import holds_records, rebuild_directory, restore_inline
from kvobj.tiers.nvme.segment_file import segment_number
from kvobj.tiers.protocol import ByteRange, Tier
from kvobj.tiers.verification import read_and_check

Report = Callable[[str, dict[str, object]], None]
OnProgress = Callable[[int, int, str], None]
Notice = Callable[[str], None]
"""Told, in a sentence, what was decided without being asked."""

CHECK_ARENA_BYTES = 320 * 1024 * 1024

_REMEDY: Final = "give the server's configuration (--config), or mount the disk"


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What was looked at and what was wrong: rows without blobs, corrupt frames, blobs without rows (harmless: swept).
    `remote_blobs` are not here, and need not be."""

    objects: int
    blobs: int
    checked_bytes: int
    missing_blobs: int
    corrupt_blobs: int
    leftover_blobs: int
    remote_blobs: int = 0

    @property
    def problems(self) -> int:
        """Findings that mean lost bytes."""
        return self.missing_blobs + self.corrupt_blobs


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What was found again. `missing_blobs` are named by rows but are in no segment: `problems`, but for the `remote_blobs`, which
    rows of class `shared` name."""

    buckets: int
    users: int
    objects: int
    blobs: int
    missing_blobs: int
    remote_blobs: int = 0

    @property
    def problems(self) -> int:
        """Findings that mean lost bytes."""
        return self.missing_blobs


def _ignore(_: str) -> None:
    """Nobody asks."""


def fsck(settings: Settings, report: Report, *, is_configured: bool = True, notice: Notice = _ignore) -> FsckReport:
    """Check a stopped store. `report(kind, finding)` is called for every finding, as it is found. Not `is_configured`: no
    configuration was given, so that segments lie where the last start had them.

    `ConfigurationError` where the configuration has them elsewhere, and that place is not this store's, or is not there.
    """
    with DataDirectory.open(settings.server.data, create=False) as data:
        directory = _nvme_directory(settings, data, is_configured=is_configured, is_lost=False, notice=notice)
        if not directory.is_dir():  # it would be made, where its disk is to be mounted
            raise ConfigurationError([f"tiers: nvme: {directory} is not there: {_REMEDY}"])
        settings = replace(settings, nvme=replace(settings.nvme, path=directory))
        with _claimed(settings, data, directory, may_write=False):
            return asyncio.run(_fsck(settings, data, report))


def rebuild(
    settings: Settings,
    progress: OnProgress,
    *,
    is_configured: bool = True,
    keep_missing: bool = False,
    notice: Notice = _ignore,
) -> RebuildReport:
    """Rebuild a stopped store's catalog and directories. `progress(done, total, step)` counts bytes or entries; `is_configured` as
    of `fsck`.

    `ConfigurationError`, and nothing is made or changed, where the configuration has segments elsewhere than the last start had
    them and that place is not this store's, and where the record log has rows whose bytes are in segments and none of this
    store's are there. `keep_missing`: the disk with the segments is lost; rows are kept without their bytes.
    """
    with DataDirectory.open(settings.server.data, create=False) as data:
        directory = _nvme_directory(settings, data, is_configured=is_configured, is_lost=keep_missing, notice=notice)
        if not keep_missing and not _has_segments(directory, data) and _needs_segments(data):
            told = (
                f"tiers: nvme: {directory}: no segments of this store are there, and its record log has objects whose bytes lie in "
                f"segments: {_REMEDY}; --keep-missing if that disk is lost: it keeps objects without their bytes"
            )
            raise ConfigurationError([told])
        settings = replace(settings, nvme=replace(settings.nvme, path=directory))
        with _claimed(settings, data, directory, may_write=True):
            return asyncio.run(_rebuild(settings, data, progress))


def _nvme_directory(
    settings: Settings, data: DataDirectory, *, is_configured: bool, is_lost: bool, notice: Notice
) -> Path:
    """Where the segments are to be looked for. `ConfigurationError` where it is another place than the last start's, and none of
    this store's; unless the last start's is lost (`is_lost`) and holds none of them."""
    configured, noted = settings.nvme.path or data.nvme_path, data.noted_nvme_path()
    if noted is None or noted.resolve() == configured.resolve():
        return configured
    if not is_configured:
        notice(f"no configuration is given: segments are read from {noted}, where the last start had them")
        return noted
    if not _is_own(configured, data) and not (is_lost and not _has_segments(noted, data)):
        told = (
            f"tiers: nvme: the configuration has the segments in {configured}, which is not marked as this store's, and the last "
            f"start had them in {noted}: give the server's configuration (--config), or move them with {CLAIM_FILE}"
        )
        raise ConfigurationError([told])
    return configured


def _is_own(directory: Path, data: DataDirectory) -> bool:
    """Whether an nvme tier's directory is this store's: by the file that says so, and where there is none, which versions before it
    did not write, by what lies in the segments."""
    owner = owner_of(directory)
    if owner:
        return owner == data.store_id.hex()
    try:
        return holds_records(directory, data.store_key)
    except OSError as error:
        raise cannot_be_used("nvme", directory, error) from error


def _has_segments(directory: Path, data: DataDirectory) -> bool:
    return any(segment_number(path) is not None for path in directory.glob("segment-*")) and _is_own(directory, data)


def _needs_segments(data: DataDirectory) -> bool:
    """Whether the record log has a row whose bytes it does not have itself: they are in a segment. What a row of class `shared`
    names may have left this node."""
    if not data.record_log_path.is_dir():
        return False
    small: set[bytes] = set()
    named: dict[tuple[str, str], list[bytes]] = {}
    for content in RecordLog.open(data.record_log_path).replay():
        match decode_catalog_entry(content):
            case ObjectRow() as row if row.durability is not Durability.SHARED:
                named[row.bucket, row.key] = [blob.blob_id for blob in _lasting(row)]
            case ObjectRow(bucket=bucket, key=key) | RowRemoved(bucket=bucket, key=key):
                named.pop((bucket, key), None)
            case _:
                pass
        match decode_nvme_entry(content):
            case InlinePut(blob_id=blob_id):
                small.add(blob_id)
            case BlobsRemoved(blob_ids=blob_ids):
                small.difference_update(blob_ids)
            case None:
                pass
    return any(not small.issuperset(blob_ids) for blob_ids in named.values())


@contextmanager
def _claimed(settings: Settings, data: DataDirectory, directory: Path, *, may_write: bool) -> Iterator[None]:
    """The nvme tier's directory and the arena's, all of this store and locked. `may_write`: whether the nvme tier's may be marked
    as this store's."""
    with (
        claimed(directory, data.store_id, data.path, may_write=may_write),
        arena_kept(choose_arena(settings.dram, data, boot_id=current_boot_id()).directory),
    ):
        yield


@asynccontextmanager
async def _check_arena(data: DataDirectory) -> AsyncIterator[Arena]:
    # Its own small arena in a temporary place: the store's own may hold what is to be adopted.
    with tempfile.TemporaryDirectory(prefix="kvobj-fsck-") as directory:
        arena = await Arena.open(
            Path(directory), capacity_bytes=CHECK_ARENA_BYTES, store_id=data.store_id, boot_id="fsck"
        )
        try:
            yield arena
        finally:
            await arena.aclose(remove=True)


async def _fsck(settings: Settings, data: DataDirectory, report: Report) -> FsckReport:
    boot_id = current_boot_id()
    choice = choose_arena(settings.dram, data, boot_id=boot_id)
    log = RecordLog.open(data.record_log_path)
    database = _open_database(settings, data, choice.volatile_path, boot_id=boot_id, rebuild=False, record_log=log)
    try:
        async with _check_arena(data) as arena:
            nvme = await _open_nvme(settings, data, database, arena)
            try:
                return await _check(await LmdbCatalog.open(database), nvme, report)
            finally:
                await nvme.aclose()
    finally:
        await database.aclose()
        if database.volatile_fresh:
            _leave_no_trace(choice.volatile_path)


async def _check(catalog: LmdbCatalog, nvme: Tier, report: Report) -> FsckReport:
    held = {blob_id async for blob_id in nvme.scan()}
    leftovers = set(held)
    objects = blobs = checked_bytes = missing = corrupt = remote = 0
    in_memory = {row.blobs[0].blob_id async for row in catalog.scan_objects(volatile_only=True)}
    async for row in catalog.scan_objects():
        objects += 1
        for blob in _lasting(row):
            blobs += 1
            blob_id = BlobId(blob.blob_id)
            if row.blobs[0].blob_id in in_memory:
                continue  # adopted by the next start, not yet in the home tier
            finding: dict[str, object] = {"bucket": row.bucket, "key": row.key, "blob_id": blob_id.hex()}
            if blob_id not in held and row.durability is Durability.SHARED:
                remote += 1
                continue
            if blob_id not in held:
                missing += 1
                report("missing-blob", finding)
                continue
            problem = await _problem(nvme, blob)
            checked_bytes += blob.plain_bytes
            if problem is not None:
                corrupt += 1
                report("corrupt-blob", {**finding, "problem": problem})
    async for raw_id in catalog.scan_named_blobs():
        leftovers.discard(BlobId(raw_id))
    for blob_id in sorted(leftovers):
        report("leftover-blob", {"blob_id": blob_id.hex()})
    return FsckReport(
        objects=objects,
        blobs=blobs,
        checked_bytes=checked_bytes,
        missing_blobs=missing,
        corrupt_blobs=corrupt,
        leftover_blobs=len(leftovers),
        remote_blobs=remote,
    )


async def _problem(tier: Tier, blob: BlobRef) -> str | None:
    try:
        return await read_and_check(tier, BlobId(blob.blob_id), plain_bytes=blob.plain_bytes, digest=blob.digest)
    except KvobjError as error:
        return str(error)


async def _rebuild(settings: Settings, data: DataDirectory, progress: OnProgress) -> RebuildReport:
    boot_id = current_boot_id()
    choice = choose_arena(settings.dram, data, boot_id=boot_id)
    record_log = RecordLog.open(data.record_log_path)
    database = _open_database(settings, data, choice.volatile_path, boot_id=boot_id, rebuild=True, record_log=None)
    try:
        progress(0, 2, "rows")
        await rebuild_catalog(record_log, database)
        progress(1, 2, "small frames")
        removed = await restore_inline(database, record_log.replay())
        directory = choose_nvme(settings.nvme, data).directory
        async for _ in rebuild_directory(
            directory,
            database=database,
            record_key=data.store_key,
            removed=removed,
            on_progress=lambda done, total: progress(done, total, "segments"),
        ):
            pass
        await database.finish_rebuild(record_log)
        async with _check_arena(data) as arena:
            nvme = await _open_nvme(settings, data, database, arena)
            try:
                return await _count(await LmdbCatalog.open(database), nvme, CodedBlobs(database))
            finally:
                await nvme.aclose()
    finally:
        await database.aclose()
        if database.volatile_fresh:
            _leave_no_trace(choice.volatile_path)
        record_log.close()


def _lasting(row: ObjectRow) -> list[BlobRef]:
    """The blobs that the home tier has to hold: of a chunk with a lossy copy that copy."""
    copy = row.lossy
    if copy is None:
        return list(row.blobs)
    return [BlobRef(copy.blob_id, copy.plain_bytes, copy.frame_bytes, copy.digest, copy.codec)]


async def _note_codecs(row: ObjectRow, lasting: list[BlobRef], nvme: NvmeTier, coded: CodedBlobs) -> None:
    """Learn which blobs lie in another codec than their rows say: their frames have another length."""
    for blob in lasting:
        blob_id = BlobId(blob.blob_id)
        frame_bytes = nvme.frame_bytes(blob_id)
        if frame_bytes is None or (frame_bytes == blob.frame_bytes and row.lossy is None):
            continue
        frame = await nvme.get(blob_id, ByteRange(0, min(frame_bytes, MAX_HEAD_BYTES)))
        if frame is None:
            continue
        try:
            await frame.complete()
            head = head_of(frame.view, frame_bytes)
        except FrameCorruptError:
            continue  # the first read finds it
        finally:
            frame.release()
        if head.codec != blob.codec or row.lossy is not None:
            await coded.note(blob_id, CodedBlob(head.codec, head.plain_bytes, frame_bytes))


async def _count(catalog: LmdbCatalog, nvme: NvmeTier, coded: CodedBlobs) -> RebuildReport:
    objects = blobs = missing = remote = 0
    async for row in catalog.scan_objects():
        objects += 1
        lasting = _lasting(row)
        blobs += len(lasting)
        absent = len(await nvme.missing([BlobId(blob.blob_id) for blob in lasting]))
        if row.durability is Durability.SHARED:
            remote += absent
        else:
            missing += absent
        await _note_codecs(row, lasting, nvme, coded)
    return RebuildReport(
        buckets=len(await catalog.buckets()),
        users=len(await catalog.users()),
        objects=objects,
        blobs=blobs,
        missing_blobs=missing,
        remote_blobs=remote,
    )


def _open_database(
    settings: Settings,
    data: DataDirectory,
    volatile: Path,
    *,
    boot_id: str,
    rebuild: bool,
    record_log: RecordLog | None,
) -> Database:
    try:
        # It lies in the arena's directory, of which nobody knows yet whether it can be used; a rebuild begins with the durable one.
        volatile.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_be_used("dram", volatile.parent, error) from error
    try:
        return Database.open(
            durable=data.catalog_path,
            volatile=volatile,
            tables=[*CATALOG_TABLES, DRAM_BLOBS, CODED_BLOBS, *NVME_TABLES],
            map_bytes=settings.catalog.map_bytes,
            volatile_map_bytes=settings.catalog.volatile_map_bytes,
            record_log=record_log,
            store_id=data.store_id,
            boot_id=boot_id,
            rebuild=rebuild,
        )
    except BaseException:
        with suppress(OSError):  # it is left if it holds anything
            volatile.rmdir()
        raise


def _leave_no_trace(volatile: Path) -> None:
    """Remove the volatile environment that this check made, also in the place of a stale one: it is the next start that has to find
    that what was in memory is lost. A store that left its arena keeps that."""
    remove_volatile(volatile)
    with suppress(OSError):
        volatile.parent.rmdir()


async def _open_nvme(settings: Settings, data: DataDirectory, database: Database, arena: Arena) -> NvmeTier:
    choice = choose_nvme(settings.nvme, data)
    return await NvmeTier.open(
        choice.directory,
        database=database,
        arena=arena,
        record_key=data.store_key,
        capacity_bytes=choice.capacity_bytes,
        segment_bytes=choice.segment_bytes,
    )
