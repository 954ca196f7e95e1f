"""The catalog's changes of objects: what each does within one transaction of a `WriteView`. Pure but for the view.

A change may run again and checks before it changes. It runs inline on the event loop first where only volatile rows may be
concerned (`durable=False`); when it then meets something durable it raises `NeedsDurableError` and is run by the durable writer.
A refusal changes something (the given blobs are queued), so it is a value here and raised by the catalog.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from kvobj.catalog import chain_rows
from kvobj.catalog.catalog_rows import CatalogRows, bucket_of, is_meant
from kvobj.catalog.encoding import EPOCH, META, StoredBucket
from kvobj.catalog.fresh_chunks import store_fresh
from kvobj.catalog.namespace_changes import is_namespace_meant, no_such_namespace
from kvobj.catalog.object_rows import NO_ROWS, RowPair
from kvobj.catalog.remote_rows import RemoteRows, reason_to_queue
from kvobj.catalog.rows import (
    DEFAULT_NAMESPACES,
    BlobRef,
    BucketKind,
    BucketRow,
    CommitMode,
    CommitOutcome,
    Durability,
    NamespaceQuota,
    ObjectRow,
    ObjectState,
    PartRow,
    WriteCondition,
    is_same_namespace,
)
from kvobj.catalog.setting_rows import ObjectUpdate, changes_of
from kvobj.catalog.upload_rows import StoredUpload
from kvobj.database import ReadView, WriteView
from kvobj.errors import (
    ConflictError,
    FencedError,
    ImmutableChunkError,
    InvalidRequestError,
    KvobjError,
    LayoutMismatchError,
    NoSuchBucketError,
    NoSuchKeyError,
    NoSuchUploadError,
    ParentNotFoundError,
    PreconditionFailedError,
    QuotaExceededError,
    StoreFullError,
)
from kvobj.ids import epoch_of

AT_ONCE_MS: Final = 0
"""When blobs may go whose row's bytes are lost, or written down elsewhere: these verbs are given no time."""


class NeedsDurableError(ConflictError):
    """An inline change met a durable row: run it in the durable writer. Never leaves the catalog."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a commit was refused; its blobs have been queued."""

    error: KvobjError


def fence(view: ReadView, blobs: Iterable[BlobRef], parts: Sequence[PartRow] = ()) -> FencedError | None:
    """The error for blobs of another session epoch than the one opened last; those of `parts` are recorded already (parts
    of an upload may be older than this start)."""
    recorded = view.get(META, EPOCH)
    known = set(_blob_ids(parts))
    for blob in blobs:
        if blob.blob_id not in known and (recorded is None or blob.blob_id[:8] != recorded):
            epoch = epoch_of(blob.blob_id)
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
    if not condition.describes(live):
        return PreconditionFailedError("the object is another")
    return None


