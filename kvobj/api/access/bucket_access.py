"""One request's rights in one ordinary bucket: policy first, then ownership, then grants; nothing else lets anybody in.

An explicit Deny binds everybody but root, and never takes the policy itself from the bucket's owner. The owner and root may do
all else; so may, on its own object, who wrote it. KV buckets share by namespaces instead (`chunk_access`): there only owner
and root pass here. Sources: S3 User Guide, "How Amazon S3 authorizes a request"; docs/adr/0008-who-may-do-what.md.
"""

from __future__ import annotations

from kvobj.api.access.actions import BUCKET_PERMISSIONS, OBJECT_PERMISSIONS, POLICY_ACTIONS, Action
from kvobj.api.access.grants import acl_allows
from kvobj.api.access.policy import Effect, judge
from kvobj.api.access.request_facts import RequestFacts
from kvobj.catalog.rows import BucketKind, BucketRow, ObjectRow
from kvobj.errors import AccessDeniedError, NoSuchKeyError


class BucketAccess:
    """See the module's text. The owner of a bucket without a policy costs two comparisons."""

    __slots__ = ("_request", "bucket", "is_owner")

    def __init__(self, bucket: BucketRow, request: RequestFacts) -> None:
        user = request.authentication.user
        self.bucket = bucket
        self.is_owner = user.is_root or bucket.owner == user.id
        self._request = request

    def may(self, action: Action, *, key: str = "", row: ObjectRow | None = None) -> bool:
        """Whether the caller may do it, on the key or ("") on the bucket. `row`: the key's object, where its grants and tags
        count (`ROW_ACTIONS`)."""
        bucket, user = self.bucket, self._request.authentication.user
        if bucket.policy:
            effect = judge(bucket, action, key=key, row=row, request=self._request)
            if effect is Effect.DENY:
                return user.is_root or (self.is_owner and action in POLICY_ACTIONS)
            if effect is Effect.ALLOW:
                return True
        if self.is_owner:
            return True
        if bucket.kind is BucketKind.KV:
            return False
        permission = OBJECT_PERMISSIONS.get(action)
        if permission is not None:
            return row is not None and acl_allows(row.acl, row.owner, permission, user)
        permission = BUCKET_PERMISSIONS.get(action)
        return permission is not None and acl_allows(bucket.acl, bucket.owner, permission, user)

    def require(self, action: Action, *, key: str = "", row: ObjectRow | None = None) -> None:
        """Raise `AccessDeniedError` unless the caller may."""
        if not self.may(action, key=key, row=row):
            user_id = self._request.authentication.user.id
            raise AccessDeniedError("not allowed", bucket=self.bucket.name, user_id=user_id, action=action.value)

    def check_row(self, row: ObjectRow | None, key: str, action: Action) -> ObjectRow:
        """The row, if there is one and the caller may do this with it.

        A missing key is told (`NoSuchKeyError`) only to who may list; to others it is denied like a key that is there.
        """
        if row is None:
            self.require(Action.LIST_BUCKET)
            raise NoSuchKeyError("no such key", bucket=self.bucket.name, key=key)
        self.require(action, key=key, row=row)
        return row
