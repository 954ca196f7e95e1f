"""What an ACL lets a user do. Pure. Source: S3 User Guide, "Access control list (ACL) overview"."""

from __future__ import annotations

from kvobj.catalog.rows import UserRow
from kvobj.catalog.setting_rows import Grant, GranteeGroup, Permission


def acl_allows(acl: tuple[Grant, ...] | None, owner: str, permission: Permission, user: UserRow) -> bool:
    """Whether the grants give `user` this permission on what `owner` owns; None: private. The anonymous user has the id "",
    which is no owner's and no grantee's."""
    if acl is None:
        return bool(user.id) and user.id == owner
    for grant in acl:
        if grant.permission in (permission, Permission.FULL_CONTROL):
            if grant.group is None:
                if user.id and grant.user_id == user.id:
                    return True
            elif grant.group is GranteeGroup.ALL_USERS or user.id:
                return True
    return False