class CommitChange(msgspec.Struct, frozen=True):
    """`Catalog.commit` as a change."""

    tables: CatalogRows
    row: ObjectRow
    mode: CommitMode
    condition: WriteCondition | None
    upload_id: str | None
    quota: NamespaceQuota | None
    now_ms: int
    durable: bool
    parent_tokens: int = 0
    made_ms: int | None = None
    tells: bool = True
    """Whether to write the event; who commits many rows tells of them together."""
    to_remote: bool = False
    namespace_root: bytes = b""
    keeps_live: bool = False
    """Whether the first writer wins without exception: no live row gives way but to `CommitMode.REPLACE`."""

    def __call__(self, view: WriteView) -> CommitOutcome | Refusal:
        """Run it."""
        row, tables = self.row, self.tables
        key = row.key.encode()
        bucket = bucket_of(view, row.bucket)
        if bucket is None:
            return self._refuse(view, NO_ROWS, (), NoSuchBucketError("no such bucket", bucket=row.bucket))
        before = tables.objects.pair(view, bucket.root, key)
        upload: StoredUpload | None = None
        parts: tuple[PartRow, ...] = ()
        if self.upload_id is not None:
            upload = tables.uploads.find(view, bucket.root, key, self.upload_id)
            parts = () if upload is None else tables.uploads.parts(view, upload)
        if not is_meant(bucket, self.made_ms):
            # The parts of a chunk meet in an upload that is named by the key: these may be the next owner's, and stay.
            return self._refuse(view, before, parts, NoSuchBucketError("no such bucket", bucket=row.bucket))
        if not is_namespace_meant(view, bucket.root, row.namespace, self.namespace_root):
            return self._refuse(view, before, parts, no_such_namespace(row.bucket, row.namespace))
        if self.upload_id is not None and upload is None:
            missing = NoSuchUploadError("no such upload", bucket=row.bucket, key=row.key, upload_id=self.upload_id)
            return self._refuse(view, before, (), missing)
        self._require_writer(before, upload)
        live = before.live
        existed = live is not None and not self._replaces(live)
        parent = None
        if row.parent and not existed:
            parent = tables.objects.live(view, bucket.root, row.parent.encode())
        is_kv = bucket.row.kind is BucketKind.KV
        refusal = self._refusal(view, bucket.root, live, parts, is_kv=is_kv) or (
            None if existed else self._no_place(view, bucket.root, live, parent)
        )
        if refusal is not None:
            return self._refuse(view, before, parts, refusal)
        if live is not None and existed:
            outcome, after = CommitOutcome(live, existed=True), before
        else:
            outcome, after = self._take(view, bucket, before, parent)
        if upload is not None:
            tables.uploads.remove(view, bucket.root, upload, parts)
        spare = _blob_ids([*parts, row]) if existed else _blob_ids(parts)
        is_volatile = upload.is_volatile if upload is not None else row.durability is Durability.MEMORY
        self._queue(view, spare, kept=after, volatile=is_volatile)
        return outcome

    def _require_writer(self, before: RowPair, upload: StoredUpload | None) -> None:
        if self.durable:
            return
        if upload is not None and not upload.is_volatile:
            raise NeedsDurableError("the upload is durable")
        if before.durable is not None and before.hidden is not None:
            raise NeedsDurableError("a hidden row that is durable is replaced")

    def _take(
        self, view: WriteView, bucket: StoredBucket, before: RowPair, parent: ObjectRow | None
    ) -> tuple[CommitOutcome, RowPair]:
        """Store the row. A hidden row gives way whole: it is no older version that power loss may bring back."""
        objects = self.tables.objects
        stored = chain_rows.placed(self.row, parent, sequence=objects.allocate())
        is_memory = stored.durability is Durability.MEMORY
        if is_memory:
            after = RowPair(stored, None if before.durable is None or before.hidden is not None else before.durable)
        else:
            after = RowPair(None, stored)
        is_kv = bucket.row.kind is BucketKind.KV
        objects.change(view, bucket.root, self.row.key.encode(), before, after)
        if before is not NO_ROWS:
            objects.queue_replaced(view, before, after, now_ms=self.now_ms, may_be_pinned=is_kv)
        if is_kv and self.tells:
            self.tables.history.stored(view, [stored], now_ms=self.now_ms, volatile=is_memory)
        if self.tables.remote is not None and not is_memory:
            reason = reason_to_queue(bucket.row, stored, asked=self.to_remote)
            if reason is not None:
                self.tables.remote.add(view, stored, reason, now_ms=self.now_ms)
        return CommitOutcome(stored, existed=False), after

    def _replaces(self, live: ObjectRow) -> bool:
        """Whether the row takes a live one's place. Chunks do not change, but a client's own keys on its own condition do, and the
        same chunk put again has its bytes, where the live row lasts in a lossy copy alone."""
        if self.mode is CommitMode.REPLACE:
            return True
        if self.keeps_live:
            return False
        if is_put_again(live, self.row):
            return True
        return (
            self.condition is not None
            and self.condition.if_match is not None
            and DEFAULT_NAMESPACES.issuperset((live.namespace, self.row.namespace))
        )

    def _refusal(
        self, view: ReadView, root: bytes, live: ObjectRow | None, parts: tuple[PartRow, ...], *, is_kv: bool
    ) -> KvobjError | None:
        """Why the row cannot be, whatever there is room for."""
        if self.row.parent is not None and not is_kv:
            return InvalidRequestError("only KV buckets have chains", bucket=self.row.bucket)
        failed = fence(view, self.row.blobs, parts) or failed_condition(live, self.condition)
        if failed is not None or live is None or self.mode is not CommitMode.FIRST_WRITER_WINS:
            return failed
        if is_put_again(live, self.row):
            return None  # what hangs below counts the same bytes and tokens
        if self._replaces(live):
            # What hangs below was made for these bytes, and counts them in its totals.
            if live.parent != self.row.parent or chain_rows.has_children(view, root, live.key.encode()):
                return ImmutableChunkError("the chunk is part of a chain", key=live.key)
        elif live.size_bytes != self.row.size_bytes:
            return ImmutableChunkError("another chunk is live", size_bytes=live.size_bytes, key=live.key)
        return None

    def _no_place(
        self, view: ReadView, root: bytes, live: ObjectRow | None, parent: ObjectRow | None
    ) -> KvobjError | None:
        """Why a row that is to be stored cannot: nothing to hang on, or no room left. Ids are keyed by namespace and other keys
        begin with its name, so a parent elsewhere is a stranger's."""
        if self.row.parent and (parent is None or not is_same_namespace(parent.namespace, self.row.namespace)):
            return ParentNotFoundError("the parent is not live", parent=self.row.parent, key=self.row.key)
        if parent is not None and parent.tokens < self.parent_tokens:
            return LayoutMismatchError("nothing follows on a partial chunk", differs=("parent",))
        return None if self.quota is None else self._over_quota(view, root, live, self.quota)

    def _over_quota(
        self, view: ReadView, root: bytes, live: ObjectRow | None, quota: NamespaceQuota
    ) -> QuotaExceededError | None:
        usage = self.tables.objects.namespace_usage(view, root, self.row.namespace)
        same = live is not None and live.namespace == self.row.namespace
        chunks = usage.objects + (0 if same else 1)
        size_bytes = usage.size_bytes + self.row.size_bytes - (live.size_bytes if live is not None and same else 0)
        if quota.chunks is not None and chunks > quota.chunks:
            return QuotaExceededError("the namespace holds as many chunks as it may", chunks=quota.chunks)
        if quota.size_bytes is not None and size_bytes > quota.size_bytes:
            return QuotaExceededError("the namespace holds as many bytes as it may", size_bytes=quota.size_bytes)
        return None

    def refuse(self, view: WriteView, error: KvobjError) -> Refusal:
        """Queue the given blobs but for those that a row goes on naming, and refuse."""
        bucket = bucket_of(view, self.row.bucket)
        rows = NO_ROWS if bucket is None else self.tables.objects.pair(view, bucket.root, self.row.key.encode())
        return self._refuse(view, rows, (), error)

    def _refuse(self, view: WriteView, rows: RowPair, parts: tuple[PartRow, ...], error: KvobjError) -> Refusal:
        """Queue the given blobs but for those that a row or a part goes on naming (a Complete sent twice names the same)."""
        spare = set(_blob_ids(parts))
        blob_ids = [blob_id for blob_id in _blob_ids([self.row]) if blob_id not in spare]
        self._queue(view, blob_ids, kept=rows, volatile=self.row.durability is Durability.MEMORY)
        return Refusal(error)

    def _queue(self, view: WriteView, blob_ids: Sequence[bytes], *, kept: RowPair, volatile: bool) -> None:
        if not blob_ids:
            return
        named = kept.blob_ids()
        spare = [blob_id for blob_id in dict.fromkeys(blob_ids) if blob_id not in named]
        row = self.row
        self.tables.objects.queue(view, spare, bucket=row.bucket, key=row.key, volatile=volatile, now_ms=self.now_ms)


