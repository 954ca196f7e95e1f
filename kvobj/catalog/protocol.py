"""The catalog: the one record of which objects exist, which blobs they need, and which blobs await deletion.

Verbs are async and take batches of values; each is one atomic step, so that it is one LMDB transaction here and
one round trip to an SQL server elsewhere. No transaction object crosses this line. A verb that returns has
happened with the durability of the rows it was given (`local`: synced; `memory`: survives the process); a verb that is
cancelled has either happened or not. Errors: the typed ones named below, and `UnavailableError` when the catalog cannot
be reached. All drivers pass `tests/contract/catalog_contract.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from kvobj.catalog.rows import (
    BucketRow,
    BucketUsage,
    CommitMode,
    CommitOutcome,
    DeleteOutcome,
    ListPage,
    ObjectRow,
    PartRow,
    QueueEntry,
    UploadPage,
    UploadRow,
    UserRow,
    WriteCondition,
)


class Catalog(Protocol):
    """See the module's text. `bucket` arguments are names, `key` arguments S3 keys of at most 1,024 bytes of UTF-8."""

    # -- sessions of writers -------------------------------------------------------------------------------------
    async def open_epoch(self, epoch: int) -> None:
        """Record a session epoch durably before its first blob id is used. Earlier epochs of this store are fenced:
        what they did not commit never will be (`FencedError`)."""
        ...

    # -- users ---------------------------------------------------------------------------------------------------
    async def users(self) -> tuple[UserRow, ...]:
        """All users, by id."""
        ...

    async def add_user(self, user: UserRow) -> None:
        """Add a user. `UserExistsError` if the id or the access key is taken."""
        ...

    async def put_user(self, user: UserRow) -> None:
        """Add the user or replace the one with the same id (what the configuration declares wins)."""
        ...

    async def remove_user(self, user_id: str) -> None:
        """Remove a user. `NoSuchUserError` if there is none."""
        ...

    # -- buckets -------------------------------------------------------------------------------------------------
    async def create_bucket(self, bucket: BucketRow) -> None:
        """Create a bucket. `BucketExistsError` (with `existing=BucketRow`) if the name is taken."""
        ...

    async def bucket(self, name: str) -> BucketRow | None:
        """The bucket's row, or None."""
        ...

    async def buckets(self) -> tuple[BucketRow, ...]:
        """All buckets, by name."""
        ...

    async def delete_bucket(self, name: str) -> None:
        """Remove an empty bucket. `NoSuchBucketError`; `BucketNotEmptyError` while it holds a live object or an upload."""
        ...

    async def bucket_usage(self, name: str) -> BucketUsage:
        """Objects and bytes of a bucket, kept by the commits themselves. `NoSuchBucketError`."""
        ...

    # -- objects -------------------------------------------------------------------------------------------------
    async def lookup(self, bucket: str, keys: Sequence[str]) -> list[ObjectRow | None]:
        """The live row of each key, all from one snapshot, or None. At most 65,536 keys."""
        ...

    async def commit(
        self,
        row: ObjectRow,
        *,
        mode: CommitMode,
        condition: WriteCondition | None = None,
        upload_id: str | None = None,
        now_ms: int,
    ) -> CommitOutcome:
        """Make an object visible, whole, in one step; `row.sequence` is assigned here.

        REPLACE: a live row under the key goes, its blobs are queued (due at `now_ms`). FIRST_WRITER_WINS: a live row of
        the same size stays and the given blobs are queued; of another size: `ImmutableChunkError`. With
        `upload_id`, the upload and all its parts are consumed in the same step; blobs of parts that the row does not
        name are queued. Given blobs are queued on every refusal too: the caller never cleans up after a commit.
        Errors: `NoSuchBucketError`, `NoSuchUploadError`, `PreconditionFailedError`, `NoSuchKeyError` (If-Match on an
        absent key), `ImmutableChunkError`, `FencedError`. Where the row exists and the condition is If-None-Match `*`
        the answer is `PreconditionFailedError` in both modes. A refused commit leaves its upload in place.
        """
        ...

    async def delete(
        self, bucket: str, keys: Sequence[str], *, conditions: Sequence[WriteCondition | None] = (), now_ms: int
    ) -> list[DeleteOutcome]:
        """Hide the keys at once and queue their blobs, in one step. Absent is fine. At most 1,000 keys.
        `NoSuchBucketError`. Durable before it returns wherever a hidden row was durable."""
        ...

    async def list_objects(
        self, bucket: str, *, key_prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> ListPage:
        """One page of live rows in key order, strictly after `after`. With a delimiter, keys that share a part up to it
        (past `key_prefix`) are one common prefix, found by a seek and never by a scan; `after` equal to a common prefix
        skips all of it. `NoSuchBucketError`."""
        ...

    async def raise_durability(self, rows: Sequence[ObjectRow]) -> list[bool]:
        """Write-behind reached a better class: store each given row (with its new `durability` and digests) if the live
        row still names the same blobs, keeping its sequence. Durable before it returns. False: the row was gone or replaced."""
        ...

    async def drop_rows(self, rows: Sequence[ObjectRow]) -> None:
        """Forget live rows whose bytes are lost (a start after power loss, a failed repair) and queue their blobs. Rows
        that name other blobs by now stay."""
        ...

    def scan_objects(self, *, volatile_only: bool = False) -> AsyncIterator[ObjectRow]:
        """Every live row, in (bucket, key) order, read page by page (no snapshot is held across pages). `volatile_only`:
        just the rows of class `memory` that have not been written down."""
        ...

    # -- multipart uploads ---------------------------------------------------------------------------------------
    async def create_upload(self, upload: UploadRow) -> None:
        """Record an upload. `NoSuchBucketError`."""
        ...

    async def upload(self, bucket: str, key: str, upload_id: str) -> UploadRow | None:
        """The upload's row, or None."""
        ...

    async def put_part(self, bucket: str, key: str, part: PartRow, *, now_ms: int) -> None:
        """Record a part, replacing one of the same number (its blobs are queued). `NoSuchUploadError` (the given blobs are
        queued then)."""
        ...

    async def parts(self, bucket: str, key: str, upload_id: str) -> tuple[PartRow, ...]:
        """All parts of an upload by number (at most 10,000). `NoSuchUploadError`."""
        ...

    async def abort_upload(self, bucket: str, key: str, upload_id: str, *, now_ms: int) -> None:
        """Forget an upload and queue the blobs of its parts. `NoSuchUploadError`."""
        ...

    async def list_uploads(
        self,
        bucket: str,
        *,
        key_prefix: str = "",
        delimiter: str = "",
        after: tuple[str, str] = ("", ""),
        limit: int = 1000,
    ) -> UploadPage:
        """One page of uploads in (key, upload id) order, strictly after `after`. `NoSuchBucketError`."""
        ...

    def scan_parts(self) -> AsyncIterator[PartRow]:
        """Every part of every upload in progress (reconcile needs the blobs they name)."""
        ...

    def scan_named_blobs(self) -> AsyncIterator[bytes]:
        """Every blob id that something names: a row (an older durable one behind a row of class `memory` too), a part, a
        queue entry. What a tier holds and this does not give is a leftover. Read page by page; repeats are possible."""
        ...

    # -- the delete queue ----------------------------------------------------------------------------------------
    async def queue_blobs(self, blob_ids: Sequence[bytes], *, now_ms: int) -> None:
        """Queue blobs that no row names: leftovers that a sweep found."""
        ...

    async def due(self, *, now_ms: int, limit: int = 1000) -> list[QueueEntry]:
        """Entries whose `not_before_ms` has passed, oldest first."""
        ...

    async def reap(self, entries: Sequence[QueueEntry]) -> None:
        """Forget entries whose blobs are deleted from every tier. Idempotent."""
        ...

    async def aclose(self) -> None:
        """Finish what was accepted and close. Idempotent."""
        ...
