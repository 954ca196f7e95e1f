"""An object whose bytes are here when its write begins: stored in one step, or left to a transfer.

`CommitStep.put_at_once` is that step, `put_filled` that of a chunk which lies in the arena already. Here is what is known before:
whether the write is one of those, whether anything answers for it or stands in its way, and the digests that its row tells.
"""

from __future__ import annotations

from collections.abc import Callable

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, Checksum, CommitMode, Durability, ObjectRow, WriteCondition
from kvobj.codec.checksums import Digester
from kvobj.codec.frame import CODEC_RAW
from kvobj.errors import KvobjError, NoSuchKeyError, PreconditionFailedError
from kvobj.ids import BlobIdAllocator
from kvobj.store.at_once import at_once
from kvobj.store.commit import CommitStep, kv_etag
from kvobj.store.ingest import ReceivedBlob, WholeSource
from kvobj.store.requests import AT_ONCE_BYTES_MAX, PutRequest, PutResult
from kvobj.store.sealing import ToldHash
from kvobj.store.split import BlobSplit


class WholeWrites:
    """Of one store. Event loop only; nothing here waits."""

    __slots__ = ("_blob_ids", "_catalog", "_commit_step", "_split")

    def __init__(
        self, *, catalog: Catalog, commit_step: CommitStep, blob_ids: BlobIdAllocator, split: BlobSplit
    ) -> None:
        self._catalog = catalog
        self._commit_step = commit_step
        self._blob_ids = blob_ids
        self._split = split

    def put(
        self, request: PutRequest, source: WholeSource, check: Callable[[Digester], tuple[Checksum, ...]]
    ) -> PutResult | None:
        """See `ObjectStore.put_at_once`."""
        bucket, size_bytes = request.bucket, request.size_bytes
        if not (size_bytes <= AT_ONCE_BYTES_MAX and self._may_be_one_step(request)):
            return None
        is_kv, condition = bucket.kind is BucketKind.KV, request.condition
        if is_kv and condition is not None and condition.if_none_match is None:
            return None  # it may replace a chunk, which a transfer sees beforehand
        if not self._is_free(request):
            return None
        body = source.take_whole()
        if body is None:
            return None
        blob_id = self._blob_ids.allocate()
        checksums: tuple[Checksum, ...] = ()
        etag = kv_etag(blob_id)
        if request.algorithms or not is_kv:
            digester = Digester(request.algorithms if is_kv else request.algorithms | {"md5"})
            digester.update(memoryview(body))
            if not is_kv:
                etag = digester.hexdigest("md5")
            try:
                checksums = check(digester) if request.algorithms else ()
            except KvobjError:
                return None  # a transfer refuses it too, unless it is refused for something else before
        return self._commit_step.put_at_once(
            request,
            body,
            blob_id,
            mode=CommitMode.FIRST_WRITER_WINS if is_kv else CommitMode.REPLACE,
            etag=etag,
            checksums=checksums,
        )

    def put_filled(
        self, request: PutRequest, room: ReceivedBlob, checksums: tuple[Checksum, ...]
    ) -> tuple[PutResult, ToldHash] | None:
        """`CommitStep.put_filled`, of a chunk that nothing answers for and whose writer waits for no digest; None, and nothing was
        done: a transfer does it, or tells why not."""
        if (
            request.bucket.kind is not BucketKind.KV
            or request.condition is not None
            or request.wants_digest
            or not self._may_be_one_step(request)
            or not self._is_free(request)
        ):
            return None
        return self._commit_step.put_filled(request, room, checksums=checksums)

    def _may_be_one_step(self, request: PutRequest) -> bool:
        """Whether it is of class `memory`, as it is, and neither a part nor made of such."""
        bucket = request.bucket
        return (
            (bucket.durability if request.durability is None else request.durability) is Durability.MEMORY
            and 0 < request.size_bytes <= self._split.blob_plain_bytes_max
            and bucket.codec == CODEC_RAW
            and request.part is None
            and request.ends is None
        )

    def _is_free(self, request: PutRequest) -> bool:
        """Whether no live row answers for the write or refuses it, as of `Standing.early_look`: its body is worth taking then.
        What hangs on the parent is left to the commit."""
        is_kv = request.bucket.kind is BucketKind.KV
        if not is_kv and request.condition is None:
            return True
        rows = at_once(self._catalog.lookup(request.bucket.name, [request.key], rescue=is_kv))
        if rows is None:
            return False
        (row,) = rows
        if is_kv or request.condition is None:
            return row is None
        try:
            check_write_condition(row, request.condition, key=request.key)
        except KvobjError:
            return False
        return True


def check_write_condition(row: ObjectRow | None, condition: WriteCondition, *, key: str) -> None:
    """Refuse early what the commit would refuse: the body need not be sent then. The commit checks again."""
    if condition.if_match is not None:
        if row is None:
            raise NoSuchKeyError("no such key", key=key)
        if condition.if_match not in ("*", row.etag):
            raise PreconditionFailedError("the etag is another", condition="If-Match", key=key)
    if condition.if_none_match is not None and row is not None and condition.if_none_match in ("*", row.etag):
        raise PreconditionFailedError("the object exists", condition="If-None-Match", key=key)
