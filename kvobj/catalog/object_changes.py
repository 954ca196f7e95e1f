"""The catalog's changes of objects: what each does within one transaction of a `WriteView`. Pure but for the view.

A change may run again and checks before it changes. It runs inline on the event loop first where only volatile rows may be
concerned (`durable=False`); when it then meets something durable it raises `NeedsDurableError` and is run by the durable writer.
A refusal changes something (the given blobs are queued), so it is a value here and raised by the catalog.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvobj.catalog.encoding import BUCKETS, EPOCH, META, ROOT_BYTES
from kvobj.catalog.object_rows import NO_ROWS, ObjectRows, RowPair
from kvobj.catalog.rows import (
    BlobRef,
    CommitMode,
    CommitOutcome,
    DeleteOutcome,
    Durability,
    ObjectRow,
    ObjectState,
    PartRow,
    WriteCondition,
)
from kvobj.catalog.upload_rows import StoredUpload, UploadRows
from kvobj.database import ReadView, WriteView
from kvobj.errors import (
    ConflictError,
    FencedError,
    ImmutableChunkError,
    KvobjError,
    NoSuchBucketError,
    NoSuchKeyError,
    NoSuchUploadError,
    PreconditionFailedError,
)
from kvobj.ids import BlobId

_AT_ONCE_MS: Final = 0
"""When blobs may go whose row's bytes are lost, or written down elsewhere: these verbs are given no time."""


class NeedsDurableError(ConflictError):
    """An inline change met a durable row: run it in the durable writer. Never leaves the catalog."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a commit was refused; its blobs have been queued."""

    error: KvobjError


def root_of(view: ReadView, bucket: str) -> bytes | None:
    """The root node of a bucket's trees, None if there is no such bucket."""
    value = view.get(BUCKETS, bucket.encode())
    return None if value is None else value[:ROOT_BYTES]


def require_root(view: ReadView, bucket: str) -> bytes:
    """`root_of`, or `NoSuchBucketError`."""
    root = root_of(view, bucket)
    if root is None:
        raise NoSuchBucketError("no such bucket", bucket=bucket)
    return root


def fence(view: ReadView, blobs: Iterable[BlobRef], *, known: frozenset[bytes] = frozenset()) -> FencedError | None:
    """The error for blobs of another session epoch than the one opened last; `known` ones are recorded already (parts
    of an upload may be older than this start)."""
    recorded = view.get(META, EPOCH)
    for blob in blobs:
        if blob.blob_id not in known and (recorded is None or blob.blob_id[:8] != recorded):
            epoch = BlobId(blob.blob_id).epoch
            return FencedError("the session epoch of a blob is not alive", epoch=f"{epoch:016x}")
    return None


def failed_condition(live: ObjectRow | None, condition: WriteCondition | None) -> KvobjError | None:
    """What a write condition says about the live row (RFC 9110 §13.1, S3 reference "Conditional writes")."""
    if condition is None:
        return None
    wanted, unwanted = condition.if_match, condition.if_none_match
    if unwanted is not None and live is not None and unwanted in {"*", live.etag}:
        return PreconditionFailedError("the object exists", etag=live.etag)
    if wanted is not None:
        if live is None:
            return NoSuchKeyError("no object to match")
        if wanted not in {"*", live.etag}:
            return PreconditionFailedError("the object has another etag", etag=live.etag)
    return None


@dataclass(frozen=True, slots=True)
class CommitChange:
    """`Catalog.commit` as a change."""

    objects: ObjectRows
    uploads: UploadRows
    row: ObjectRow
    mode: CommitMode
    condition: WriteCondition | None
    upload_id: str | None
    now_ms: int
    durable: bool

    def __call__(self, view: WriteView) -> CommitOutcome | Refusal:
        """Run it."""
        row = self.row
        key = row.key.encode()
        root = root_of(view, row.bucket)
        if root is None:
            return self._refuse(view, NO_ROWS, (), NoSuchBucketError("no such bucket", bucket=row.bucket))
        before = self.objects.pair(view, root, key)
        upload: StoredUpload | None = None
        parts: tuple[PartRow, ...] = ()
        if self.upload_id is not None:
            upload = self.uploads.find(view, root, key, self.upload_id)
            if upload is None:
                missing = NoSuchUploadError("no such upload", bucket=row.bucket, key=row.key, upload_id=self.upload_id)
                return self._refuse(view, before, (), missing)
            if not upload.is_volatile and not self.durable:
                raise NeedsDurableError("the upload is durable")
            parts = self.uploads.parts(view, upload)
        refusal = self._refusal(view, before.live, parts)
        if refusal is not None:
            return self._refuse(view, before, parts, refusal)
        if before.live is not None and self.mode is CommitMode.FIRST_WRITER_WINS:
            outcome = CommitOutcome(before.live, existed=True)
            after = before
        else:
            stored = msgspec.structs.replace(row, sequence=self.objects.allocate(), state=ObjectState.LIVE)
            is_memory = row.durability is Durability.MEMORY
            after = RowPair(stored, before.durable) if is_memory else RowPair(None, stored)
            self.objects.change(view, root, key, before, after)
            self.objects.queue_replaced(view, before, after, now_ms=self.now_ms)
            outcome = CommitOutcome(stored, existed=False)
        if upload is not None:
            self.uploads.remove(view, root, upload, parts)
        spare = _blob_ids(parts) if outcome.existed is False else _blob_ids([*parts, row])
        volatile = upload.is_volatile if upload is not None else row.durability is Durability.MEMORY
        self._queue(view, spare, kept=after.blob_ids(), volatile=volatile)
        return outcome

    def _refusal(self, view: ReadView, live: ObjectRow | None, parts: tuple[PartRow, ...]) -> KvobjError | None:
        fenced = fence(view, self.row.blobs, known=frozenset(_blob_ids(parts)))
        failed = fenced or failed_condition(live, self.condition)
        if failed is not None or live is None or self.mode is not CommitMode.FIRST_WRITER_WINS:
            return failed
        if live.size_bytes != self.row.size_bytes:
            return ImmutableChunkError("another chunk is live", size_bytes=live.size_bytes, key=live.key)
        return None

    def _refuse(self, view: WriteView, rows: RowPair, parts: tuple[PartRow, ...], error: KvobjError) -> Refusal:
        """Queue the given blobs but for those that a row or a part goes on naming (a Complete sent twice names the same)."""
        kept = rows.blob_ids().union(_blob_ids(parts))
        self._queue(view, _blob_ids([self.row]), kept=kept, volatile=self.row.durability is Durability.MEMORY)
        return Refusal(error)

    def _queue(self, view: WriteView, blob_ids: Sequence[bytes], *, kept: set[bytes], volatile: bool) -> None:
        spare = [blob_id for blob_id in dict.fromkeys(blob_ids) if blob_id not in kept]
        if spare:
            row = self.row
            self.objects.queue(view, spare, bucket=row.bucket, key=row.key, volatile=volatile, now_ms=self.now_ms)


