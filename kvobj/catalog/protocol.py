"""The catalog: the one record of which objects exist, which blobs they need, and which blobs await deletion.

Verbs are async and take batches of values; each is one atomic step, so that it is one LMDB transaction here and
one round trip to an SQL server elsewhere. No transaction object crosses this line. A verb that returns has
happened with the durability of the rows it was given (`local`: synced; `memory`: survives the process); a verb that is
cancelled has either happened or not. Errors: the typed ones named below, and `UnavailableError` when the catalog cannot
be reached. All drivers pass `tests/contract/catalog_contract.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from kvobj.catalog.history_protocol import History
from kvobj.catalog.lease_protocol import Leases
from kvobj.catalog.namespace_protocol import Namespaces
from kvobj.catalog.remote_protocol import Outbox, RemoteQueue
from kvobj.catalog.rows import (
    BucketRow,
    BucketUsage,
    ChunkName,
    Claimed,
    CommitMode,
    CommitOutcome,
    DeleteOutcome,
    ListPage,
    NamespaceQuota,
    ObjectRow,
    PartRow,
    QueueEntry,
    RecallPage,
    UploadPage,
    UploadRow,
    UserRow,
    WriteCondition,
)
from kvobj.catalog.setting_rows import BucketUpdate, ObjectUpdate
from kvobj.catalog.unfinished import UnfinishedBytes
from kvobj.database import WriteView
from kvobj.errors import KvobjError


class Catalog(Protocol):
    """See the module's text. `bucket` arguments are names, `key` arguments S3 keys of at most 1,024 bytes of UTF-8.

    `now_ms` is wall time and only ever recorded; `now_boot_ms` (`clock.boot_ms`) is the clock of leases and grace.
    """

    @property
    def leases(self) -> Leases:
        """Sessions, pins and match, in the same transactions."""
        ...

    @property
    def namespaces(self) -> Namespaces:
        """Declared namespaces of KV buckets."""
        ...

    @property
    def history(self) -> History:
        """What was stored and removed, in order, for a while."""
        ...

    @property
    def unfinished(self) -> UnfinishedBytes:
        """What uploads in progress hold, of each user. In a worker process nobody asks for it: uploads are the store process's."""
        ...

    @property
    def outbox(self) -> Outbox:
        """Changes of users, buckets, namespaces and rows of class SHARED, to be told to the remote; empty where there is none."""
        ...

    @property
    def remote_queue(self) -> RemoteQueue:
        """Rows that are to go to the remote; empty where there is none."""
        ...

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
        """Create a bucket. `BucketExistsError` (with `existing=BucketRow`) if the name is taken. Its `created_ms` is raised where
        that is needed to lie above those of all buckets that were ever removed here, whatever clocks, restarts and rebuilds did in
        between: so the time tells it from every other that had its name (`made_ms` of `commit`)."""
        ...

    async def bucket(self, name: str) -> BucketRow | None:
        """The bucket's row, or None."""
        ...

    async def buckets(self) -> tuple[BucketRow, ...]:
        """All buckets, by name."""
        ...

    async def update_bucket(self, name: str, update: BucketUpdate, *, made_ms: int | None = None) -> BucketRow:
        """Change what the update names, in one durable step, and return the new row. `NoSuchBucketError` (`made_ms` as of
        `commit`). Who asks for the bucket after this has returned sees the change."""
        ...

    async def delete_bucket(self, name: str, *, made_ms: int | None = None) -> None:
        """Remove an empty bucket. `NoSuchBucketError` (`made_ms` as of `commit`); `BucketNotEmptyError` while it holds a live
        object. Uploads in progress end with the bucket, chunks of which not all parts came among them, up to 1,000 with 10,000
        parts; with more it is not empty."""
        ...

    async def bucket_usage(self, name: str) -> BucketUsage:
        """Objects and bytes of a bucket, kept by the commits themselves. `NoSuchBucketError`."""
        ...

    # -- objects -------------------------------------------------------------------------------------------------
    async def lookup(self, bucket: str, keys: Sequence[str], *, rescue: bool = False) -> list[ObjectRow | None]:
        """The live row of each key, all from one snapshot, or None. At most 65,536 keys.

        `rescue`: somebody asks for the objects, so those that policy has condemned are live again. A row that is being
        claimed is absent already.
        """
        ...

    async def lookup_hidden(self, bucket: str, key: str) -> ObjectRow | None:
        """The CONDEMNED row of a key, which only a pin's holder may read, or None."""
        ...

    async def commit(
        self,
        row: ObjectRow,
        *,
        mode: CommitMode,
        condition: WriteCondition | None = None,
        upload_id: str | None = None,
        quota: NamespaceQuota | None = None,
        parent_tokens: int = 0,
        made_ms: int | None = None,
        namespace_root: bytes = b"",
        now_ms: int,
        to_remote: bool = False,
    ) -> CommitOutcome:
        """Make an object visible, whole, in one step; `row.sequence` is assigned here, and so are a chunk's depth and totals.

        A row with a parent needs it live, and of the same namespace, in the same step (`ParentNotFoundError`), and of at least
        `parent_tokens` tokens (`LayoutMismatchError`: `parent`); a parent that policy has condemned is rescued.
        A CONDEMNED row under the key is replaced, its blobs are queued. `quota` is checked against the usage of `row.namespace`
        (`QuotaExceededError`). `made_ms`: when the bucket was made that the writer was let into; another that has its name by now
        is none of the writer's (`NoSuchBucketError`). `namespace_root`: that of the namespace that the writer was let into, if it
        is a declared one; another that is declared under its name by now, or none, takes nothing (`NoSuchNamespaceError`).

        REPLACE: a live row under the key goes, its blobs are queued (due at `now_ms`). FIRST_WRITER_WINS: a live row of
        the same size stays and the given blobs are queued; of another size: `ImmutableChunkError`. One with a lossy copy goes all
        the same where the given row is that chunk again, of its namespace, parent and tokens: its bytes need not be anywhere. With
        `upload_id`, the upload and all its parts are consumed in the same step; blobs of parts that the row does not
        name are queued. Given blobs are queued on every refusal too: the caller never cleans up after a commit.
        Errors: `NoSuchBucketError`, `NoSuchUploadError`, `PreconditionFailedError`, `NoSuchKeyError` (If-Match on an
        absent key), `ImmutableChunkError`, `FencedError`. Where the row exists and the condition is If-None-Match `*`
        the answer is `PreconditionFailedError` in both modes. A refused commit leaves its upload in place.

        Where there is a remote, a LOCAL row that is stored goes into the remote queue in the same step if `to_remote`, or if its
        bucket's rule (`always`) or default class (`shared`) says so.
        """
        ...

    def commit_at_once(
        self,
        row: ObjectRow,
        *,
        mode: CommitMode,
        condition: WriteCondition | None = None,
        quota: NamespaceQuota | None = None,
        parent_tokens: int = 0,
        made_ms: int | None = None,
        namespace_root: bytes = b"",
        now_ms: int,
        beside: Callable[[WriteView], None],
    ) -> CommitOutcome | None:
        """`commit` of a row of class `memory` before this returns, in one step with `beside`, which changes other tables of the
        same database. None, and nothing was done: something has to be waited for, `commit` would refuse the row, a live one stands
        (which only `CommitMode.REPLACE` replaces here: no chunk's bytes change), there is no room, or this catalog has no such
        database."""
        ...

    async def commit_chain(
        self,
        rows: Sequence[ObjectRow],
        *,
        quota: NamespaceQuota | None = None,
        parent_tokens: int = 0,
        made_ms: int | None = None,
        namespace_root: bytes = b"",
        now_ms: int,
        to_remote: bool = False,
    ) -> list[CommitOutcome | KvobjError]:
        """Commit chunks of one bucket in one step, first writer wins, each with its parent live or earlier in the list.

        One outcome a row, in order: where one is refused, those that need it are refused with `ParentNotFoundError`, the others
        stand. At most 1,000 rows.
        """
        ...

    async def delete(
        self,
        bucket: str,
        keys: Sequence[str],
        *,
        conditions: Sequence[WriteCondition | None] = (),
        made_ms: int | None = None,
        now_ms: int,
    ) -> list[DeleteOutcome]:
        """Hide the keys at once and queue their blobs, in one step. Absent is fine. At most 1,000 keys.
        `NoSuchBucketError` (`made_ms` as of `commit`: of each step). Durable before it returns wherever a hidden row was durable.

        Descendants of a key are hidden with it, or, where they are more than one step takes, before it: no step leaves a hole.
        What a pin holds, and every ancestor of it that is hidden here, stays as a CONDEMNED row.
        """
        ...

    # -- gc of chunks --------------------------------------------------------------------------------------------
    async def condemn(self, chunks: Sequence[ChunkName], *, not_before_boot_ms: int) -> list[bool]:
        """Mark live chunks for removal at policy's wish; at most 1,000, children before parents.

        True where it was done: the row is live under this blob id, unpinned, every child is marked too, and it is not quiet time.
        Marks do not outlive the process, hide nothing, and go when a look-up rescues the row or a child is committed under it.
        """
        ...

    async def claim(self, *, now_boot_ms: int, limit: int = 1000, now_ms: int) -> Claimed:
        """Remove up to `limit` rows that nothing holds: marked ones whose time has come, and CONDEMNED ones; leaf first.

        Pins and children are checked again in the same step; a marked row that fails the check loses its mark. Nothing in
        quiet time. The blobs are queued: from here on their removal is certain.
        """
        ...

    def condemned(self) -> tuple[int, int]:
        """How many rows are marked, and how many are CONDEMNED and wait for pins."""
        ...

    async def recall(
        self,
        bucket: str,
        *,
        namespace: str | None = None,
        writer: str | None = None,
        from_ms: int | None = None,
        to_ms: int | None = None,
        after: str = "",
        limit: int = 4000,
        made_ms: int | None = None,
        namespace_root: bytes = b"",
        now_ms: int,
    ) -> RecallPage:
        """Hide every chunk that all given conditions fit (`modified_ms` in [from_ms, to_ms)), with all descendants, as DELETE
        does; one bounded step in key order after `after`, which hides about `limit` rows. `NoSuchBucketError` (`made_ms` as of
        `commit`); `NoSuchNamespaceError` where `namespace` is by now another than that of `namespace_root`: from then on nothing
        is hidden, also of the same page. A page of which a part was hidden by then tells of that part, and the call that goes on
        from it is refused."""
        ...

    async def drop_orphans(self, *, now_ms: int) -> int:
        """Remove durable chunks whose parent's row is gone, with their descendants: a start does so after power loss, before
        anything is served. How many went."""
        ...

    async def list_objects(
        self, bucket: str, *, key_prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> ListPage:
        """One page of live rows in key order, strictly after `after`. With a delimiter, keys that share a part up to it
        (past `key_prefix`) are one common prefix, found by a seek and never by a scan; `after` equal to a common prefix
        skips all of it. `NoSuchBucketError`."""
        ...

    async def update_object(
        self, bucket: str, key: str, update: ObjectUpdate, *, sequence: int | None = None
    ) -> ObjectRow | None:
        """Change what the update names of the live row, in one step as durable as the row, and return the new one; None: there is
        none, or (`sequence`) not the one that was read. Its sequence stays, and so do its blobs. `NoSuchBucketError`."""
        ...

    async def raise_durability(self, rows: Sequence[ObjectRow]) -> list[bool]:
        """Write-behind reached a better class: store each given row (with its new `durability` and digests) if the live
        row still names the same blobs, keeping its sequence. Durable before it returns. False: the row was gone or replaced.

        To LOCAL: where there is a remote, a row whose bucket's rule or default class says so goes into the remote queue in the same
        step. To SHARED: the row is published and its queue entry goes, in the same step; False also where its lossy copy is
        another by now, so that what the remote has is not what the row names. A SHARED row stays SHARED, and what it names
        stays too: False where a given row has another lossy copy.
        """
        ...

    async def drop_rows(self, rows: Sequence[ObjectRow], *, now_ms: int = 0) -> None:
        """Forget live rows whose bytes are lost (a start after power loss, a failed repair), with all their descendants, and queue
        their blobs, due at once. Rows that name other blobs by now stay. Descendants that a pin holds stay as CONDEMNED rows, and
        what is above them does. `now_ms` is told to readers of events."""
        ...

    def scan_objects(self, *, volatile_only: bool = False, with_hidden: bool = False) -> AsyncIterator[ObjectRow]:
        """Every live row, in (bucket, key) order, read page by page (no snapshot is held across pages). `volatile_only`:
        just the rows of class `memory` that have not been written down. `with_hidden`: CONDEMNED rows too."""
        ...

    # -- multipart uploads ---------------------------------------------------------------------------------------
    async def create_upload(self, upload: UploadRow, *, made_ms: int | None = None, limit: int | None = None) -> None:
        """Record an upload; one of `group_parts` that is there already stands. `NoSuchBucketError` (`made_ms` as of `commit`);
        `NoSuchNamespaceError` where its namespace is another than that of its `namespace_root`;
        `QuotaExceededError` where its owner's parts may hold no more (`unfinished`); `TooManyUploadsError` where its bucket has
        `limit` in progress, those of `group_parts` not counted, or as many as are being begun."""
        ...

    async def upload(self, bucket: str, key: str, upload_id: str) -> UploadRow | None:
        """The upload's row, or None."""
        ...

    async def put_part(
        self,
        bucket: str,
        key: str,
        part: PartRow,
        *,
        made_ms: int | None = None,
        namespace_root: bytes = b"",
        now_ms: int,
    ) -> PartRow:
        """Record a part, replacing one of the same number (its blobs are queued), and return it. In an upload of `group_parts` the
        first part of a number stands and is returned, the given blobs are queued. `NoSuchUploadError`, also where the upload is one
        of another namespace than that of `namespace_root`; `NoSuchNamespaceError` where none of that root stands any more, and
        `NoSuchBucketError` where the bucket is another than that of `made_ms` (`commit`); the given blobs are queued then too."""
        ...

    async def parts(self, bucket: str, key: str, upload_id: str) -> tuple[PartRow, ...]:
        """All parts of an upload by number (at most 10,000). `NoSuchUploadError`."""
        ...

    async def abort_upload(
        self,
        bucket: str,
        key: str,
        upload_id: str,
        *,
        made_ms: int | None = None,
        namespace_root: bytes = b"",
        if_empty: bool = False,
        now_ms: int,
    ) -> None:
        """Forget an upload and queue the blobs of its parts; `if_empty`: one that has a part stays. `NoSuchUploadError`, also where
        the bucket is another than that of `made_ms` (`commit`), or the upload, whose id may be another's by now, is none of the
        namespace of `namespace_root`."""
        ...

    async def list_uploads(
        self,
        bucket: str,
        *,
        key_prefix: str = "",
        delimiter: str = "",
        after: tuple[str, str] = ("", ""),
        limit: int = 1000,
        groups: bool = False,
    ) -> UploadPage:
        """One page of uploads in (key, upload id) order, strictly after `after`; those of chunks in parts (`group_parts`) only
        with `groups`. `NoSuchBucketError`."""
        ...

    def scan_parts(self) -> AsyncIterator[PartRow]:
        """Every part of every upload in progress (reconcile needs the blobs they name)."""
        ...

    def scan_named_blobs(self) -> AsyncIterator[bytes]:
        """Every blob id that something names: a row (an older durable one behind a row of class `memory` too), a part, a
        queue entry. What a tier holds and this does not give is a leftover. Read page by page; repeats are possible."""
        ...

    # -- the delete queue ----------------------------------------------------------------------------------------
    async def queue_blobs(self, blob_ids: Sequence[bytes], *, now_ms: int, pinned_by: bytes = b"") -> None:
        """Queue blobs that no row names: leftovers that a sweep found. What a pin names (it was replaced) waits for the pin.
        `pinned_by`: the blob that a pin of all of them names, the first of the row that they were of; b"": each by itself."""
        ...

    async def due(self, *, now_ms: int, limit: int = 1000, after: int = 0) -> list[QueueEntry]:
        """Entries behind the position `after` whose `not_before_ms` has passed and whose blob nobody pins, oldest first. Those of
        one position come together, so there may be up to 100 more than `limit`."""
        ...

    async def reap(self, entries: Sequence[QueueEntry]) -> None:
        """Forget entries whose blobs are deleted from every tier, in any portions. Idempotent."""
        ...

    async def aclose(self) -> None:
        """Finish what was accepted and close. Idempotent."""
        ...
