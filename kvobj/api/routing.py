"""From a request to its operation: parsed once, before any handler runs, so that handlers read no query string.

What is a known feature of S3 but not built is refused here by its name (501), what no operation has by its method (405).
Parameters that S3 ignores are ignored; but a write whose query names a sub-resource that nobody here knows is refused (501): it is
of a feature that came to S3 later, and would otherwise store over, or delete, the object or bucket itself. Sources: Amazon S3 API
reference; docs/kv-api.md for the calls of the KV API.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from kvobj.api.errors import S3Error
from kvobj.api.kv.routing import KV_CALLS, parse_kv_call
from kvobj.api.operations import (
    AbortMultipartUpload,
    CompleteMultipartUpload,
    CopyObject,
    CreateBucket,
    CreateMultipartUpload,
    DeleteBucket,
    DeleteObject,
    DeleteObjects,
    GetBucketLocation,
    GetBucketVersioning,
    GetObject,
    GetObjectAttributes,
    HeadBucket,
    ListBuckets,
    ListMultipartUploads,
    ListObjectsV1,
    ListObjectsV2,
    ListObjectVersions,
    ListParts,
    Operation,
    Preflight,
    PutObject,
    UploadPart,
    UploadPartCopy,
)
from kvobj.api.parameters import integer_of, limit_of, name_of, part_number_of
from kvobj.api.request import Target, check_bucket_name, check_key, decode
from kvobj.api.sub_resources import BUCKET_METHODS, OBJECT_METHODS, bucket_setting, object_setting
from kvobj.catalog.rows import MAX_KEY_BYTES, MAX_PARTS

MAX_BUCKETS: Final = 10_000
_LAYERS: Final = re.compile(r"(\d{1,5})-(\d{1,5})\Z", re.ASCII).match
_UPLOAD_ID: Final = re.compile(r"[A-Za-z0-9._~\-]{1,128}\Z").match

_WRITES: Final = ("PUT", "POST", "DELETE")
_MAY_BE_EMPTY: Final = frozenset({"uploadId", "partNumber", "versionId"})
# Sub-resources of S3 and of our own that are not built, by where they may stand; a plain parameter is in none of these.
_NOT_BUILT_BUCKET: Final = frozenset(
    {
        "abac",
        "accelerate",
        "analytics",
        "encryption",
        "intelligent-tiering",
        "inventory",
        "logging",
        "metadataAnnotationTable",
        "metadataConfiguration",
        "metadataInventoryTable",
        "metadataJournalTable",
        "metadataTable",
        "metrics",
        "notification",
        "object-lock",
        "ownershipControls",
        "publicAccessBlock",
        "replication",
        "requestPayment",
        "session",
        "website",
    }
)
_NOT_BUILT_OBJECT: Final = frozenset(
    {
        "annotation",
        "encryption",
        "legal-hold",
        "restore",
        "retention",
        "select",
        "torrent",
        "renameObject",
    }
)
_NOT_BUILT_HEADERS: Final = (
    "x-amz-server-side-encryption",
    "x-amz-object-lock-",
    "x-amz-website-redirect-location",
    "x-amz-write-offset-bytes",
    "x-amz-copy-source-server-side-encryption",
)


def parse_operation(method: str, target: Target, fields: dict[str, str]) -> Operation:
    """The operation that a request names. Raises `S3Error`: NotImplemented, MethodNotAllowed, InvalidArgument and others."""
    if method == "OPTIONS":
        return Preflight(target.bucket, target.key)
    if target.key:
        return _parse_object(method, target, fields)
    if target.bucket:
        return _parse_bucket(method, target)
    if method in ("GET", "HEAD"):
        return _parse_service(target.parameters)
    raise S3Error("MethodNotAllowed", Method=method, ResourceType="SERVICE", Allow="GET")


def _parse_service(query: dict[str, str]) -> ListBuckets:
    if not query:
        return ListBuckets()
    token, limit = query.get("continuation-token"), None
    if query.get("max-buckets"):
        limit = integer_of(query, "max-buckets", default=0)
        if not 1 <= limit <= MAX_BUCKETS:
            raise S3Error(
                "InvalidArgument",
                f"Argument max-buckets must be an integer between 1 and {MAX_BUCKETS}.",
                ArgumentName="max-buckets",
            )
    return ListBuckets(
        prefix=name_of(query, "prefix"),
        after="" if not token else decode_token(token),
        region=query.get("bucket-region", ""),
        limit=limit,
    )


def _parse_bucket(method: str, target: Target) -> Operation:
    query, bucket = target.parameters, target.bucket
    if query:
        named = _parse_named(method, target)
        if named is not None:
            return named
        if "versioning" in query and method in _WRITES:
            raise _not_built("versioning")
        _check_sub_resources(method, query, BUCKET_METHODS)
    match method:
        case "GET":
            return _parse_bucket_read(target)
        case "HEAD":
            return HeadBucket(bucket)
        case "PUT":
            return CreateBucket(bucket)
        case "DELETE":
            return DeleteBucket(bucket)
        case "POST" if "delete" in query:
            return DeleteObjects(bucket)
        case "POST":
            raise _not_built("POST object forms")
        case _:
            raise S3Error(
                "MethodNotAllowed", Method=method, ResourceType="BUCKET", Allow="GET, HEAD, PUT, DELETE, POST"
            )


def _parse_named(method: str, target: Target) -> Operation | None:
    """The call of the KV API or the setting that the query names."""
    query = target.parameters
    if not KV_CALLS.isdisjoint(query):
        return parse_kv_call(method, target)
    if not _NOT_BUILT_BUCKET.isdisjoint(query):
        raise _not_built(min(_NOT_BUILT_BUCKET.intersection(query)))
    return bucket_setting(method, target.bucket, query)


def _parse_bucket_read(target: Target) -> Operation:
    query, bucket = target.parameters, target.bucket
    for name, kind in (("location", GetBucketLocation), ("versioning", GetBucketVersioning)):
        if name in query:
            return kind(bucket)
    key_prefix, delimiter = name_of(query, "prefix"), name_of(query, "delimiter")
    encode = _encoding(query)
    if "uploads" in query:
        return ListMultipartUploads(
            bucket, key_prefix, delimiter, limit_of(query, "max-uploads"), encode,
            name_of(query, "key-marker"), name_of(query, "upload-id-marker"),
        )  # fmt: skip
    limit = limit_of(query, "max-keys")
    if "versions" in query:
        return ListObjectVersions(
            bucket,
            key_prefix,
            delimiter,
            limit,
            encode,
            name_of(query, "key-marker"),
            name_of(query, "version-id-marker"),
        )
    if query.get("list-type") == "2":
        token = query.get("continuation-token")
        start_after = name_of(query, "start-after")
        after = start_after if token is None else decode_token(token)
        fetch_owner = query.get("fetch-owner", "").lower() == "true"
        return ListObjectsV2(bucket, key_prefix, delimiter, limit, encode, start_after, token, after, fetch_owner)
    return ListObjectsV1(bucket, key_prefix, delimiter, limit, encode, name_of(query, "marker"))


def _parse_object(method: str, target: Target, fields: dict[str, str]) -> Operation:
    query, bucket, key = target.parameters, target.bucket, target.key
    if query:
        if not _NOT_BUILT_OBJECT.isdisjoint(query):
            raise _not_built(min(_NOT_BUILT_OBJECT.intersection(query)))
        _check_version(query.get("versionId"))
        setting = object_setting(method, bucket, key, query)
        if setting is not None:
            return setting
        _check_sub_resources(method, query, OBJECT_METHODS)
    match method:
        case "GET" | "HEAD":
            return _parse_object_read(method, target)
        case "PUT":
            return _parse_object_put(target, fields)
        case "POST":
            return _parse_object_post(target, fields)
        case "DELETE" if "uploadId" in query:
            return AbortMultipartUpload(bucket, key, _upload_id(query))
        case "DELETE":
            return DeleteObject(bucket, key)
        case _:
            raise S3Error("MethodNotAllowed", Method=method, ResourceType="OBJECT", Allow="GET, HEAD, PUT, DELETE")


def _parse_object_read(method: str, target: Target) -> Operation:
    query, bucket, key = target.parameters, target.bucket, target.key
    if query:
        if method == "GET" and "attributes" in query:
            return GetObjectAttributes(bucket, key)
        if method == "GET" and "uploadId" in query:
            after = integer_of(query, "part-number-marker", default=0)
            return ListParts(bucket, key, _upload_id(query), after, limit_of(query, "max-parts"))
        chosen = [name for name in ("partNumber", "layers", "part") if name in query]
        if len(chosen) > 1:
            raise S3Error("InvalidArgument", f"A read names one of {', '.join(chosen)}.")
        if "follow" in query and "layers" not in chosen and chosen:
            raise S3Error("InvalidArgument", f"follow does not go with {chosen[0]}.", ArgumentName="follow")
        return GetObject(
            bucket,
            key,
            part_number_of(query) if "partNumber" in query else None,
            layers=_layers(query["layers"]) if "layers" in query else None,
            part=_part_index(query) if "part" in query else None,
            # A HEAD has nothing to follow: it is answered as any other.
            follow=method == "GET" and "follow" in query,
        )
    return GetObject(bucket, key)


def _parse_object_post(target: Target, fields: dict[str, str]) -> Operation:
    query, bucket, key = target.parameters, target.bucket, target.key
    if "uploads" in query:
        _check_headers(fields)
        return CreateMultipartUpload(bucket, key)
    if "uploadId" in query:
        return CompleteMultipartUpload(bucket, key, _upload_id(query))
    raise S3Error("MethodNotAllowed", Method="POST", ResourceType="OBJECT", Allow="GET, HEAD, PUT, DELETE")


def _parse_object_put(target: Target, fields: dict[str, str]) -> Operation:
    query, bucket, key = target.parameters, target.bucket, target.key
    _check_headers(fields)
    source = fields.get("x-amz-copy-source")
    if "uploadId" in query or "partNumber" in query:
        if "uploadId" not in query or "partNumber" not in query:
            raise S3Error("InvalidArgument", "A part needs both uploadId and partNumber.")
        number = part_number_of(query)
        if source is None:
            return UploadPart(bucket, key, _upload_id(query), number)
        return UploadPartCopy(bucket, key, _upload_id(query), number, *_copy_source(source))
    if source is None:
        return PutObject(bucket, key)
    return CopyObject(bucket, key, *_copy_source(source))


def _copy_source(value: str) -> tuple[str, str]:
    """Bucket and key of x-amz-copy-source, under the same rules as a path; a leading slash and `?versionId=null` may be there."""
    path, _, version = value.partition("?")
    if version:
        name, _, version_id = version.partition("=")
        if name != "versionId":
            raise S3Error("InvalidArgument", "Copy source has an unknown parameter.", ArgumentName="x-amz-copy-source")
        _check_version(version_id)
    bucket, _, key = decode(path).removeprefix("/").partition("/")
    if not bucket or not key:
        raise S3Error(
            "InvalidArgument", "Copy source must mention the source bucket and key.", ArgumentName="x-amz-copy-source"
        )
    check_bucket_name(bucket)
    check_key(key)
    return bucket, key


def _check_headers(fields: dict[str, str]) -> None:
    for name, value in fields.items():
        if name.startswith("x-amz-"):
            if name.startswith(_NOT_BUILT_HEADERS):
                raise _not_built(name)
            if name == "x-amz-storage-class" and value not in ("STANDARD", "REDUCED_REDUNDANCY"):
                raise S3Error("InvalidStorageClass", StorageClassRequested=value)


def _check_sub_resources(method: str, query: dict[str, str], methods: dict[str, tuple[str, ...]]) -> None:
    """Raise `S3Error` for a sub-resource that has not this method (MethodNotAllowed), and for a write with a name that stands
    alone, as sub-resources do, and is none of those known (NotImplemented)."""
    for name, value in query.items():
        if name in methods:
            if method not in methods[name] and method != "HEAD":
                raise S3Error(
                    "MethodNotAllowed", Method=method, ResourceType=name.upper(), Allow=", ".join(methods[name])
                )
        elif not value and method in _WRITES and name not in _MAY_BE_EMPTY and not name.lower().startswith("x-"):
            raise _not_built(name)


def _check_version(version_id: str | None) -> None:
    if version_id is not None and version_id not in ("null", ""):
        raise S3Error("NoSuchVersion", VersionId=version_id)


def _encoding(query: dict[str, str]) -> bool:
    value = query.get("encoding-type")
    if value in (None, ""):
        return False
    if value != "url":
        raise S3Error("InvalidArgument", "Invalid Encoding Method specified in Request", ArgumentName="encoding-type")
    return True


def _upload_id(query: dict[str, str]) -> str:
    """An id of the form this server draws. Another names no upload, and never reaches the catalog."""
    upload_id = query["uploadId"]
    if not _UPLOAD_ID(upload_id):
        raise S3Error("NoSuchUpload")
    return upload_id


def _layers(value: str) -> tuple[int, int]:
    parsed = _LAYERS(value)
    if parsed is None or int(parsed[1]) > int(parsed[2]):
        raise S3Error("InvalidArgument", "Layers are A-B, both in the range, A not above B.", ArgumentName="layers")
    return int(parsed[1]), int(parsed[2])


def _part_index(query: dict[str, str]) -> int:
    index = integer_of(query, "part", default=MAX_PARTS)
    if index >= MAX_PARTS:
        raise S3Error("InvalidArgument", f"A part is an integer between 0 and {MAX_PARTS - 1}.", ArgumentName="part")
    return index


def _not_built(feature: str) -> S3Error:
    return S3Error("NotImplemented", f"{feature} is not implemented.", Feature=feature)


def encode_token(after: str) -> str:
    """An opaque continuation token: clients must not read it as a key."""
    return base64.urlsafe_b64encode(b"1" + after.encode()).decode()


def decode_token(token: str) -> str:
    """The key that a token continues after. Raises `S3Error` InvalidArgument for one that this server did not make."""
    try:
        raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        if raw[:1] == b"1" and len(raw) <= MAX_KEY_BYTES + 1 and b"\0" not in raw:
            return raw[1:].decode()
    except (binascii.Error, ValueError):
        pass
    raise S3Error("InvalidArgument", "The continuation token provided is incorrect.", ArgumentName="continuation-token")
