"""The ACL that a request's headers state: a canned one by its name, or grants one by one. Pure.

An ACL is grants in order, or None for private: full control for the owner alone. Sources: S3 User Guide, "Access control list (ACL)
overview" (canned ACLs, grantees, headers); docs/adr/0008-who-may-do-what.md for what is taken as private.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kvobj.api.errors import S3Error
from kvobj.catalog.setting_rows import Grant, GranteeGroup, Permission

Acl = tuple[Grant, ...] | None

CANNED_HEADER: Final = "x-amz-acl"
MAX_GRANTS: Final = 100
GROUP_URI: Final = "http://acs.amazonaws.com/groups/global/"
_LOG_DELIVERY: Final = "http://acs.amazonaws.com/groups/s3/LogDelivery"

_GRANT_HEADERS: Final = {
    "x-amz-grant-read": Permission.READ,
    "x-amz-grant-write": Permission.WRITE,
    "x-amz-grant-read-acp": Permission.READ_ACP,
    "x-amz-grant-write-acp": Permission.WRITE_ACP,
    "x-amz-grant-full-control": Permission.FULL_CONTROL,
}
ACL_HEADERS: Final = frozenset({CANNED_HEADER, *_GRANT_HEADERS})

# What is given to groups; the owner's full control follows.
_CANNED_GROUPS: Final = {
    "public-read": ((GranteeGroup.ALL_USERS, Permission.READ),),
    "public-read-write": ((GranteeGroup.ALL_USERS, Permission.READ), (GranteeGroup.ALL_USERS, Permission.WRITE)),
    "authenticated-read": ((GranteeGroup.AUTHENTICATED_USERS, Permission.READ),),
}
_CANNED_BUCKET_OWNER: Final = {
    "bucket-owner-read": Permission.READ,
    "bucket-owner-full-control": Permission.FULL_CONTROL,
}
# No service reads for EC2 and none delivers logs: there is nobody whom these would let in.
_CANNED_PRIVATE: Final = ("private", "aws-exec-read")
_CANNED_PRIVATE_BUCKET: Final = "log-delivery-write"

# Possessive: a header may have thousands of characters, and none is looked at twice.
_GRANTEE: Final = re.compile(r"\s*+([A-Za-z]++)\s*+=\s*+(?:\"([^\"]*+)\"\s*+|([^\",]*+))(?:,|\Z)").match


def states_acl(fields: Mapping[str, str]) -> bool:
    """Whether the headers state an ACL at all. On the way of every PUT: a third of a microsecond."""
    return not fields.keys().isdisjoint(ACL_HEADERS)


def acl_of_headers(fields: Mapping[str, str], *, owner: str, bucket_owner: str, on_bucket: bool) -> Acl:
    """The ACL for what `owner` owns. Whether grantees exist is the caller's to check.

    Raises `S3Error`: InvalidArgument, InvalidRequest for both forms at once, UnresolvableGrantByEmailAddress, MalformedACLError.
    """
    canned = fields.get(CANNED_HEADER)
    granting = [(name, permission) for name, permission in _GRANT_HEADERS.items() if name in fields]
    if canned is not None:
        if granting:
            raise S3Error("InvalidRequest", "Specifying both Canned ACLs and Header Grants is not allowed")
        return _canned(canned, owner=owner, bucket_owner=bucket_owner, on_bucket=on_bucket)
    if not granting:
        return None
    grants: list[Grant] = []
    for name, permission in granting:
        _add_grants(grants, fields[name], name, permission)
    return normalised(grants, owner=owner)


def normalised(grants: list[Grant], *, owner: str) -> Acl:
    """The ACL of these grants; None where they say no more than private does."""
    acl = tuple(grants)
    return None if acl == (Grant(owner, None, Permission.FULL_CONTROL),) else acl


def group_of(uri: str) -> GranteeGroup:
    """The group of a URI. Raises `S3Error`: InvalidArgument, and NotImplemented for the group of log delivery."""
    if uri.startswith(GROUP_URI):
        try:
            return GranteeGroup(uri[len(GROUP_URI) :])
        except ValueError:
            pass
    if uri == _LOG_DELIVERY:
        raise S3Error("NotImplemented", "Log delivery is not implemented.", Feature="LogDelivery")
    raise S3Error("InvalidArgument", "Invalid group uri", ArgumentName="uri", ArgumentValue=uri)


def no_such_address(address: str) -> S3Error:
    """Users have no e-mail addresses here, so that no address is known."""
    return S3Error("UnresolvableGrantByEmailAddress", ArgumentName="emailAddress", ArgumentValue=address)


def _canned(name: str, *, owner: str, bucket_owner: str, on_bucket: bool) -> Acl:
    if name in _CANNED_PRIVATE or (on_bucket and name == _CANNED_PRIVATE_BUCKET):
        return None
    own = Grant(owner, None, Permission.FULL_CONTROL)
    if name in _CANNED_GROUPS:
        return (*[Grant("", group, permission) for group, permission in _CANNED_GROUPS[name]], own)
    if name in _CANNED_BUCKET_OWNER:
        if on_bucket or owner == bucket_owner:
            return None
        return (own, Grant(bucket_owner, None, _CANNED_BUCKET_OWNER[name]))
    raise S3Error("InvalidArgument", ArgumentName=CANNED_HEADER, ArgumentValue=name)


def _add_grants(grants: list[Grant], value: str, header: str, permission: Permission) -> None:
    position = 0
    while position < len(value) or not value:
        parsed = _GRANTEE(value, position)
        if len(grants) >= MAX_GRANTS:
            raise S3Error("MalformedACLError", f"An ACL has at most {MAX_GRANTS} grants.")
        grant = None if parsed is None else _grant(parsed[1], (parsed[2] or parsed[3] or "").strip(), permission)
        if parsed is None or grant is None:
            raise S3Error("InvalidArgument", "Argument format not recognized", ArgumentName=header, ArgumentValue=value)
        grants.append(grant)
        position = parsed.end()


def _grant(kind: str, value: str, permission: Permission) -> Grant | None:
    match kind.lower():
        case "id" if value:
            return Grant(value, None, permission)
        case "uri":
            return Grant("", group_of(value), permission)
        case "emailaddress":
            raise no_such_address(value)
        case _:
            return None
