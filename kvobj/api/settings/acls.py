"""ACLs: read and changed on buckets and objects, and stated by the headers of what makes either.

Source: S3 API reference, the operations' pages. KV buckets share by namespaces (docs/kv-api.md): there every ACL is private.
"""

from __future__ import annotations

from typing import Final

from kvobj.api.access.actions import Action
from kvobj.api.access.stated_acl import CANNED_HEADER, Acl, acl_of_headers, states_acl
from kvobj.api.checksums import parse_announced
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange
from kvobj.api.message import Reply
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import GetBucketAcl, GetObjectAcl, ObjectOperation, PutBucketAcl, PutObjectAcl
from kvobj.api.settings.acl_document import acl_document, parse_acl_document
from kvobj.api.settings.object_update import update_checked
from kvobj.catalog.rows import BucketKind, BucketRow, ObjectRow
from kvobj.catalog.setting_rows import BucketUpdate, Grant, ObjectUpdate

MAX_DOCUMENT_BYTES: Final = 64 * 1024
_PRIVATE_TO_KV: Final = ("private", "bucket-owner-read", "bucket-owner-full-control")


class Acls:
    """Handlers of ?acl."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def get_bucket(self, exchange: Exchange, operation: GetBucketAcl) -> Reply:
        """The bucket's ACL."""
        row = exchange.authorise(
            await self._store.catalog.bucket(operation.bucket), operation.bucket, Action.GET_BUCKET_ACL
        )
        return exchange.xml(acl_document(row.acl, owner=row.owner, display_name=exchange.users.display_name))

    async def put_bucket(self, exchange: Exchange, operation: PutBucketAcl) -> Reply:
        """Replace the bucket's ACL."""
        row = exchange.authorise(
            await self._store.catalog.bucket(operation.bucket), operation.bucket, Action.PUT_BUCKET_ACL
        )
        acl = await _asked_acl(exchange, row, owner=row.owner, on_bucket=True)
        await self._store.catalog.update_bucket(row.name, BucketUpdate(acl=acl), made_ms=row.created_ms)
        return exchange.reply(200)

    async def get_object(self, exchange: Exchange, operation: GetObjectAcl) -> Reply:
        """The object's ACL."""
        _, row = await self._object(exchange, operation, Action.GET_OBJECT_ACL)
        return exchange.xml(acl_document(row.acl, owner=row.owner, display_name=exchange.users.display_name))

    async def put_object(self, exchange: Exchange, operation: PutObjectAcl) -> Reply:
        """Replace the object's ACL. Its ETag and dates stay."""
        bucket, row = await self._object(exchange, operation, Action.PUT_OBJECT_ACL)
        acl = await _asked_acl(exchange, bucket, owner=row.owner, on_bucket=False)
        await update_checked(self._store.catalog, row, ObjectUpdate(acl=acl))
        return exchange.reply(200)

    async def _object(
        self, exchange: Exchange, operation: ObjectOperation, action: Action
    ) -> tuple[BucketRow, ObjectRow]:
        rights = exchange.access(await self._store.catalog.bucket(operation.bucket), operation.bucket)
        (found,) = await self._store.catalog.lookup(operation.bucket, [operation.key])
        return rights.bucket, rights.check_row(found, operation.key, action)


async def acl_of_bucket(exchange: Exchange, kind: BucketKind) -> Acl:
    """The ACL that CreateBucket's headers state for the caller's new bucket. Raises `S3Error`."""
    if not states_acl(exchange.fields):
        return None
    owner = exchange.authentication.user.id
    return await stated_acl(exchange, kind, owner=owner, bucket_owner=owner, on_bucket=True)


async def stated_acl(exchange: Exchange, kind: BucketKind, *, owner: str, bucket_owner: str, on_bucket: bool) -> Acl:
    """The ACL that the headers state, its grantees checked. Raises `S3Error`."""
    acl = acl_of_headers(exchange.fields, owner=owner, bucket_owner=bucket_owner, on_bucket=on_bucket)
    if kind is BucketKind.KV:
        if acl is not None and exchange.fields.get(CANNED_HEADER) not in _PRIVATE_TO_KV:
            raise _kv_is_private()
        return None
    await _check_grantees(exchange, acl or ())
    return acl


async def _asked_acl(exchange: Exchange, bucket: BucketRow, *, owner: str, on_bucket: bool) -> Acl:
    """The ACL that a PUT of one states, in its headers or in its body."""
    announced = parse_announced(exchange.fields, exchange.authentication)
    document = await exchange.read_document(announced, limit_bytes=MAX_DOCUMENT_BYTES)
    if states_acl(exchange.fields):
        if document:
            raise S3Error("UnexpectedContent")
        return await stated_acl(exchange, bucket.kind, owner=owner, bucket_owner=bucket.owner, on_bucket=on_bucket)
    if not document:
        raise S3Error("MissingSecurityHeader", MissingHeaderName=CANNED_HEADER)
    acl = parse_acl_document(document, owner=owner)
    if acl is not None and bucket.kind is BucketKind.KV:
        raise _kv_is_private()
    await _check_grantees(exchange, acl or ())
    return acl


async def _check_grantees(exchange: Exchange, grants: tuple[Grant, ...]) -> None:
    for user_id in {grant.user_id for grant in grants if grant.group is None}:
        if await exchange.users.with_id(user_id) is None:
            raise S3Error("InvalidArgument", "Invalid id", ArgumentName="CanonicalUser/ID", ArgumentValue=user_id)


def _kv_is_private() -> S3Error:
    return S3Error("InvalidRequest", "A bucket of kind kv is shared by its namespaces, not by ACLs.")
