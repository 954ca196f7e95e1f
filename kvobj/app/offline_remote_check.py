"""`fsck --remote`: a stopped store's catalog against what lies on its remote tier. Changes nothing.

Blobs are compared by listing them, and with `read` by downloading and checking each; the manifests by reading them as a rebuild
would: what they say, with what waits in the outbox, has to be what the catalog says. Takes ~300 bytes of memory an object.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from blake3 import blake3

from kvobj.app.kv_api import wrapping_key_of
from kvobj.app.offline_opening import Report, on_pool, open_bucket, open_database
from kvobj.arena import Arena
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.log_entries import LogEntry, RowRemoved, encode_entry
from kvobj.catalog.remote_protocol import Outbox
from kvobj.catalog.rows import BlobRef, Durability, ObjectRow, ObjectState
from kvobj.clock import SystemClock
from kvobj.config.settings import RemoteSettings, Settings
from kvobj.data_directory import DataDirectory
from kvobj.database import Database
from kvobj.errors import ConfigurationError, CorruptionError, KvobjError, NotFoundError
from kvobj.ids import BlobId
from kvobj.manifests.folder import FixedLineage, ManifestFolder
from kvobj.manifests.reading import find_state, read_state
from kvobj.manifests.sealing import SealedUser, Sealer, opened_content
from kvobj.manifests.signing import reading_under
from kvobj.record_log import RecordLog
from kvobj.store.key_wrapping import KeyWrapper
from kvobj.store.remote_frames import lasting_blobs
from kvobj.tiers.remote.bucket import RemoteBucket
from kvobj.tiers.remote.directory import RemoteDirectory, RemotePlace
from kvobj.tiers.remote.identity import StoreIdentity
from kvobj.tiers.remote.names import RemoteNames, coded_by
from kvobj.tiers.remote.tier import RemoteTier
from kvobj.tiers.verification import read_and_check

_ARENA_BYTES: Final = 512 * 1024 * 1024
_READ_AT_ONCE: Final = 8
_READ_AT_ONCE_BYTES: Final = 256 * 1024 * 1024


@dataclass(slots=True)
class RemoteFsckReport:
    """What was looked at and what was wrong. `objects`, `blobs`: those of class `shared`; `remote_blobs`: those that lie there.

    Loss: blobs that rows name and that are missing, of another size, or corrupt; rows that a rebuild would lack (`untold_rows`),
    or would bring back though they are gone (`stale_rows`); manifests that cannot be read. Harmless: blobs that nothing names,
    which a sweep removes, and objects under the prefix that are not ours.
    """

    objects: int = 0
    blobs: int = 0
    remote_blobs: int = 0
    checked_bytes: int = 0
    missing_blobs: int = 0
    different_sizes: int = 0
    corrupt_blobs: int = 0
    untold_rows: int = 0
    stale_rows: int = 0
    unreadable_manifests: int = 0
    leftover_blobs: int = 0
    foreign_objects: int = 0

    @property
    def problems(self) -> int:
        """Findings that mean lost bytes, or a rebuild that would lose or bring back some."""
        blobs = self.missing_blobs + self.different_sizes + self.corrupt_blobs
        return blobs + self.untold_rows + self.stale_rows + self.unreadable_manifests


def fsck_remote(settings: Settings, report: Report, *, read: bool) -> RemoteFsckReport:
    """Check a stopped store against its remote. `report(kind, finding)` is called for every finding, as it is found.

    `ConfigurationError` where no remote is configured or another store lies there; `TierUnavailableError` where it does not answer.
    """
    if settings.remote is None:
        raise ConfigurationError(["the configuration names no remote tier to compare with"])
    with (
        DataDirectory.open(settings.server.data, create=False) as data,
        tempfile.TemporaryDirectory(prefix="kvobj-fsck-") as directory,
    ):
        return asyncio.run(_Check(settings, settings.remote, data, report, Path(directory)).run(read=read))


@dataclass(slots=True)
class _Check:
    settings: Settings
    remote: RemoteSettings
    data: DataDirectory
    report: Report
    directory: Path
    found: RemoteFsckReport = field(default_factory=RemoteFsckReport)

    async def run(self, *, read: bool) -> RemoteFsckReport:
        names = RemoteNames(self.remote.prefix)
        log = RecordLog.open(self.data.record_log_path)
        database = open_database(self.settings, self.data, record_log=log, volatile=self.directory / "volatile")
        try:
            catalog = await LmdbCatalog.open(database)
            try:
                with ThreadPoolExecutor(4, "fsck") as executor:
                    async with open_bucket(self.remote, executor) as bucket:
                        lineage = await self._lineage(bucket, names)
                        folder = ManifestFolder(
                            bucket,
                            prefix=self.remote.prefix,
                            store_id=self.data.store_id,
                            identity=FixedLineage(lineage),
                            epoch=0,
                            run=on_pool(executor),
                            signing=reading_under(self.settings.security.wrapping_key),
                        )
                        await self._check_manifests(catalog, folder)
                        listed = await self._listed(bucket, names)
                        if read:
                            async with self._tier(bucket, database, names) as tier:
                                await self._check_rows(catalog, listed, tier)
                        else:
                            await self._check_rows(catalog, listed, None)
                        await self._find_leftovers(catalog, listed)
            finally:
                await catalog.aclose()
        finally:
            await database.aclose()
        return self.found

    async def _lineage(self, bucket: RemoteBucket, names: RemoteNames) -> int:
        claim = self.data.remote_claim_path
        record = await StoreIdentity(bucket, names, claim_file=claim, clock=SystemClock()).read()
        if record is None or record.store_id != self.data.store_id:
            whose = "no store" if record is None else f"another store ({record.store_id.hex()})"
            raise ConfigurationError([f"{self.remote.endpoint}/{self.remote.bucket}/{names.store}: {whose} lies there"])
        return record.lineage

    async def _listed(self, bucket: RemoteBucket, names: RemoteNames) -> dict[BlobId, RemotePlace]:
        listed: dict[BlobId, RemotePlace] = {}
        async for each in bucket.list(names.blobs):
            name = names.parse(each.key)
            if name is None:
                self.found.foreign_objects += 1
                self.report("foreign-object", {"key": each.key})
                continue
            listed[name.blob_id] = RemotePlace(each.size_bytes, name.name)
        self.found.remote_blobs = len(listed)
        return listed

    # -- blobs -----------------------------------------------------------------------------------------------------

    async def _check_rows(
        self, catalog: LmdbCatalog, listed: dict[BlobId, RemotePlace], tier: RemoteTier | None
    ) -> None:
        waiting: list[tuple[ObjectRow, BlobRef]] = []
        size = 0
        async for row in catalog.scan_objects():
            if row.durability is not Durability.SHARED:
                continue
            self.found.objects += 1
            for blob in lasting_blobs(row):
                self.found.blobs += 1
                if self._is_there(row, blob, listed) and tier is not None:
                    waiting.append((row, blob))
                    size += blob.frame_bytes
                    if len(waiting) == _READ_AT_ONCE or size >= _READ_AT_ONCE_BYTES:
                        await self._read(tier, waiting)
                        waiting, size = [], 0
        if tier is not None:
            await self._read(tier, waiting)

    def _is_there(self, row: ObjectRow, blob: BlobRef, listed: dict[BlobId, RemotePlace]) -> bool:
        finding: dict[str, object] = {"bucket": row.bucket, "key": row.key, "blob_id": blob.blob_id.hex()}
        place = listed.get(BlobId(blob.blob_id))
        if place is None:
            self.found.missing_blobs += 1
            self.report("missing-blob", finding)
            return False
        # What lies there in another codec has another length, which its frame alone knows.
        if coded_by(place.name) is None and place.frame_bytes != blob.frame_bytes:
            self.found.different_sizes += 1
            self.report(
                "different-size", {**finding, "frame_bytes": blob.frame_bytes, "remote_bytes": place.frame_bytes}
            )
            return False
        return True

    async def _read(self, tier: RemoteTier, blobs: Sequence[tuple[ObjectRow, BlobRef]]) -> None:
        problems = await asyncio.gather(*(_problem(tier, blob) for _, blob in blobs))
        for (row, blob), problem in zip(blobs, problems, strict=True):
            self.found.checked_bytes += blob.plain_bytes
            if problem is not None:
                self.found.corrupt_blobs += 1
                self.report(
                    "corrupt-blob",
                    {"bucket": row.bucket, "key": row.key, "blob_id": blob.blob_id.hex(), "problem": problem},
                )

    @asynccontextmanager
    async def _tier(self, bucket: RemoteBucket, database: Database, names: RemoteNames) -> AsyncIterator[RemoteTier]:
        arena = await Arena.open(
            self.directory / "arena", capacity_bytes=_ARENA_BYTES, store_id=self.data.store_id, boot_id="fsck"
        )
        tier = RemoteTier(bucket, RemoteDirectory(database), arena=arena, names=names, may_write=lambda: False)
        try:
            yield tier
        finally:
            await tier.aclose()
            await arena.aclose(remove=True)

    async def _find_leftovers(self, catalog: LmdbCatalog, listed: dict[BlobId, RemotePlace]) -> None:
        async for raw_id in catalog.scan_named_blobs():
            listed.pop(BlobId(raw_id), None)
        self.found.leftover_blobs = len(listed)
        for blob_id, place in listed.items():
            self.report("leftover-blob", {"blob_id": blob_id.hex(), "name": place.name})

    # -- manifests -------------------------------------------------------------------------------------------------

    async def _check_manifests(self, catalog: LmdbCatalog, folder: ManifestFolder) -> None:
        """Whether a rebuild would make the rows of class `shared` that there are, and no others."""
        told: dict[bytes, bytes] = {}
        try:
            await _gather(folder, KeyWrapper(wrapping_key_of(self.settings, self.data.store_key)), told)
        except (CorruptionError, NotFoundError) as error:
            self.found.unreadable_manifests += 1
            self.report("unreadable-manifest", {"problem": str(error)})
            return
        _add_waiting(catalog.outbox, KeyWrapper(wrapping_key_of(self.settings, self.data.store_key)), told)
        async for row in catalog.scan_objects():
            if row.durability is Durability.SHARED and told.pop(_subject(row.bucket, row.key), b"") != _digest(row):
                self.found.untold_rows += 1
                self.report("untold-row", {"bucket": row.bucket, "key": row.key})
        self.found.stale_rows = len(told)
        if told:
            self.report("stale-rows", {"count": len(told)})


async def _problem(tier: RemoteTier, blob: BlobRef) -> str | None:
    try:
        return await read_and_check(tier, BlobId(blob.blob_id), plain_bytes=blob.plain_bytes, digest=blob.digest)
    except KvobjError as error:
        return str(error)


async def _gather(folder: ManifestFolder, sealer: Sealer, told: dict[bytes, bytes]) -> None:
    state = await find_state(folder, newest=folder.lineage)
    async with aclosing(read_state(folder, state)) as batches:
        async for batch in batches:
            for _, content in batch:
                _apply(opened_content(content, sealer), told)


def _add_waiting(outbox: Outbox, sealer: Sealer, told: dict[bytes, bytes]) -> None:
    """What the remote has not been told yet, and will be at the next start."""
    after = 0
    while page := outbox.entries(after):
        for entry in page:
            _apply(opened_content(entry.content, sealer), told)
        after = page[-1].position


def _apply(entry: LogEntry | SealedUser, told: dict[bytes, bytes]) -> None:
    if isinstance(entry, ObjectRow) and entry.state is ObjectState.LIVE:
        told[_subject(entry.bucket, entry.key)] = _digest(entry)
    elif isinstance(entry, ObjectRow | RowRemoved):
        told.pop(_subject(entry.bucket, entry.key), None)


def _subject(bucket: str, key: str) -> bytes:
    return blake3(f"{bucket}\0{key}".encode()).digest(16)


def _digest(row: ObjectRow) -> bytes:
    return blake3(encode_entry(row)).digest(16)
