"""?namespace and ?namespaces: what may share chunks, declared once, read by those who may use it."""

from __future__ import annotations

from typing import Final

from kvobj.api.exchange import Exchange
from kvobj.api.kv.calls import Call, begin
from kvobj.api.kv_store import ChunkStore
from kvobj.api.message import Reply
from kvobj.api.object_store import ObjectStore
from kvobj.api.operations import DeclareNamespace, GetNamespace, ListNamespaces, RemoveNamespace
from kvobj.catalog.namespace_protocol import NamespaceUsage
from kvobj.errors import AccessDeniedError, InvalidRequestError
from kvobj.ids.chunk_ids import NAMESPACE_KEY_BYTES
from kvobj.store.chunk_values import OpenNamespace
from kvobj.store.namespace_declaration import identity_of, settings_of

KEY_FIELD: Final = "key"
"""In a declaration: the key that the namespace has in another store."""


class Namespaces:
    """Handlers of ?namespace and ?namespaces."""

    def __init__(self, store: ObjectStore, chunks: ChunkStore) -> None:
        self._store = store
        self._chunks = chunks

    async def declare(self, exchange: Exchange, operation: DeclareNamespace) -> Reply:
        """Declare a namespace, or change the settings of one that is declared equally."""
        call = await begin(exchange, operation, self._store, self._chunks)
        declaration = await call.read(dict[str, object], dict[str, object])
        key = None
        if KEY_FIELD in declaration:
            if not exchange.authentication.user.is_root:
                raise AccessDeniedError("only administrators give a namespace its key", bucket=call.bucket.name)
            key = key_of_document(declaration.pop(KEY_FIELD))
        opened, is_new = await self._chunks.declare_namespace(
            call.bucket, operation.name, declaration, caller=call.caller, key=key
        )
        usage = await self._chunks.namespace_usage(call.bucket, operation.name)
        return call.reply(_whole(call, opened, usage) | {"existed": not is_new})

    async def get(self, exchange: Exchange, operation: GetNamespace) -> Reply:
        """One namespace, with its key."""
        call = await begin(exchange, operation, self._store, self._chunks)
        opened = await call.namespace(operation.name)
        usage = await self._chunks.namespace_usage(call.bucket, operation.name)
        return call.reply(_whole(call, opened, usage))

    async def list(self, exchange: Exchange, operation: ListNamespaces) -> Reply:
        """A page of the namespaces that the caller may use, without their keys."""
        call = await begin(exchange, operation, self._store, self._chunks)
        if not call.caller.is_owner:
            await call.access.check_granted_any()
        found = await self._chunks.namespaces(
            call.bucket, after=operation.after, limit=operation.limit, caller=call.caller
        )
        more = len(found) >= operation.limit
        return call.reply(
            {
                "namespaces": [_value(opened, usage) for opened, usage in found],
                "next_start_after": found[-1][0].row.name if more else None,
            }
        )

    async def remove(self, exchange: Exchange, operation: RemoveNamespace) -> Reply:
        """Recall a namespace's chunks and forget it."""
        call = await begin(exchange, operation, self._store, self._chunks)
        await call.namespace(operation.name)
        recalled = await self._chunks.remove_namespace(call.bucket, operation.name, caller=call.caller)
        return call.reply({"recalled": recalled})


def key_of_document(value: object) -> bytes:
    """A namespace's key as a document has it: hex, or raw in msgpack. `InvalidRequestError`, which does not repeat it."""
    key = value
    if isinstance(value, str):
        # `fromhex` passes over blanks, and the length is what is checked: of hex digits alone the text has twice as many.
        try:
            key = bytes.fromhex(value) if len(value) == 2 * NAMESPACE_KEY_BYTES else None
        except ValueError:
            key = None
    if not isinstance(key, bytes) or len(key) != NAMESPACE_KEY_BYTES:
        raise InvalidRequestError(
            f"key: a namespace's key is {NAMESPACE_KEY_BYTES} bytes, in JSON hex", field=KEY_FIELD
        )
    return key


def _whole(call: Call, opened: OpenNamespace, usage: NamespaceUsage) -> dict[str, object]:
    """All that a user of the namespace may know: to whom else it is granted, and its quota, only the owner."""
    row = opened.row
    settings = settings_of(row)
    if not call.caller.is_owner:
        settings = {name: settings[name] for name in ("codecs", "lossy", "profile")}
    return _value(opened, usage) | {
        "key": opened.key,
        "root": row.root,
        "declaration": identity_of(row.declaration),
        **settings,
    }


def _value(opened: OpenNamespace, usage: NamespaceUsage) -> dict[str, object]:
    row = opened.row
    value: dict[str, object] = {
        "name": row.name,
        "fingerprint": row.fingerprint,
        "ids": row.ids,
        "chunk_tokens": row.chunk_tokens,
        "part_axis": row.part_axis,
        "may_write": opened.may_write,
        "chunks": usage.chunks,
        "size_bytes": usage.size_bytes,
    }
    if row.chunk_bytes is not None:
        value["chunk_bytes"] = row.chunk_bytes
    return value
