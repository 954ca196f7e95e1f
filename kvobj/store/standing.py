"""What stands already where somebody writes: the live chunk that answers for the write, or refuses it before its body comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, Durability, ObjectRow
from kvobj.errors import ImmutableChunkError, LayoutMismatchError, ParentNotFoundError, PreconditionFailedError
from kvobj.ids import BlobId
from kvobj.store.lost_rows import LostRows
from kvobj.store.places import DEFAULT_NAMESPACE, ChunkPlace
from kvobj.store.requests import PutRequest
from kvobj.store.whole_writes import check_write_condition


class Standing:
    """Of one store. Event loop only; the commit looks again."""

    __slots__ = ("_catalog", "_lost", "_on_asked")

    def __init__(self, *, catalog: Catalog, lost: LostRows, on_asked: Callable[[ObjectRow], None]) -> None:
        self._catalog = catalog
        self._lost = lost
        self._on_asked = on_asked

    async def of_batch(self, requests: Sequence[PutRequest], durability: Durability) -> list[ObjectRow | None]:
        """The live chunk that answers for each write of a batch, which is of one bucket and of one class; None: it is to be
        stored."""
        bucket = requests[0].bucket.name
        rows = await self._catalog.lookup(bucket, [request.key for request in requests], rescue=True)
        for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
            if row is not None:
                self._on_asked(row)
                if row.size_bytes == request.size_bytes and not await self.stands(row, durability):
                    rows[index] = None
        return rows

    async def early_look(self, request: PutRequest) -> ObjectRow | None:
        """The live chunk that answers for the write; refuses what the commit would refuse, before the body."""
        bucket, key, condition, place = request.bucket, request.key, request.condition, request.place
        if bucket.kind is not BucketKind.KV:
            if condition is not None:
                (row,) = await self._catalog.lookup(bucket.name, [key])
                check_write_condition(row, condition, key=key)
            return None
        row = await self.live_chunk(bucket.name, key, place)
        if condition is not None:
            check_write_condition(row, condition, key=key)
            if row is not None and condition.if_match is not None:
                if place is not None and place.namespace.name != DEFAULT_NAMESPACE:
                    raise ImmutableChunkError("a chunk of a declared namespace is never replaced", key=key)
                return None  # the commit replaces it
        return row

    async def live_chunk(self, bucket: str, key: str, place: ChunkPlace | None) -> ObjectRow | None:
        """The live chunk that a writer of the key meets, as `look_up` gives it; where there is none, the parent has to be live.
        Raises `ParentNotFoundError`, and `LayoutMismatchError` (`parent`) where that is a partial chunk."""
        parent = None if place is None else place.parent
        keys = [key, parent] if parent else [key]
        row, *parents = await self._catalog.lookup(bucket, keys, rescue=True)
        if row is None and parent and place is not None:
            (parent_row,) = parents
            check_parent(parent_row, place, bucket=bucket, key=key)
        if row is not None:
            self._on_asked(row)
        return row

    async def standing_chunk(
        self, bucket: str, key: str, place: ChunkPlace | None, durability: Durability
    ) -> ObjectRow | None:
        """`live_chunk` for who writes it in parts: None where it does not stand."""
        row = await self.live_chunk(bucket, key, place)
        return row if row is not None and await self.stands(row, durability) else None

    async def stands(self, row: ObjectRow, durability: Durability) -> bool:
        """Whether the live row answers for a write of the same chunk. One whose bytes are gone, but for a lossy copy, does not (the
        chunk is stored again), nor does it where the writer is to be promised that its bytes last."""
        if row.lossy is None:
            return True
        if durability is not Durability.MEMORY:
            return False
        return not await self._lost.are_missing([BlobId(blob.blob_id) for blob in row.blobs])


def check_parent(row: ObjectRow | None, place: ChunkPlace, *, bucket: str, key: str) -> None:
    """Refuse a chunk early whose parent, of which this is the live row, does not let it follow: `ParentNotFoundError`, and
    `LayoutMismatchError` (`parent`) where that is a partial chunk. The commit checks again."""
    # Ids are keyed by namespace and other keys begin with its name, so a parent elsewhere is a stranger's.
    if row is None or (row.namespace or DEFAULT_NAMESPACE) != place.namespace.name:
        raise ParentNotFoundError("the parent is not live", parent=place.parent, bucket=bucket, key=key)
    if row.tokens < place.parent_tokens:
        raise LayoutMismatchError("nothing follows on a partial chunk", differs=("parent",))


def check_same_chunk(row: ObjectRow, request: PutRequest) -> None:
    """First writer wins: the live chunk answers for a write of the same size. Raises `ImmutableChunkError` and, under
    If-None-Match `*`, `PreconditionFailedError`."""
    if request.condition is not None and request.condition.if_none_match is not None:
        raise PreconditionFailedError("the chunk exists", bucket=row.bucket, key=row.key)
    if row.size_bytes != request.size_bytes:
        raise ImmutableChunkError(
            "a live chunk has another size", bucket=row.bucket, key=row.key, size_bytes=row.size_bytes
        )
