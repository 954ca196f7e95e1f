"""Namespaces of KV buckets: what may share chunks, declared once, immutable but for its settings (`kv-api` §3).

A row holds the canonical declaration and the namespace key, wrapped by the store's wrapping key; who may use the key is the
`access` setting. Declarations go to the record log too, so that a rebuild restores them before any chunk.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from kvobj.catalog.rows import NamespaceQuota

NAMESPACES_PER_BUCKET: Final = 10_000
"""One more is a `QuotaExceededError`."""


class NamespaceRow(msgspec.Struct, frozen=True, array_like=True):
    """One namespace. Identity: `declaration` (canonical JSON, RFC 8785) and what follows from it. Settings: the rest.

    `ids` is `kvobj`, `foreign` or an engine's chain. `chunk_bytes` is the size of a full chunk, None for an opaque layout. `access`
    maps user ids to `read` or `write`; the bucket's owner and root need no entry.
    `profile` is the digest of the model's profile, for codecs that need one; empty: none.
    """

    bucket: str
    name: str
    declaration: bytes
    fingerprint: bytes
    wrapped_key: bytes
    root: bytes
    ids: str
    chunk_tokens: int
    chunk_bytes: int | None
    part_axis: str | None
    created_ms: int
    owner: str
    codecs: dict[str, str] = {}
    lossy: bool = False
    access: dict[str, str] = {}
    quota: NamespaceQuota = NamespaceQuota()
    profile: bytes = b""


class NamespaceUsage(msgspec.Struct, frozen=True, array_like=True):
    """Live chunks of a namespace and their plain bytes."""

    chunks: int
    size_bytes: int


class Namespaces(Protocol):
    """See the module's text. Rows are values: who needs the key unwraps it (`store.namespaces`)."""

    async def declare(self, row: NamespaceRow, *, made_ms: int | None = None) -> tuple[NamespaceRow, bool]:
        """Record a namespace durably: the row that stands, and whether it is new. The same declaration again changes nothing
        but is answered with the row that stands. `NamespaceConflictError` (another declaration; the caller finds what
        differs in its `existing`), `QuotaExceededError` (as many as a bucket may have), `NoSuchBucketError` (`made_ms` as of
        `Catalog.commit`)."""
        ...

    async def change_settings(self, row: NamespaceRow, *, made_ms: int | None = None) -> NamespaceRow:
        """Replace codecs, lossy, access, quota and profile. `NoSuchNamespaceError`, also where it is another than that of the row's
        `root`; `NoSuchBucketError` (`made_ms` as of `Catalog.commit`)."""
        ...

    async def namespace(self, bucket: str, name: str) -> NamespaceRow | None:
        """The row, or None. Cached: a few microseconds."""
        ...

    async def page(self, bucket: str, *, after: str = "", limit: int = 1000) -> tuple[NamespaceRow, ...]:
        """Rows in name order strictly after `after`. `NoSuchBucketError`."""
        ...

    async def remove(self, bucket: str, name: str, *, made_ms: int | None = None, namespace_root: bytes = b"") -> None:
        """Forget a namespace (its chunks are recalled first, by the caller). `NoSuchNamespaceError`, also where it is another than
        that of `namespace_root`; no commit that was let into it comes after that (`Catalog.commit`). `NoSuchBucketError` (`made_ms`
        as of there). `BusyError` while it has live chunks: one was stored since the recall."""
        ...

    async def usage(self, bucket: str, name: str) -> NamespaceUsage:
        """Kept by the commits themselves. `NoSuchBucketError`."""
        ...

    def forget_bucket(self, bucket: str) -> None:
        """For the catalog: a bucket of this name is gone, and its namespaces with it."""
        ...
