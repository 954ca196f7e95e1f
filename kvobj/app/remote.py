"""Composes what belongs to the remote tier: the bucket, whose prefix it is, the tier over it, the manifests; and, once the other
tiers stand, the uploads and what class `shared` takes of them.

A server that is away delays nothing but what needs it: the start waits a few seconds for it at most, and whatever could not be done
then is done in the background. So it is with one that answers as no S3 does. Only a prefix that is not this store's ends the start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from kvobj.arena import Arena
from kvobj.catalog.encoding import EPOCH, META
from kvobj.catalog.encoding import REMOTE_TABLES as QUEUE_TABLES
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.remote_protocol import Outbox
from kvobj.catalog.rows import ObjectRow
from kvobj.clock import Clock
from kvobj.config.settings import RemoteSettings, Settings
from kvobj.data_directory import DataDirectory
from kvobj.database import Database, Table
from kvobj.errors import KvobjError, UnavailableError
from kvobj.manifests.compaction import Compaction, ManifestUpkeep
from kvobj.manifests.folder import FixedLineage, ManifestFolder
from kvobj.manifests.journal import JournalLag, ManifestJournal, outbox_age_seconds
from kvobj.manifests.names import ManifestName
from kvobj.manifests.signing import Signing
from kvobj.metrics import Metrics
from kvobj.store.key_wrapping import KeyWrapper
from kvobj.store.placement import ReadTier
from kvobj.store.remote_class import SharedWrites, WriteDown
from kvobj.store.remote_frames import RemoteFrames
from kvobj.store.remote_room import QueueRoom
from kvobj.store.remote_rules import RemoteRules
from kvobj.store.remote_uploads import RemoteUploads
from kvobj.tiers.coded_blobs import CodedBlobs
from kvobj.tiers.in_use import BlobsInUse
from kvobj.tiers.protocol import Tier
from kvobj.tiers.remote.bucket import RemoteBucket
from kvobj.tiers.remote.directory import REMOTE_TABLES as BLOB_TABLES
from kvobj.tiers.remote.directory import RemoteDirectory
from kvobj.tiers.remote.identity import IdentityState, IdentityWatch, StoreIdentity
from kvobj.tiers.remote.leftovers import Leftovers
from kvobj.tiers.remote.names import RemoteNames
from kvobj.tiers.remote.tier import RemoteTier
from kvobj.tiers.verified import RunOnPool

CLAIM_SECONDS: Final = 5.0
"""How long a start waits for the remote to say whose the prefix is. Nothing is written there before that is known."""
UNCLAIMED_SECONDS: Final = 1.0
"""How often the remote is asked for that until it has answered: nothing is uploaded before."""
TOLD_SECONDS: Final = 30.0
"""How long blobs that may go wait for the remote to be told so, before they are put off."""
_ARENA_SHARE: Final = 8
"""Of the arena, uploads from nvme take one part in so many at most."""
_UPLOADED_AT_ONCE_MAX_BYTES: Final = 512 * 1024 * 1024


def remote_tables(settings: Settings) -> list[Table]:
    """What a database has for the remote, where there is one."""
    return [] if settings.remote is None else [*QUEUE_TABLES, *BLOB_TABLES]


def last_epochs(database: Database) -> tuple[int, ...]:
    """The session epoch of the process before this one, which may have left something on the remote that nobody names. Before this
    process records its own."""
    with database.read() as view:
        recorded = view.get(META, EPOCH)
    return () if recorded is None else (int.from_bytes(recorded, "big"),)


class Manifests:
    """The journal of manifests, from when the store's lineage is known. Implements `remote_uploads.Journal`. Event-loop-only."""

    def __init__(
        self, make: Callable[[], tuple[ManifestJournal, ManifestUpkeep]], catalog: LmdbCatalog, clock: Clock
    ) -> None:
        self._make = make
        self._catalog = catalog
        self._clock = clock
        self._journal: ManifestJournal | None = None
        self._upkeep: ManifestUpkeep | None = None
        self._begun = asyncio.Event()

    def begin(self) -> None:
        """The prefix is this store's: tell what is to be told. Idempotent."""
        if self._journal is None:
            self._journal, self._upkeep = self._make()
            self._upkeep.start()
            self._journal.start()
            self._begun.set()

    async def settled(self, position: int, *, timeout_seconds: float) -> bool:
        """See `remote_uploads.Journal`."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._begun.wait()
                assert self._journal is not None
                return await self._journal.settled(position, timeout_seconds=timeout_seconds)
        except TimeoutError:
            return False

    async def is_told(self) -> bool:
        """See `RemoteReaping`. What a reader of the catalog has seen is in the outbox, whether or not this loop has heard of its
        commit."""
        outbox = self._catalog.outbox
        position = outbox.position
        while entries := outbox.entries(position):
            position = entries[-1].position
        return await self.settled(position, timeout_seconds=TOLD_SECONDS)

    async def flush(self, *, timeout_seconds: float) -> bool:
        """See `remote_uploads.Journal`."""
        return await self.settled(self._catalog.outbox.position, timeout_seconds=timeout_seconds)

    @property
    def lag(self) -> JournalLag:
        """See `ManifestJournal.lag`."""
        if self._journal is None:
            outbox = self._catalog.outbox
            age_seconds = outbox_age_seconds(outbox, self._clock)
            return JournalLag(outbox.pending, age_seconds, 0, "the prefix is not claimed yet")
        return self._journal.lag

    def fullness(self) -> str:
        """Why nothing more may become SHARED before the remote is told of what did; "" where it may."""
        return "the remote is not told fast enough of what was uploaded" if self._catalog.outbox.is_full else ""

    async def aclose(self) -> None:
        """Stop; what is not told stays in the outbox."""
        if self._journal is not None:
            await self._journal.aclose()
        if self._upkeep is not None:
            await self._upkeep.aclose()


@dataclass(frozen=True, slots=True)
class Remote:
    """The remote tier of a node and what goes with it."""

    settings: RemoteSettings
    bucket: RemoteBucket
    names: RemoteNames
    identity: StoreIdentity
    directory: RemoteDirectory
    tier: RemoteTier
    leftovers: Leftovers
    manifests: Manifests

    def refusal(self) -> str:
        """Why nothing may be written to the remote, "" where it may: the prefix is not this store's, or not known to be."""
        return "" if self.identity.may_write() else self.identity.reason

    def absence(self) -> str:
        """As `refusal`, or why writing is in vain: the server is known not to answer, or to refuse."""
        refusal, health = self.refusal(), self.bucket.health
        if not refusal and health.state in ("down", "refused"):
            return health.reason or health.state
        return refusal


