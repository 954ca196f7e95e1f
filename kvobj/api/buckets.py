"""Buckets: list, create, head, delete, and what S3 asks of a bucket that has one region and no versions."""

from __future__ import annotations

from typing import Final

from kvobj.api import xml
from kvobj.api.access.actions import Action
from kvobj.api.checksums import parse_announced
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange
from kvobj.api.message import Reply
from kvobj.api.object_headers import parse_durability
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import (
    CreateBucket,
    DeleteBucket,
    GetBucketLocation,
    GetBucketVersioning,
    HeadBucket,
    ListBuckets,
)
from kvobj.api.routing import encode_token
from kvobj.api.settings.acls import acl_of_bucket
from kvobj.api.settings.tags import BUCKET_TAGS_MAX, tags_of_elements
from kvobj.api.timestamps import iso_time
from kvobj.catalog.rows import BucketKind, BucketRow, Durability
from kvobj.catalog.setting_rows import RemoteRule
from kvobj.config.bucket_name import bucket_name_problem
from kvobj.errors import AccessDeniedError, BucketExistsError, InvalidRequestError

MAX_DOCUMENT_BYTES: Final = 64 * 1024
_KIND_HEADER: Final = "x-kvobj-bucket-kind"
_REMOTE_HEADER: Final = "x-kvobj-remote"
_OWNERSHIP_HEADER: Final = "x-amz-object-ownership"
_OWN: Final = "ObjectWriter"
"""The ownership that buckets have here: who writes an object owns it, and ACLs count."""
_OTHER_OWNERSHIPS: Final = ("BucketOwnerEnforced", "BucketOwnerPreferred")


class Buckets:
    """Handlers of the operations on buckets."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def list(self, exchange: Exchange, operation: ListBuckets) -> Reply:
        """The user's own buckets by name; root's are all. Without a limit in one page."""
        user = exchange.authentication.user
        if exchange.authentication.is_anonymous:
            raise AccessDeniedError("buckets are listed for users")
        rows = [row for row in await self._store.catalog.buckets() if user.is_root or row.owner == user.id]
        rows = [row for row in rows if row.name.startswith(operation.prefix) and row.name > operation.after]
        if operation.region:
            rows = [row for row in rows if row.region == operation.region]
        page = rows[: operation.limit]
        is_paged = operation != ListBuckets()
        nodes: list[xml.Node] = [
            ("Owner", [("ID", user.id), ("DisplayName", user.display_name)]),
            ("Buckets", [("Bucket", _about(row, with_region=is_paged)) for row in page]),
        ]
        if len(page) < len(rows):
            nodes.append(("ContinuationToken", encode_token(page[-1].name)))
        if operation.prefix:
            nodes.append(("Prefix", operation.prefix))
        return exchange.xml(xml.document("ListAllMyBucketsResult", nodes))

    async def create(self, exchange: Exchange, operation: CreateBucket) -> Reply:
        """Create a bucket. One's own with the same settings again is a 200."""
        if exchange.authentication.is_anonymous:
            raise AccessDeniedError("buckets are made by users")
        if bucket_name_problem(operation.bucket) is not None:
            raise S3Error("InvalidBucketName", BucketName=operation.bucket)
        fields = exchange.fields
        kind = _parse_kind(fields.get(_KIND_HEADER))
        _check_bucket_headers(fields)
        acl = await acl_of_bucket(exchange, kind)
        announced = parse_announced(fields, exchange.authentication)
        document = await exchange.read_document(announced, limit_bytes=MAX_DOCUMENT_BYTES)
        region, tags = _parse_configuration(document, exchange)
        default = Durability.MEMORY if kind is BucketKind.KV else Durability.LOCAL
        durability, remote = parse_durability(fields) or default, _parse_remote(fields.get(_REMOTE_HEADER))
        if not exchange.settings.has_remote and (durability is Durability.SHARED or remote is not RemoteRule.NEVER):
            raise InvalidRequestError("what goes to a remote tier needs one, and none is configured")
        row = BucketRow(
            name=operation.bucket,
            kind=kind,
            owner=exchange.authentication.user.id,
            created_ms=exchange.clock.now_ms(),
            durability=durability,
            region=region,
            acl=acl,
            remote=remote,
            tags=tags,
        )
        try:
            await self._store.catalog.create_bucket(row)
        except BucketExistsError as error:
            _check_same_bucket(error, row)
        return exchange.reply(200, [("location", f"/{row.name}")])

    async def head(self, exchange: Exchange, operation: HeadBucket) -> Reply:
        """Whether the bucket is there and may be used, and its region."""
        row = exchange.authorise(
            await self._store.catalog.bucket(operation.bucket), operation.bucket, Action.LIST_BUCKET
        )
        headers = [("x-amz-bucket-region", row.region), ("content-type", "application/xml")]
        rule = [] if row.remote is RemoteRule.NEVER else [(_REMOTE_HEADER, row.remote.value)]
        return exchange.reply(200, [*headers, (_KIND_HEADER, row.kind.value), *rule])

    async def delete(self, exchange: Exchange, operation: DeleteBucket) -> Reply:
        """Remove an empty bucket."""
        row = exchange.authorise(
            await self._store.catalog.bucket(operation.bucket), operation.bucket, Action.DELETE_BUCKET
        )
        await self._store.delete_bucket(row.name, made_ms=row.created_ms)
        return exchange.reply(204)

    async def location(self, exchange: Exchange, operation: GetBucketLocation) -> Reply:
        """The bucket's region; empty for us-east-1."""
        row = exchange.authorise(
            await self._store.catalog.bucket(operation.bucket), operation.bucket, Action.GET_BUCKET_LOCATION
        )
        region = "" if row.region == "us-east-1" else xml.text(row.region)
        document = f'{xml.PROLOG}<LocationConstraint xmlns="{xml.NAMESPACE}">{region}</LocationConstraint>'
        return exchange.xml(document.encode())

    async def versioning(self, exchange: Exchange, operation: GetBucketVersioning) -> Reply:
        """Never enabled: an empty document."""
        exchange.authorise(
            await self._store.catalog.bucket(operation.bucket), operation.bucket, Action.GET_BUCKET_VERSIONING
        )
        return exchange.xml(xml.document("VersioningConfiguration", []))


