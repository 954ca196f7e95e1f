"""One request's rights in one ordinary bucket: policy first, then ownership, then grants; nothing else lets anybody in.

An explicit Deny binds everybody but root, and never takes the policy itself from the bucket's owner. The owner and root may do
all else; who wrote an object may read and change its ACL. KV buckets share by namespaces instead (`chunk_access`): there only owner
and root pass here. Sources: S3 User Guide, "How Amazon S3 authorizes a request"; docs/adr/0008-who-may-do-what.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from kvobj.api.access.actions import BUCKET_PERMISSIONS, OBJECT_PERMISSIONS, OWN_OBJECT_ACTIONS, POLICY_ACTIONS, Action
from kvobj.api.access.grants import acl_allows
from kvobj.api.access.policy import Effect, allows_write_with_tags, judge
from kvobj.api.access.request_facts import RequestFacts
from kvobj.api.access.stated_acl import Acl
from kvobj.api.settings.tags import replaces_tags, tags_of_header
from kvobj.catalog.rows import BucketKind, BucketRow, ObjectRow
from kvobj.catalog.setting_rows import Permission
from kvobj.errors import AccessDeniedError, NoSuchKeyError


class BucketAccess:
    """See the module's text. The owner of a bucket without a policy costs two comparisons."""

    __slots__ = ("_request", "bucket", "is_owner")

    def __init__(self, bucket: BucketRow, request: RequestFacts) -> None:
        user = request.authentication.user
        self.bucket = bucket
        self.is_owner = user.is_root or bucket.owner == user.id
        self._request = request

    def may(
        self,
        action: Action,
        *,
        key: str = "",
        row: ObjectRow | None = None,
        tags: Mapping[str, str] | None = None,
        stated: Mapping[str, str] | None = None,
    ) -> bool:
        """Whether the caller may do it, on the key or ("") on the bucket. `row`: the key's object, where its grants and tags
        count (`ROW_ACTIONS`). `tags`: those that the request's document gives it; None: its headers say. `stated`: see `Asked`."""
        if self.bucket.policy:
            effect = self._judge(action, key=key, row=row, tags=tags, stated=stated)
            if effect is not None:
                return self._binds(effect, action)
        return self.is_owner or self._is_granted(action, row)

    def may_state_acl(self, acl: Acl, key: str) -> bool:
        """Whether the caller, who may write the object under `key`, may give it this ACL.

        Who may write by a grant on the bucket will own the object, and may say who else uses it. Who may by a policy needs
        s3:PutObjectAcl of it, unless the ACL lets in the bucket's owner alone, which is what owners ask of whom they let write.
        """
        bucket, user = self.bucket, self._request.authentication.user
        if bucket.policy:
            effect = self._judge(Action.PUT_OBJECT_ACL, key=key, row=None, tags=None)
            if effect is not None:
                return self._binds(effect, Action.PUT_OBJECT_ACL)
        if self.is_owner or acl is None or {grant.user_id for grant in acl} <= {user.id, bucket.owner} - {""}:
            return True
        return acl_allows(bucket.acl, bucket.owner, Permission.WRITE, user)

    def may_state_tags(self, tags: Mapping[str, str], key: str) -> bool:
        """Whether the caller, who may write the object under `key`, may give it these tags: s3:PutObjectTagging, or a policy that
        allows the write for its tags. A grant on the bucket does not do."""
        bucket = self.bucket
        if bucket.policy:
            effect = self._judge(Action.PUT_OBJECT_TAGGING, key=key, row=None, tags=tags)
            if effect is not None:
                return self._binds(effect, Action.PUT_OBJECT_TAGGING)
            if allows_write_with_tags(bucket, key, self._request, lambda: tags):
                return True
        return self.is_owner

    def require(
        self, action: Action, *, key: str = "", row: ObjectRow | None = None, tags: Mapping[str, str] | None = None
    ) -> None:
        """Raise `AccessDeniedError` unless the caller `may`."""
        if not self.may(action, key=key, row=row, tags=tags):
            raise self._denied(action)

    @property
    def may_all(self) -> bool:
        """Nobody need ask about a single action: there is no policy, and the caller is the owner or root."""
        return self.is_owner and not self.bucket.policy

    def require_acl(self, acl: Acl, key: str) -> None:
        """Raise `AccessDeniedError` unless `may_state_acl`."""
        if not self.may_state_acl(acl, key):
            raise self._denied(Action.PUT_OBJECT_ACL)

    def require_tags(self, tags: Mapping[str, str], key: str) -> None:
        """Raise `AccessDeniedError` unless `may_state_tags`."""
        if not self.may_state_tags(tags, key):
            raise self._denied(Action.PUT_OBJECT_TAGGING)

    def check_row(
        self, row: ObjectRow | None, key: str, action: Action, *, tags: Mapping[str, str] | None = None
    ) -> ObjectRow:
        """The row, if there is one and the caller may do this with it; `tags` as in `may`.

        A missing key is told (`NoSuchKeyError`) only to who may list and is not denied the key; to others it is denied like a key
        that is there.
        """
        if row is None:
            if not self.may_know_absence(key, action):
                raise self._denied(action)
            raise NoSuchKeyError("no such key", bucket=self.bucket.name, key=key)
        self.require(action, key=key, row=row, tags=tags)
        return row

    def may_know_absence(self, key: str, action: Action) -> bool:
        """Whether the caller, who asked for the action on a key that is missing, may be told that it is: who may list, and is not
        denied the key."""
        if not self.bucket.policy:
            return self.is_owner or self._is_granted(Action.LIST_BUCKET, None)
        of_key = self._judge(action, key=key, row=None, tags=None)
        if of_key is Effect.DENY:
            return self._binds(of_key, action)
        effect = self._judge(Action.LIST_BUCKET, key="", row=None, tags=None, missing_key=key)
        if effect is not None:
            return self._binds(effect, Action.LIST_BUCKET)
        return self.is_owner or self._is_granted(Action.LIST_BUCKET, None)

    def _judge(
        self,
        action: Action,
        *,
        key: str,
        row: ObjectRow | None,
        tags: Mapping[str, str] | None,
        missing_key: str | None = None,
        stated: Mapping[str, str] | None = None,
    ) -> Effect | None:
        request = self._request
        return judge(
            self.bucket,
            action,
            key=key,
            row=row,
            request=request,
            request_tags=partial(_stated_tags, request) if tags is None else lambda: tags,
            missing_key=missing_key,
            stated=stated,
        )

    def _binds(self, effect: Effect, action: Action) -> bool:
        """What becomes of the policy's word for this caller."""
        if effect is Effect.ALLOW:
            return True
        return self._request.authentication.user.is_root or (self.is_owner and action in POLICY_ACTIONS)

    def _is_granted(self, action: Action, row: ObjectRow | None) -> bool:
        bucket, user = self.bucket, self._request.authentication.user
        if bucket.kind is BucketKind.KV:
            return False
        permission = OBJECT_PERMISSIONS.get(action)
        if permission is not None:
            if row is None:
                return False
            return acl_allows(row.acl, row.owner, permission, user) or (
                action in OWN_OBJECT_ACTIONS and bool(user.id) and row.owner == user.id
            )
        permission = BUCKET_PERMISSIONS.get(action)
        return permission is not None and acl_allows(bucket.acl, bucket.owner, permission, user)

    def _denied(self, action: Action) -> AccessDeniedError:
        user_id = self._request.authentication.user.id
        return AccessDeniedError("not allowed", bucket=self.bucket.name, user_id=user_id, action=action.value)


def _stated_tags(request: RequestFacts) -> Mapping[str, str]:
    """The tags that the headers give the object: none where a copy takes those of its source, whatever else the headers say."""
    fields = request.fields
    if request.head.method == "PUT" and "x-amz-copy-source" in fields and not replaces_tags(fields):
        return {}
    return tags_of_header(fields)
