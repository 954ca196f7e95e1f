"""The removal of many keys' rows in one change: tables and links at once, what is summed up or told of them together at the end.

What `ObjectRows.change` and `queue_replaced` do for one key whose rows go, at half the cost a key. For rows that no pin holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvobj.catalog import chain_rows
from kvobj.catalog.encoding import (
    DELETE_QUEUE,
    DELETE_QUEUE_VOLATILE,
    EXPOSED,
    NAMESPACE_USAGE,
    NAMESPACE_USAGE_VOLATILE,
    OBJECTS,
    USAGE,
    USAGE_VOLATILE,
    encode_row,
    number_key,
)
from kvobj.catalog.key_tree import STRIDE_BYTES
from kvobj.catalog.object_rows import ObjectRows, RowPair, tell_removed
from kvobj.catalog.rows import ObjectRow, ObjectState, QueueEntry
from kvobj.database import WriteView

_Items = list[tuple[bytes, bytes]]
_NOTHING: Final = (0, 0)
_USAGES: Final = {False: (USAGE, NAMESPACE_USAGE), True: (USAGE_VOLATILE, NAMESPACE_USAGE_VOLATILE)}


class BatchRemoval:
    """See the module's text. Between the first `take` and `finish` only row tables and links are right, not counters.
    `is_all`: nothing is written to the view meanwhile but what this removes."""

    __slots__ = ("_has_exposed", "_now_ms", "_objects", "_taken", "_view")

    def __init__(self, objects: ObjectRows, view: WriteView, *, now_ms: int, is_all: bool = False) -> None:
        self._objects = objects
        self._view = view
        self._now_ms = now_ms
        self._taken: list[tuple[bytes, RowPair]] = []
        # Removals expose nothing.
        self._has_exposed = not (is_all and view.is_empty(EXPOSED))

    def take(self, root: bytes, key: bytes, before: RowPair) -> None:
        """Remove the rows of a key, which are `before`, and their links."""
        view, objects = self._view, self._objects
        if before.durable is not None:
            objects.durable.delete(view, root, key)
            chain_rows.relink(view, root, key, before.durable, None, volatile=False, may_be_exposed=self._has_exposed)
        if before.volatile is not None:
            objects.volatile.delete(view, root, key)
            chain_rows.relink(view, root, key, before.volatile, None, volatile=True)
        self._taken.append((root, before))

    def take_all(self, taken: Sequence[tuple[bytes, bytes, RowPair]]) -> None:
        """`take` of each (bucket root, key, rows): in a third of the time where all are durable and of ordinary length."""
        durable = [(root, key, row) for root, key, (volatile, row) in taken if volatile is None and row is not None]
        if self._has_exposed or len(durable) != len(taken) or any(len(key) > STRIDE_BYTES for _, key, _ in taken):
            for root, key, before in taken:
                self.take(root, key, before)
            return
        self._view.delete_many(OBJECTS, [root + key for root, key, _ in durable])
        chain_rows.unlink_durable(self._view, durable)
        self._taken += [(root, before) for root, _, before in taken]

    def finish(self) -> None:
        """Count out what was taken, write it to the record log, and queue the blobs, due at once."""
        view, remote = self._view, self._objects.remote
        durable_items: _Items = []
        volatile_items: _Items = []
        for _, (volatile, durable) in self._taken:
            if durable is not None:
                tell_removed(view, durable)
                if remote is not None:
                    remote.overtaken(view, durable, None)
                self._queue(durable_items, durable, (), volatile=False)
            if volatile is not None:
                self._queue(volatile_items, volatile, set(durable.blob_ids) if durable else (), volatile=True)
        if durable_items:
            view.put_many(DELETE_QUEUE, durable_items)
        if volatile_items:
            view.put_many(DELETE_QUEUE_VOLATILE, volatile_items)
        for (is_volatile, root, namespace), amounts in self._totals().items():
            usage, namespaces = _USAGES[is_volatile]
            view.add(usage, root, amounts)
            if namespace:
                view.add(namespaces, root + namespace.encode(), amounts)
        self._taken.clear()

    def _totals(self) -> dict[tuple[bool, bytes, str], tuple[int, int]]:
        """What goes, objects and bytes, by volatile or durable table, bucket and namespace."""
        totals: dict[tuple[bool, bytes, str], tuple[int, int]] = {}

        def count(root: bytes, row: ObjectRow, sign: int, *, volatile: bool) -> None:
            if row.state is ObjectState.LIVE:
                place = (volatile, root, row.namespace)
                objects, size_bytes = totals.get(place, _NOTHING)
                totals[place] = (objects + sign, size_bytes + sign * row.size_bytes)

        for root, (volatile, durable) in self._taken:
            if durable is not None:
                count(root, durable, -1, volatile=False)
            if volatile is not None:
                # The volatile table counted its row instead of the durable one behind it.
                count(root, volatile, -1, volatile=True)
                if durable is not None:
                    count(root, durable, 1, volatile=True)
        return totals

    def _queue(self, items: _Items, row: ObjectRow, queued: set[bytes] | tuple[()], *, volatile: bool) -> None:
        for blob_id in row.blob_ids:
            if blob_id not in queued:
                position = self._objects.allocate()
                entry = QueueEntry(blob_id, self._now_ms, row.bucket, row.key, position, volatile)
                items.append((number_key(position), encode_row(entry)))
