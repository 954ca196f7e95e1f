"""Entries of the delete queue that stand for many blobs: those of durable rows that a claim took, up to `BATCH_BLOBS` ids an entry.

A blob takes 16 bytes and no key of its own: a fraction of the time to queue, find and forget one. Outside of the tables each blob
has an entry (`QueueEntry.together`); those of one position may be reaped in any portions. Older versions made one entry a blob,
which is read as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from kvobj.catalog.encoding import decode_queue_entry, encode_row, number_key
from kvobj.catalog.rows import QueueEntry
from kvobj.database import Table, WriteView
from kvobj.ids import BLOB_ID_BYTES

BATCH_BLOBS: Final = 100
"""Small enough for several entries a page."""


def encode_batches(blob_ids: Sequence[bytes], allocate: Callable[[], int], *, now_ms: int) -> list[tuple[bytes, bytes]]:
    """The entries that queue these blobs of durable rows, due at once: keys and values, in order."""
    items: list[tuple[bytes, bytes]] = []
    for start in range(0, len(blob_ids), BATCH_BLOBS):
        batch, position = blob_ids[start : start + BATCH_BLOBS], allocate()
        together = 0 if len(batch) == 1 else len(batch)
        entry = QueueEntry(b"".join(batch), now_ms, "", "", position, together=together)
        items.append((number_key(position), encode_row(entry)))
    return items


def blobs_of(stored: QueueEntry) -> list[bytes]:
    """The blobs that an entry as it is stored stands for."""
    if not stored.together:
        return [stored.blob_id]
    joined = stored.blob_id
    return [joined[start : start + BLOB_ID_BYTES] for start in range(0, len(joined), BLOB_ID_BYTES)]


def entries_of(stored: QueueEntry) -> list[QueueEntry]:
    """An entry for each of the blobs that the stored one stands for."""
    if not stored.together:
        return [stored]
    now_ms, position, volatile, together = stored.not_before_ms, stored.position, stored.volatile, stored.together
    return [QueueEntry(blob_id, now_ms, "", "", position, volatile, together=together) for blob_id in blobs_of(stored)]


def forget(view: WriteView, table: Table, entries: Sequence[QueueEntry]) -> None:
    """Take entries out of the queue; of a batch of which not all are given the others stay. Some may be gone already."""
    whole: list[int] = []
    for position, together, blob_ids in _by_position(entries):
        if len(blob_ids) >= together:
            whole.append(position)
            continue
        place = number_key(position)
        value = view.get(table, place)
        if value is None:
            continue
        stored = decode_queue_entry(value)
        left = [blob_id for blob_id in blobs_of(stored) if blob_id not in blob_ids]
        if left:
            # Still of as many as it was of: who holds entries of before has not reaped all before these are gone, too.
            rest = msgspec.structs.replace(stored, blob_id=b"".join(left))
            view.put(table, place, encode_row(rest), headroom=True)
        else:
            whole.append(position)
    view.delete_many(table, [number_key(position) for position in whole])


def _by_position(entries: Sequence[QueueEntry]) -> Iterator[tuple[int, int, set[bytes]]]:
    """Positions, of how many blobs their entries were made, and which of these are given."""
    batches: dict[int, tuple[int, set[bytes]]] = {}
    for entry in entries:
        if not entry.together:
            yield entry.position, 0, set()
            continue
        batch = batches.get(entry.position)
        if batch is None:
            batch = batches[entry.position] = entry.together, set()
        batch[1].add(entry.blob_id)
    for position, (together, blob_ids) in batches.items():
        yield position, together, blob_ids
