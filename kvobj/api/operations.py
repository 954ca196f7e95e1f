"""What a request can ask for, as values: one class an operation, made by `routing.py`, answered by one handler.

They are structs of msgspec, which are made in a quarter of the time that frozen dataclasses take.
Sources: Amazon S3 API reference, one page an operation; for those of `KvOperation` docs/kv-api.md.
"""

from __future__ import annotations

import msgspec


class ListBuckets(msgspec.Struct, frozen=True):
    """GET /. Names behind `after` that begin with `prefix`, of one `region` ("": any), at most `limit` of them (None: all)."""

    prefix: str = ""
    after: str = ""
    region: str = ""
    limit: int | None = None


class BucketOperation(msgspec.Struct, frozen=True):
    """An operation on a bucket that has no further parameters; the subclasses say which."""

    bucket: str


class CreateBucket(BucketOperation, frozen=True):
    """PUT /bucket."""


class HeadBucket(BucketOperation, frozen=True):
    """HEAD /bucket."""


class DeleteBucket(BucketOperation, frozen=True):
    """DELETE /bucket."""


class GetBucketLocation(BucketOperation, frozen=True):
    """GET /bucket?location."""


class GetBucketVersioning(BucketOperation, frozen=True):
    """GET /bucket?versioning."""


class GetBucketAcl(BucketOperation, frozen=True):
    """GET /bucket?acl."""


class PutBucketAcl(BucketOperation, frozen=True):
    """PUT /bucket?acl."""


class GetBucketPolicy(BucketOperation, frozen=True):
    """GET /bucket?policy."""


class PutBucketPolicy(BucketOperation, frozen=True):
    """PUT /bucket?policy."""


class DeleteBucketPolicy(BucketOperation, frozen=True):
    """DELETE /bucket?policy."""


class GetBucketPolicyStatus(BucketOperation, frozen=True):
    """GET /bucket?policyStatus."""


class GetBucketTagging(BucketOperation, frozen=True):
    """GET /bucket?tagging."""


class PutBucketTagging(BucketOperation, frozen=True):
    """PUT /bucket?tagging."""


class DeleteBucketTagging(BucketOperation, frozen=True):
    """DELETE /bucket?tagging."""


class GetBucketLifecycle(BucketOperation, frozen=True):
    """GET /bucket?lifecycle."""


class PutBucketLifecycle(BucketOperation, frozen=True):
    """PUT /bucket?lifecycle."""


class DeleteBucketLifecycle(BucketOperation, frozen=True):
    """DELETE /bucket?lifecycle."""


class GetBucketCors(BucketOperation, frozen=True):
    """GET /bucket?cors."""


class PutBucketCors(BucketOperation, frozen=True):
    """PUT /bucket?cors."""


class DeleteBucketCors(BucketOperation, frozen=True):
    """DELETE /bucket?cors."""


class DeleteObjects(BucketOperation, frozen=True):
    """POST /bucket?delete."""


class KvOperation(BucketOperation, frozen=True):
    """A call of the KV API: only in KV buckets, with documents in JSON or msgpack, errors among them."""


class MatchChunks(KvOperation, frozen=True):
    """POST /bucket?match."""


class PinChunks(KvOperation, frozen=True):
    """POST /bucket?pins."""


class OpenSession(KvOperation, frozen=True):
    """POST /bucket?sessions."""


class GetChunks(KvOperation, frozen=True):
    """POST /bucket?mget."""


class PutChunks(KvOperation, frozen=True):
    """POST /bucket?mput."""


class OpenSameHost(KvOperation, frozen=True):
    """POST /bucket?same-host."""


class RenewSameHost(KvOperation, frozen=True):
    """POST /bucket?same-host=ID."""

    grant_id: bytes


class SessionOperation(KvOperation, frozen=True):
    """An operation on a session; the subclasses say which."""

    session_id: bytes


class RenewSession(SessionOperation, frozen=True):
    """PUT /bucket?sessions=ID."""


class CloseSession(SessionOperation, frozen=True):
    """DELETE /bucket?sessions=ID."""


class NamespaceOperation(KvOperation, frozen=True):
    """An operation on a namespace; the subclasses say which."""

    name: str


class DeclareNamespace(NamespaceOperation, frozen=True):
    """PUT /bucket?namespace=NAME."""


