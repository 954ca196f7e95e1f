"""The namespaces of the reference driver: a dict, every verb read off the protocol's text."""

from __future__ import annotations

from collections.abc import Callable

from kvobj.catalog.log_entries import NamespaceRemoved
from kvobj.catalog.namespace_changes import equally_declared, no_such_namespace, require_empty, with_settings
from kvobj.catalog.namespace_protocol import NAMESPACES_PER_BUCKET, NamespaceRow, NamespaceUsage
from kvobj.errors import QuotaExceededError


class MemoryNamespaces:
    """See `Namespaces`. `require_bucket` (its name, and when it was made) and `usage_of` (bucket, namespace) ask the catalog that
    this belongs to, `publish` tells its outbox, `require_room` asks that for room."""

    def __init__(
        self,
        require_bucket: Callable[[str, int | None], None],
        usage_of: Callable[[str, str], NamespaceUsage],
        publish: Callable[[NamespaceRow | NamespaceRemoved], None] = lambda _: None,
        require_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._require_room = require_room
        self._require_bucket = require_bucket
        self._publish = publish
        self._usage_of = usage_of
        self._rows: dict[tuple[str, str], NamespaceRow] = {}

    def is_meant(self, bucket: str, name: str, namespace_root: bytes) -> bool:
        """Whether the namespace of this name has this root."""
        row = self._rows.get((bucket, name))
        return row is not None and row.root == namespace_root

    async def declare(self, row: NamespaceRow, *, made_ms: int | None = None) -> tuple[NamespaceRow, bool]:
        """See `Namespaces.declare`."""
        self._require_bucket(row.bucket, made_ms)
        existing = self._rows.get((row.bucket, row.name))
        if existing is not None:
            return equally_declared(existing, row), False
        if sum(bucket == row.bucket for bucket, _ in self._rows) >= NAMESPACES_PER_BUCKET:
            raise QuotaExceededError("the bucket has as many namespaces as it may", limit=NAMESPACES_PER_BUCKET)
        self._require_room()
        self._rows[row.bucket, row.name] = row
        self._publish(row)
        return row, True

    async def change_settings(self, row: NamespaceRow, *, made_ms: int | None = None) -> NamespaceRow:
        """See `Namespaces.change_settings`."""
        self._require_bucket(row.bucket, made_ms)
        self._require_room()
        changed = with_settings(self._rows.get((row.bucket, row.name)), row)
        self._rows[row.bucket, row.name] = changed
        self._publish(changed)
        return changed

    async def namespace(self, bucket: str, name: str) -> NamespaceRow | None:
        """See `Namespaces.namespace`."""
        return self._rows.get((bucket, name))

    async def page(self, bucket: str, *, after: str = "", limit: int = 1000) -> tuple[NamespaceRow, ...]:
        """See `Namespaces.page`."""
        self._require_bucket(bucket, None)
        rows = [row for (where, name), row in self._rows.items() if where == bucket and name.encode() > after.encode()]
        return tuple(sorted(rows, key=lambda row: row.name.encode())[:limit])

    async def remove(self, bucket: str, name: str, *, made_ms: int | None = None, namespace_root: bytes = b"") -> None:
        """See `Namespaces.remove`."""
        self._require_bucket(bucket, made_ms)
        existing = self._rows.get((bucket, name))
        if existing is None or (namespace_root and existing.root != namespace_root):
            raise no_such_namespace(bucket, name)
        require_empty(self._usage_of(bucket, name), name)
        del self._rows[bucket, name]
        self._publish(NamespaceRemoved(bucket, name))

    def rows(self) -> list[NamespaceRow]:
        """All of them."""
        return list(self._rows.values())

    async def usage(self, bucket: str, name: str) -> NamespaceUsage:
        """See `Namespaces.usage`."""
        self._require_bucket(bucket, None)
        return self._usage_of(bucket, name)

    def forget_bucket(self, bucket: str) -> None:
        """See `Namespaces.forget_bucket`."""
        for place in [place for place in self._rows if place[0] == bucket]:
            del self._rows[place]
            self._publish(NamespaceRemoved(*place))
