"""The remote queue as it is written inside the transactions that fill and empty it.

A line of entries by position, an index of them by the row that each is for (`queue_name`), and the sum of their bytes. A row that
takes another's place is another: the entry of the first goes in the same transaction, so that what is deleted or replaced while
the remote is away counts no more (but for a row that DELETE hides and a pin keeps: its entry goes with the row). Every put takes
from the headroom: whether a row is taken on is decided elsewhere. Stateless but for its callbacks: every call works on the given
view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from kvobj.catalog.encoding import (
    REMOTE_QUEUE,
    REMOTE_QUEUE_BYTES,
    REMOTE_QUEUE_ROWS,
    encode_row,
    number_key,
)
from kvobj.catalog.remote_protocol import QueuedUpload, QueueReason, QueueTotals, first_blob, queue_name
from kvobj.catalog.rows import BucketRow, Durability, ObjectRow
from kvobj.catalog.setting_rows import RemoteRule
from kvobj.database import ReadView, WriteView

_TOTAL: Final = b"total"
_decode = msgspec.msgpack.Decoder(QueuedUpload).decode


class RemoteRows:
    """See the module's text. `on_added` and `on_removed` are called inside changes, on whatever thread they run."""

    __slots__ = ("allocate", "on_added", "on_removed")

    def __init__(self, allocate: Callable[[], int]) -> None:
        self.allocate = allocate
        self.on_added: Callable[[], None] = _nothing
        self.on_removed: Callable[[], None] = _nothing

    def add(self, view: WriteView, row: ObjectRow, reason: QueueReason, *, now_ms: int) -> None:
        """Queue a row, which has its sequence. One that waits already keeps its place."""
        name = queue_name(row)
        if view.get(REMOTE_QUEUE_ROWS, name) is not None:
            return
        position = self.allocate()
        blob_id = first_blob(row)
        entry = QueuedUpload(position, row.bucket, row.key, blob_id, row.size_bytes, now_ms, reason, row.sequence)
        key = number_key(position)
        view.put(REMOTE_QUEUE, key, encode_row(entry), headroom=True)
        view.put(REMOTE_QUEUE_ROWS, name, key, headroom=True)
        view.add(REMOTE_QUEUE_BYTES, _TOTAL, (row.size_bytes,))
        self.on_added()

    def remove_row(self, view: WriteView, row: ObjectRow) -> None:
        """Take the row's entry out, if it has one."""
        key = view.get(REMOTE_QUEUE_ROWS, queue_name(row))
        if key is not None:
            self._remove(view, key)

    def overtaken(self, view: WriteView, before: ObjectRow | None, after: ObjectRow | None) -> None:
        """A durable row gives way to another or to none: take its entry out, if it has one and is not the same object still. Never
        raises."""
        if before is None or before.durability is not Durability.LOCAL:
            return
        if after is None or queue_name(after) != queue_name(before):
            self.remove_row(view, before)

    def remove(self, view: WriteView, positions: list[int]) -> None:
        """Take entries out; those that are gone already are no matter."""
        for position in positions:
            self._remove(view, number_key(position))

    def _remove(self, view: WriteView, key: bytes) -> None:
        value = view.get(REMOTE_QUEUE, key)
        if value is None:
            return
        entry = _decode(value)
        view.delete(REMOTE_QUEUE, key)
        view.delete(REMOTE_QUEUE_ROWS, queue_name(entry))
        view.add(REMOTE_QUEUE_BYTES, _TOTAL, (-entry.size_bytes,))
        self.on_removed()

    @staticmethod
    def find(view: ReadView, row: ObjectRow) -> QueuedUpload | None:
        """The row's entry."""
        key = view.get(REMOTE_QUEUE_ROWS, queue_name(row))
        value = None if key is None else view.get(REMOTE_QUEUE, key)
        return None if value is None else _decode(value)

    @staticmethod
    def entries(view: ReadView, after: int) -> Iterator[QueuedUpload]:
        """Entries behind a position, in order."""
        for _, value in view.range(REMOTE_QUEUE, number_key(after + 1)):
            yield _decode(value)

    @staticmethod
    def totals(view: ReadView) -> QueueTotals:
        """Of a snapshot."""
        (size_bytes,) = view.counters(REMOTE_QUEUE_BYTES, _TOTAL) or (0,)
        first = view.under(REMOTE_QUEUE, b"", limit=1)
        return QueueTotals(view.count(REMOTE_QUEUE), size_bytes, _decode(first[0][1]).since_ms if first else None)


def reason_to_queue(bucket: BucketRow, row: ObjectRow, *, asked: bool = False) -> QueueReason | None:
    """Why a row that becomes LOCAL goes to the remote at once; None: it does not. `asked`: its writer wants class `shared`."""
    if row.durability is not Durability.LOCAL:
        return None
    if asked or bucket.durability is Durability.SHARED:
        return QueueReason.SHARED
    return QueueReason.ALWAYS if bucket.remote is RemoteRule.ALWAYS else None


def _nothing() -> None:
    """Nobody waits for entries."""