class GetNamespace(NamespaceOperation, frozen=True):
    """GET /bucket?namespace=NAME."""


class RemoveNamespace(NamespaceOperation, frozen=True):
    """DELETE /bucket?namespace=NAME."""


class ListNamespaces(KvOperation, frozen=True):
    """GET /bucket?namespaces. `limit` is what was asked, cut to 1,000."""

    after: str
    limit: int


class ReadEvents(KvOperation, frozen=True):
    """GET /bucket?events. `after`: the last number that the reader knows, None: whatever is kept. `follow`: go on for ever."""

    after: int | None
    follow: bool


class Listing(msgspec.Struct, frozen=True):
    """What all listings share. `limit` is what was asked, cut to 1,000; `encode` is encoding-type=url."""

    bucket: str
    key_prefix: str
    delimiter: str
    limit: int
    encode: bool


class ListObjectsV1(Listing, frozen=True):
    """GET /bucket."""

    marker: str


class ListObjectsV2(Listing, frozen=True):
    """GET /bucket?list-type=2. `token` is what the client sent, `after` the key it or start-after stands for."""

    start_after: str
    token: str | None
    after: str
    fetch_owner: bool


class ListObjectVersions(Listing, frozen=True):
    """GET /bucket?versions."""

    key_marker: str
    version_id_marker: str


class ListMultipartUploads(Listing, frozen=True):
    """GET /bucket?uploads."""

    key_marker: str
    upload_id_marker: str


class ObjectOperation(msgspec.Struct, frozen=True):
    """An operation on an object that has no further parameters; the subclasses say which."""

    bucket: str
    key: str


class GetObject(ObjectOperation, frozen=True):
    """GET or HEAD /bucket/key. Of a chunk `layers` is a range of layers, both ends in it, and `part` one of its parts, from 0;
    `follow`: also while it is still being uploaded."""

    part_number: int | None = None
    layers: tuple[int, int] | None = None
    part: int | None = None
    follow: bool = False

    @property
    def is_whole(self) -> bool:
        """The query names nothing less than the object."""
        return self.layers is None and self.part is None and self.part_number is None


class PutObject(ObjectOperation, frozen=True):
    """PUT /bucket/key."""


class DeleteObject(ObjectOperation, frozen=True):
    """DELETE /bucket/key."""


class Preflight(ObjectOperation, frozen=True):
    """OPTIONS /bucket or /bucket/key: may a page of another origin send a request? `bucket` and `key` may be ""."""


class GetObjectAcl(ObjectOperation, frozen=True):
    """GET /bucket/key?acl."""


class PutObjectAcl(ObjectOperation, frozen=True):
    """PUT /bucket/key?acl."""


class GetObjectTagging(ObjectOperation, frozen=True):
    """GET /bucket/key?tagging."""


class PutObjectTagging(ObjectOperation, frozen=True):
    """PUT /bucket/key?tagging."""


class DeleteObjectTagging(ObjectOperation, frozen=True):
    """DELETE /bucket/key?tagging."""


class GetObjectAttributes(ObjectOperation, frozen=True):
    """GET /bucket/key?attributes. Headers name which ones, and the page of parts."""


class CreateMultipartUpload(ObjectOperation, frozen=True):
    """POST /bucket/key?uploads."""


class CopyObject(ObjectOperation, frozen=True):
    """PUT /bucket/key with x-amz-copy-source."""

    source_bucket: str
    source_key: str


class UploadOperation(ObjectOperation, frozen=True):
    """An operation on a multipart upload; the subclasses say which."""

    upload_id: str


class CompleteMultipartUpload(UploadOperation, frozen=True):
    """POST /bucket/key?uploadId=ID."""


class AbortMultipartUpload(UploadOperation, frozen=True):
    """DELETE /bucket/key?uploadId=ID."""


class ListParts(UploadOperation, frozen=True):
    """GET /bucket/key?uploadId=ID."""

    after: int
    limit: int


class UploadPart(UploadOperation, frozen=True):
    """PUT /bucket/key?partNumber=N&uploadId=ID."""

    number: int


class UploadPartCopy(UploadPart, frozen=True):
    """UploadPart with x-amz-copy-source."""

    source_bucket: str
    source_key: str


Operation = ListBuckets | BucketOperation | Listing | ObjectOperation
