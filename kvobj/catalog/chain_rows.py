"""What the catalog keeps beside the rows because chunks hang in chains: who a row's children are, and what is hidden.

Four facts, each changed with its row in the same transaction:
- the children directory: bucket root ‖ hash of the parent's key ‖ hash of the child's key → the child's key, for every row with a
  parent in any state; in the table of the child's own durability. First chunks (parent "") have no entry: nothing removes a root.
- exposed parents (durable): parents of durable rows that were not durable themselves when the child was written. Power loss may
  take them, so a start looks at these, and not at all rows, for orphans.
- hidden rows: CONDEMNED ones, deepest first, so that gc finds them without a scan.
- a chunk's place: depth, chain sum and totals, computed from its parent's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from kvobj.catalog.encoding import (
    CHILDREN,
    CHILDREN_VOLATILE,
    EXPOSED,
    HIDDEN,
    HIDDEN_VOLATILE,
    ROOT_BYTES,
)
from kvobj.catalog.key_hash import key_hash
from kvobj.catalog.key_tree import behind
from kvobj.catalog.listing import merged
from kvobj.catalog.rows import ObjectRow, ObjectState
from kvobj.database import ReadView, WriteView
from kvobj.ids.chain_sums import extend, key_lanes

_DEEPEST: Final = 0xFFFF_FFFF


def children_place(root: bytes, parent: bytes) -> bytes:
    """What the entries of a key's children begin with."""
    return root + key_hash(parent)


def children(view: ReadView, root: bytes, key: bytes) -> list[bytes]:
    """The keys of all rows that name the key as their parent."""
    place = children_place(root, key)
    above = view.under(CHILDREN_VOLATILE, place)
    below = view.under(CHILDREN, place)
    if above and below:
        return list(dict.fromkeys(child for _, child in (*above, *below)))
    return [child for _, child in above or below]


def has_children(view: ReadView, root: bytes, key: bytes) -> bool:
    """Whether any row, in any state, names the key as its parent."""
    place = children_place(root, key)
    return bool(view.under(CHILDREN_VOLATILE, place, limit=1) or view.under(CHILDREN, place, limit=1))


class Children:
    """The children directory for many questions in a row over one view, which meanwhile gets no row more: of an environment without
    chunks that have a parent nothing is asked, which is two thirds of what a question costs."""

    __slots__ = ("_tables", "_view")

    def __init__(self, view: ReadView) -> None:
        self._view = view
        self._tables = [table for table in (CHILDREN_VOLATILE, CHILDREN) if not view.is_empty(table)]

    def of_many(self, root: bytes, keys: Sequence[bytes]) -> list[list[bytes]]:
        """Of each key the keys of all rows, in any state, that name it as their parent; of one with a row in both environments
        twice."""
        if not self._tables:
            return [[] for _ in keys]
        places = [root + key_hash(key) for key in keys]  # `children_place` of each
        first, *others = self._tables
        found = self._view.values_under(first, places)
        for table in others:
            for below, more in zip(found, self._view.values_under(table, places), strict=True):
                below.extend(more)
        return found


def relink(
    view: WriteView,
    root: bytes,
    key: bytes,
    before: ObjectRow | None,
    after: ObjectRow | None,
    *,
    volatile: bool,
    may_be_exposed: bool = True,
) -> None:
    """Change what hangs on one row of one table from `before` to `after`. Puts of new links may raise (`StoreFullError`), first.
    Not `may_be_exposed`: the caller knows that no parent is."""
    old = before.parent if before is not None else None
    new = after.parent if after is not None else None
    table = CHILDREN_VOLATILE if volatile else CHILDREN
    if new and old != new:
        place = children_place(root, new.encode())
        view.put(table, place + key_hash(key), key)
    if old and old != new:
        place = children_place(root, old.encode())
        view.delete(table, place + key_hash(key))
        if (
            may_be_exposed
            and not volatile
            and view.get(EXPOSED, place) is not None
            and not view.under(CHILDREN, place, limit=1)
        ):
            view.delete(EXPOSED, place)
    was_hidden = before is not None and before.state is ObjectState.CONDEMNED
    is_hidden = after is not None and after.state is ObjectState.CONDEMNED
    if was_hidden or is_hidden:
        hidden = HIDDEN_VOLATILE if volatile else HIDDEN
        if before is not None and was_hidden:
            view.delete(hidden, _hidden_place(root, before))
        if after is not None and is_hidden:
            name = after.bucket.encode() + b"\0" + key
            view.put(hidden, _hidden_place(root, after), name, headroom=True)


