"""What a write says of the new object beside its bytes: who owns it, who may use it, and its tags.

Whoever may write the object needs a right of its own for the two latter. Nothing here costs a write that says neither.
"""

from __future__ import annotations

from kvobj.api.access.bucket_access import BucketAccess
from kvobj.api.access.stated_acl import Acl, states_acl
from kvobj.api.exchange import Exchange
from kvobj.api.settings.acls import stated_acl
from kvobj.api.settings.tags import TAGGING_HEADER, tags_of_header
from kvobj.catalog.rows import BucketRow


def owner_of_object(exchange: Exchange, bucket: BucketRow) -> str:
    """Who owns what the caller writes: the caller, or the bucket's owner where nobody signed."""
    return exchange.authentication.user.id or bucket.owner


async def acl_of_object(exchange: Exchange, rights: BucketAccess, key: str) -> Acl:
    """The ACL that the headers state. Raises `S3Error`, and `AccessDeniedError` where the caller may write the object, but not say
    who else may use it."""
    if not states_acl(exchange.fields):
        return None
    bucket = rights.bucket
    owner = owner_of_object(exchange, bucket)
    acl = await stated_acl(exchange, bucket.kind, owner=owner, bucket_owner=bucket.owner, on_bucket=False)
    rights.require_acl(acl, key)
    return acl


def tags_of_object(exchange: Exchange, rights: BucketAccess, key: str) -> dict[str, str]:
    """The tags that the headers state. Raises `S3Error`, and `AccessDeniedError` where the caller may not tag."""
    if TAGGING_HEADER not in exchange.fields:
        return {}
    tags = tags_of_header(exchange.fields)
    rights.require_tags(tags, key)
    return tags
