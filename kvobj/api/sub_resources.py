"""Settings of buckets and objects that a query names, and which operation each method of them is."""

from __future__ import annotations

from collections.abc import KeysView
from typing import Final, TypeVar

from kvobj.api import operations as ops
from kvobj.api.errors import S3Error

_Operation = TypeVar("_Operation")

BUCKET_SETTINGS: Final[dict[str, dict[str, type[ops.BucketOperation]]]] = {
    "acl": {"GET": ops.GetBucketAcl, "PUT": ops.PutBucketAcl},
    "cors": {"GET": ops.GetBucketCors, "PUT": ops.PutBucketCors, "DELETE": ops.DeleteBucketCors},
    "lifecycle": {"GET": ops.GetBucketLifecycle, "PUT": ops.PutBucketLifecycle, "DELETE": ops.DeleteBucketLifecycle},
    "policy": {"GET": ops.GetBucketPolicy, "PUT": ops.PutBucketPolicy, "DELETE": ops.DeleteBucketPolicy},
    "policyStatus": {"GET": ops.GetBucketPolicyStatus},
    "tagging": {"GET": ops.GetBucketTagging, "PUT": ops.PutBucketTagging, "DELETE": ops.DeleteBucketTagging},
}
OBJECT_SETTINGS: Final[dict[str, dict[str, type[ops.ObjectOperation]]]] = {
    "acl": {"GET": ops.GetObjectAcl, "PUT": ops.PutObjectAcl},
    "tagging": {"GET": ops.GetObjectTagging, "PUT": ops.PutObjectTagging, "DELETE": ops.DeleteObjectTagging},
}

BUCKET_METHODS: Final[dict[str, tuple[str, ...]]] = {
    "delete": ("POST",),
    "location": ("GET",),
    "uploads": ("GET",),
    "versioning": ("GET",),
    "versions": ("GET",),
}
"""Methods of the sub-resources of a bucket that are no settings."""
OBJECT_METHODS: Final[dict[str, tuple[str, ...]]] = {"attributes": ("GET",), "uploads": ("POST",)}
"""Those of an object."""


def bucket_setting(method: str, bucket: str, query: dict[str, str]) -> ops.BucketOperation | None:
    """The operation on a setting of a bucket, None where the query names none. `S3Error` MethodNotAllowed, InvalidArgument."""
    name = _named(query, BUCKET_SETTINGS.keys())
    return None if name is None else _of_method(method, BUCKET_SETTINGS[name])(bucket)


def object_setting(method: str, bucket: str, key: str, query: dict[str, str]) -> ops.ObjectOperation | None:
    """The operation on a setting of an object, None where the query names none. Errors as `bucket_setting`."""
    name = _named(query, OBJECT_SETTINGS.keys())
    return None if name is None else _of_method(method, OBJECT_SETTINGS[name])(bucket, key)


def _named(query: dict[str, str], settings: KeysView[str]) -> str | None:
    named = settings & query.keys()
    if len(named) > 1:
        raise S3Error("InvalidArgument", f"A request names one of {', '.join(sorted(named))}.")
    return named.pop() if named else None


def _of_method(method: str, methods: dict[str, _Operation]) -> _Operation:
    found = methods.get(method)
    if found is None:
        raise S3Error("MethodNotAllowed", Method=method, ResourceType="SUBRESOURCE", Allow=", ".join(methods))
    return found
