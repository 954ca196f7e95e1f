"""The rows of one key in both environments, what a change makes of them, and the counts that follow.

An acknowledged `memory` row lies in the volatile table only and may shadow an older durable row: then the volatile one is the live
one, and power loss brings the older back (that is what the class promises). Guarantees: row tables, usage counters
and log entries change together, in the caller's transaction; a live key counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kvobj.catalog.encoding import (
    DELETE_QUEUE,
    DELETE_QUEUE_VOLATILE,
    OBJECTS,
    OBJECTS_VOLATILE,
    USAGE,
    USAGE_VOLATILE,
    decode_object,
    encode_row,
    number_key,
)
from kvobj.catalog.key_tree import KeyTree
from kvobj.catalog.listing import merged
from kvobj.catalog.log_entries import RowRemoved, encode_entry, encode_object_value
from kvobj.catalog.rows import BucketUsage, ObjectRow, QueueEntry
from kvobj.database import ReadView, WriteView


class RowPair(NamedTuple):
    """The rows of one key; `live` is the one that readers see."""

    volatile: ObjectRow | None
    durable: ObjectRow | None

    @property
    def live(self) -> ObjectRow | None:
        """The volatile row if there is one, else the durable one."""
        return self.durable if self.volatile is None else self.volatile

    def blob_ids(self) -> set[bytes]:
        """Blobs that either row names."""
        return {blob.blob_id for row in self if row is not None for blob in row.blobs}


NO_ROWS = RowPair(None, None)


class ObjectRows:
    """The object tables. Stateless: every call works on the given view."""

    __slots__ = ("allocate", "durable", "volatile")

    def __init__(self, allocate: Callable[[], int]) -> None:
        self.allocate = allocate
        self.durable = KeyTree(OBJECTS, allocate)
        self.volatile = KeyTree(OBJECTS_VOLATILE, allocate)

    def live(self, view: ReadView, root: bytes, key: bytes) -> ObjectRow | None:
        """The live row of a key."""
        value = self.volatile.get(view, root, key)
        if value is None:
            value = self.durable.get(view, root, key)
        return None if value is None else decode_object(value)

    def pair(self, view: ReadView, root: bytes, key: bytes) -> RowPair:
        """Both rows of a key."""
        above = self.volatile.get(view, root, key)
        below = self.durable.get(view, root, key)
        if above is None and below is None:
            return NO_ROWS
        return RowPair(
            None if above is None else decode_object(above),
            None if below is None else decode_object(below),
        )

    def items(self, view: ReadView, root: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys and encoded live rows in key order from `start` on."""
        return merged(self.volatile.items(view, root, start), self.durable.items(view, root, start))

    def usage(self, view: ReadView, root: bytes) -> BucketUsage:
        """Live rows and their plain bytes."""
        durable = view.counters(USAGE, root) or (0, 0)
        volatile = view.counters(USAGE_VOLATILE, root) or (0, 0)
        return BucketUsage(durable[0] + volatile[0], durable[1] + volatile[1])

    def change(self, view: WriteView, root: bytes, key: bytes, before: RowPair, after: RowPair) -> None:
        """Make the rows of a key `after`; `before` is what they are now (rows left alone are the same objects).

        Puts come first: they alone may raise (`StoreFullError`), and then nothing has changed.
        """
        if after.durable is not None and after.durable is not before.durable:
            value = encode_row(after.durable)
            self.durable.put(view, root, key, value)
            view.log(encode_object_value(value))
        if after.volatile is not None and after.volatile is not before.volatile:
            self.volatile.put(view, root, key, encode_row(after.volatile))
        if after.durable is None and before.durable is not None:
            self.durable.delete(view, root, key)
            view.log(encode_entry(RowRemoved(before.durable.bucket, before.durable.key)))
        if after.volatile is None and before.volatile is not None:
            self.volatile.delete(view, root, key)
        was_durable, is_durable = _durable_share(before), _durable_share(after)
        if was_durable != is_durable:
            view.add(USAGE, root, [new - old for new, old in zip(is_durable, was_durable, strict=True)])
        was_volatile, is_volatile = _volatile_share(before), _volatile_share(after)
        if was_volatile != is_volatile:
            view.add(USAGE_VOLATILE, root, [new - old for new, old in zip(is_volatile, was_volatile, strict=True)])

    def queue_replaced(self, view: WriteView, before: RowPair, after: RowPair, *, now_ms: int) -> None:
        """Queue the blobs that `before` names and `after` does not, each with the durability of the row that named it."""
        kept = after.blob_ids()
        for row, is_volatile in ((before.durable, False), (before.volatile, True)):
            if row is not None:
                spare = [blob.blob_id for blob in row.blobs if blob.blob_id not in kept]
                kept.update(spare)
                self.queue(view, spare, bucket=row.bucket, key=row.key, volatile=is_volatile, now_ms=now_ms)

    def queue(
        self, view: WriteView, blob_ids: Iterable[bytes], *, bucket: str, key: str, volatile: bool, now_ms: int
    ) -> None:
        """Queue blobs for deletion. Takes from the headroom: what makes room must work in a full store."""
        table = DELETE_QUEUE_VOLATILE if volatile else DELETE_QUEUE
        for blob_id in blob_ids:
            position = self.allocate()
            entry = QueueEntry(blob_id, now_ms, bucket, key, position, volatile)
            view.put(table, number_key(position), encode_row(entry), headroom=True)


def _durable_share(rows: RowPair) -> tuple[int, int]:
    return (0, 0) if rows.durable is None else (1, rows.durable.size_bytes)


def _volatile_share(rows: RowPair) -> tuple[int, int]:
    if rows.volatile is None:
        return (0, 0)
    if rows.durable is None:
        return (1, rows.volatile.size_bytes)
    return (0, rows.volatile.size_bytes - rows.durable.size_bytes)