@dataclass(frozen=True, slots=True)
class DeleteChange:
    """`Catalog.delete` as a change."""

    objects: ObjectRows
    bucket: str
    keys: Sequence[str]
    conditions: Sequence[WriteCondition | None]
    now_ms: int
    durable: bool

    def __call__(self, view: WriteView) -> list[DeleteOutcome]:
        """Run it."""
        root = require_root(view, self.bucket)
        outcomes: list[DeleteOutcome] = []
        hidden: dict[bytes, RowPair] = {}
        conditions = self.conditions or [None] * len(self.keys)
        for key, condition in zip(self.keys, conditions, strict=True):
            encoded = key.encode()
            before = NO_ROWS if encoded in hidden else self.objects.pair(view, root, encoded)
            live = before.live
            # A DELETE whose key is absent succeeds whatever its If-Match says (S3 reference, DeleteObject).
            if live is not None and failed_condition(live, condition) is not None:
                outcomes.append(DeleteOutcome(key, None, precondition_failed=True))
                continue
            if before.durable is not None and not self.durable:
                raise NeedsDurableError("a row is durable")
            if live is not None:
                hidden[encoded] = before
            outcomes.append(DeleteOutcome(key, live))
        for encoded, before in hidden.items():
            self.objects.change(view, root, encoded, before, NO_ROWS)
            self.objects.queue_replaced(view, before, NO_ROWS, now_ms=self.now_ms)
        return outcomes


@dataclass(frozen=True, slots=True)
class DropChange:
    """`Catalog.drop_rows` as a change. An older durable row under a dropped volatile one goes too: bytes of an earlier PUT are
    no answer to a GET after a later one."""

    objects: ObjectRows
    rows: Sequence[ObjectRow]
    durable: bool

    def __call__(self, view: WriteView) -> None:
        """Run it."""
        doomed: dict[tuple[bytes, bytes], RowPair] = {}
        for row in self.rows:
            root = root_of(view, row.bucket)
            key = row.key.encode()
            before = NO_ROWS if root is None else self.objects.pair(view, root, key)
            if root is None or before.live is None or not same_blobs(before.live, row):
                continue
            if before.durable is not None and not self.durable:
                raise NeedsDurableError("a row is durable")
            doomed[root, key] = before
        for (root, key), before in doomed.items():
            self.objects.change(view, root, key, before, NO_ROWS)
            self.objects.queue_replaced(view, before, NO_ROWS, now_ms=_AT_ONCE_MS)


@dataclass(frozen=True, slots=True)
class RaiseChange:
    """`Catalog.raise_durability` as a change; the durable writer's."""

    objects: ObjectRows
    rows: Sequence[ObjectRow]

    def __call__(self, view: WriteView) -> list[bool]:
        """Run it."""
        return [self._raise(view, row) for row in self.rows]

    def _raise(self, view: WriteView, row: ObjectRow) -> bool:
        root = root_of(view, row.bucket)
        if root is None:
            return False
        key = row.key.encode()
        before = self.objects.pair(view, root, key)
        if before.live is None or not same_blobs(before.live, row):
            return False
        after = RowPair(None, msgspec.structs.replace(row, sequence=before.live.sequence))
        self.objects.change(view, root, key, before, after)
        self.objects.queue_replaced(view, before, after, now_ms=_AT_ONCE_MS)
        return True


def same_blobs(one: ObjectRow, other: ObjectRow) -> bool:
    """Whether both rows name the same blobs in the same order. Empty objects have none: there the sequence tells."""
    if not one.blobs and not other.blobs:
        return one.sequence == other.sequence
    return [blob.blob_id for blob in one.blobs] == [blob.blob_id for blob in other.blobs]


def _blob_ids(rows: Iterable[ObjectRow | PartRow]) -> list[bytes]:
    return [blob.blob_id for row in rows for blob in row.blobs]