@dataclass(frozen=True, slots=True)
class RemoteWriting:
    """What brings rows to the remote."""

    uploads: RemoteUploads
    rules: RemoteRules
    shared: SharedWrites

    def note_read(self, row: ObjectRow) -> None:
        """A client reads the object. Cheap."""
        self.uploads.pace.note_read(row.size_bytes)
        self.rules.note_reused(row)

    def start(self, stack: AsyncExitStack) -> None:
        """Begin to work in the background; ended by the stack."""
        for worker in (self.uploads, self.rules):
            worker.start()
            stack.push_async_callback(worker.aclose)


async def open_remote(
    stack: AsyncExitStack,
    settings: RemoteSettings,
    *,
    data: DataDirectory,
    database: Database,
    catalog: LmdbCatalog,
    arena: Arena,
    epoch: int,
    wrapping_key: bytes,
    signing: Signing,
    run: RunOnPool,
    clock: Clock,
    metrics: Metrics,
    log: logging.Logger,
) -> Remote:
    """Everything up to the tier; closed by the stack. `ConfigurationError` where the prefix is another store's, or what speaks to
    S3 is not installed. `epoch` is this process's, `wrapping_key` what seals users' secrets, `signing`
    signs manifests."""
    bucket = await RemoteBucket.open(settings, clock=clock, metrics=metrics, run=run, log=log)
    stack.push_async_callback(bucket.aclose)
    names = RemoteNames(settings.prefix)
    where = f"{settings.endpoint}/{settings.bucket}/{names.store}"

    async def objection(lineage: int) -> str:
        folder = ManifestFolder(
            bucket,
            prefix=settings.prefix,
            store_id=data.store_id,
            identity=FixedLineage(lineage),
            epoch=epoch,
            run=run,
        )
        return _older_than_told(await folder.names(), catalog.outbox.position, data)

    directory = RemoteDirectory(database)
    identity = StoreIdentity(
        bucket,
        names,
        claim_file=data.remote_claim_path,
        clock=clock,
        where=where,
        objection=objection,
        on_anew=directory.forget_all,
    )
    tier = RemoteTier(bucket, directory, arena=arena, names=names, may_write=identity.may_write)
    stack.push_async_callback(tier.aclose)

    def make_journal() -> tuple[ManifestJournal, ManifestUpkeep]:
        folder = ManifestFolder(
            bucket,
            prefix=settings.prefix,
            store_id=data.store_id,
            identity=identity,
            epoch=epoch,
            run=run,
            signing=signing,
        )
        sealer = KeyWrapper(wrapping_key)
        compaction = Compaction(folder, catalog.outbox, sealer)
        upkeep = ManifestUpkeep(compaction, log=log)
        journal = ManifestJournal(
            outbox=catalog.outbox,
            folder=folder,
            compaction=compaction,
            sealer=sealer,
            clock=clock,
            log=log,
            metrics=metrics,
            upkeep=upkeep,
            interval_seconds=settings.manifest_interval_seconds,
        )
        return journal, upkeep

    manifests = Manifests(make_journal, catalog, clock)
    stack.push_async_callback(manifests.aclose)

    learning: set[asyncio.Task[None]] = set()

    def on_changed(state: IdentityState) -> None:
        if state == "claimed":
            manifests.begin()
            if not learning:
                learning.add(asyncio.create_task(_learn(tier, directory, log), name="remote-census"))

    async def pause(seconds: float) -> None:
        await asyncio.sleep(seconds if identity.lineage else UNCLAIMED_SECONDS)

    watch = IdentityWatch(identity, data.store_id, log=log, on_changed=on_changed, sleep=pause)
    await _claim(identity, data.store_id, log)
    stack.push_async_callback(_end, learning)
    on_changed(identity.state)
    if learning:
        # Rows of class SHARED are judged by the directory from here on.
        await asyncio.wait(learning)
    watch.start()
    stack.push_async_callback(watch.aclose)
    leftovers = Leftovers(bucket, directory, names, still_ours=identity.check, clock=clock)
    return Remote(settings, bucket, names, identity, directory, tier, leftovers, manifests)