def _about(row: BucketRow, *, with_region: bool) -> list[xml.Node]:
    """One bucket of a listing; its region is told to who asked for pages, as S3 does."""
    about: list[xml.Node] = [("Name", row.name), ("CreationDate", iso_time(row.created_ms))]
    return [*about, ("BucketRegion", row.region)] if with_region else about


def _parse_kind(value: str | None) -> BucketKind:
    if value is None:
        return BucketKind.ORDINARY
    try:
        return BucketKind(value.strip().lower())
    except ValueError as error:
        raise S3Error("InvalidArgument", f"{_KIND_HEADER} is kv or ordinary.", ArgumentName=_KIND_HEADER) from error


def _parse_remote(value: str | None) -> RemoteRule:
    if value is None:
        return RemoteRule.NEVER
    try:
        return RemoteRule(value.strip().lower())
    except ValueError as error:
        problem = f"{_REMOTE_HEADER} is never, reused, evicted or always."
        raise S3Error("InvalidArgument", problem, ArgumentName=_REMOTE_HEADER) from error


def _check_bucket_headers(fields: dict[str, str]) -> None:
    if fields.get("x-amz-bucket-object-lock-enabled", "false").lower() == "true":
        raise S3Error("NotImplemented", "Object lock is not implemented.", Header="x-amz-bucket-object-lock-enabled")
    ownership = fields.get(_OWNERSHIP_HEADER, _OWN)
    if ownership in _OTHER_OWNERSHIPS:
        # Who asks for the first counts on ACLs that let nobody in: they would, here.
        raise S3Error("NotImplemented", f"{ownership} is not implemented.", Header=_OWNERSHIP_HEADER)
    if ownership != _OWN:
        raise S3Error(
            "InvalidArgument",
            f"Invalid {_OWNERSHIP_HEADER} header: {ownership}",
            ArgumentName=_OWNERSHIP_HEADER,
            ArgumentValue=ownership,
        )
    if fields.get("x-amz-bucket-namespace", "global") != "global":
        raise S3Error("NotImplemented", "Namespaces of accounts are not implemented.", Header="x-amz-bucket-namespace")


def _parse_configuration(document: bytes, exchange: Exchange) -> tuple[str, dict[str, str]]:
    """The region and the tags that CreateBucket's document asks for."""
    if not document.strip():
        return exchange.settings.region, {}
    try:
        root = xml.parse(document, root="CreateBucketConfiguration")
    except xml.XmlSyntaxError as error:
        raise S3Error("MalformedXML") from error
    if root.child("Bucket") is not None or root.child("Location") is not None:
        raise S3Error("NotImplemented", "Directory buckets are not implemented.", Feature="Directory buckets")
    region = (root.child_text("LocationConstraint") or "").strip()
    if region and region not in exchange.settings.regions:
        raise S3Error("InvalidLocationConstraint", LocationConstraint=region)
    listed = root.child("Tags")
    tags = {} if listed is None else tags_of_elements(listed.children, tags_max=BUCKET_TAGS_MAX)
    return region or exchange.settings.region, tags


def _check_same_bucket(error: BucketExistsError, row: BucketRow) -> None:
    existing = error.data.get("existing")
    if not isinstance(existing, BucketRow) or existing.owner != row.owner or existing.acl != row.acl:
        raise S3Error("BucketAlreadyExists", BucketName=row.name) from error
    settings = [(each.kind, each.durability, each.region, each.remote) for each in (existing, row)]
    if settings[0] != settings[1]:
        raise S3Error("BucketAlreadyOwnedByYou", BucketName=row.name) from error
