"""The namespaces of the LMDB catalog: `namespace_protocol.Namespaces`, with rows once read kept in memory.

Event loop only. Does not own the database. Rows change here alone, so a remembered row is the row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from itertools import islice
from typing import Final, TypeVar

from kvobj.catalog.catalog_rows import require_root, root_of
from kvobj.catalog.flight_keys import bucket_key
from kvobj.catalog.followed import followed
from kvobj.catalog.namespace_changes import (
    ChangeSettings,
    DeclareNamespace,
    RemoveNamespace,
    stored_namespace,
    stored_namespaces,
    stored_usage,
)
from kvobj.catalog.namespace_protocol import NamespaceRow, NamespaceUsage
from kvobj.database import Database, WriteView

T = TypeVar("T")

_KNOWN: Final = 4096


class LmdbNamespaces:
    """See the module's text and `Namespaces`."""

    __slots__ = ("_database", "_known", "_on_changed", "_require_room")

    def __init__(
        self,
        database: Database,
        *,
        on_changed: Callable[[], None] = lambda: None,
        require_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_changed` is called when a row has changed or gone, before who asked for that is told; `require_room` raises where
        nothing more may be told (`Outbox.require_room`)."""
        self._database = database
        self._on_changed = on_changed
        self._require_room = require_room
        self._known: dict[tuple[str, str], NamespaceRow | None] = {}

    async def declare(self, row: NamespaceRow, *, made_ms: int | None = None) -> tuple[NamespaceRow, bool]:
        """See `Namespaces.declare`."""
        if await self.namespace(row.bucket, row.name) is None:
            self._require_room()
        return await self._write(DeclareNamespace(row, made_ms), row.bucket, row.name)

    async def change_settings(self, row: NamespaceRow, *, made_ms: int | None = None) -> NamespaceRow:
        """See `Namespaces.change_settings`."""
        self._require_room()
        return await self._write(ChangeSettings(row, made_ms), row.bucket, row.name)

    async def namespace(self, bucket: str, name: str) -> NamespaceRow | None:
        """See `Namespaces.namespace`."""
        place = (bucket, name)
        if place in self._known:
            return self._known[place]
        with self._database.read() as view:
            root = root_of(view, bucket)
            row = None if root is None else stored_namespace(view, root, name)
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[place] = row
        return row

    async def page(self, bucket: str, *, after: str = "", limit: int = 1000) -> tuple[NamespaceRow, ...]:
        """See `Namespaces.page`."""
        with self._database.read() as view:
            return tuple(islice(stored_namespaces(view, require_root(view, bucket), after=after), limit))

    async def remove(self, bucket: str, name: str, *, made_ms: int | None = None, namespace_root: bytes = b"") -> None:
        """See `Namespaces.remove`."""
        # Commits wait for the bucket's name: one that ran beside this would be in no count here, and find the namespace there.
        change = RemoveNamespace(bucket, name, made_ms, namespace_root)
        await self._write(change, bucket, name, [bucket_key(bucket)])

    async def usage(self, bucket: str, name: str) -> NamespaceUsage:
        """See `Namespaces.usage`."""
        with self._database.read() as view:
            return stored_usage(view, require_root(view, bucket), name)

    def forget_bucket(self, bucket: str) -> None:
        """See `Namespaces.forget_bucket`."""
        for place in [place for place in self._known if place[0] == bucket]:
            del self._known[place]

    def forget_all(self) -> None:
        """Read all rows anew from here on: another process has changed one."""
        self._known.clear()

    async def _write(self, change: Callable[[WriteView], T], bucket: str, name: str, keys: Collection[bytes] = ()) -> T:
        """Run a change; what was remembered is forgotten when the change is over, also where the caller has been cancelled."""

        def over(_: asyncio.Future[T]) -> None:
            self._known.pop((bucket, name), None)
            self._on_changed()

        return await followed(self._database.submit(change, keys), over)
