"""The namespaces of KV buckets as their users see them: declared, opened with their keys, listed, forgotten.

The catalog keeps the rows, with wrapped keys; here keys are made, wrapped, unwrapped and kept in memory, and rights are checked. A
namespace that the caller may not use is told as an absent one. Event loop only.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from kvobj.catalog.namespace_protocol import NamespaceRow, Namespaces
from kvobj.catalog.rows import BucketKind, BucketRow
from kvobj.clock import Clock
from kvobj.errors import (
    AccessDeniedError,
    InvalidRequestError,
    NamespaceConflictError,
    NoSuchNamespaceError,
)
from kvobj.ids import RandomBytes
from kvobj.ids.chunk_ids import NAMESPACE_KEY_BYTES, namespace_root
from kvobj.store.chunk_values import Caller, OpenNamespace
from kvobj.store.key_wrapping import KeyWrapper
from kvobj.store.namespace_declaration import Declaration, differs, parse_declaration
from kvobj.store.places import DEFAULT_HINT, DEFAULT_NAMESPACE, default_namespace

__all__ = ["NamespaceBook", "differs", "no_profiles"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KEYS_KEPT: Final = 4096
_PAGE: Final = 1000
_WRITE: Final = "write"


async def no_profiles(_: NamespaceRow) -> None:
    """For a store without profiles."""
    raise InvalidRequestError("profile: this store holds none", field="profile")


class NamespaceBook:
    """See the module's text. Every KV bucket has the namespace `default`, which is no row and has no key. `on_changed` is told of
    a namespace whose settings were changed; `check_profile` refuses one whose profile will not do."""

    def __init__(
        self,
        namespaces: Namespaces,
        *,
        wrapper: KeyWrapper,
        clock: Clock,
        random_bytes: RandomBytes = os.urandom,
        on_changed: Callable[[NamespaceRow], None] = lambda _: None,
        check_profile: Callable[[NamespaceRow], Awaitable[None]] = no_profiles,
    ) -> None:
        self._namespaces = namespaces
        self._wrapper = wrapper
        self._clock = clock
        self._random_bytes = random_bytes
        self._on_changed = on_changed
        self._check_profile = check_profile
        self._keys: dict[bytes, bytes] = {}
        # Settings are read, changed and written back: one at a time, so that none is lost.
        self._changing = asyncio.Lock()

    async def declare(
        self,
        bucket: BucketRow,
        name: str,
        document: Mapping[str, object],
        *,
        caller: Caller,
        key: bytes | None = None,
    ) -> tuple[OpenNamespace, bool]:
        """Declare a namespace: it, and whether it is new. Where it stands declared equally, the settings that the document names
        are changed and its key stays.

        `key`: another store's, of which the chunks are to be known here by the same ids; that of a namespace that stands has to be
        the same. Who may give one is the caller's to check. Without, a new namespace gets a new key.

        Raises `InvalidRequestError` (with `field`), `NamespaceConflictError` (with `differs`), `AccessDeniedError` for all but
        the bucket's owner and root, `QuotaExceededError`, `NoSuchBucketError`.
        """
        require_owner(bucket, caller)
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                "a namespace's name has 1 to 128 of letters, digits, dot, underscore, hyphen, and begins with a letter or digit",
                field="namespace",
            )
        if name == DEFAULT_NAMESPACE:
            raise InvalidRequestError(f"{DEFAULT_NAMESPACE} is there without a declaration", field="namespace")
        declaration = parse_declaration(document)
        async with self._changing:
            standing = await self._namespaces.namespace(bucket.name, name)
            if standing is None:
                fresh = self._fresh(bucket, name, declaration, caller, key)
                if fresh.profile:
                    await self._check_profile(fresh)
                standing, is_new = await self._declare(fresh, made_ms=bucket.created_ms)
                if is_new:
                    return self._opened(standing, caller), True
            if standing.declaration != declaration.canonical:
                raise _conflict(standing, declaration.canonical)
            if key is not None and not hmac.compare_digest(key, self._key_of(standing)):
                raise NamespaceConflictError(
                    "the namespace has another key", bucket=bucket.name, namespace=name, differs=("key",)
                )
            changed = declaration.settings.over(standing)
            if changed.profile and changed.profile != standing.profile:
                await self._check_profile(changed)
            if changed != standing:
                changed = await self._namespaces.change_settings(changed, made_ms=bucket.created_ms)
                self._on_changed(changed)
            return self._opened(changed, caller), False

    async def check_key(self, buckets: Iterable[BucketRow]) -> None:
        """Unwrap the key of the first namespace of these buckets that has one. `CorruptionError` (see `KeyWrapper`)."""
        for bucket in buckets:
            after = ""
            while rows := await self._namespaces.page(bucket.name, after=after, limit=_PAGE):
                wrapped = next((row for row in rows if row.wrapped_key), None)
                if wrapped is not None:
                    self._key_of(wrapped)
                    return
                after = rows[-1].name

    async def open(self, bucket: BucketRow, name: str, *, caller: Caller) -> OpenNamespace:
        """The namespace with its key, if the caller may use it. `NoSuchNamespaceError`; `CorruptionError` (see `KeyWrapper`)."""
        if name in ("", DEFAULT_NAMESPACE):
            if not caller.is_owner:
                raise NoSuchNamespaceError("no such namespace", bucket=bucket.name, namespace=name, hint=DEFAULT_HINT)
            return OpenNamespace(default_namespace(bucket.name), b"", may_write=True)
        row = await self._namespaces.namespace(bucket.name, name) if _NAME.fullmatch(name) else None
        if row is None or not (caller.is_owner or caller.user_id in row.access):
            raise NoSuchNamespaceError("no such namespace", bucket=bucket.name, namespace=name)
        return self._opened(row, caller)

    async def page(
        self, bucket: BucketRow, *, caller: Caller, after: str = "", limit: int = 1000
    ) -> tuple[OpenNamespace, ...]:
        """Namespaces that the caller may use, in name order strictly after `after`, `default` among them for owners."""
        listed: list[NamespaceRow] = []
        if caller.is_owner and after < DEFAULT_NAMESPACE:
            listed.append(default_namespace(bucket.name))
        last = after
        while rows := await self._namespaces.page(bucket.name, after=last, limit=_PAGE):
            listed += [row for row in rows if caller.is_owner or caller.user_id in row.access]
            last = rows[-1].name
            if len(listed) > limit or len(rows) < _PAGE:
                break
        listed.sort(key=lambda row: row.name)
        return tuple([self._opened(row, caller) for row in listed[:limit]])

    async def remove(self, bucket: BucketRow, name: str, *, caller: Caller, namespace_root: bytes = b"") -> None:
        """Forget a namespace whose chunks have been recalled. For owners. `NoSuchNamespaceError` (see `Namespaces.remove`);
        `BusyError` while it has live chunks; `AccessDeniedError`."""
        require_owner(bucket, caller)
        if name == DEFAULT_NAMESPACE:
            raise InvalidRequestError(f"{DEFAULT_NAMESPACE} cannot be removed", field="namespace")
        async with self._changing:
            await self._namespaces.remove(bucket.name, name, made_ms=bucket.created_ms, namespace_root=namespace_root)

    def _fresh(
        self, bucket: BucketRow, name: str, declaration: Declaration, caller: Caller, key: bytes | None
    ) -> NamespaceRow:
        if key is None:
            key = self._random_bytes(NAMESPACE_KEY_BYTES)
        elif len(key) != NAMESPACE_KEY_BYTES:
            raise InvalidRequestError(f"key: a namespace's key has {NAMESPACE_KEY_BYTES} bytes", field="key")
        return declaration.row(
            bucket=bucket.name,
            name=name,
            wrapped_key=self._wrapper.wrap(key),
            root=namespace_root(key, declaration.fingerprint),
            owner=caller.user_id,
            now_ms=self._clock.now_ms(),
        )

    async def _declare(self, row: NamespaceRow, *, made_ms: int) -> tuple[NamespaceRow, bool]:
        try:
            return await self._namespaces.declare(row, made_ms=made_ms)
        except NamespaceConflictError as error:
            standing = error.data.get("existing")
            assert isinstance(standing, NamespaceRow)
            raise _conflict(standing, row.declaration) from error

    def _opened(self, row: NamespaceRow, caller: Caller) -> OpenNamespace:
        may_write = caller.is_owner or row.access.get(caller.user_id) == _WRITE
        return OpenNamespace(row, self._key_of(row), may_write=may_write)

    def _key_of(self, row: NamespaceRow) -> bytes:
        if not row.wrapped_key:
            return b""
        key = self._keys.get(row.wrapped_key)
        if key is None:
            key = self._wrapper.unwrap(row.wrapped_key, bucket=row.bucket, namespace=row.name)
            if len(self._keys) >= _KEYS_KEPT:
                self._keys.clear()
            self._keys[row.wrapped_key] = key
        return key


def require_owner(bucket: BucketRow, caller: Caller) -> None:
    """What declaring and removing ask for: `InvalidRequestError` for a bucket that has no namespaces, `AccessDeniedError`."""
    if bucket.kind is not BucketKind.KV:
        raise InvalidRequestError("only KV buckets have namespaces", bucket=bucket.name)
    if not caller.is_owner:
        hint = "only the bucket's owner declares and removes namespaces"
        raise AccessDeniedError(hint, bucket=bucket.name, hint=hint)


def _conflict(standing: NamespaceRow, declaration: bytes) -> NamespaceConflictError:
    fields = differs(standing.declaration, declaration)
    return NamespaceConflictError(
        f"the namespace is declared otherwise: {', '.join(fields)}",
        bucket=standing.bucket,
        namespace=standing.name,
        differs=fields,
    )
