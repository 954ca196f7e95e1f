"""The rows of one key in both environments, what a change makes of them, and the counts that follow.

An acknowledged `memory` row lies in the volatile table only and may shadow an older durable row: then the volatile one is the live
one, and power loss brings the older back (that is what the class promises). Guarantees: row tables, usage counters
and log entries change together, in the caller's transaction; a live key counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kvobj.catalog import chain_rows
from kvobj.catalog.encoding import (
    DELETE_QUEUE,
    DELETE_QUEUE_VOLATILE,
    NAMESPACE_USAGE,
    NAMESPACE_USAGE_VOLATILE,
    OBJECTS,
    OBJECTS_VOLATILE,
    USAGE,
    USAGE_VOLATILE,
    decode_object,
    encode_row,
    number_key,
)
from kvobj.catalog.key_tree import STRIDE_BYTES, KeyTree
from kvobj.catalog.lease_rows import PinGuard
from kvobj.catalog.listing import merged
from kvobj.catalog.log_entries import encode_object_value, encode_row_removed
from kvobj.catalog.remote_rows import RemoteRows
from kvobj.catalog.rows import BucketUsage, Durability, ObjectRow, ObjectState, QueueEntry
from kvobj.database import ReadView, Snapshot, Table, TablePages, WriteView


class RowPair(NamedTuple):
    """The rows of one key. A CONDEMNED row is always alone."""

    volatile: ObjectRow | None
    durable: ObjectRow | None

    @property
    def top(self) -> ObjectRow | None:
        """The volatile row if there is one, else the durable one; hidden or not."""
        return self.durable if self.volatile is None else self.volatile

    @property
    def live(self) -> ObjectRow | None:
        """The row that readers see."""
        top = self.top
        return top if top is not None and top.state is ObjectState.LIVE else None

    @property
    def hidden(self) -> ObjectRow | None:
        """The CONDEMNED row, if that is what stands there."""
        top = self.top
        return top if top is not None and top.state is ObjectState.CONDEMNED else None

    def blob_ids(self) -> set[bytes]:
        """Blobs that either row names."""
        return {blob_id for row in self if row is not None for blob_id in row.blob_ids}


NO_ROWS = RowPair(None, None)
_NOTHING = (0, 0)
_REMEMBERED_ROWS: Final = 2048
_REMEMBERED_ROW_BYTES: Final = 1024


class ObjectRows:
    """The object tables. `remote`: the queue that rows may wait in. Every call works on
    the given view."""

    __slots__ = ("_decoded", "allocate", "durable", "guard", "on_queued", "remote", "volatile")

    def __init__(
        self, allocate: Callable[[], int], guard: PinGuard | None = None, remote: RemoteRows | None = None
    ) -> None:
        self.allocate = allocate
        self.guard = guard if guard is not None else PinGuard()
        self.remote = remote
        self.durable = KeyTree(OBJECTS, allocate)
        self.volatile = KeyTree(OBJECTS_VOLATILE, allocate)
        # Called inside every change that queues blobs for deletion, on whatever thread it runs.
        self.on_queued: Callable[[], None] = _nothing
        # By what they are encoded as, so that none is ever out of date. What is read again is the same object, too.
        self._decoded: dict[bytes, ObjectRow] = {}

    def live(self, view: ReadView, root: bytes, key: bytes) -> ObjectRow | None:
        """The live row of a key."""
        row = self.any(view, root, key)
        return row if row is not None and row.state is ObjectState.LIVE else None

    def live_once(self, snapshot: Snapshot, root: bytes, key: bytes) -> ObjectRow | None:
        """`live` in a snapshot that was not entered. Event loop only."""
        if len(key) > STRIDE_BYTES:
            with snapshot as view:
                return self.live(view, root, key)
        value = snapshot.get_once(OBJECTS_VOLATILE, OBJECTS, root + key)
        if value is None:
            return None
        row = self._decoded.get(value)
        if row is None:
            row = decode_object(value)
            if len(value) <= _REMEMBERED_ROW_BYTES:
                if len(self._decoded) >= _REMEMBERED_ROWS:
                    self._decoded.clear()
                self._decoded[value] = row
        return row if row.state is ObjectState.LIVE else None

    def any(self, view: ReadView, root: bytes, key: bytes) -> ObjectRow | None:
        """The row of a key that counts, hidden or not."""
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

    def pairs(self, view: ReadView, root: bytes, keys: Sequence[bytes]) -> list[RowPair]:
        """`pair` of each key."""
        return [self.pair(view, root, key) for key in keys]

    def durable_rows(self, view: ReadView, root: bytes, keys: Sequence[bytes]) -> list[ObjectRow | None]:
        """The durable row of each key, hidden or not: at a third of the cost of `any` where all are of ordinary length."""
        if max(map(len, keys), default=0) > STRIDE_BYTES:
            values = [self.durable.get(view, root, key) for key in keys]
        else:
            values = view.get_many(OBJECTS, [root + key for key in keys])
        return [None if value is None else decode_object(value) for value in values]

    @staticmethod
    def pages(view: Snapshot) -> list[TablePages]:
        """The tables to look rows up in (`Snapshot.pages`), a row of an earlier one before one of a later; [] where their pages
        cannot be read."""
        above, below = view.pages(OBJECTS_VOLATILE), view.pages(OBJECTS)
        return [] if above is None or below is None else [above, below]

    def values(self, view: ReadView, root: bytes, keys: Sequence[bytes]) -> list[bytes | None]:
        """The encoded row of each key that counts, hidden or not, of a snapshot: half the cost of `any` where there are many."""
        if max(map(len, keys), default=0) > STRIDE_BYTES:
            return [self.volatile.get(view, root, key) or self.durable.get(view, root, key) for key in keys]
        stored = [root + key for key in keys]
        if not view.count(OBJECTS_VOLATILE):
            return view.get_many(OBJECTS, stored)
        values = view.get_many(OBJECTS_VOLATILE, stored)
        absent = [index for index, value in enumerate(values) if value is None]
        for index, value in zip(absent, view.get_many(OBJECTS, [stored[index] for index in absent]), strict=True):
            values[index] = value
        return values

    def items(self, view: ReadView, root: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys and encoded live rows in key order from `start` on."""
        rows = self.all_items(view, root, start)
        if chain_rows.hides_any(view, root):
            return (item for item in rows if decode_object(item[1]).state is ObjectState.LIVE)
        return rows

    def all_items(self, view: ReadView, root: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Keys and encoded rows that count, hidden or not, in key order from `start` on."""
        return merged(self.volatile.items(view, root, start), self.durable.items(view, root, start))

    def usage(self, view: ReadView, root: bytes) -> BucketUsage:
        """Live rows and their plain bytes."""
        return self._usage(view, USAGE, USAGE_VOLATILE, root)

    def namespace_usage(self, view: ReadView, root: bytes, namespace: str) -> BucketUsage:
        """The same of one namespace. Within an inline change, without what the durable writer is about to add."""
        return self._usage(view, NAMESPACE_USAGE, NAMESPACE_USAGE_VOLATILE, root + namespace.encode())

    @staticmethod
    def _usage(view: ReadView, below: Table, above: Table, place: bytes) -> BucketUsage:
        durable = view.counters(below, place) or (0, 0)
        volatile = view.counters(above, place) or (0, 0)
        return BucketUsage(durable[0] + volatile[0], durable[1] + volatile[1])

    def change(self, view: WriteView, root: bytes, key: bytes, before: RowPair, after: RowPair) -> None:
        """Make the rows of a key `after`; `before` is what they are now (rows left alone are the same objects).

        Puts come first: they alone may raise (`StoreFullError`), and then nothing has changed. Hiding and removing never raise.
        """
        if after.durable is not None and after.durable is not before.durable:
            self._put_durable(view, root, key, before.durable, after.durable)
        if after.volatile is not None and after.volatile is not before.volatile:
            hides = after.volatile.state is ObjectState.CONDEMNED
            self.volatile.put(view, root, key, encode_row(after.volatile), headroom=hides)
            chain_rows.relink(view, root, key, before.volatile, after.volatile, volatile=True)
        if after.durable is None and before.durable is not None:
            self.durable.delete(view, root, key)
            chain_rows.relink(view, root, key, before.durable, None, volatile=False)
            tell_removed(view, before.durable)
        if self.remote is not None and after.durable is not before.durable:
            self.remote.overtaken(view, before.durable, after.durable)
        if after.volatile is None and before.volatile is not None:
            self.volatile.delete(view, root, key)
            chain_rows.relink(view, root, key, before.volatile, None, volatile=True)
        if after.durable is not before.durable:
            _count(view, USAGE, NAMESPACE_USAGE, root, [*_share(after.durable, 1), *_share(before.durable, -1)])
        if after.volatile is not before.volatile or (
            after.volatile is not None and after.durable is not before.durable
        ):
            shares = [*_volatile_share(after, 1), *_volatile_share(before, -1)]
            _count(view, USAGE_VOLATILE, NAMESPACE_USAGE_VOLATILE, root, shares)

    def _put_durable(
        self, view: WriteView, root: bytes, key: bytes, before: ObjectRow | None, after: ObjectRow
    ) -> None:
        value = encode_row(after)
        self.durable.put(view, root, key, value, headroom=after.state is ObjectState.CONDEMNED)
        entry = encode_object_value(value)
        view.log(entry)
        if after.durability is Durability.SHARED:
            view.publish(entry, topic="" if after.state is ObjectState.LIVE else after.bucket)
        elif before is not None and before.durability is Durability.SHARED:
            view.publish(encode_row_removed(after.bucket, after.key), topic=after.bucket)
        chain_rows.relink(view, root, key, before, after, volatile=False)
        if before is None:
            chain_rows.settle(view, root, key)
        if after.parent:
            parent = after.parent.encode()
            if self.durable.get(view, root, parent) is None:
                chain_rows.expose(view, root, parent)

    def queue_replaced(
        self, view: WriteView, before: RowPair, after: RowPair, *, now_ms: int, may_be_pinned: bool = False
    ) -> None:
        """Queue the blobs that `before` names and `after` does not, each with the durability of the row that named it.

        `may_be_pinned`: ask of each row's blobs whether they must wait for a pin. A pin names a row's first blob: if that waits,
        all of them do.
        """
        kept = set() if after is NO_ROWS else after.blob_ids()
        for row, is_volatile in ((before.durable, False), (before.volatile, True)):
            if row is None or not row.blobs:
                continue
            spare = [blob_id for blob_id in row.blob_ids if blob_id not in kept]
            kept.update(spare)
            first = row.blobs[0].blob_id
            waits_for = first if may_be_pinned and self.guard.holds_blob(view, first) else b""
            self.queue(
                view, spare, bucket=row.bucket, key=row.key, volatile=is_volatile, now_ms=now_ms, waits_for=waits_for
            )

    def queue(
        self,
        view: WriteView,
        blob_ids: Iterable[bytes],
        *,
        bucket: str,
        key: str,
        volatile: bool,
        now_ms: int,
        waits_for: bytes = b"",
    ) -> None:
        """Queue blobs for deletion; `waits_for`: not before this blob is no longer pinned. Takes from the headroom: what makes
        room must work in a full store."""
        table = DELETE_QUEUE_VOLATILE if volatile else DELETE_QUEUE
        has_queued = False
        for blob_id in blob_ids:
            position = self.allocate()
            entry = QueueEntry(blob_id, now_ms, bucket, key, position, volatile, bool(waits_for), waits_for)
            view.put(table, number_key(position), encode_row(entry), headroom=True)
            has_queued = True
        if has_queued:
            self.on_queued()


def tell_removed(view: WriteView, row: ObjectRow) -> None:
    """Write to the record log that a durable row went, and publish it where the remote has the row."""
    entry = encode_row_removed(row.bucket, row.key)
    view.log(entry)
    if row.durability is Durability.SHARED:
        view.publish(entry, topic=row.bucket)


_Shares = list[tuple[int, ObjectRow | None]]
"""Rows to be counted in (1) or out (-1)."""


def _share(row: ObjectRow | None, sign: int) -> _Shares:
    return [] if row is None else [(sign, row)]


def _volatile_share(rows: RowPair, sign: int) -> _Shares:
    """What the volatile table adds to the durable one's count: its row instead of the durable one."""
    return [] if rows.volatile is None else [(sign, rows.volatile), (-sign, rows.durable)]


def _count(view: WriteView, usage: Table, namespaces: Table, root: bytes, shares: _Shares) -> None:
    """Bring the counters up to date: live rows only, per bucket and per namespace."""
    (sign, first), *others = shares
    if first is not None and first.state is ObjectState.LIVE and all(row is None for _, row in others):
        amounts = (sign, sign * first.size_bytes)
        view.add(usage, root, amounts)
        if first.namespace:
            view.add(namespaces, root + first.namespace.encode(), amounts)
        return
    totals: dict[str, tuple[int, int]] = {}
    for sign, row in shares:
        if row is not None and row.state is ObjectState.LIVE:
            objects, size_bytes = totals.get(row.namespace, _NOTHING)
            totals[row.namespace] = (objects + sign, size_bytes + sign * row.size_bytes)
    objects = size_bytes = 0
    for namespace, amounts in totals.items():
        if amounts != _NOTHING:
            objects += amounts[0]
            size_bytes += amounts[1]
            if namespace:
                view.add(namespaces, root + namespace.encode(), amounts)
    if objects or size_bytes:
        view.add(usage, root, (objects, size_bytes))


def _nothing() -> None:
    """Nobody waits for what is queued."""
