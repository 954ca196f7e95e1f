"""The values the catalog keeps: frozen, slotted, and encoded as msgpack arrays (append fields, never reorder).

A row is what a commit makes durable and what a lookup returns. Residency (which tier holds a blob) is not in
here: it would lie. `durability` is the class that was reached, which a start needs in order to know which
rows may have lost their bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from kvobj.catalog.setting_rows import CorsRule, Grant, LifecycleRule, RemoteRule

MAX_KEY_BYTES: Final = 1024
MAX_PARTS: Final = 10_000

DEFAULT_NAMESPACES: Final = frozenset({"", "default"})
"""Both name the namespace that every KV bucket has, where keys are the clients' own."""


def is_same_namespace(one: str, other: str) -> bool:
    """Whether two rows' namespaces are one."""
    return one == other or DEFAULT_NAMESPACES.issuperset((one, other))


class BucketKind(StrEnum):
    """`kv` buckets hold immutable chunks (first writer wins); in `ordinary` ones PUT replaces."""

    ORDINARY = "ordinary"
    KV = "kv"


class Durability(StrEnum):
    """What a PUT's acknowledgement survives: process death, power loss, loss of the node."""

    MEMORY = "memory"
    LOCAL = "local"
    SHARED = "shared"


class ObjectState(StrEnum):
    """States of `gc-protocol` §2.3 that a row can be seen in.

    Absent and uploading have no row; deleting is an entry of the delete queue. CONDEMNED is a row that DELETE or recall has
    hidden while a pin still protects it or something below it: it is invisible, never rescued, replaced by a PUT, and claimed
    once nothing holds it. What policy condemns stays LIVE and is only marked (`Catalog.condemn`): a look-up rescues it.
    """

    LIVE = "live"
    CONDEMNED = "condemned"


class _Row(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False):
    """Common encoding: arrays, so that a row costs its values and not its field names."""


class UserRow(_Row, frozen=True, array_like=True):
    """One user. `secret_key` is never logged. The root user may do everything, users and admin calls included."""

    id: str
    display_name: str
    access_key: str
    secret_key: str
    is_root: bool = False

    def __repr__(self) -> str:
        """Without the secret: a row may end up in a traceback."""
        return f"UserRow({self.id!r}, access_key={self.access_key!r}, is_root={self.is_root})"


class BucketRow(_Row, frozen=True, array_like=True):
    """One bucket and its defaults. `owner` is a user id. Names are S3 bucket names, unique in the store; of buckets that have one
    name after one another, no two have the same `created_ms` (`Catalog.create_bucket`).

    `acl` None: private, full control for the owner alone. `policy` is the document as it was put (b"": none), `tags`,
    `lifecycle` and `cors` are empty where nobody has set them. `Catalog.update_bucket` changes these five, and `remote`.
    """

    name: str
    kind: BucketKind
    owner: str
    created_ms: int
    durability: Durability
    codec: str = "raw"
    region: str = "us-east-1"
    acl: tuple[Grant, ...] | None = None
    policy: bytes = b""
    tags: dict[str, str] = {}
    lifecycle: tuple[LifecycleRule, ...] = ()
    cors: tuple[CorsRule, ...] = ()
    remote: RemoteRule = RemoteRule.NEVER

    def is_still(self, now: BucketRow | None) -> bool:
        """Whether `now`, what has this name by now, is the same bucket, and not one that was made anew."""
        return now is not None and now.created_ms == self.created_ms


class BlobRef(_Row, frozen=True, array_like=True, gc=False):
    """One blob of an object, in order. `digest` is BLAKE3 of the plain bytes, None while it is being computed.

    `frame_bytes` is the length of the blob's frame (header, directory, blocks) as `codec` laid it out;
    `codec` is the frame's codec name (`raw`, `zp`). Lossless copies in other tiers keep `plain_bytes`.
    """

    blob_id: bytes
    plain_bytes: int
    frame_bytes: int
    digest: bytes | None
    codec: str = "raw"


class LossyCopy(_Row, frozen=True, array_like=True, gc=False):
    """Another representation of a chunk, which does not give back the bytes that were put: a blob of its own, in the home tier.

    `frame_bytes` is its frame's length there, `codec` the codec's own name (`eq:83/1`), `digest` BLAKE3 of what it decodes to,
    which has `plain_bytes`; no value of it is further off than `max_error`. `profile`: the digest of the profile that decoding it
    takes, empty where it takes none.
    """

    blob_id: bytes
    plain_bytes: int
    frame_bytes: int
    digest: bytes
    codec: str
    max_error: float
    profile: bytes = b""


