"""What a request can ask for, as values: one class an operation, made by `routing.py`, answered by one handler.

Sources: Amazon S3 API reference, one page an operation; for those of `KvOperation` docs/kv-api.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ListBuckets:
    """GET /. Names behind `after` that begin with `prefix`, of one `region` ("": any), at most `limit` of them (None: all)."""

    prefix: str = ""
    after: str = ""
    region: str = ""
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class BucketOperation:
    """An operation on a bucket that has no further parameters; the subclasses say which."""

    bucket: str


class CreateBucket(BucketOperation):
    """PUT /bucket."""


class HeadBucket(BucketOperation):
    """HEAD /bucket."""


class DeleteBucket(BucketOperation):
    """DELETE /bucket."""


class GetBucketLocation(BucketOperation):
    """GET /bucket?location."""


class GetBucketVersioning(BucketOperation):
    """GET /bucket?versioning."""


class GetBucketAcl(BucketOperation):
    """GET /bucket?acl."""


class PutBucketAcl(BucketOperation):
    """PUT /bucket?acl."""


class GetBucketPolicy(BucketOperation):
    """GET /bucket?policy."""


class PutBucketPolicy(BucketOperation):
    """PUT /bucket?policy."""


class DeleteBucketPolicy(BucketOperation):
    """DELETE /bucket?policy."""


class GetBucketPolicyStatus(BucketOperation):
    """GET /bucket?policyStatus."""


class GetBucketTagging(BucketOperation):
    """GET /bucket?tagging."""


class PutBucketTagging(BucketOperation):
    """PUT /bucket?tagging."""


class DeleteBucketTagging(BucketOperation):
    """DELETE /bucket?tagging."""


class GetBucketLifecycle(BucketOperation):
    """GET /bucket?lifecycle."""


class PutBucketLifecycle(BucketOperation):
    """PUT /bucket?lifecycle."""


class DeleteBucketLifecycle(BucketOperation):
    """DELETE /bucket?lifecycle."""


class GetBucketCors(BucketOperation):
    """GET /bucket?cors."""


class PutBucketCors(BucketOperation):
    """PUT /bucket?cors."""


class DeleteBucketCors(BucketOperation):
    """DELETE /bucket?cors."""


class DeleteObjects(BucketOperation):
    """POST /bucket?delete."""


class KvOperation(BucketOperation):
    """A call of the KV API: only in KV buckets, with documents in JSON or msgpack, errors among them."""


class MatchChunks(KvOperation):
    """POST /bucket?match."""


class PinChunks(KvOperation):
    """POST /bucket?pins."""


class OpenSession(KvOperation):
    """POST /bucket?sessions."""


class GetChunks(KvOperation):
    """POST /bucket?mget."""


class PutChunks(KvOperation):
    """POST /bucket?mput."""


class OpenSameHost(KvOperation):
    """POST /bucket?same-host."""


@dataclass(frozen=True, slots=True)
class RenewSameHost(KvOperation):
    """POST /bucket?same-host=ID."""

    grant_id: bytes


@dataclass(frozen=True, slots=True)
class SessionOperation(KvOperation):
    """An operation on a session; the subclasses say which."""

    session_id: bytes


class RenewSession(SessionOperation):
    """PUT /bucket?sessions=ID."""


class CloseSession(SessionOperation):
    """DELETE /bucket?sessions=ID."""


@dataclass(frozen=True, slots=True)
class NamespaceOperation(KvOperation):
    """An operation on a namespace; the subclasses say which."""

    name: str


class DeclareNamespace(NamespaceOperation):
    """PUT /bucket?namespace=NAME."""


class GetNamespace(NamespaceOperation):
    """GET /bucket?namespace=NAME."""


class RemoveNamespace(NamespaceOperation):
    """DELETE /bucket?namespace=NAME."""


@dataclass(frozen=True, slots=True)
class ListNamespaces(KvOperation):
    """GET /bucket?namespaces. `limit` is what was asked, cut to 1,000."""

    after: str
    limit: int


@dataclass(frozen=True, slots=True)
class ReadEvents(KvOperation):
    """GET /bucket?events. `after`: the last number that the reader knows, None: whatever is kept. `follow`: go on for ever."""

    after: int | None
    follow: bool


@dataclass(frozen=True, slots=True)
class Listing:
    """What all listings share. `limit` is what was asked, cut to 1,000; `encode` is encoding-type=url."""

    bucket: str
    key_prefix: str
    delimiter: str
    limit: int
    encode: bool


@dataclass(frozen=True, slots=True)
class ListObjectsV1(Listing):
    """GET /bucket."""

    marker: str


@dataclass(frozen=True, slots=True)
class ListObjectsV2(Listing):
    """GET /bucket?list-type=2. `token` is what the client sent, `after` the key it or start-after stands for."""

    start_after: str
    token: str | None
    after: str
    fetch_owner: bool


@dataclass(frozen=True, slots=True)
class ListObjectVersions(Listing):
    """GET /bucket?versions."""

    key_marker: str
    version_id_marker: str


@dataclass(frozen=True, slots=True)
class ListMultipartUploads(Listing):
    """GET /bucket?uploads."""

    key_marker: str
    upload_id_marker: str


@dataclass(frozen=True, slots=True)
class ObjectOperation:
    """An operation on an object that has no further parameters; the subclasses say which."""

    bucket: str
    key: str


@dataclass(frozen=True, slots=True)
class GetObject(ObjectOperation):
    """GET or HEAD /bucket/key. Of a chunk `layers` is a range of layers, both ends in it, and `part` one of its parts, from 0;
    `follow`: also while it is still being uploaded."""

    part_number: int | None = None
    layers: tuple[int, int] | None = None
    part: int | None = None
    follow: bool = False


class PutObject(ObjectOperation):
    """PUT /bucket/key."""


class DeleteObject(ObjectOperation):
    """DELETE /bucket/key."""


class Preflight(ObjectOperation):
    """OPTIONS /bucket or /bucket/key: may a page of another origin send a request? `bucket` and `key` may be ""."""


class GetObjectAcl(ObjectOperation):
    """GET /bucket/key?acl."""


class PutObjectAcl(ObjectOperation):
    """PUT /bucket/key?acl."""


class GetObjectTagging(ObjectOperation):
    """GET /bucket/key?tagging."""


class PutObjectTagging(ObjectOperation):
    """PUT /bucket/key?tagging."""


class DeleteObjectTagging(ObjectOperation):
    """DELETE /bucket/key?tagging."""


class GetObjectAttributes(ObjectOperation):
    """GET /bucket/key?attributes. Headers name which ones, and the page of parts."""


class CreateMultipartUpload(ObjectOperation):
    """POST /bucket/key?uploads."""


@dataclass(frozen=True, slots=True)
class CopyObject(ObjectOperation):
    """PUT /bucket/key with x-amz-copy-source."""

    source_bucket: str
    source_key: str


@dataclass(frozen=True, slots=True)
class UploadOperation(ObjectOperation):
    """An operation on a multipart upload; the subclasses say which."""

    upload_id: str


class CompleteMultipartUpload(UploadOperation):
    """POST /bucket/key?uploadId=ID."""


class AbortMultipartUpload(UploadOperation):
    """DELETE /bucket/key?uploadId=ID."""


@dataclass(frozen=True, slots=True)
class ListParts(UploadOperation):
    """GET /bucket/key?uploadId=ID."""

    after: int
    limit: int


@dataclass(frozen=True, slots=True)
class UploadPart(UploadOperation):
    """PUT /bucket/key?partNumber=N&uploadId=ID."""

    number: int


@dataclass(frozen=True, slots=True)
class UploadPartCopy(UploadPart):
    """UploadPart with x-amz-copy-source."""

    source_bucket: str
    source_key: str


Operation = ListBuckets | BucketOperation | Listing | ObjectOperation
