"""A store for tests of the S3 layer: rows in dicts, bytes in dicts, the same rules as the real one, no tiers and no disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from kvobj.api.message import ByteSource
from kvobj.catalog.rows import (
    BlobRef,
    BucketKind,
    BucketRow,
    Checksum,
    DeleteOutcome,
    Durability,
    ListPage,
    ObjectRow,
    PartRow,
    UploadPage,
    UploadRow,
    UserRow,
    WriteCondition,
)
from kvobj.catalog.setting_rows import BucketUpdate, ObjectUpdate, changes_of
from kvobj.codec.checksums import Digester
from kvobj.errors import (
    BucketExistsError,
    BucketNotEmptyError,
    ImmutableChunkError,
    IncompleteBodyError,
    InvalidRequestError,
    NoSuchBucketError,
    NoSuchKeyError,
    NoSuchUploadError,
    PreconditionFailedError,
    StoreFullError,
    TooManyUploadsError,
)
from kvobj.ids import BlobIdAllocator
from kvobj.store.commit import kv_etag
from kvobj.store.ingest import WholeSource
from kvobj.store.multipart import CompletedPart, choose_parts, multipart_etag, part_infos
from kvobj.store.places import ChunkPlace
from kvobj.store.reader import HotRead
from kvobj.store.representation import Accepted, choose
from kvobj.store.requests import PutRequest, PutResult

CAPACITY_BYTES = 256 * 2**20
"""Room for an object is made where it is begun, all of it."""


def _page_keys(keys: Sequence[str], key_prefix: str, delimiter: str, after: str) -> list[tuple[str, bool]]:
    """(name, is common prefix) in key order, after `after`."""
    found: list[tuple[str, bool]] = []
    for key in keys:
        if not key.startswith(key_prefix):
            continue
        end = key.find(delimiter, len(key_prefix)) if delimiter else -1
        name, is_common = (key[: end + len(delimiter)], True) if end >= 0 else (key, False)
        if name.encode() <= after.encode() or (is_common and key.encode() <= after.encode() and name == after):
            continue
        if not found or found[-1][0] != name:
            found.append((name, is_common))
    return found


class FakeCatalog:
    """The verbs of `Catalog` that the S3 layer uses."""

    def __init__(self) -> None:
        self.bucket_rows: dict[str, BucketRow] = {}
        self.objects: dict[tuple[str, str], ObjectRow] = {}
        self.uploads: dict[tuple[str, str, str], UploadRow] = {}
        self.part_rows: dict[str, dict[int, PartRow]] = {}
        self.user_rows: dict[str, UserRow] = {}
        self.sequence = 0

    async def users(self) -> tuple[UserRow, ...]:
        return tuple(self.user_rows[name] for name in sorted(self.user_rows))

    async def put_user(self, user: UserRow) -> None:
        self.user_rows[user.id] = user

    async def remove_user(self, user_id: str) -> None:
        del self.user_rows[user_id]

    async def create_bucket(self, bucket: BucketRow) -> None:
        if bucket.name in self.bucket_rows:
            raise BucketExistsError("the bucket exists", existing=self.bucket_rows[bucket.name])
        self.bucket_rows[bucket.name] = bucket

    async def bucket(self, name: str) -> BucketRow | None:
        return self.bucket_rows.get(name)

    async def buckets(self) -> tuple[BucketRow, ...]:
        return tuple(self.bucket_rows[name] for name in sorted(self.bucket_rows))

    async def delete_bucket(self, name: str, *, made_ms: int | None = None) -> None:
        self.require(name, made_ms)
        if any(bucket == name for bucket, _ in self.objects):
            raise BucketNotEmptyError("the bucket is not empty", bucket=name)
        self.uploads = {place: row for place, row in self.uploads.items() if row.bucket != name}
        del self.bucket_rows[name]

    async def update_bucket(self, name: str, update: BucketUpdate, *, made_ms: int | None = None) -> BucketRow:
        self.require(name, made_ms)
        row = self.bucket_rows[name] = msgspec.structs.replace(self.bucket_rows[name], **changes_of(update))
        return row

    async def update_object(
        self, bucket: str, key: str, update: ObjectUpdate, *, sequence: int | None = None
    ) -> ObjectRow | None:
        self.require(bucket)
        live = self.objects.get((bucket, key))
        if live is not None and sequence not in (None, live.sequence):
            return None
        if live is not None:
            live = self.objects[bucket, key] = msgspec.structs.replace(live, **changes_of(update))
        return live

    def require(self, name: str, made_ms: int | None = None) -> None:
        if name not in self.bucket_rows or made_ms not in (None, self.bucket_rows[name].created_ms):
            raise NoSuchBucketError("no such bucket", bucket=name)

    async def lookup(self, bucket: str, keys: Sequence[str]) -> list[ObjectRow | None]:
        return [self.objects.get((bucket, key)) for key in keys]

    def commit(self, row: ObjectRow, *, kind: BucketKind, condition: WriteCondition | None) -> tuple[ObjectRow, bool]:
        live = self.objects.get((row.bucket, row.key))
        if condition is not None:
            check_condition(live, condition, key=row.key)
        if live is not None and kind is BucketKind.KV and not _replaces(condition):
            if live.size_bytes != row.size_bytes:
                raise ImmutableChunkError("another size", key=row.key)
            return live, True
        self.sequence += 1
        row = msgspec.structs.replace(row, sequence=self.sequence)
        self.objects[row.bucket, row.key] = row
        return row, False

    async def list_objects(
        self, bucket: str, *, key_prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> ListPage:
        self.require(bucket)
        keys = sorted((key for name, key in self.objects if name == bucket), key=str.encode)
        names = _page_keys(keys, key_prefix, delimiter, after)
        page = names[:limit]
        return ListPage(
            rows=tuple(self.objects[bucket, name] for name, is_common in page if not is_common),
            common_prefixes=tuple(name for name, is_common in page if is_common),
            next_after=page[-1][0] if len(names) > len(page) else None,
        )

    async def create_upload(self, upload: UploadRow, *, made_ms: int | None = None, limit: int | None = None) -> None:
        self.require(upload.bucket)
        if limit is not None and sum(bucket == upload.bucket for bucket, _, _ in self.uploads) >= limit:
            raise TooManyUploadsError("too many uploads", limit=limit)
        if made_ms not in (None, self.bucket_rows[upload.bucket].created_ms):
            raise NoSuchBucketError("no such bucket", bucket=upload.bucket)
        self.uploads[upload.bucket, upload.key, upload.upload_id] = upload
        self.part_rows[upload.upload_id] = {}

    async def upload(self, bucket: str, key: str, upload_id: str) -> UploadRow | None:
        return self.uploads.get((bucket, key, upload_id))

    async def parts(self, bucket: str, key: str, upload_id: str) -> tuple[PartRow, ...]:
        if (bucket, key, upload_id) not in self.uploads:
            raise NoSuchUploadError("no such upload", upload_id=upload_id)
        rows = self.part_rows[upload_id]
        return tuple(rows[number] for number in sorted(rows))

    async def list_uploads(
        self,
        bucket: str,
        *,
        key_prefix: str = "",
        delimiter: str = "",
        after: tuple[str, str] = ("", ""),
        limit: int = 1000,
    ) -> UploadPage:
        self.require(bucket)
        rows = sorted(
            (row for row in self.uploads.values() if row.bucket == bucket and row.key.startswith(key_prefix)),
            key=lambda row: (row.key, row.upload_id),
        )
        common = tuple(
            name for name, is_common in _page_keys([row.key for row in rows], key_prefix, delimiter, "") if is_common
        )
        rows = [row for row in rows if not any(row.key.startswith(name) for name in common)]
        rows = [row for row in rows if (row.key, row.upload_id) > after]
        page = rows[:limit]
        last = (page[-1].key, page[-1].upload_id) if len(rows) > len(page) else None
        return UploadPage(rows=tuple(page), common_prefixes=common, next_after=last)


def _replaces(condition: WriteCondition | None) -> bool:
    """Whether a live chunk makes way for the write: one that names its ETag."""
    return condition is not None and condition.if_match is not None


def check_condition(row: ObjectRow | None, condition: WriteCondition, *, key: str) -> None:
    if condition.if_match is not None:
        if row is None:
            raise NoSuchKeyError("no such key", key=key)
        if condition.if_match not in ("*", row.etag):
            raise PreconditionFailedError("the etag is another", key=key)
    if condition.if_none_match is not None and row is not None and condition.if_none_match in ("*", row.etag):
        raise PreconditionFailedError("the object exists", key=key)


class FakeTransfer:
    def __init__(
        self, store: FakeStore, request: PutRequest, existing: ObjectRow | None, durability: Durability
    ) -> None:
        self.existing = existing
        self._store = store
        self._request = request
        self._durability = durability
        self._buffer = bytearray(request.size_bytes)
        self._told_bytes = 0
        self._received = False

    async def __aenter__(self) -> Self:
        self._store.open_transfers += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.open_transfers -= 1

    async def receive(self, source: ByteSource) -> None:
        # In pieces, as a body of several blobs is received.
        step = self._store.blob_bytes
        view = memoryview(self._buffer)
        for start in range(0, len(view), step):
            piece = view[start : start + step]
            told: list[int] = []
            await source.receive_into(piece, told.append)
            if not told or told[-1] != len(piece) or told != sorted(told):
                raise AssertionError(f"on_bytes told {told} of {len(piece)} bytes")
        self._received = True

    async def digests(self) -> Digester:
        digester = Digester(self._request.algorithms | {"md5", "blake3"})
        digester.update(memoryview(self._buffer))
        return digester

    async def commit(self, *, checksums: tuple[Checksum, ...] = (), want_digest: bool = False) -> PutResult:
        if not self._received:
            raise IncompleteBodyError("the body has not been received")
        del want_digest
        digester = await self.digests()
        return self._store.commit(self._request, bytes(self._buffer), digester, checksums, self._durability)


class FakeReader:
    """Hands out two views, so that nobody takes the first for the whole."""

    tier = "dram"

    def __init__(self, data: bytes) -> None:
        self.length = len(data)
        self.closed = False
        self._data = data

    async def views(self) -> AsyncIterator[memoryview]:
        half = len(self._data) // 2
        for piece in (self._data[:half], self._data[half:]):
            if piece:
                yield memoryview(piece)

    async def aclose(self) -> None:
        self.closed = True


class NothingArrives:
    """Where `Following` is asked for: bodies come whole here, and there is nothing to follow."""

    async def find(self, bucket: BucketRow, key: str) -> None:
        del bucket, key


class FakeStore:
    """See the module's text. `blob_bytes`: bodies are received in pieces of this size."""

    def __init__(self, *, now_ms: Callable[[], int], blob_bytes: int = 1 << 20) -> None:
        self.catalog = FakeCatalog()
        self.following = NothingArrives()
        self.blobs: dict[bytes, bytes] = {}
        self.open_transfers = 0
        self.blob_bytes = blob_bytes
        self.refuse_put: Exception | None = None
        self._now_ms = now_ms
        self._ids = BlobIdAllocator(1)

    async def start_put(self, request: PutRequest) -> FakeTransfer:
        if self.refuse_put is not None:
            raise self.refuse_put
        durability = request.durability or request.bucket.durability
        existing = None
        if request.part is not None:
            upload = await self.catalog.upload(request.bucket.name, request.key, request.part.upload_id)
            if upload is None:
                raise NoSuchUploadError("no such upload", upload_id=request.part.upload_id)
            durability = upload.durability
        else:
            live = self.catalog.objects.get((request.bucket.name, request.key))
            if request.condition is not None:
                check_condition(live, request.condition, key=request.key)
            existing = live if request.bucket.kind is BucketKind.KV and not _replaces(request.condition) else None
        if durability is Durability.SHARED:
            raise InvalidRequestError("durability class shared needs a remote tier, and none is configured")
        if request.size_bytes > CAPACITY_BYTES:
            raise StoreFullError("larger than the store", size_bytes=request.size_bytes)
        return FakeTransfer(self, request, existing, durability)

    def put_at_once(
        self,
        request: PutRequest,  # noqa: ARG002 - as the protocol has it, likewise below
        source: WholeSource,  # noqa: ARG002
        check: Callable[[Digester], tuple[Checksum, ...]],  # noqa: ARG002
    ) -> PutResult | None:
        return None

    def commit(
        self,
        request: PutRequest,
        data: bytes,
        digester: Digester,
        checksums: tuple[Checksum, ...],
        durability: Durability,
    ) -> PutResult:
        blob_id = self._ids.allocate()
        digest = digester.digest("blake3")
        ref = BlobRef(bytes(blob_id), len(data), len(data) + 256, digest)
        is_kv = request.bucket.kind is BucketKind.KV
        etag = kv_etag(blob_id) if is_kv else digester.hexdigest("md5")
        if request.part is not None:
            upload = self.catalog.uploads.get((request.bucket.name, request.key, request.part.upload_id))
            if upload is None:
                raise NoSuchUploadError("no such upload", upload_id=request.part.upload_id)
            part = PartRow(
                upload_id=request.part.upload_id,
                number=request.part.number,
                blobs=(ref,),
                size_bytes=len(data),
                etag=etag,
                modified_ms=self._now_ms(),
                checksum=checksums[0] if checksums else None,
            )
            self.catalog.part_rows[part.upload_id][part.number] = part
            self.blobs[bytes(blob_id)] = data
            return PutResult(row=part, existed=False, durability=durability)
        row = ObjectRow(
            bucket=request.bucket.name,
            key=request.key,
            blobs=(ref,),
            size_bytes=len(data),
            etag=etag,
            modified_ms=self._now_ms(),
            owner=request.owner,
            durability=durability,
            headers=dict(request.headers),
            metadata=dict(request.metadata),
            checksums=checksums,
            digest=digest,
            acl=request.acl,
            tags=dict(request.tags),
        )
        row, existed = self.catalog.commit(row, kind=request.bucket.kind, condition=request.condition)
        self.blobs[bytes(blob_id)] = data
        return PutResult(row=row, existed=existed, durability=row.durability)

    async def open(self, row: ObjectRow, start: int, stop: int) -> FakeReader | None:
        if any(ref.blob_id not in self.blobs for ref in row.blobs):
            return None
        return FakeReader(b"".join(self.blobs[ref.blob_id] for ref in row.blobs)[start:stop])

    def open_hot(self, row: ObjectRow, start: int, stop: int) -> FakeReader | None:  # noqa: ARG002 - as the protocol has it
        return None

    def read_hot(self, bucket: BucketRow, key: str, *, only_short: bool = False) -> HotRead | None:  # noqa: ARG002 - as the protocol has it
        return None

    def look_up_hot(self, bucket: BucketRow, key: str) -> HotRead | None:  # noqa: ARG002 - as the protocol has it
        return None

    async def look_up(self, bucket: str, key: str, *, will_open: bool = False) -> ObjectRow | None:  # noqa: ARG002 - as the protocol has it
        return self.catalog.objects.get((bucket, key))

    async def live_chunk(self, bucket: str, key: str, place: ChunkPlace | None) -> ObjectRow | None:
        assert place is None or not place.parent, "chains are tested over the real store"
        return self.catalog.objects.get((bucket, key))

    async def settled(self, row: ObjectRow, *, wait: bool = True) -> ObjectRow:  # noqa: ARG002 - nothing is pending here
        return row

    async def represent(self, row: ObjectRow, accepts: Sequence[Accepted]) -> ObjectRow | None:
        return choose(row, [None], accepts)

    async def delete(
        self,
        bucket: str,
        keys: Sequence[str],
        conditions: Sequence[WriteCondition | None] = (),
        *,
        made_ms: int | None = None,
    ) -> list[DeleteOutcome]:
        self.catalog.require(bucket, made_ms)
        outcomes = []
        for index, key in enumerate(keys):
            condition = conditions[index] if conditions else None
            live = self.catalog.objects.get((bucket, key))
            if condition is not None and live is not None and condition.if_match not in (None, "*", live.etag):
                outcomes.append(DeleteOutcome(key, None, precondition_failed=True))
            else:
                outcomes.append(DeleteOutcome(key, self.catalog.objects.pop((bucket, key), None)))
        return outcomes

    async def delete_bucket(self, name: str, *, made_ms: int | None = None) -> None:
        await self.catalog.delete_bucket(name, made_ms=made_ms)

    async def abort_upload(self, bucket: str, key: str, upload_id: str) -> None:
        if self.catalog.uploads.pop((bucket, key, upload_id), None) is None:
            raise NoSuchUploadError("no such upload", upload_id=upload_id)
        del self.catalog.part_rows[upload_id]

    async def copy(
        self,
        source: ObjectRow,
        start: int,
        stop: int,
        request: PutRequest,
        *,
        checksums: tuple[Checksum, ...] = (),
        checksum_algorithm: str | None = None,
    ) -> PutResult | None:
        reader = await self.open(source, start, stop)
        if reader is None:
            return None
        data = b"".join([bytes(view) async for view in reader.views()])
        transfer = await self.start_put(request)
        if transfer.existing is not None:
            return PutResult(row=transfer.existing, existed=True, durability=transfer.existing.durability)
        digester = Digester(request.algorithms | {"md5", "blake3"})
        digester.update(memoryview(data))
        if checksum_algorithm is not None:
            checksums = (Checksum(checksum_algorithm, digester.base64(checksum_algorithm.lower())),)
        return self.commit(request, data, digester, checksums, request.durability or request.bucket.durability)

    async def complete_upload(
        self,
        bucket: BucketRow,
        upload: UploadRow,
        parts: Sequence[CompletedPart],
        *,
        condition: WriteCondition | None = None,
        checksums: tuple[Checksum, ...] = (),
        size_bytes: int | None = None,
    ) -> PutResult:
        chosen = choose_parts(await self.catalog.parts(bucket.name, upload.key, upload.upload_id), parts)
        total = sum(part.size_bytes for part in chosen)
        if size_bytes is not None and size_bytes != total:
            raise InvalidRequestError("the parts do not sum to the size given")
        blobs = tuple(blob for part in chosen for blob in part.blobs)
        row = ObjectRow(
            bucket=bucket.name,
            key=upload.key,
            blobs=blobs,
            size_bytes=total,
            etag=kv_etag(blobs[0].blob_id)
            if bucket.kind is BucketKind.KV
            else multipart_etag([part.etag for part in chosen]),
            modified_ms=self._now_ms(),
            owner=upload.owner,
            durability=upload.durability,
            headers=upload.headers,
            metadata=upload.metadata,
            checksums=checksums,
            parts=part_infos(chosen),
            acl=upload.acl,
            tags=upload.tags,
        )
        row, existed = self.catalog.commit(row, kind=bucket.kind, condition=condition)
        await self.abort_upload(bucket.name, upload.key, upload.upload_id)
        return PutResult(row=row, existed=existed, durability=row.durability)
