"""From the parts of an upload to an object: S3's Complete, and chunks that complete themselves when their last part is there.

A chunk with a tensor layout becomes one blob: its parts are joined by the one stated copy in the arena, since codecs and layer-wise
reads work on whole tensors. It stays in its parts' blobs where it is too large for one blob, or where there is no room to spare.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Final, Protocol

import msgspec

from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import (
    BlobRef,
    BucketKind,
    BucketRow,
    Checksum,
    CommitMode,
    Durability,
    ObjectRow,
    PartRow,
    UploadRow,
    WriteCondition,
)
from kvobj.clock import Clock
from kvobj.errors import (
    BusyError,
    CapacityError,
    ImmutableChunkError,
    InvalidRequestError,
    LayoutMismatchError,
    NoSuchBucketError,
    NoSuchNamespaceError,
    NoSuchUploadError,
    ParentNotFoundError,
    UnavailableError,
)
from kvobj.store.commit import CommitStep, kv_etag
from kvobj.store.group_writers import GroupWriters
from kvobj.store.groups import GroupStart, GroupState, check_same_group, check_same_part, group_upload, group_upload_id
from kvobj.store.ingest import PutTransfer
from kvobj.store.multipart import CompletedPart, choose_parts, multipart_etag, part_infos
from kvobj.store.places import DEFAULT_NAMESPACE, ChunkPlace, GroupPart, check_size, default_namespace
from kvobj.store.reader import ObjectReader, ReaderSource
from kvobj.store.remote_class import SharedWrites, Sharing
from kvobj.store.requests import PartTarget, PutRequest, PutResult, UploadEnd

# A group may be completed, and its chunk deleted, between two look-ups: each attempt looks anew.
_ATTEMPTS: Final = 3
# Looked up on the event loop before others run.
_KEYS_A_TURN: Final = 64


class ReceivedPart(Protocol):
    """A transfer whose body has been received (`PutTransfer`)."""

    async def commit(self, *, checksums: tuple[Checksum, ...] = (), want_digest: bool = False) -> PutResult:
        """See `PutTransfer.commit`."""
        ...


class UploadEnds:
    """See the module's text. A part of `Store`, which gives it its own ways to look up, to read and to write."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        commit_step: CommitStep,
        clock: Clock,
        live_chunk: Callable[[str, str, ChunkPlace | None, Durability], Awaitable[ObjectRow | None]],
        open_blobs: Callable[[Sequence[BlobRef], int, int], Awaitable[ObjectReader | None]],
        start_whole: Callable[[PutRequest, Durability], Awaitable[PutTransfer | None]],
        on_removed: Callable[[Sequence[ObjectRow]], None],
        on_whole: Callable[[str, str, tuple[PartRow, ...]], None] = lambda *_: None,
        on_gone: Callable[[str, str], None] = lambda *_: None,
        shared: SharedWrites | None = None,
    ) -> None:
        self._catalog = catalog
        self._commit_step = commit_step
        self._clock = clock
        self._live_chunk = live_chunk
        self._open_blobs = open_blobs
        self._start_whole = start_whole
        self._on_removed = on_removed
        self._on_whole = on_whole
        self._shared = shared
        self.writers = GroupWriters(catalog, clock, on_gone=on_gone)

    async def complete(
        self,
        bucket: BucketRow,
        upload: UploadRow,
        parts: Sequence[CompletedPart],
        *,
        condition: WriteCondition | None,
        checksums: tuple[Checksum, ...],
        size_bytes: int | None,
    ) -> PutResult:
        """See `Store.complete_upload`."""
        uploaded = await self._catalog.parts(bucket.name, upload.key, upload.upload_id)
        chosen = choose_parts(uploaded, parts)
        total = sum(part.size_bytes for part in chosen)
        if size_bytes is not None and size_bytes != total:
            raise InvalidRequestError(
                "the parts do not sum to the size given", size_bytes=total, given_bytes=size_bytes
            )
        return await self._commit(bucket, upload, chosen, condition=condition, checksums=checksums)

    async def live_or_coming(
        self, bucket: str, key: str, place: ChunkPlace | None, durability: Durability
    ) -> ObjectRow | None:
        """As `Store.live_chunk`, for the parts of a chunk: their parent may still be coming in parts itself. Only the commit asks
        for a live one: so the layers of a whole chain are put one after the other, each of all its chunks."""
        try:
            return await self._live_chunk(bucket, key, place, durability)
        except ParentNotFoundError:
            assert place is not None
            assert place.parent
            parent = await self._catalog.upload(bucket, place.parent, group_upload_id(bucket, place.parent))
            if parent is None or parent.namespace != place.namespace.name or not _is_of(parent, place.namespace):
                raise
            if parent.tokens < place.parent_tokens:
                raise LayoutMismatchError("nothing follows on a partial chunk", differs=("parent",)) from None
            return None

    async def start_part(self, request: PutRequest, durability: Durability) -> GroupStart:
        """The group's upload, begun if this is its first part. `LayoutMismatchError` where the writers do not agree."""
        writer = await self.writers.begin(request)
        start = GroupStart()
        try:
            start = await self._start_part(request, durability)
        finally:
            # One that is of a part already has entered for its body, and does not do so again.
            goes_on = start.request is not None and request.part is None
            await writer.leave(is_stored=start.part is not None, goes_on=goes_on)
        return start

    async def _start_part(self, request: PutRequest, durability: Durability) -> GroupStart:
        place = request.place
        assert place is not None
        assert place.group is not None
        bucket, key, group = request.bucket.name, request.key, place.group
        upload_id = group_upload_id(bucket, key)
        for _ in range(_ATTEMPTS):
            upload = await self._catalog.upload(bucket, key, upload_id)
            if upload is None:
                # Who follows would take what is begun beside a live chunk for what that is made of. But who comes for a body needs
                # somewhere to take it in; the chunk answers for it then (`end_part`).
                if request.part is None:
                    existing = await self.live_or_coming(bucket, key, place, durability)
                    if existing is not None:
                        return GroupStart(existing=existing)
                upload = await self._begun(request, place, group, durability)
            existing = await self.live_or_coming(bucket, key, place, upload.durability if upload else durability)
            if existing is not None:
                return GroupStart(existing=existing)
            if upload is None:
                continue
            if not _is_of(upload, place.namespace):
                await self._end_former(request.bucket, upload, place.namespace)
                continue
            check_same_group(upload, place, group)
            try:
                parts = await self._catalog.parts(bucket, key, upload_id)
            except NoSuchUploadError:
                continue
            number = group.index + 1
            stored = next((part for part in parts if part.number == number), None)
            if stored is not None:
                return GroupStart(part=stored)
            target = msgspec.structs.replace(request, condition=None, part=PartTarget(upload_id, number))
            return GroupStart(request=target)
        raise BusyError("the chunk's parts come and go", bucket=bucket, key=key)

    async def _begun(
        self, request: PutRequest, place: ChunkPlace, group: GroupPart, durability: Durability
    ) -> UploadRow | None:
        """The upload that this writer begins; where another began it a moment ago, that one stands."""
        begun = group_upload(request, place, group, durability, self._clock.now_ms())
        await self._catalog.create_upload(begun, made_ms=request.bucket.created_ms)
        return await self._catalog.upload(begun.bucket, begun.key, begun.upload_id)

    async def end_part(
        self, request: PutRequest, transfer: ReceivedPart, checksums: tuple[Checksum, ...]
    ) -> GroupState:
        """Commit a received part, then the chunk if it was the last. Where that has become whole meanwhile, the part is left."""
        durability = request.bucket.durability if request.durability is None else request.durability
        if await self._live_chunk(request.bucket.name, request.key, None, durability) is not None:
            return await self._whole(request)
        try:
            result = await transfer.commit(checksums=checksums)
            existed = result.existed
            if result.row.size_bytes != request.size_bytes:
                raise ImmutableChunkError("an earlier writer's part has another size", size_bytes=result.row.size_bytes)
        except NoSuchUploadError:
            # Another writer's same part was the last: then the chunk is there, and else the error stands (below).
            existed = True
        state = await self.end_group(request)
        return replace(state, existed=state.existed or existed)

    async def end_group(self, request: PutRequest) -> GroupState:
        """Make the chunk if all its parts are there. Several may find them so: one commit wins, the others see its chunk."""
        place = request.place
        assert place is not None
        assert place.group is not None
        bucket, key = request.bucket, request.key
        upload_id = group_upload_id(bucket.name, key)
        upload = await self._catalog.upload(bucket.name, key, upload_id)
        if upload is not None:
            try:
                parts = await self._catalog.parts(bucket.name, key, upload_id)
                await self._require_same_bucket(bucket)
                await self._require_same_namespace(place.namespace)
                if len(parts) < upload.group_parts:
                    return GroupState(len(parts), upload.group_parts, None)
                result = await self._commit(bucket, upload, parts, condition=None, checksums=())
                return GroupState(upload.group_parts, upload.group_parts, result, existed=result.existed)
            except NoSuchUploadError:
                pass
        return await self._whole(request)

    async def _whole(self, request: PutRequest) -> GroupState:
        """What the live chunk answers to who brings a part of it."""
        place, bucket, key = request.place, request.bucket, request.key
        assert place is not None
        assert place.group is not None
        group = place.group
        row = await self._live_chunk(bucket.name, key, None, Durability.MEMORY)
        await self._require_same_bucket(bucket)
        await self._require_same_namespace(place.namespace)
        if row is None:
            raise NoSuchUploadError("the chunk was deleted while its parts arrived", bucket=bucket.name, key=key)
        check_same_part(row, group, request.size_bytes)
        if self._shared is not None:
            durability = bucket.durability if request.durability is None else request.durability
            by_name = request.durability is Durability.SHARED
            (row,) = await self._shared.reached([row], self._shared.sharing(bucket, durability, by_name=by_name))
        return GroupState(
            group.count, group.count, PutResult(row, existed=True, durability=row.durability), existed=True
        )

    async def _end_former(self, bucket: BucketRow, upload: UploadRow, namespace: NamespaceRow) -> None:
        """Give up parts of a namespace that is gone, for one that is declared anew under its name. Where the writer's own is gone,
        `NoSuchNamespaceError`, and they stay."""
        await self._require_same_namespace(namespace)
        with suppress(NoSuchUploadError):  # another writer has given it up, and may have begun the next under its id
            await self._catalog.abort_upload(
                upload.bucket,
                upload.key,
                upload.upload_id,
                made_ms=bucket.created_ms,
                namespace_root=upload.namespace_root,
                now_ms=self._clock.now_ms(),
            )

    async def _require_same_namespace(self, namespace: NamespaceRow) -> None:
        """As `_require_same_bucket`, of a namespace. `default` is always the same."""
        if namespace.root:
            standing = await self._catalog.namespaces.namespace(namespace.bucket, namespace.name)
            if standing is None or standing.root != namespace.root:
                raise NoSuchNamespaceError("no such namespace", bucket=namespace.bucket, namespace=namespace.name)

    async def _require_same_bucket(self, bucket: BucketRow) -> None:
        """Called after a look-up: where the bucket is the same still, what was found is of it, and not its next owner's."""
        if not bucket.is_still(await self._catalog.bucket(bucket.name)):
            raise NoSuchBucketError("the bucket is gone", bucket=bucket.name)

    async def give_up_parts(self, bucket: str, keys: Sequence[str], *, made_ms: int | None = None) -> None:
        """Forget what came of these chunks, where they are not whole yet. In ordinary buckets there is nothing to forget, and none
        of a bucket that is another than that of `made_ms` (`Catalog.commit`) by now. Parts of what would follow on them stay: their
        writers may bring the parent again."""
        row = await self._catalog.bucket(bucket)
        if row is None or row.kind is not BucketKind.KV or made_ms not in (None, row.created_ms):
            return
        for number, key in enumerate(keys):
            upload_id = group_upload_id(bucket, key)
            if await self._catalog.upload(bucket, key, upload_id) is not None:
                # It has become whole this moment, or the bucket was made anew: the id, which the key gives, may be used there.
                with suppress(NoSuchUploadError):
                    await self._catalog.abort_upload(
                        bucket, key, upload_id, made_ms=row.created_ms, now_ms=self._clock.now_ms()
                    )
            if number % _KEYS_A_TURN == _KEYS_A_TURN - 1:
                await asyncio.sleep(0)

    async def _commit(
        self,
        bucket: BucketRow,
        upload: UploadRow,
        parts: Sequence[PartRow],
        *,
        condition: WriteCondition | None,
        checksums: tuple[Checksum, ...],
    ) -> PutResult:
        total = sum(part.size_bytes for part in parts)
        blobs = tuple(blob for part in parts for blob in part.blobs)
        place = await self._place(bucket, upload)
        if place is not None:
            existing = await self._live_chunk(bucket.name, upload.key, place, upload.durability)
            if existing is None:
                check_size(place, total)
                joined = await self._join(bucket, upload, parts, blobs, place, condition=condition, checksums=checksums)
                if joined is not None:
                    self._on_removed([])
                    return joined
        now_ms = self._clock.now_ms()
        row = ObjectRow(
            bucket=bucket.name,
            key=upload.key,
            blobs=blobs,
            size_bytes=total,
            etag=kv_etag(blobs[0].blob_id) if place is not None else multipart_etag([part.etag for part in parts]),
            modified_ms=now_ms,
            owner=upload.owner,
            durability=Durability.LOCAL if upload.durability is Durability.SHARED else upload.durability,
            headers=upload.headers,
            metadata=upload.metadata,
            checksums=checksums,
            parts=part_infos(parts),
            digest=blobs[0].digest if len(blobs) == 1 else None,
            parent=upload.parent,
            namespace="" if place is None else place.namespace.name,
            tokens=upload.tokens,
            acl=upload.acl,
            tags=upload.tags,
        )
        sharing = Sharing.NONE
        async with AsyncExitStack() as stack:
            if self._shared is not None:
                sharing = self._shared.sharing(bucket, upload.durability, by_name=False)
                self._shared.check(sharing)
                if self._shared.must_queue(bucket, sharing):
                    await stack.enter_async_context(self._shared.room.of(total))
                if place is None:
                    row = await self._shared.replacing(row, sharing, owns_blobs=False)
                    stack.callback(self._shared.concluded, row)
            outcome = await self._catalog.commit(
                row,
                mode=CommitMode.REPLACE if place is None else CommitMode.FIRST_WRITER_WINS,
                condition=condition,
                upload_id=upload.upload_id,
                quota=None if place is None else place.quota,
                parent_tokens=0 if place is None else place.parent_tokens,
                made_ms=bucket.created_ms,
                namespace_root=b"" if place is None else place.namespace_root,
                now_ms=now_ms,
                to_remote=sharing is not Sharing.NONE,
            )
        self._on_removed([])
        if not outcome.existed:
            self._on_whole(bucket.name, upload.key, tuple(parts))
            await self._commit_step.committed(outcome.row)
        stands = outcome.row
        if self._shared is not None:
            if not outcome.existed:
                self._shared.committed(stands)
            (stands,) = await self._shared.reached([stands], sharing)
        return PutResult(row=stands, existed=outcome.existed, durability=stands.durability)

    async def _place(self, bucket: BucketRow, upload: UploadRow) -> ChunkPlace | None:
        if bucket.kind is not BucketKind.KV:
            return None
        if upload.namespace in ("", DEFAULT_NAMESPACE):
            return ChunkPlace(default_namespace(bucket.name), upload.parent, upload.tokens)
        namespace = await self._catalog.namespaces.namespace(bucket.name, upload.namespace)
        if namespace is None or not _is_of(upload, namespace):
            raise NoSuchNamespaceError("no such namespace", bucket=bucket.name, namespace=upload.namespace)
        return ChunkPlace(namespace, upload.parent, upload.tokens)

    async def _join(
        self,
        bucket: BucketRow,
        upload: UploadRow,
        parts: Sequence[PartRow],
        blobs: Sequence[BlobRef],
        place: ChunkPlace,
        *,
        condition: WriteCondition | None,
        checksums: tuple[Checksum, ...],
    ) -> PutResult | None:
        """The chunk committed as one blob; None where it has to stay in several, or is one already."""
        if place.namespace.chunk_bytes is None or len(blobs) == 1:
            return None
        total = sum(part.size_bytes for part in parts)
        request = PutRequest(
            bucket=bucket,
            key=upload.key,
            size_bytes=total,
            owner=upload.owner,
            durability=upload.durability,
            headers=upload.headers,
            metadata=upload.metadata,
            condition=condition,
            place=place,
            ends=UploadEnd(upload.upload_id, part_infos(parts)),
            acl=upload.acl,
            tags=upload.tags,
        )
        transfer = await self._start_whole(request, upload.durability)
        if transfer is None:
            return None
        try:
            async with transfer:
                reader = await self._open_blobs(blobs, 0, total)
                if reader is None:
                    return None
                source = ReaderSource(reader)
                try:
                    await transfer.receive(source)
                finally:
                    await source.aclose()
                    await reader.aclose()
                result = await transfer.commit(checksums=checksums)
                if not result.existed:
                    self._on_whole(bucket.name, upload.key, tuple(parts))
                return result
        except (CapacityError, UnavailableError):
            # No room at home for a second copy, or another writer's join has won and its parts' blobs go already: the commit of the
            # parts' own blobs succeeds, or says which.
            return None


def _is_of(upload: UploadRow, namespace: NamespaceRow) -> bool:
    """Whether the upload was begun in this namespace, and not in one that had its name before."""
    return upload.namespace_root == namespace.root