@dataclass(frozen=True, slots=True)
class CommitChainChange:
    """`Catalog.commit_chain` as a change: each row sees those before it. One that finds no room is refused like any other."""

    tables: CatalogRows
    rows: Sequence[ObjectRow]
    quota: NamespaceQuota | None
    now_ms: int
    durable: bool
    parent_tokens: int = 0
    made_ms: int | None = None
    to_remote: bool = False
    namespace_root: bytes = b""

    def __call__(self, view: WriteView) -> list[CommitOutcome | KvobjError]:
        """Run it."""
        bucket = bucket_of(view, self.rows[0].bucket)
        # All are of one namespace, and it is asked for once.
        is_meant_here = bucket is None or is_namespace_meant(
            view, bucket.root, self.rows[0].namespace, self.namespace_root
        )
        if not self.durable and self.quota is None and is_meant_here:
            with suppress(StoreFullError):  # each is refused by itself
                fresh = store_fresh(self.tables, view, self.rows, now_ms=self.now_ms, made_ms=self.made_ms)
                if fresh is not None:
                    return list(fresh)
        outcomes: list[CommitOutcome | KvobjError] = []
        for row in self.rows:
            commit = CommitChange(
                self.tables,
                row,
                CommitMode.FIRST_WRITER_WINS,
                condition=None,
                upload_id=None,
                quota=self.quota,
                now_ms=self.now_ms,
                durable=self.durable,
                parent_tokens=self.parent_tokens,
                made_ms=self.made_ms,
                tells=False,
                to_remote=self.to_remote,
                namespace_root=b"" if is_meant_here else self.namespace_root,
            )
            try:
                outcome = commit(view)
            except StoreFullError as error:
                # The first put of a row raises before anything of it has changed; nobody names its blobs.
                outcome = commit.refuse(view, error)
            outcomes.append(outcome.error if isinstance(outcome, Refusal) else outcome)
        self._tell(view, [each.row for each in outcomes if isinstance(each, CommitOutcome) and not each.existed])
        return outcomes

    def _tell(self, view: WriteView, stored: list[ObjectRow]) -> None:
        bucket = bucket_of(view, self.rows[0].bucket)
        if bucket is None or bucket.row.kind is not BucketKind.KV:
            return
        for volatile in (True, False):
            rows = [row for row in stored if (row.durability is Durability.MEMORY) is volatile]
            if rows:
                self.tables.history.stored(view, rows, now_ms=self.now_ms, volatile=volatile)


