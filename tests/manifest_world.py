"""Manifests without a server: a bucket in a dict whose writes can fail, lose their answer or wait, and folders over it.

The tests that speak to real servers are beside those that use this.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from hashlib import md5
from pathlib import Path

import msgspec
from fakes import ManualClock

from kvobj.catalog.encoding import CATALOG_TABLES, REMOTE_TABLES
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.log_entries import BucketRemoved, GoneBuckets, LogEntry, RowRemoved, UserRemoved
from kvobj.catalog.rows import BlobRef, BucketKind, BucketRow, CommitMode, Durability, ObjectRow, UserRow
from kvobj.database import Database
from kvobj.errors import TierUnavailableError
from kvobj.ids import make_blob_id
from kvobj.manifests.folder import ManifestFolder
from kvobj.manifests.reading import find_state, read_state
from kvobj.manifests.sealing import SealedUser, opened_content
from kvobj.manifests.signing import UNSIGNED, Signing
from kvobj.record_log import RecordLog
from kvobj.store.key_wrapping import KeyWrapper

STORE = bytes(range(16))
EPOCH = 5
WRAPPER = KeyWrapper(b"w" * 32)


def run_inline(work: object, /, *arguments: object) -> asyncio.Future[object]:
    """A pool that is not one."""
    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    assert callable(work)
    future.set_result(work(*arguments))
    return future


@dataclass(frozen=True, slots=True)
class Listed:
    key: str
    size_bytes: int


@dataclass
class DictBucket:
    """`SmallObjects` over a dict. `fail_puts`: how many of the next writes fail; `lose_answers`: how many happen and fail all the
    same; `gate`: writes wait for it. `puts` counts those that were begun."""

    objects: dict[str, bytes] = field(default_factory=dict)
    fail_puts: int = 0
    lose_answers: int = 0
    fail_deletes: int = 0
    gate: asyncio.Event | None = None
    puts: int = 0
    gets: int = 0

    async def put_small(
        self, key: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str | None:
        assert not if_absent
        assert if_match is None
        self.puts += 1
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        if self.fail_puts:
            self.fail_puts -= 1
            raise TierUnavailableError("the remote is away")
        self.objects[key] = body
        if self.lose_answers:
            self.lose_answers -= 1
            raise TierUnavailableError("the answer was lost")
        return md5(body, usedforsecurity=False).hexdigest()

    async def get_small(self, key: str, *, max_bytes: int) -> tuple[bytes, str] | None:
        self.gets += 1
        await asyncio.sleep(0)
        body = self.objects.get(key)
        return None if body is None else (body[:max_bytes], "etag")

    async def delete(self, keys: Sequence[str]) -> None:
        await asyncio.sleep(0)
        if self.fail_deletes:
            self.fail_deletes -= 1
            raise TierUnavailableError("the remote is away")
        for key in keys:
            self.objects.pop(key, None)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[Listed]:
        await asyncio.sleep(0)
        for key in sorted(self.objects):
            if key.startswith(prefix) and key > after:
                yield Listed(key, len(self.objects[key]))


@dataclass
class SetLineage:
    """An identity whose fence is set by hand, or (`taken_over`) found at the next look."""

    lineage: int = 1
    is_fenced: bool = False
    taken_over: bool = False
    looks: int = 0

    async def check(self) -> bool:
        self.looks += 1
        self.is_fenced = self.is_fenced or self.taken_over
        return not self.is_fenced


def folder_of(
    bucket: DictBucket,
    *,
    lineage: int | SetLineage = 1,
    epoch: int = 7,
    prefix: str = "store/",
    signing: Signing = UNSIGNED,
) -> ManifestFolder:
    identity = SetLineage(lineage) if isinstance(lineage, int) else lineage
    return ManifestFolder(
        bucket,
        prefix=prefix,
        store_id=STORE,
        identity=identity,
        epoch=epoch,
        run=run_inline,  # type: ignore[arg-type]
        signing=signing,
    )


class OutboxCatalog:
    """A real catalog that keeps an outbox, in a directory, opened as often as a test likes."""

    def __init__(self, directory: Path, clock: ManualClock) -> None:
        self._directory = directory
        self._clock = clock

    async def __aenter__(self) -> LmdbCatalog:
        self._database = Database.open(
            durable=self._directory / "durable",
            volatile=self._directory / "volatile",
            tables=[*CATALOG_TABLES, *REMOTE_TABLES],
            map_bytes=1 << 28,
            volatile_map_bytes=1 << 26,
            record_log=RecordLog.open(self._directory / "log", rotate_bytes=64 * 1024),
            sync=False,
            boot_id="boot",
            outbox=self._clock,
        )
        self._catalog = await LmdbCatalog.open(self._database)
        await self._catalog.open_epoch(EPOCH)
        return self._catalog

    async def __aexit__(self, *_: object) -> None:
        await self._catalog.aclose()
        await self._database.aclose()


def bucket_row(name: str, kind: BucketKind = BucketKind.ORDINARY) -> BucketRow:
    return BucketRow(name, kind, "ann", 1_700_000_000_000, Durability.LOCAL)


async def put_shared(
    catalog: LmdbCatalog, bucket: str, key: str, blob: int, *, mode: CommitMode = CommitMode.REPLACE
) -> ObjectRow:
    """An object that is on the remote, as far as the catalog knows."""
    row = ObjectRow(
        bucket, key, (BlobRef(make_blob_id(EPOCH, blob), 10, 300, bytes(32)),), 10, f"etag-{blob}", 1_700_000_000_000 + blob, "ann",
        Durability.LOCAL, metadata={"number": str(blob)}, digest=bytes(32),
    )  # fmt: skip
    outcome = await catalog.commit(row, mode=mode, now_ms=1)
    (raised,) = await catalog.raise_durability([msgspec.structs.replace(outcome.row, durability=Durability.SHARED)])
    assert raised
    return msgspec.structs.replace(outcome.row, durability=Durability.SHARED)


async def told(bucket: DictBucket, *, newest: int = 1) -> dict[tuple[str, ...], LogEntry | SealedUser]:
    """What the manifests say there is, by subject: the records applied in the order in which they are read."""
    return await told_by(folder_of(bucket, epoch=0), newest=newest)


async def told_by(folder: ManifestFolder, *, newest: int = 1) -> dict[tuple[str, ...], LogEntry | SealedUser]:
    """See `told`."""
    state = await find_state(folder, newest=newest)
    found: dict[tuple[str, ...], LogEntry | SealedUser] = {}
    async for batch in read_state(folder, state):
        for _, content in batch:
            entry = opened_content(content, WRAPPER)
            match entry:
                case ObjectRow():
                    found["object", entry.bucket, entry.key] = entry
                case RowRemoved():
                    found.pop(("object", entry.bucket, entry.key), None)
                case BucketRow():
                    found["bucket", entry.name] = entry
                case BucketRemoved():
                    found.pop(("bucket", entry.name), None)
                case GoneBuckets():
                    found["gone buckets",] = entry
                case UserRow() | SealedUser():
                    found["user", entry.id] = entry
                case UserRemoved():
                    found.pop(("user", entry.id), None)
                case _:
                    raise AssertionError(entry)
    return found


async def shared_rows(catalog: LmdbCatalog) -> dict[tuple[str, ...], ObjectRow]:
    """What the manifests have to say of objects."""
    return {
        ("object", row.bucket, row.key): row
        async for row in catalog.scan_objects()
        if row.durability is Durability.SHARED
    }


def objects_of(found: dict[tuple[str, ...], LogEntry | SealedUser]) -> dict[tuple[str, ...], object]:
    return {subject: entry for subject, entry in found.items() if subject[0] == "object"}
