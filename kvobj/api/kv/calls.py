"""What every call of the KV API begins and ends with: whose it is, its document, its reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from kvobj.api.access.actions import Action
from kvobj.api.checksums import parse_announced
from kvobj.api.chunk_access import ChunkAccess, open_bucket
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange
from kvobj.api.kv.bodies import (
    MAX_DOCUMENT_BYTES,
    MAX_MSGPACK_BYTES,
    Format,
    decode,
    encode,
    reply_format,
    request_format,
)
from kvobj.api.kv_store import ChunkStore
from kvobj.api.message import Reply
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import KvOperation
from kvobj.catalog.rows import BucketKind, BucketRow
from kvobj.errors import DocumentTooLargeError, EntityTooLargeError, NoSuchNamespaceError
from kvobj.store.chunk_values import Caller, OpenNamespace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its bucket, which is a KV bucket, and who makes it."""

    exchange: Exchange
    bucket: BucketRow
    caller: Caller
    access: ChunkAccess
    chunks: ChunkStore

    async def namespace(self, name: str) -> OpenNamespace:
        """The namespace, if there is one that the caller may use. `NoSuchNamespaceError`; `AccessDeniedError` for who is granted
        nothing in the bucket."""
        try:
            return await self.chunks.namespace(self.bucket, name, caller=self.caller)
        except NoSuchNamespaceError:
            await self.access.check_granted_any()
            raise

    async def read(self, json_kind: type[T], msgpack_kind: type[T]) -> T:
        """The request's document, verified as any body, as a value of the type that its format has.

        Raises the errors of `request_format` and `decode`, `EntityTooLargeError`, and those of signatures and checksums.
        """
        document_format = request_format(self.exchange.fields)
        is_json = document_format is Format.JSON
        announced = parse_announced(self.exchange.fields, self.exchange.authentication)
        limit_bytes = MAX_DOCUMENT_BYTES if is_json else MAX_MSGPACK_BYTES
        try:
            document = await self.exchange.read_bytes(announced, limit_bytes=limit_bytes)
        except DocumentTooLargeError as error:  # this API has one word for all that is too large
            raise EntityTooLargeError("the document is too large", **error.data) from error
        return decode(document, json_kind if is_json else msgpack_kind, document_format)

    def reply(self, value: object) -> Reply:
        """A 200 with a document in the format that the caller takes."""
        document_format = reply_format(self.exchange.fields)
        return self.exchange.reply(200, [("content-type", document_format.value)], encode(value, document_format))

    @property
    def is_msgpack_reply(self) -> bool:
        """Whether ids in the reply are raw bytes."""
        return reply_format(self.exchange.fields) is Format.MSGPACK


async def begin(exchange: Exchange, operation: KvOperation, store: ObjectStore, chunks: ChunkStore) -> Call:
    """The call, once its bucket is known to be one that it can be made on.

    Raises `NoSuchBucketError`, `AccessDeniedError` (an ordinary bucket of somebody else's) and `S3Error` InvalidRequest.
    """
    access = await open_bucket(exchange, store.catalog, operation.bucket, action=Action.LIST_BUCKET)
    if access.bucket.kind is not BucketKind.KV:
        raise S3Error("InvalidRequest", "The KV API works on buckets of kind kv, and this one is ordinary.")
    caller = Caller(user_id=exchange.authentication.user.id, is_owner=access.is_owner)
    return Call(exchange, access.bucket, caller, access, chunks)
