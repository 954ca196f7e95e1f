"""What can be said about a bucket or an object after it was made: who may use it, tags, expiration, cross-origin rules, and
what of it goes to the remote tier.

Values as the catalog keeps them: frozen, encoded as msgpack arrays (append fields, never reorder). What the S3 documents they come
from look like is the API's business; what they do is that of the API (grants, cross-origin rules) and of gc (expiration).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec import UNSET, UnsetType


class _Row(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False):
    """Common encoding: arrays, so that a row costs its values and not its field names."""


class Permission(StrEnum):
    """What an ACL can grant. On a bucket READ lists it and WRITE puts and deletes in it; on an object READ reads it and
    WRITE means nothing; READ_ACP and WRITE_ACP read and change the ACL itself."""

    READ = "READ"
    WRITE = "WRITE"
    READ_ACP = "READ_ACP"
    WRITE_ACP = "WRITE_ACP"
    FULL_CONTROL = "FULL_CONTROL"


class GranteeGroup(StrEnum):
    """Groups that S3 has beside single users: everybody, and everybody who signs."""

    ALL_USERS = "AllUsers"
    AUTHENTICATED_USERS = "AuthenticatedUsers"


class Grant(_Row, frozen=True, array_like=True):
    """One line of an ACL: one user (`user_id`, group None) or one group (`user_id` "") may do one thing."""

    user_id: str
    group: GranteeGroup | None
    permission: Permission


class LifecycleRule(_Row, frozen=True, array_like=True):
    """One rule: what it applies to (all that is given must fit), and what then happens.

    Days count from `modified_ms` of an object, and from `initiated_ms` of an upload; `expire_date_ms` is midnight UTC of a day.
    `size_over_bytes` and `size_under_bytes` are exclusive. `form` remembers how the filter was written, so that it is told back so:
    `prefix` beside no filter, `filter` of one condition, `empty`, `and`, `and-prefix` with an empty key prefix among others.
    `noncurrent_days`, `noncurrent_kept` and `expires_delete_marker` are kept and told back: without versions they do nothing.
    """

    id: str
    enabled: bool
    key_prefix: str = ""
    tags: dict[str, str] = {}
    size_over_bytes: int | None = None
    size_under_bytes: int | None = None
    expire_days: int | None = None
    expire_date_ms: int | None = None
    abort_upload_days: int | None = None
    form: str = "filter"
    noncurrent_days: int | None = None
    noncurrent_kept: int | None = None
    expires_delete_marker: bool | None = None


class CorsRule(_Row, frozen=True, array_like=True):
    """One cross-origin rule: pages of which origins may send which methods with which headers, and read which of ours."""

    id: str
    origins: tuple[str, ...]
    methods: tuple[str, ...]
    headers: tuple[str, ...] = ()
    exposed: tuple[str, ...] = ()
    max_age_seconds: int | None = None


class RemoteRule(StrEnum):
    """What of a bucket is written to the remote tier beside class `shared`: nothing; what is read again; what the collector
    wants room of; everything, behind the acknowledgement."""

    NEVER = "never"
    REUSED = "reused"
    EVICTED = "evicted"
    ALWAYS = "always"


class BucketUpdate(msgspec.Struct, frozen=True):
    """What to change of a bucket; a field left out stays as it is. See `rows.BucketRow` for what the values mean."""

    acl: tuple[Grant, ...] | UnsetType | None = UNSET
    policy: bytes | UnsetType = UNSET
    tags: dict[str, str] | UnsetType = UNSET
    lifecycle: tuple[LifecycleRule, ...] | UnsetType = UNSET
    cors: tuple[CorsRule, ...] | UnsetType = UNSET
    remote: RemoteRule | UnsetType = UNSET


class ObjectUpdate(msgspec.Struct, frozen=True):
    """What to change of an object; a field left out stays as it is. Its bytes, ETag, dates and number never change."""

    acl: tuple[Grant, ...] | UnsetType | None = UNSET
    tags: dict[str, str] | UnsetType = UNSET


def changes_of(update: BucketUpdate | ObjectUpdate) -> dict[str, object]:
    """The fields that an update names, with their new values."""
    return {name: value for name in update.__struct_fields__ if (value := getattr(update, name)) is not UNSET}
