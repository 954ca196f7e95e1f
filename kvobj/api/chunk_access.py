"""Who may do what with the objects of a bucket, and to which namespace a chunk's key belongs.

In a KV bucket the owner and root may do all. Others are granted a namespace, to read or to write: what they are not granted answers
as if it were absent, and who is granted nothing in a bucket is denied as with any bucket, and so is who signs nothing. Deletes
and listings are the owner's (`Exchange.authorise`). In an ordinary bucket `access.BucketAccess` decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvobj.api.access.actions import ROW_ACTIONS, Action
from kvobj.api.access.bucket_access import BucketAccess
from kvobj.api.chunk_headers import ChunkHeaders, parse_chunk_headers, refuse_chunk_headers
from kvobj.api.exchange import Exchange
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, ObjectRow, UploadRow
from kvobj.errors import (
    AccessDeniedError,
    ImmutableChunkError,
    InvalidChunkIdError,
    NoSuchKeyError,
    NoSuchNamespaceError,
    NoSuchUploadError,
)
from kvobj.store.places import DEFAULT_HINT, DEFAULT_NAMESPACE, ChunkPlace, default_namespace, place_of

NAMESPACE_PAGE: Final = 100
_NAME_CHARACTERS_MAX: Final = 128


class ChunkAccess:
    """One request's rights in one bucket. Made by `open_bucket`."""

    __slots__ = ("_catalog", "_user_id", "bucket", "is_owner", "rights")

    def __init__(self, rights: BucketAccess, catalog: Catalog, *, user_id: str) -> None:
        self.rights = rights
        self.bucket = rights.bucket
        self.is_owner = rights.is_owner
        self._catalog = catalog
        self._user_id = user_id

    async def stands(self) -> bool:
        """Whether the bucket is there still, and not another that was made anew under its name."""
        return self.bucket.is_still(await self._catalog.bucket(self.bucket.name))

    async def namespace(self, name: str) -> NamespaceRow | None:
        """The namespace of this name, whoever asks: a right to it is not checked."""
        if name in ("", DEFAULT_NAMESPACE):
            return default_namespace(self.bucket.name)
        if "/" in name or "\0" in name or len(name) > _NAME_CHARACTERS_MAX or not name.isascii():
            return None  # none can be declared so
        return await self._catalog.namespaces.namespace(self.bucket.name, name)

    async def check_read(self, row: ObjectRow | None, key: str, action: Action = Action.GET_OBJECT) -> ObjectRow:
        """The row, if there is one that the user may read. `NoSuchKeyError`, or `AccessDeniedError` for who is granted nothing."""
        if self.bucket.kind is not BucketKind.KV:
            return self.rights.check_row(row, key, action)
        if row is not None and await self.may_read(row.namespace):
            return row
        await self.check_granted_any()
        raise NoSuchKeyError("no such key", bucket=self.bucket.name, key=key)

    async def may_read(self, namespace: str) -> bool:
        """Whether the user may read the chunks of this namespace of a KV bucket."""
        return self.is_owner or await self._level(namespace) is not None

    async def check_shown(self, row: ObjectRow) -> None:
        """A live chunk stands in a write's way, or answers for it: raise `ImmutableChunkError`, which tells nothing of it, if it
        belongs to a namespace that the user may not use. Bare keys of all namespaces share a bucket."""
        if not self.is_owner and await self._level(row.namespace) is None:
            raise ImmutableChunkError("a live chunk of another namespace has the key", bucket=row.bucket, key=row.key)

    async def place(self, key: str, fields: Mapping[str, str]) -> ChunkPlace | None:
        """Where the chunk that a request writes belongs, if the user may write there; None in an ordinary bucket.

        Errors: those of `parse_chunk_headers` and `place_of`; `NoSuchNamespaceError`, `AccessDeniedError`.
        """
        if self.bucket.kind is not BucketKind.KV:
            refuse_chunk_headers(fields)
            return None
        headers = parse_chunk_headers(fields)
        namespace = await self._namespace_of(key, headers)
        return place_of(namespace, key, parent=headers.parent, tokens=headers.tokens, group=headers.part)

    async def check_upload(self, upload: UploadRow | None, upload_id: str) -> UploadRow:
        """The upload, if the user may go on with it: an owner, or who began it and may still write there; in an ordinary bucket
        whoever `open_bucket` let in for it."""
        if upload is not None and not upload.group_parts:
            if self.is_owner or self.bucket.kind is not BucketKind.KV:
                return upload
            if upload.owner == self._user_id and await self._level(upload.namespace) == "write":
                return upload
        if self.bucket.kind is BucketKind.KV:
            await self.check_granted_any()
        raise NoSuchUploadError("no such upload", upload_id=upload_id)

    async def _namespace_of(self, key: str, headers: ChunkHeaders) -> NamespaceRow:
        """The namespace that the headers name, or that the key's first segment does, or `default`; the two must agree."""
        declared: NamespaceRow | None = None
        front, slash, _ = key.partition("/")
        if slash and front != DEFAULT_NAMESPACE:
            declared = await self.namespace(front)
        if headers.namespace is None:
            found: NamespaceRow | None = declared or default_namespace(self.bucket.name)
        else:
            found = await self.namespace(headers.namespace)
        if not self.is_owner:
            found = await self._writable(found)
        if found is None:
            raise NoSuchNamespaceError("no such namespace", bucket=self.bucket.name, namespace=headers.namespace)
        if declared is not None and declared.name != found.name:
            raise InvalidChunkIdError("the key belongs to another namespace than x-kvobj-namespace names")
        return found

    async def _writable(self, namespace: NamespaceRow | None) -> NamespaceRow | None:
        level = None if namespace is None else namespace.access.get(self._user_id)
        if level is None:
            await self.check_granted_any()
        if level == "read" or (namespace is not None and namespace.name == DEFAULT_NAMESPACE):
            hint = {} if level == "read" else {"hint": DEFAULT_HINT}
            raise AccessDeniedError(
                "the namespace may not be written", bucket=self.bucket.name, user_id=self._user_id, **hint
            )
        return None if level is None else namespace

    async def _level(self, namespace: str) -> str | None:
        row = await self.namespace(namespace)
        return None if row is None else row.access.get(self._user_id)

    async def check_granted_any(self) -> None:
        """Who is granted something here is told "absent" where others are told "denied", and what to do about it."""
        if self.is_owner:
            return
        after = ""
        while rows := await self._catalog.namespaces.page(self.bucket.name, after=after, limit=NAMESPACE_PAGE):
            if any(self._user_id in row.access for row in rows):
                return
            after = rows[-1].name
        raise AccessDeniedError(
            "not the bucket's owner", bucket=self.bucket.name, user_id=self._user_id, hint=DEFAULT_HINT
        )


async def open_bucket(
    exchange: Exchange,
    catalog: Catalog,
    name: str,
    *,
    action: Action,
    key: str = "",
    is_source: bool = False,
) -> ChunkAccess:
    """The caller's rights in the bucket of this name, for one action on a key of it ("": on the bucket).

    `NoSuchBucketError`. In an ordinary bucket `AccessDeniedError` where the action is not allowed, unless the object's row has to
    be known for that (`ROW_ACTIONS`): then `check_read` says so. In a KV bucket who signs nothing is denied, others are told what
    they are granted by the methods.
    """
    rights = exchange.access(await catalog.bucket(name), name, is_source=is_source)
    if rights.bucket.kind is BucketKind.KV:
        if exchange.authentication.is_anonymous:
            raise AccessDeniedError("chunks are for users", bucket=name)
    elif action not in ROW_ACTIONS:
        rights.require(action, key=key)
    return ChunkAccess(rights, catalog, user_id=exchange.authentication.user.id)
