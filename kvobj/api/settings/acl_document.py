"""ACLs as S3's AccessControlPolicy documents: read, and written. Pure. Source: S3 API reference, PutBucketAcl and GetBucketAcl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvobj.api import xml
from kvobj.api.access.stated_acl import GROUP_URI, MAX_GRANTS, Acl, group_of, no_such_address, normalised
from kvobj.api.errors import S3Error
from kvobj.catalog.setting_rows import Grant, Permission
from kvobj.errors import AccessDeniedError

_XSI: Final = ' xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:type='


def parse_acl_document(document: bytes, *, owner: str) -> Acl:
    """The ACL for what `owner` owns. Whether grantees exist is the caller's to check.

    Raises `S3Error` (MalformedACLError, InvalidArgument, UnresolvableGrantByEmailAddress), and `AccessDeniedError` where the
    document names another owner: ownership does not change.
    """
    try:
        root = xml.parse(document, root="AccessControlPolicy")
    except xml.XmlSyntaxError as error:
        raise S3Error("MalformedACLError") from error
    named, listed = root.child("Owner"), root.child("AccessControlList")
    if named is None or listed is None or len(root.children) != 2 or len(listed.children) > MAX_GRANTS:  # noqa: PLR2004 - the two
        raise S3Error("MalformedACLError")
    owner_id = (named.child_text("ID") or "").strip()
    if not owner_id:
        raise S3Error("MalformedACLError")
    if owner_id != owner:
        raise AccessDeniedError("an ACL names another owner", owner=owner_id)
    return normalised([_parse_grant(element) for element in listed.children], owner=owner)


def acl_document(acl: Acl, *, owner: str, display_name: Callable[[str], str]) -> bytes:
    """The document that tells of the ACL. `display_name` of a user's id."""
    grants = (Grant(owner, None, Permission.FULL_CONTROL),) if acl is None else acl
    # A grantee's type is an attribute, the only one that S3 has: the writer of elements does not carry it.
    listed = "".join(
        [
            f"<Grant>{_grantee(grant, display_name)}<Permission>{grant.permission.value}</Permission></Grant>"
            for grant in grants
        ]
    )
    return (
        f'{xml.PROLOG}<AccessControlPolicy xmlns="{xml.NAMESPACE}"><Owner>{_about(owner, display_name)}</Owner>'
        f"<AccessControlList>{listed}</AccessControlList></AccessControlPolicy>"
    ).encode()


def _parse_grant(element: xml.Element) -> Grant:
    grantee, permission = element.child("Grantee"), (element.child_text("Permission") or "").strip()
    if element.name != "Grant" or grantee is None or permission not in Permission.__members__:
        raise S3Error("MalformedACLError")
    kinds = [value for name, value in grantee.attributes.items() if name.rpartition(":")[2] == "type"]
    kind = kinds[0].rpartition(":")[2] if len(kinds) == 1 else ""
    user_id, uri, address = ((grantee.child_text(name) or "").strip() for name in ("ID", "URI", "EmailAddress"))
    match kind:
        case "CanonicalUser" if user_id and not uri and not address:
            return Grant(user_id, None, Permission[permission])
        case "Group" if uri and not user_id and not address:
            return Grant("", group_of(uri), Permission[permission])
        case "AmazonCustomerByEmail" if address and not user_id and not uri:
            raise no_such_address(address)
        case _:
            raise S3Error("MalformedACLError")


def _grantee(grant: Grant, display_name: Callable[[str], str]) -> str:
    if grant.group is not None:
        return f'<Grantee{_XSI}"Group"><URI>{GROUP_URI}{grant.group.value}</URI></Grantee>'
    return f'<Grantee{_XSI}"CanonicalUser">{_about(grant.user_id, display_name)}</Grantee>'


def _about(user_id: str, display_name: Callable[[str], str]) -> str:
    return f"<ID>{xml.text(user_id)}</ID><DisplayName>{xml.text(display_name(user_id))}</DisplayName>"