def _older_than_told(told: Sequence[ManifestName], position: int, data: DataDirectory) -> str:
    """Why a catalog must not go on that has published up to `position`; "" where it may. One that was put back from a copy knows
    nothing of what the remote was told since: its sweep would take the blobs of that for leftovers, and its positions would be
    given out twice."""
    last = max((name.last for name in told), default=0)
    if last <= position:
        return ""
    return (
        f"{data.path} is older than what the remote was told by it (changes up to {last}, here up to {position}): was it put back "
        "from a copy? Rebuild from the remote (kvobj-admin rebuild --remote --replace) to go on with what is there"
    )


async def _learn(tier: RemoteTier, directory: RemoteDirectory, log: logging.Logger) -> None:
    """Note what lies on the remote, where the directory knows of nothing: it is new, or a rebuild has begun it anew."""
    if directory.totals[0]:
        return
    try:
        census = await tier.census()
    except KvobjError as error:
        log.warning("what lies on the remote could not be listed, it is looked up blob by blob: %s", error)
    else:
        if census.noted:
            log.info("learnt of %d blobs on the remote tier", census.noted)


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def _claim(identity: StoreIdentity, store_id: bytes, log: logging.Logger) -> None:
    try:
        async with asyncio.timeout(CLAIM_SECONDS):
            await identity.claim(store_id)
    except (UnavailableError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        log.warning("the remote tier does not answer, the start goes on without it: %s", reason)


def make_remote_writing(
    remote: Remote,
    *,
    catalog: LmdbCatalog,
    local: Sequence[Tier],
    read: ReadTier,
    coded_blobs: CodedBlobs,
    arena_bytes: int,
    in_use: BlobsInUse,
    settle: Callable[[ObjectRow], Awaitable[ObjectRow]],
    write_down: WriteDown,
    has_sound_copy: Callable[[ObjectRow], Awaitable[bool]],
    on_queued: Callable[[], None],
    on_shared: Callable[[ObjectRow], None],
    wait_seconds: float,
    waiting_max: int,
    clock: Clock,
    metrics: Metrics,
    log: logging.Logger,
) -> RemoteWriting:
    """Uploads, buckets' rules and class `shared`. `local`, `read`: see `RemoteFrames`; `settle`, `write_down`: see `SharedWrites`;
    `has_sound_copy`, `on_queued`, `on_shared`: see `RemoteUploads`. `wait_seconds`: for room in the queue."""
    directory, settings, manifests = remote.directory, remote.settings, remote.manifests
    room = QueueRoom(catalog.remote_queue, limit_bytes=settings.queue_bytes, wait_seconds=wait_seconds)
    frames = RemoteFrames(
        remote=remote.tier,
        local=local,
        read=read,
        coded=coded_blobs.find,
        is_there=lambda blob_id: directory.find(blob_id) is not None,
    )
    uploads = RemoteUploads(
        catalog=catalog,
        frames=frames,
        journal=manifests,
        in_use=in_use,
        clock=clock,
        log=log,
        bytes_at_once=min(arena_bytes // _ARENA_SHARE, _UPLOADED_AT_ONCE_MAX_BYTES),
        refusal=lambda: remote.refusal() or manifests.fullness(),
        is_available=lambda: remote.tier.is_available,
        has_sound_copy=has_sound_copy,
        on_queued=on_queued,
        on_shorter=room.note,
        on_shared=on_shared,
    )
    _register(metrics, uploads, catalog.outbox, clock)
    shared = SharedWrites(
        catalog=catalog,
        uploads=uploads,
        room=room,
        journal=manifests,
        refusal=lambda: remote.absence() or manifests.fullness(),
        absence=remote.absence,
        settle=settle,
        write_down=write_down,
        deadline_seconds=settings.share_timeout_seconds,
        waiting_max=waiting_max,
        log=log,
    )
    return RemoteWriting(uploads, RemoteRules(catalog=catalog, room=room, clock=clock, log=log), shared)


def _register(metrics: Metrics, uploads: RemoteUploads, outbox: Outbox, clock: Clock) -> None:
    for name, text, read in (
        ("queued_objects", "objects that wait to be uploaded", lambda: uploads.backlog.objects),
        ("queued_bytes", "bytes of objects that wait to be uploaded", lambda: uploads.backlog.size_bytes),
        ("queue_oldest_seconds", "for how long the oldest waits", lambda: uploads.backlog.oldest_seconds),
        ("upload_failures", "uploads that failed and are tried again, since the start", lambda: uploads.failures),
        ("uploaded_objects", "objects uploaded since the start", lambda: uploads.uploaded_objects),
        ("uploaded_bytes", "bytes of their frames", lambda: uploads.uploaded_bytes),
    ):
        metrics.gauge_of(f"kvobj_remote_{name}", text, read)
    for name, text, read in (
        ("entries", "records that the remote is not told yet", lambda: outbox.pending),
        ("bytes", "what they take in the catalog", lambda: outbox.size_bytes),
        ("seconds", "age of the oldest of them", lambda: outbox_age_seconds(outbox, clock)),
    ):
        metrics.gauge_of(f"kvobj_manifest_lag_{name}", text, read)
