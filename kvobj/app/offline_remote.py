"""`rebuild --remote`: a store made again on another machine from what lies on its remote tier, and nothing else.

The old node is fenced first: this one becomes the store's next lineage (`kvobj.tiers.remote.identity`). Then users, buckets,
namespaces and rows come from the manifests, the places of the blobs from listing them; rows whose blobs are not there are left out,
with their descendants. A snapshot of the new lineage ends it. Until then the data directory is marked, and another run begins anew.

Root's credentials and the store key, which never leave a node, are new on an empty disk: users' secrets and namespaces' keys open
only where `[security] wrapping_key_env` gives the key that they were sealed under.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvobj.app.kv_api import wrapping_key_of
from kvobj.app.offline_opening import Report, on_pool, open_bucket, open_database
from kvobj.app.placement_choice import choose_nvme
from kvobj.app.tier_claim import claimed
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.log_entries import LogEntry, NamespaceRemoved, UserRemoved
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rebuild import rebuild_from_entries
from kvobj.catalog.rows import ObjectRow, UserRow
from kvobj.clock import SystemClock
from kvobj.config.settings import RemoteSettings, Settings
from kvobj.data_directory import DataDirectory
from kvobj.errors import ConfigurationError, CorruptionError, UnavailableError, UntrustedError
from kvobj.ids import BlobId, new_epoch
from kvobj.manifests.compaction import Compaction
from kvobj.manifests.folder import FixedLineage, ManifestFolder
from kvobj.manifests.names import ManifestName
from kvobj.manifests.reading import StoredState, find_state, read_state
from kvobj.manifests.sealing import SealedUser, opened_content
from kvobj.manifests.signing import Signing, reading_under
from kvobj.record_log import RecordLog
from kvobj.store.key_wrapping import KeyWrapper
from kvobj.store.remote_frames import lasting_blobs
from kvobj.tiers.remote.bucket import RemoteBucket
from kvobj.tiers.remote.directory import RemoteDirectory, RemotePlace
from kvobj.tiers.remote.identity import StoreIdentity, StoreRecord
from kvobj.tiers.remote.names import RemoteNames

OnProgress = Callable[[int, int, str], None]

_PAGE: Final = 1000
_TRIES: Final = 32
_LOG: Final = logging.getLogger("kvobj.rebuild")


@dataclass(frozen=True, slots=True)
class RemoteRebuildReport:
    """What was found again. `missing_objects`: rows whose blobs are not on the remote; `orphans`: chunks without an ancestor; both
    are left out, unless they were to be kept. `closed_users` and `closed_namespaces` need another wrapping key than was given,
    and are left out; chunks of the latter are there. `left_out_manifests`: journals that are damaged, or not the store's;
    `missing_spans`: of changes that none of the others tells of."""

    store_id: str
    lineage: int
    buckets: int
    namespaces: int
    users: int
    objects: int
    blobs: int
    seconds: float
    missing_objects: int
    orphans: int
    closed_users: int
    closed_namespaces: int
    unreadable_snapshots: int
    left_out_manifests: int
    missing_spans: int
    made_credentials: bool

    @property
    def problems(self) -> int:
        """What was lost, cannot be used, or is not the store's."""
        unusable = self.closed_users + self.closed_namespaces
        return self.missing_objects + self.orphans + unusable + self.left_out_manifests + self.missing_spans


@dataclass(slots=True)
class _Counts:
    missing: int = 0
    closed_users: set[str] = field(default_factory=set)
    closed_namespaces: set[tuple[str, str]] = field(default_factory=set)


def rebuild_remote(
    settings: Settings,
    progress: OnProgress,
    report: Report,
    *,
    replace: bool = False,
    keep_missing: bool = False,
    without_secrets: bool = False,
    accept_unsigned: bool = False,
    accept_gaps: bool = False,
) -> RemoteRebuildReport:
    """Do it. `progress(done, total, step)` counts records, blobs and objects; `report(kind, finding)` is called for each loss.

    `ConfigurationError`: no remote tier is configured, no store lies there, the data directory is one already and not `replace`,
    users and namespaces were sealed under another wrapping key and not `without_secrets` (a later rebuild would lack them), or the
    manifests are not signed under the wrapping key that is given and not `accept_unsigned`. `CorruptionError`: no snapshot can be
    used, or journals are damaged or missing and not `accept_gaps`.
    """
    if settings.remote is None:
        raise ConfigurationError(["the configuration names no remote tier to rebuild from"])
    path = settings.server.data
    was_there = (path / "FORMAT").is_file()
    # Nothing stays that was written under the store key, so that any will do, also where the store's own was lost.
    with (
        DataDirectory.open(path, takes_any_key=True) as data,
        tempfile.TemporaryDirectory(prefix="kvobj-rebuild-") as volatile,
    ):
        if was_there and not replace and not data.rebuild_mark_path.is_file():
            raise ConfigurationError([f"{path}: is a data directory already; --replace makes it anew from the remote"])
        whole = _Rebuild(
            settings,
            settings.remote,
            data,
            progress,
            report,
            volatile=Path(volatile),
            keep_missing=keep_missing,
            without_secrets=without_secrets,
            accept_unsigned=accept_unsigned,
            accept_gaps=accept_gaps,
        )
        return asyncio.run(whole.run())