@dataclass(frozen=True, slots=True)
class RaiseChange:
    """`Catalog.raise_durability` as a change; the durable writer's. A row that was hidden meanwhile and is kept for its pins
    is raised too, and stays hidden: what it names must not be taken for a leftover. What the remote has is what the row named when
    it was uploaded, so a SHARED row, and one that becomes it, names the same before and after."""

    tables: CatalogRows
    rows: Sequence[ObjectRow]

    def __call__(self, view: WriteView) -> list[bool]:
        """Run it."""
        return [self._raise(view, row) for row in self.rows]

    def _raise(self, view: WriteView, row: ObjectRow) -> bool:
        bucket = bucket_of(view, row.bucket)
        if bucket is None:
            return False
        objects = self.tables.objects
        key = row.key.encode()
        before = objects.pair(view, bucket.root, key)
        top = before.top
        if top is None or not same_blobs(top, row):
            return False
        if Durability.SHARED in (row.durability, top.durability) and row.blob_ids != top.blob_ids:
            return False
        raised = self._raised(row, top)
        after = RowPair(None, raised)
        objects.change(view, bucket.root, key, before, after)
        objects.queue_replaced(view, before, after, now_ms=AT_ONCE_MS, may_be_pinned=bucket.row.kind is BucketKind.KV)
        if bucket.row.kind is BucketKind.KV:
            self.tables.history.made_durable(view, raised)
        if self.tables.remote is not None:
            self._queue(view, self.tables.remote, bucket.row, top, raised)
        return True

    @staticmethod
    def _queue(view: WriteView, queue: RemoteRows, bucket: BucketRow, top: ObjectRow, raised: ObjectRow) -> None:
        if raised.durability is Durability.SHARED:
            queue.remove_row(view, raised)
        elif top.durability is Durability.MEMORY and raised.state is ObjectState.LIVE:
            reason = reason_to_queue(bucket, raised)
            if reason is not None:
                queue.add(view, raised, reason, now_ms=raised.modified_ms)

    @staticmethod
    def _raised(row: ObjectRow, top: ObjectRow) -> ObjectRow:
        """Place, state and number are the catalog's: `row` is as old as the moment when it was read. What was written down already
        is as it is, but for its class: an upload brings nothing else."""
        if row.durability is Durability.SHARED and top.durability is not Durability.MEMORY:
            return msgspec.structs.replace(top, durability=Durability.SHARED)
        return msgspec.structs.replace(
            row,
            durability=Durability.SHARED if top.durability is Durability.SHARED else row.durability,
            sequence=top.sequence,
            state=top.state,
            parent=top.parent,
            depth=top.depth,
            chain_sum=top.chain_sum,
            namespace=top.namespace,
            tokens=top.tokens,
            chain_bytes=top.chain_bytes,
            chain_tokens=top.chain_tokens,
            acl=top.acl,
            tags=top.tags,
        )


@dataclass(frozen=True, slots=True)
class UpdateObject:
    """`Catalog.update_object` as a change; the durable writer's. A row of class `memory` stays one."""

    tables: CatalogRows
    bucket: str
    key: str
    update: ObjectUpdate
    sequence: int | None = None

    def __call__(self, view: WriteView) -> ObjectRow | None:
        """Run it."""
        bucket = bucket_of(view, self.bucket)
        if bucket is None:
            raise NoSuchBucketError("no such bucket", bucket=self.bucket)
        objects, key = self.tables.objects, self.key.encode()
        before = objects.pair(view, bucket.root, key)
        live = before.live
        if live is None or self.sequence not in (None, live.sequence):
            return None
        row = msgspec.structs.replace(live, **changes_of(self.update))
        after = RowPair(None, row) if before.volatile is None else RowPair(row, before.durable)
        objects.change(view, bucket.root, key, before, after)
        return row


def is_put_again(live: ObjectRow, row: ObjectRow) -> bool:
    """Whether the row brings back the bytes of a chunk of which no more than a lossy copy was promised to last."""
    return (
        live.lossy is not None
        and row.lossy is None
        and is_same_namespace(live.namespace, row.namespace)
        and (live.size_bytes, live.parent, live.tokens) == (row.size_bytes, row.parent, row.tokens)
    )


def same_blobs(one: ObjectRow, other: ObjectRow) -> bool:
    """Whether both rows name the same blobs in the same order. Empty objects have none: there the sequence tells."""
    if not one.blobs and not other.blobs:
        return one.sequence == other.sequence
    return [blob.blob_id for blob in one.blobs] == [blob.blob_id for blob in other.blobs]


def _blob_ids(rows: Iterable[ObjectRow | PartRow]) -> list[bytes]:
    return [blob_id for row in rows for blob_id in row.blob_ids]
