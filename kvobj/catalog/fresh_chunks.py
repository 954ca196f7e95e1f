"""New chunks of class `memory`, of which nothing is known under their keys: what most of `commit_chain` is about, at half the cost.

What one row's commit asks and writes (`CommitChange`) is asked and written for all of them together. Pure but for the view.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvobj.catalog import chain_rows
from kvobj.catalog.catalog_rows import CatalogRows, bucket_of, is_meant
from kvobj.catalog.encoding import (
    EPOCH,
    META,
    NAMESPACE_USAGE_VOLATILE,
    OBJECTS,
    OBJECTS_VOLATILE,
    USAGE_VOLATILE,
    encode_row,
)
from kvobj.catalog.key_tree import STRIDE_BYTES
from kvobj.catalog.rows import BucketKind, CommitOutcome, Durability, ObjectRow
from kvobj.database import WriteView


def store_fresh(
    tables: CatalogRows, view: WriteView, rows: Sequence[ObjectRow], *, now_ms: int, made_ms: int | None = None
) -> list[CommitOutcome] | None:
    """Store rows of one bucket, without a quota; None, and nothing has changed, where they are to be looked at one by one: one has
    a parent, is no fresh chunk of class `memory` of the running session, is of another namespace, or its key stands or is long.
    `StoreFullError` as of the first put of `CommitChange`, before anything has changed."""
    first = rows[0]
    bucket = bucket_of(view, first.bucket)
    if bucket is None or bucket.row.kind is not BucketKind.KV or not is_meant(bucket, made_ms):
        return None
    epoch, namespace, root = view.get(META, EPOCH), first.namespace, bucket.root
    keys: list[bytes] = []
    size_bytes = 0
    for row in rows:
        key = row.key.encode()
        if (
            row.parent
            or row.durability is not Durability.MEMORY
            or row.namespace != namespace
            or len(key) > STRIDE_BYTES
            or any(blob.blob_id[:8] != epoch for blob in row.blobs)
        ):
            return None
        keys.append(root + key)
        size_bytes += row.size_bytes
    if len(set(keys)) < len(keys) or any(view.get_many(OBJECTS_VOLATILE, keys)) or any(view.get_many(OBJECTS, keys)):
        return None
    allocate, placed = tables.objects.allocate, chain_rows.placed
    stored = [placed(row, None, sequence=allocate()) for row in rows]
    values = list(zip(keys, map(encode_row, stored), strict=True))
    # Refuses where the store is full; it was not for this one, nor is it for the others.
    view.put(OBJECTS_VOLATILE, *values[0])
    view.put_many(OBJECTS_VOLATILE, values[1:])
    amounts = (len(rows), size_bytes)
    view.add(USAGE_VOLATILE, root, amounts)
    if namespace:
        view.add(NAMESPACE_USAGE_VOLATILE, root + namespace.encode(), amounts)
    tables.history.stored(view, stored, now_ms=now_ms, volatile=True)
    return [CommitOutcome(row, existed=False) for row in stored]
