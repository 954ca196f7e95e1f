"""What a request can ask for, as values: one class an operation of S3, made by `routing.py`, answered by one handler.

Source: Amazon S3 API reference, one page an operation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ListBuckets:
    """GET /."""


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


class DeleteObjects(BucketOperation):
    """POST /bucket?delete."""


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
    """GET or HEAD /bucket/key."""

    part_number: int | None = None


class PutObject(ObjectOperation):
    """PUT /bucket/key."""


class DeleteObject(ObjectOperation):
    """DELETE /bucket/key."""


class GetObjectAcl(ObjectOperation):
    """GET /bucket/key?acl."""


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