class _Rebuild:
    """One rebuild, step by step."""

    def __init__(
        self,
        settings: Settings,
        remote: RemoteSettings,
        data: DataDirectory,
        progress: OnProgress,
        report: Report,
        *,
        volatile: Path,
        keep_missing: bool,
        without_secrets: bool,
        accept_unsigned: bool,
        accept_gaps: bool,
    ) -> None:
        # Its own place: another data directory of this very store may still be in use on this machine.
        self._volatile = volatile
        self._settings = settings
        self._remote = remote
        self._data = data
        self._progress = progress
        self._report = report
        self._keep_missing = keep_missing
        self._without_secrets = without_secrets
        self._accept_gaps = accept_gaps
        key = settings.security.wrapping_key
        self._reading = Signing.under(key, accepts_any=True) if accept_unsigned else reading_under(key)
        self._clock = SystemClock()
        self._names = RemoteNames(remote.prefix)
        self._counts = _Counts()
        self._left_out = 0
        self._wrapper = KeyWrapper(wrapping_key_of(settings, data.store_key))

    async def run(self) -> RemoteRebuildReport:
        began = self._clock.monotonic()
        with ThreadPoolExecutor(4, "rebuild") as executor:
            async with open_bucket(self._remote, executor) as bucket:
                identity = self._identity(bucket)
                record = await identity.read()
                if record is None:
                    raise ConfigurationError([f"{self._where}: no store lies there"])
                folder = self._folder(bucket, executor, record.store_id, FixedLineage(record.lineage))
                # There is something to rebuild from, before anybody is fenced and anything is removed.
                await self._find_state(folder, record)
                await asyncio.to_thread(self._clear, record.store_id)
                lineage = await identity.take_over(record.store_id)
                state = await self._make_catalog(folder, record, bucket)
                fresh = self._folder(bucket, executor, record.store_id, FixedLineage(lineage), epoch=new_epoch())
                return await self._finish(fresh, record, state, began)

    def _clear(self, store_id: bytes) -> None:
        data, mark = self._data, self._data.rebuild_mark_path
        segments = choose_nvme(self._settings.nvme, data).directory
        with claimed(segments, store_id, data.path, also=(data.store_id,)):  # before anything goes
            if not mark.exists() or data.store_id != store_id:
                # A rebuild that did not finish goes on in the lineage that it took; any other takes the next one.
                data.remote_claim_path.unlink(missing_ok=True)
            mark.touch(mode=0o600)
            for directory in (data.catalog_path, data.record_log_path):
                shutil.rmtree(directory, ignore_errors=True)
            for segment in segments.glob("segment-*"):
                segment.unlink()
            data.adopt(store_id)

    @property
    def _where(self) -> str:
        return f"{self._remote.endpoint}/{self._remote.bucket}/{self._names.store}"

    def _identity(self, bucket: RemoteBucket) -> StoreIdentity:
        claim_file = self._data.remote_claim_path
        return StoreIdentity(bucket, self._names, claim_file=claim_file, clock=self._clock, where=self._where)

    def _folder(
        self,
        bucket: RemoteBucket,
        executor: ThreadPoolExecutor,
        store_id: bytes,
        lineage: FixedLineage,
        *,
        epoch: int = 0,
    ) -> ManifestFolder:
        return ManifestFolder(
            bucket,
            prefix=self._remote.prefix,
            store_id=store_id,
            identity=lineage,
            epoch=epoch,
            run=on_pool(executor),
            signing=Signing.under(self._settings.security.wrapping_key) if epoch else self._reading,
        )

    # -- the catalog -----------------------------------------------------------------------------------------------

    async def _make_catalog(self, folder: ManifestFolder, record: StoreRecord, bucket: RemoteBucket) -> StoredState:
        """Rows from the manifests and places from the listing, side by side. Where a snapshot turns out to be damaged, all over
        again from an older one; where a journal does, or is not the store's, without it; where the old node tidied up once more
        before it was fenced, from what there is now."""
        broken: set[ManifestName] = set()
        for _ in range(_TRIES):
            state = await self._find_state(folder, record, broken)
            try:
                await self._fill(folder, state, bucket)
            except CorruptionError as error:
                if await self._find_state(folder, record, broken) == state:
                    broken.add(self._culprit(state, error))
                continue
            for after, last in state.gaps:
                self._report("missing-changes", {"after": after, "last": last})
            return state
        raise UnavailableError("the manifests do not keep still: is another node writing them?")

    async def _find_state(
        self, folder: ManifestFolder, record: StoreRecord, broken: Collection[ManifestName] = ()
    ) -> StoredState:
        try:
            return await find_state(folder, newest=record.lineage, without=broken, may_lack_journals=self._accept_gaps)
        except UntrustedError as error:
            told = (
                f"{error}. The wrapping key is another than the store's, or an older version wrote these manifests, which did not "
                "sign, or somebody else: give the key, or take them as they are (--accept-unsigned)"
            )
            raise ConfigurationError([told]) from error
        except CorruptionError as error:
            if self._accept_gaps:
                raise
            told = f"{error.message}; --accept-gaps goes on without journals that are damaged or missing"
            raise CorruptionError(told, **error.data) from error

    def _culprit(self, state: StoredState, error: CorruptionError) -> ManifestName:
        """What to go on without: the journal that the error names, else the snapshot."""
        name = ManifestName.parse(str(error.data.get("name", "")))
        if name is None or name not in state.journals:
            self._report("unreadable-snapshot", {"name": state.snapshot.name.key, "problem": str(error)})
            return state.snapshot.name
        self._left_out += 1
        kind = "untrusted-manifest" if isinstance(error, UntrustedError) else "unreadable-manifest"
        self._report(kind, {"name": name.key, "problem": str(error)})
        return name

    async def _fill(self, folder: ManifestFolder, state: StoredState, bucket: RemoteBucket) -> None:
        self._counts = _Counts()
        record_log = RecordLog.open(self._data.record_log_path)
        database = open_database(
            self._settings,
            self._data,
            record_log=None,
            volatile=self._volatile,
            rebuild=True,
        )
        try:
            async with aclosing(self._entries(folder, state)) as entries, asyncio.TaskGroup() as group:
                listing = group.create_task(self._note_places(bucket, RemoteDirectory(database)))
                await rebuild_from_entries(entries, database, next_position=state.position + 1)
                await listing
            await database.finish_rebuild(record_log, log_is_whole=False)
        except BaseExceptionGroup as group_error:
            raise _first_error(group_error) from group_error
        finally:
            await database.aclose()
            record_log.close()

    async def _entries(self, folder: ManifestFolder, state: StoredState) -> AsyncGenerator[LogEntry, None]:
        done, total = 0, state.entries_max
        async with aclosing(read_state(folder, state)) as batches:
            async for batch in batches:
                for _, content in batch:
                    entry = self._opened(content)
                    if entry is not None:
                        yield entry
                done += len(batch)
                self._progress(done, max(total, done), "records")

    def _opened(self, content: bytes) -> LogEntry | None:
        """The entry, None for what cannot be used without the key that it was sealed under."""
        entry = opened_content(content, self._wrapper)
        users, namespaces = self._counts.closed_users, self._counts.closed_namespaces
        match entry:
            case SealedUser():
                users.add(entry.id)
                return None
            case UserRow() | UserRemoved():
                users.discard(entry.id)
            case NamespaceRow():
                namespaces.discard((entry.bucket, entry.name))
                try:
                    self._wrapper.unwrap(entry.wrapped_key, bucket=entry.bucket, namespace=entry.name)
                except CorruptionError:
                    namespaces.add((entry.bucket, entry.name))
                    return None
            case NamespaceRemoved():
                namespaces.discard((entry.bucket, entry.name))
            case _:
                pass
        return entry

    async def _note_places(self, bucket: RemoteBucket, directory: RemoteDirectory) -> None:
        places: dict[BlobId, RemotePlace] = {}
        async for listed in bucket.list(self._names.blobs):
            found = self._names.parse(listed.key)
            if found is not None:
                places[found.blob_id] = RemotePlace(listed.size_bytes, found.name)
            if len(places) == _PAGE:
                await directory.note_many(places)
                places = {}
        await directory.note_many(places)

    # -- what is not there -----------------------------------------------------------------------------------------

    async def _finish(
        self, folder: ManifestFolder, record: StoreRecord, state: StoredState, began: float
    ) -> RemoteRebuildReport:
        data = self._data
        database = open_database(
            self._settings, data, record_log=RecordLog.open(data.record_log_path), volatile=self._volatile
        )
        try:
            catalog = await LmdbCatalog.open(database)
            try:
                found, blobs = await self._check_rows(catalog, RemoteDirectory(database))
                if not self._keep_missing:
                    await catalog.drop_orphans(now_ms=self._clock.now_ms())
                self._judge_secrets()
                users = await catalog.users()
                buckets = await catalog.buckets()
                namespaces = [await _namespaces_of(catalog, bucket.name) for bucket in buckets]
                objects = sum([(await catalog.bucket_usage(bucket.name)).objects for bucket in buckets])
                self._progress(0, 1, "snapshot")
                await Compaction(folder, catalog.outbox, self._wrapper).take_snapshot()
                await catalog.outbox.discard(catalog.outbox.position)
            finally:
                await catalog.aclose()
        finally:
            await database.aclose()
        made = self._settings.root_credentials is None and not data.credentials_path.exists()
        data.root_credentials(self._settings.root_credentials)
        data.rebuild_mark_path.unlink()
        return RemoteRebuildReport(
            store_id=record.store_id.hex(),
            lineage=folder.lineage,
            buckets=len(buckets),
            namespaces=sum(len(each) for each in namespaces),
            users=len(users),
            objects=objects,
            blobs=blobs,
            seconds=round(self._clock.monotonic() - began, 3),
            missing_objects=self._counts.missing,
            orphans=0 if self._keep_missing else found - self._counts.missing - objects,
            closed_users=len(self._counts.closed_users),
            closed_namespaces=len(self._counts.closed_namespaces),
            unreadable_snapshots=len(state.passed_over),
            left_out_manifests=self._left_out,
            missing_spans=len(state.gaps),
            made_credentials=made,
        )

    def _judge_secrets(self) -> None:
        # Those of the configuration get their secrets from it at the next start.
        self._counts.closed_users -= {user.id for user in self._settings.users}
        users, namespaces = sorted(self._counts.closed_users), sorted(self._counts.closed_namespaces)
        for user_id in users:
            self._report("closed-user", {"user": user_id})
        for bucket, name in namespaces:
            self._report("closed-namespace", {"bucket": bucket, "namespace": name})
        if (users or namespaces) and not self._without_secrets:
            told = (
                f"{len(users)} users and {len(namespaces)} namespaces do not open: give the wrapping key that they were sealed "
                "under ([security] wrapping_key_env), or go on for good without them (--without-secrets)"
            )
            raise ConfigurationError([told])

    async def _check_rows(self, catalog: LmdbCatalog, directory: RemoteDirectory) -> tuple[int, int]:
        """Objects and blobs that the rows name; rows with a blob that is not there are dropped."""
        objects = blobs = 0
        page: list[ObjectRow] = []
        lost: list[ObjectRow] = []
        async for row in catalog.scan_objects():
            page.append(row)
            if len(page) == _PAGE:
                lost += self._lost(page, directory)
                objects, blobs, page = objects + len(page), blobs + sum(len(lasting_blobs(each)) for each in page), []
                self._progress(objects, objects, "objects")
        lost += self._lost(page, directory)
        objects, blobs = objects + len(page), blobs + sum(len(lasting_blobs(each)) for each in page)
        self._progress(objects, objects, "objects")
        self._counts.missing = len(lost)
        if not self._keep_missing:
            for start in range(0, len(lost), _PAGE):
                await catalog.drop_rows(lost[start : start + _PAGE], now_ms=self._clock.now_ms())
        return objects, blobs

    def _lost(self, rows: Sequence[ObjectRow], directory: RemoteDirectory) -> list[ObjectRow]:
        wanted = [BlobId(blob.blob_id) for row in rows for blob in lasting_blobs(row)]
        there = directory.find_many(wanted)
        lost = [row for row in rows if any(BlobId(blob.blob_id) not in there for blob in lasting_blobs(row))]
        for row in lost:
            self._report("missing-blob", {"bucket": row.bucket, "key": row.key})
        return lost


async def _namespaces_of(catalog: LmdbCatalog, bucket: str) -> list[NamespaceRow]:
    rows: list[NamespaceRow] = []
    while page := await catalog.namespaces.page(bucket, after=rows[-1].name if rows else ""):
        rows += page
    return rows


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What ended a group of tasks: there is one cause, the others were cancelled."""
    first = group.exceptions[0]
    return _first_error(first) if isinstance(first, BaseExceptionGroup) else first
