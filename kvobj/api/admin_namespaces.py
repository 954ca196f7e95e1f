"""The admin port's calls about namespaces: listed, shown, exported with their keys, and imported into another store.

A namespace's key names all its chunks: whoever has it knows which prompts are stored. It leaves in `export` alone, for the root
user, and comes in with `import` alone; it is in no log line and no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvobj.api.kv.namespaces import key_of_document
from kvobj.api.kv_store import ChunkStore
from kvobj.catalog.namespace_protocol import NamespaceUsage
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, BucketRow
from kvobj.errors import InvalidRequestError, NamespaceConflictError, NoSuchBucketError
from kvobj.store.chunk_values import Caller, OpenNamespace
from kvobj.store.namespace_declaration import identity_of, parse_declaration, settings_of
from kvobj.store.places import DEFAULT_NAMESPACE

PAGE: Final = 1000


class AdminNamespaces:
    """Over the parts of the KV API. Every call is made as the bucket's owner, since only the root user gets here."""

    def __init__(self, catalog: Catalog, chunks: ChunkStore) -> None:
        self._catalog = catalog
        self._chunks = chunks

    async def page(self, bucket_name: str, *, after: str) -> dict[str, object]:
        """Namespaces of a bucket in name order strictly after `after`, with their usage and without keys."""
        bucket, owner = await self._bucket(bucket_name)
        found = await self._chunks.namespaces(bucket, after=after, limit=PAGE, caller=owner)
        return {
            "namespaces": [_document(opened, usage) for opened, usage in found],
            "next_after": found[-1][0].row.name if len(found) == PAGE else None,
        }

    async def show(self, bucket_name: str, name: str) -> dict[str, object]:
        """One namespace with its declaration and settings, without its key. `NoSuchNamespaceError`."""
        bucket, owner = await self._bucket(bucket_name)
        opened = await self._chunks.namespace(bucket, name, caller=owner)
        usage = await self._chunks.namespace_usage(bucket, name)
        settings = {} if name == DEFAULT_NAMESPACE else settings_of(opened.row)
        return _document(opened, usage) | {"declaration": identity_of(opened.row.declaration)} | settings

    async def export(self, bucket_name: str, name: str) -> dict[str, object]:
        """What another store needs to name the same chunks alike: declaration and key. `InvalidRequestError` for `default`, which
        every bucket has alike."""
        bucket, owner = await self._bucket(bucket_name)
        if name == DEFAULT_NAMESPACE:
            raise InvalidRequestError(f"{DEFAULT_NAMESPACE} has no key: every bucket has it alike", field="name")
        opened = await self._chunks.namespace(bucket, name, caller=owner)
        return {
            "name": name,
            "declaration": identity_of(opened.row.declaration),
            "fingerprint": opened.row.fingerprint.hex(),
            "root": opened.row.root.hex(),
            "key": opened.key.hex(),
        }

    async def import_(
        self, bucket_name: str, name: str, declaration: Mapping[str, object], *, key: str, fingerprint: str
    ) -> dict[str, object]:
        """Declare a namespace with a key of another store. `NamespaceConflictError` where it stands declared otherwise or with
        another key, and where the declaration has not this fingerprint here: this version reads it as something else."""
        bucket, owner = await self._bucket(bucket_name)
        if fingerprint and parse_declaration(declaration).fingerprint.hex() != fingerprint:
            raise NamespaceConflictError(
                "the declaration has another fingerprint here than in the store it was exported from",
                name=name,
                differs=("fingerprint",),
            )
        opened, is_new = await self._chunks.declare_namespace(
            bucket, name, declaration, caller=owner, key=key_of_document(key)
        )
        usage = await self._chunks.namespace_usage(bucket, name)
        return _document(opened, usage) | {"existed": not is_new}

    async def _bucket(self, name: str) -> tuple[BucketRow, Caller]:
        bucket = await self._catalog.bucket(name)
        if bucket is None:
            raise NoSuchBucketError("no such bucket", bucket=name)
        if bucket.kind is not BucketKind.KV:
            raise InvalidRequestError("only buckets of kind kv have namespaces", bucket=name)
        return bucket, Caller(user_id=bucket.owner, is_owner=True)


def _document(opened: OpenNamespace, usage: NamespaceUsage) -> dict[str, object]:
    row = opened.row
    return {
        "name": row.name,
        "ids": row.ids,
        "chunk_tokens": row.chunk_tokens,
        "chunk_bytes": row.chunk_bytes,
        "fingerprint": row.fingerprint.hex(),
        "root": row.root.hex(),
        "chunks": usage.chunks,
        "size_bytes": usage.size_bytes,
    }
