"""Checks an LMDB catalog's tables against each other: what is kept beside the rows must be what the rows say."""

from __future__ import annotations

from collections import Counter

from kvobj.catalog import chain_rows
from kvobj.catalog.encoding import (
    BUCKETS,
    CHILDREN,
    CHILDREN_VOLATILE,
    HIDDEN,
    HIDDEN_VOLATILE,
    USAGE,
    USAGE_VOLATILE,
    decode_object,
    decode_stored_bucket,
)
from kvobj.catalog.object_rows import ObjectRows
from kvobj.catalog.rows import ObjectRow, ObjectState
from kvobj.database import Database, ReadView

_OBJECTS = ObjectRows(lambda: 0)


def assert_consistent(database: Database, *, lost_memory: bool = False) -> None:
    """The children directory, the hidden rows, the counters and the rule that a live chunk's parent is live.

    `lost_memory`: power was lost, and a hidden parent of class `memory` may have gone from above a hidden row.
    """
    links: dict[bool, set[tuple[bytes, bytes]]] = {True: set(), False: set()}
    hidden: dict[bool, set[bytes]] = {True: set(), False: set()}
    usage: Counter[tuple[bytes, int]] = Counter()
    with database.read() as view:
        for _, value in view.range(BUCKETS):
            root = decode_stored_bucket(value).root
            rows = _rows(view, root)
            for key, (row, volatile) in rows.items():
                if row.state is ObjectState.CONDEMNED:
                    hidden[volatile].add(row.bucket.encode() + b"\0" + key)
                    continue
                for place in {root, root + row.namespace.encode()}:
                    usage[place, 0] += 1
                    usage[place, 1] += row.size_bytes
            for key, (row, _) in rows.items():
                if lost_memory and row.state is ObjectState.CONDEMNED:
                    continue
                _assert_parent(key, row, {name: row for name, (row, _) in rows.items()})
            for volatile in (True, False):
                links[volatile] |= _links(view, root, volatile=volatile)
        for volatile, table in ((False, CHILDREN), (True, CHILDREN_VOLATILE)):
            assert {(entry[:24], child) for entry, child in view.range(table)} == links[volatile]
        for volatile, table in ((False, HIDDEN), (True, HIDDEN_VOLATILE)):
            assert {name for _, name in view.range(table)} == hidden[volatile]
        assert _counted(view) == +usage


def _rows(view: ReadView, root: bytes) -> dict[bytes, tuple[ObjectRow, bool]]:
    """The row of each key that counts, and whether it is the volatile one."""
    rows: dict[bytes, tuple[ObjectRow, bool]] = {}
    for volatile, tree in ((False, _OBJECTS.durable), (True, _OBJECTS.volatile)):
        for key, value in tree.items(view, root):
            rows[key] = (decode_object(value), volatile)
    return rows


def _links(view: ReadView, root: bytes, *, volatile: bool) -> set[tuple[bytes, bytes]]:
    tree = _OBJECTS.volatile if volatile else _OBJECTS.durable
    parents = ((key, decode_object(value).parent) for key, value in tree.items(view, root))
    return {(chain_rows.children_place(root, parent.encode()), key) for key, parent in parents if parent}


def _assert_parent(key: bytes, row: ObjectRow, rows: dict[bytes, ObjectRow]) -> None:
    if not row.parent:
        return
    parent = rows.get(row.parent.encode())
    assert parent is not None, f"{key!r} hangs on nothing"
    if row.state is ObjectState.LIVE:
        assert parent.state is ObjectState.LIVE, f"{key!r} is live and its parent is not"
        assert row.depth == parent.depth + 1


def _counted(view: ReadView) -> Counter[tuple[bytes, int]]:
    totals: Counter[tuple[bytes, int]] = Counter()
    for table in (USAGE, USAGE_VOLATILE):
        for place, _ in view.range(table):
            for at, amount in enumerate(view.counters(table, place)):
                totals[place, at] += amount
    assert all(amount >= 0 for amount in totals.values())
    return +totals