class Checksum(_Row, frozen=True, array_like=True):
    """An S3 additional checksum. `algorithm` is CRC32, CRC32C, CRC64NVME, SHA1 or SHA256; `value` is base64 as S3
    prints it (with `-N` for a composite of N parts); `type` is FULL_OBJECT or COMPOSITE."""

    algorithm: str
    value: str
    type: str = "FULL_OBJECT"


class PartInfo(_Row, frozen=True, array_like=True):
    """What is remembered of one part of a completed multipart upload, for partNumber reads and attributes."""

    number: int
    size_bytes: int
    checksum: Checksum | None = None


class ObjectRow(_Row, frozen=True, array_like=True, gc=False):
    """One object. Its bytes are the blobs in order; their plain sizes sum to `size_bytes`.

    `etag` has no quotes. `headers` are the stored standard headers by lower-case name (content-type,
    cache-control, content-disposition, content-encoding, content-language, expires); `metadata` the user
    metadata without the `x-amz-meta-` in front. `sequence` is the store-wide commit number, set by the
    catalog, ascending: of two rows for one key the higher is the newer. `digest` is BLAKE3 of all plain bytes, None
    while unknown (several blobs, or still being computed).
    """

    bucket: str
    key: str
    blobs: tuple[BlobRef, ...]
    size_bytes: int
    etag: str
    modified_ms: int
    owner: str
    durability: Durability
    headers: dict[str, str] = {}
    metadata: dict[str, str] = {}
    checksums: tuple[Checksum, ...] = ()
    parts: tuple[PartInfo, ...] = ()
    digest: bytes | None = None
    state: ObjectState = ObjectState.LIVE
    sequence: int = 0
    # A chunk's place in its chain. `parent`: the parent's key, "" for a first chunk (the namespace's root), None for a key
    # without a parent. The commit fills the rest: `depth` counts from 0 for a first chunk, `chain_sum` is the position-weighted
    # sum of `ids.chain_sums` (16 bytes; b"" without a parent), `chain_bytes` and `chain_tokens` are totals from the root to here.
    parent: str | None = None
    depth: int = 0
    chain_sum: bytes = b""
    namespace: str = ""
    tokens: int = 0
    chain_bytes: int = 0
    chain_tokens: int = 0
    # None: private, full control for `owner` alone. `Catalog.update_object` changes these two.
    acl: tuple[Grant, ...] | None = None
    tags: dict[str, str] = {}
    # What the home tier has in place of the blob where a namespace allows that: set by write-behind together with `durability`. The
    # blob itself is then in memory alone, for as long as it stays there.
    lossy: LossyCopy | None = None

    @property
    def blob_ids(self) -> list[bytes]:
        """All blobs that the row names: those of its bytes in order, then its lossy copy's."""
        if self.lossy is None and len(self.blobs) == 1:
            return [self.blobs[0].blob_id]  # nearly every row: a third of the time
        blob_ids = [blob.blob_id for blob in self.blobs]
        return blob_ids if self.lossy is None else [*blob_ids, self.lossy.blob_id]


class UploadRow(_Row, frozen=True, array_like=True):
    """One multipart upload in progress. Its identity is (bucket, key, upload_id)."""

    bucket: str
    key: str
    upload_id: str
    initiated_ms: int
    owner: str
    durability: Durability
    headers: dict[str, str] = {}
    metadata: dict[str, str] = {}
    checksum_algorithm: str | None = None
    checksum_type: str | None = None
    # A chunk that arrives in parts of several writers (`kv-api` §4) is an upload that completes itself: so many parts, 0 for an
    # upload of S3's. Such uploads are in no listing. The rest is its place in its chain, as in `ObjectRow`.
    group_parts: int = 0
    parent: str | None = None
    namespace: str = ""
    tokens: int = 0
    # What the object will have.
    acl: tuple[Grant, ...] | None = None
    tags: dict[str, str] = {}
    namespace_root: bytes = b""
    """That of `namespace` when the upload was begun: what is declared anew under its name is another. Empty: of no declared one.
    Older versions did not write it down; a start adds what it can know (`upload_changes.begun_unnamed`)."""


class PartRow(_Row, frozen=True, array_like=True):
    """One uploaded part; a part sent again under the same number replaces the earlier one."""

    upload_id: str
    number: int
    blobs: tuple[BlobRef, ...]
    size_bytes: int
    etag: str
    modified_ms: int
    checksum: Checksum | None = None

    @property
    def blob_ids(self) -> list[bytes]:
        """All blobs that the row names, in order."""
        return [blob.blob_id for blob in self.blobs]


