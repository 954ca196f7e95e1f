"""The catalog's changes of namespaces: rare, durable, each one transaction of the durable writer, told to the record log.

A row stands under its bucket's root and its name, so that a bucket made anew under an old name has none of the old ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec

from kvobj.catalog.catalog_rows import require_root, root_of
from kvobj.catalog.encoding import (
    NAMESPACE_USAGE,
    NAMESPACE_USAGE_VOLATILE,
    NAMESPACES,
    decode_namespace,
    encode_row,
)
from kvobj.catalog.log_entries import NamespaceRemoved, tell
from kvobj.catalog.namespace_protocol import NAMESPACES_PER_BUCKET, NamespaceRow, NamespaceUsage
from kvobj.database import ReadView, WriteView
from kvobj.errors import BusyError, NamespaceConflictError, NoSuchNamespaceError, QuotaExceededError

_NOTHING: Final = (0, 0)


def stored_namespace(view: ReadView, root: bytes, name: str) -> NamespaceRow | None:
    """The row of a namespace of the bucket with this root."""
    value = view.get(NAMESPACES, _place(root, name))
    return None if value is None else decode_namespace(value)


def stored_namespaces(view: ReadView, root: bytes, *, after: str = "") -> Iterator[NamespaceRow]:
    """The rows of a bucket in name order, strictly after `after`."""
    start = _place(root, after) + b"\0" if after else root
    for _, value in view.range(NAMESPACES, start, _end_of(root)):
        yield decode_namespace(value)


def stored_usage(view: ReadView, root: bytes, name: str) -> NamespaceUsage:
    """Live chunks of a namespace. The commits keep the counters (`object_rows`)."""
    place = root + name.encode()
    durable = view.counters(NAMESPACE_USAGE, place) or _NOTHING
    volatile = view.counters(NAMESPACE_USAGE_VOLATILE, place) or _NOTHING
    return NamespaceUsage(durable[0] + volatile[0], durable[1] + volatile[1])


def is_namespace_meant(view: ReadView, root: bytes, name: str, namespace_root: bytes) -> bool:
    """Whether the namespace of this name is the one that a writer was let into, and not one that was declared anew while the body
    arrived: that may have another layout, and other users. Of the same key and declaration it is the same. Empty: whichever."""
    if not namespace_root:
        return True
    value = view.get(NAMESPACES, _place(root, name))
    return value is not None and _root_in(value) == namespace_root


@lru_cache(maxsize=1024)
def _root_in(value: bytes) -> bytes:
    return decode_namespace(value).root


def replay_namespace(view: WriteView, entry: NamespaceRow | NamespaceRemoved) -> None:
    """Do what an entry of the record log says; one about a bucket that is gone again is skipped."""
    root = root_of(view, entry.bucket)
    if root is None:
        return
    if isinstance(entry, NamespaceRow):
        view.put(NAMESPACES, _place(root, entry.name), encode_row(entry))
    else:
        view.delete(NAMESPACES, _place(root, entry.name))


def drop_namespaces(view: WriteView, bucket: str) -> list[str]:
    """Take away all rows of a bucket that is being removed; their names. The log's entry of the bucket's removal stands for theirs:
    the log is read in order."""
    root = root_of(view, bucket)
    if root is None:
        return []
    keys = [key for key, _ in view.range(NAMESPACES, root, _end_of(root))]
    for key in keys:
        view.delete(NAMESPACES, key)
    return [key[len(root) :].decode() for key in keys]


@dataclass(frozen=True, slots=True)
class DeclareNamespace:
    """`Namespaces.declare` as a change."""

    row: NamespaceRow
    made_ms: int | None = None

    def __call__(self, view: WriteView) -> tuple[NamespaceRow, bool]:
        """Run it."""
        row = self.row
        root = require_root(view, row.bucket, self.made_ms)
        existing = stored_namespace(view, root, row.name)
        if existing is not None:
            return equally_declared(existing, row), False
        if sum(1 for _ in view.range(NAMESPACES, root, _end_of(root))) >= NAMESPACES_PER_BUCKET:
            raise QuotaExceededError("the bucket has as many namespaces as it may", limit=NAMESPACES_PER_BUCKET)
        _write(view, root, row)
        return row, True


@dataclass(frozen=True, slots=True)
class ChangeSettings:
    """`Namespaces.change_settings` as a change."""

    row: NamespaceRow
    made_ms: int | None = None

    def __call__(self, view: WriteView) -> NamespaceRow:
        """Run it."""
        root = require_root(view, self.row.bucket, self.made_ms)
        existing = stored_namespace(view, root, self.row.name)
        changed = with_settings(existing, self.row)
        _write(view, root, changed)
        return changed


@dataclass(frozen=True, slots=True)
class RemoveNamespace:
    """`Namespaces.remove` as a change."""

    bucket: str
    name: str
    made_ms: int | None = None
    namespace_root: bytes = b""

    def __call__(self, view: WriteView) -> None:
        """Run it."""
        root = require_root(view, self.bucket, self.made_ms)
        existing = stored_namespace(view, root, self.name)
        if existing is None or (self.namespace_root and existing.root != self.namespace_root):
            raise no_such_namespace(self.bucket, self.name)
        require_empty(stored_usage(view, root, self.name), self.name)
        view.delete(NAMESPACES, _place(root, self.name))
        tell(view, NamespaceRemoved(self.bucket, self.name), removed_from=self.bucket)


def equally_declared(existing: NamespaceRow, row: NamespaceRow) -> NamespaceRow:
    """The row that stands, if it is declared as the given one is. `NamespaceConflictError`."""
    if existing.declaration != row.declaration:
        raise NamespaceConflictError("the namespace is declared otherwise", namespace=row.name, existing=existing)
    return existing


def with_settings(existing: NamespaceRow | None, row: NamespaceRow) -> NamespaceRow:
    """The row that stands with the settings of the given one. `NoSuchNamespaceError`, also where it has another root."""
    if existing is None or (row.root and existing.root != row.root):
        raise no_such_namespace(row.bucket, row.name)
    return msgspec.structs.replace(
        existing, codecs=row.codecs, lossy=row.lossy, access=row.access, quota=row.quota, profile=row.profile
    )


def require_empty(usage: NamespaceUsage, name: str) -> None:
    """Refuse to forget a namespace whose chunks can still be read."""
    if usage.chunks > 0:
        raise BusyError("the namespace has live chunks: recall them first", name=name, chunks=usage.chunks)


def no_such_namespace(bucket: str, name: str) -> NoSuchNamespaceError:
    """What absent and forbidden answer alike."""
    return NoSuchNamespaceError("no such namespace", bucket=bucket, namespace=name)


def _write(view: WriteView, root: bytes, row: NamespaceRow) -> None:
    view.put(NAMESPACES, _place(root, row.name), encode_row(row))
    tell(view, row)


def _place(root: bytes, name: str) -> bytes:
    return root + name.encode()


def _end_of(root: bytes) -> bytes:
    """Behind the last key of a bucket. Roots are numbers, far below the highest of 8 bytes."""
    return (int.from_bytes(root, "big") + 1).to_bytes(len(root), "big")