def unlink_durable(view: WriteView, root: bytes, keys: Sequence[bytes], removed: Sequence[ObjectRow]) -> None:
    """`relink` of many durable rows of a bucket that go, where no parent is exposed. `keys` are theirs."""
    links = [
        root + key_hash(row.parent.encode()) + key_hash(key)  # as in `relink`
        for key, row in zip(keys, removed, strict=True)
        if row.parent
    ]
    if links:
        view.delete_many(CHILDREN, links)
    hidden = [_hidden_place(root, row) for row in removed if row.state is ObjectState.CONDEMNED]
    if hidden:
        view.delete_many(HIDDEN, hidden)


def expose(view: WriteView, root: bytes, parent: bytes) -> None:
    """Note that a durable row hangs on a parent that is not durable."""
    view.put(EXPOSED, children_place(root, parent), parent, headroom=True)


def settle(view: WriteView, root: bytes, key: bytes) -> None:
    """The key has a durable row from now on: nothing durable below it is exposed."""
    view.delete(EXPOSED, children_place(root, key))


def exposed_parents(view: ReadView) -> list[tuple[bytes, bytes]]:
    """Bucket root and key of every parent noted by `expose`."""
    return [(place[:ROOT_BYTES], parent) for place, parent in view.range(EXPOSED)]


def hides_any(view: ReadView, root: bytes) -> bool:
    """Whether the bucket has a hidden row."""
    return any(True for table in (HIDDEN_VOLATILE, HIDDEN) for _ in view.range(table, root, behind(root)))


def hidden_names(view: ReadView, after: bytes, *, until: bytes | None = None) -> Iterator[tuple[bytes, str, str]]:
    """(place, bucket, key) of hidden rows, the deepest of a bucket first, behind the place `after` up to the place `until`."""
    start, stop = after + b"\0", None if until is None else until + b"\0"
    for place, name in merged(view.range(HIDDEN_VOLATILE, start, stop), view.range(HIDDEN, start, stop)):
        bucket, _, key = name.partition(b"\0")
        yield place, bucket.decode(), key.decode()


def hidden_count(view: ReadView) -> int:
    """How many rows are hidden."""
    return view.count(HIDDEN_VOLATILE) + view.count(HIDDEN)


def placed(row: ObjectRow, parent: ObjectRow | None, *, sequence: int) -> ObjectRow:
    """The row, live and numbered, with its place in the chain: `parent` is its parent's row, None for a first chunk or a key
    without a parent. A parent that has no parent itself counts as the first chunk of a chain."""
    depth, chain_sum, chain_bytes, chain_tokens = 0, b"", row.size_bytes, row.tokens
    if row.parent is not None:
        above = b""
        if parent is not None:
            depth = parent.depth + 1
            above = parent.chain_sum or extend(b"", 0, key_lanes(parent.key))
            chain_bytes += parent.chain_bytes
            chain_tokens += parent.chain_tokens
        chain_sum = extend(above, depth, key_lanes(row.key))
    return msgspec.structs.replace(
        row,
        sequence=sequence,
        state=ObjectState.LIVE,
        depth=depth,
        chain_sum=chain_sum,
        chain_bytes=chain_bytes,
        chain_tokens=chain_tokens,
    )


def _hidden_place(root: bytes, row: ObjectRow) -> bytes:
    depth = (_DEEPEST - row.depth).to_bytes(4, "big")
    return root + depth + key_hash(row.key.encode())