class QueueEntry(_Row, frozen=True, array_like=True, gc=False):
    """A blob that no row names any more. Its tiers' copies may be deleted once `not_before_ms` has passed.

    `position` is the entry's place in the queue, set by the catalog; reap names it. `pinned`: the chunk was pinned when
    it was queued, so it waits until it is not, and through quiet time; `pinned_blob` is the blob that its pins name.
    `together`: so many blobs of durable rows, which nothing pinned, were queued under this position by one claim (0: this one
    alone), without bucket and key. In the LMDB catalog they are one entry, with their ids end to end (`queue_batches`); nobody
    else sees them so.
    """

    blob_id: bytes
    not_before_ms: int
    bucket: str
    key: str
    position: int = 0
    volatile: bool = False
    pinned: bool = False
    pinned_blob: bytes = b""
    together: int = 0


class WriteCondition(_Row, frozen=True, array_like=True):
    """Conditions checked in the commit's own transaction. Values are bare ETags or `*`, as S3 has them. `sequence`: the row that
    was read, and no newer one. `size_bytes` and `modified_seconds` are the live row's, of a DELETE that names them."""

    if_match: str | None = None
    if_none_match: str | None = None
    sequence: int | None = None
    size_bytes: int | None = None
    modified_seconds: int | None = None

    @property
    def compares(self) -> bool:
        """Whether its outcome tells something of a row that is there: its ETag, size or date."""
        return (
            self.if_match not in (None, "*")
            or self.if_none_match not in (None, "*")
            or self.size_bytes is not None
            or self.modified_seconds is not None
        )

    def describes(self, live: ObjectRow | None) -> bool:
        """Whether the live row is the very one, and of the size and date, that the condition names where it names them."""
        if self.sequence is not None and (live is None or live.sequence != self.sequence):
            return False
        if live is None:
            return True
        return (self.size_bytes is None or live.size_bytes == self.size_bytes) and (
            self.modified_seconds is None or live.modified_ms // 1000 == self.modified_seconds
        )


class CommitMode(StrEnum):
    """What a commit does about a live row under its key."""

    REPLACE = "replace"
    FIRST_WRITER_WINS = "first-writer-wins"


class CommitOutcome(_Row, frozen=True, array_like=True):
    """The row that is live after the commit. `existed`: an earlier writer's row stood and the given one was not taken
    (its blobs are queued for deletion in the same transaction)."""

    row: ObjectRow
    existed: bool


class DeleteOutcome(_Row, frozen=True, array_like=True):
    """One key's result: the row that was hidden, or None if there was none, and how many of its descendants went with it. `kept`
    says why an object stays that must not be deleted."""

    key: str
    removed: ObjectRow | None
    precondition_failed: bool = False
    descendants: tuple[ObjectRow, ...] = ()
    kept: str = ""


class ListPage(_Row, frozen=True, array_like=True):
    """One page in key order (bytes of UTF-8). `next_after` continues: pass it as `after`; None at the end.

    `common_prefixes` are the keys' leading parts up to and with the delimiter; a page holds at most `limit` of rows
    and common prefixes together.
    """

    rows: tuple[ObjectRow, ...]
    common_prefixes: tuple[str, ...]
    next_after: str | None


class UploadPage(_Row, frozen=True, array_like=True):
    """One page of uploads in (key, upload id) order; `next_after` is the last (key, upload id) when more follow."""

    rows: tuple[UploadRow, ...]
    common_prefixes: tuple[str, ...]
    next_after: tuple[str, str] | None


class BucketUsage(_Row, frozen=True, array_like=True):
    """Objects and plain bytes of one bucket, live rows only."""

    objects: int
    size_bytes: int


class ChunkName(_Row, frozen=True, array_like=True, gc=False):
    """One chunk as gc names it: a row under this key that names another first blob is another chunk."""

    bucket: str
    key: str
    blob_id: bytes


class Claimed(_Row, frozen=True, array_like=True):
    """What a claim removed: marked chunks, those of a bucket in the order of their marks, and then rows that had been hidden
    before. `size_bytes`: of all of them."""

    chunks: tuple[ChunkName, ...]
    hidden: tuple[ObjectRow, ...]
    size_bytes: int

    def __len__(self) -> int:
        return len(self.chunks) + len(self.hidden)


class NamespaceQuota(_Row, frozen=True, array_like=True):
    """What a namespace may hold; None: no bound."""

    chunks: int | None = None
    size_bytes: int | None = None


class RecallPage(_Row, frozen=True, array_like=True):
    """One step of a recall: rows hidden, and where to go on (None: done)."""

    recalled: tuple[ObjectRow, ...]
    next_after: str | None
