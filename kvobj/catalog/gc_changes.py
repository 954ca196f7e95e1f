"""What the collector asks of the catalog: may these chunks go (condemn), and take those that nothing holds (claim).

A mark says only that policy wishes a chunk gone. Every guard is asked again by the claim, in the transaction that removes the
row; from then on the removal is certain, and the blobs are queued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from kvobj.catalog import chain_rows
from kvobj.catalog.batch_removal import BatchRemoval
from kvobj.catalog.catalog_rows import CatalogRows, root_of
from kvobj.catalog.chunk_heads import RowHead, decode_row_head
from kvobj.catalog.encoding import OBJECTS_VOLATILE
from kvobj.catalog.history_protocol import RemovalReason
from kvobj.catalog.object_rows import RowPair
from kvobj.catalog.rows import ChunkName, ObjectRow, ObjectState
from kvobj.database import ReadView, WriteView


def first_blob(row: ObjectRow) -> bytes:
    """The blob that names the row to gc and pins; b"" for an empty object."""
    return row.blobs[0].blob_id if row.blobs else b""


def without_relied_on(
    view: ReadView, chunks: Sequence[ChunkName], is_relied_on: Callable[[ChunkName], bool]
) -> list[ChunkName]:
    """The chunks, children before parents, less those that something relies on, or with a child row that does not go with them."""
    roots = {bucket: root_of(view, bucket) for bucket in {chunk.bucket for chunk in chunks}}
    going: dict[str, set[bytes]] = {bucket: set() for bucket in roots}
    children = chain_rows.Children(view)
    found: list[ChunkName] = []
    for chunk in chunks:
        root, key, gone = roots[chunk.bucket], chunk.key.encode(), going[chunk.bucket]
        if root is None or is_relied_on(chunk):
            continue
        if gone.issuperset(children.of(root, key)):
            gone.add(key)
            found.append(chunk)
    return found


def may_condemn(
    view: ReadView, tables: CatalogRows, chunks: Sequence[ChunkName], is_marked: Callable[[str, str], bool]
) -> list[bool]:
    """Which chunks policy may condemn, children before parents: live under this blob id, not pinned, all children marked."""
    given: set[tuple[str, str]] = set()
    allowed: list[bool] = []
    children, pins = chain_rows.Children(view), tables.guard.over(view)
    for bucket, members in groupby(chunks, key=attrgetter("bucket")):
        some = list(members)
        root = root_of(view, bucket)
        if root is None:
            allowed += [False] * len(some)
            continue
        keys = [chunk.key.encode() for chunk in some]
        for chunk, key, value in zip(some, keys, tables.objects.values(view, root, keys), strict=True):
            may = (
                value is not None
                and _is_live_as(decode_row_head(value), chunk)
                and not pins.holds_row(bucket, chunk.key)
                and all(
                    (bucket, child) in given or is_marked(bucket, child)
                    for child in map(bytes.decode, children.of(root, key))
                )
            )
            if may:
                given.add((bucket, chunk.key))
            allowed.append(may)
    return allowed


def _is_live_as(row: RowHead, chunk: ChunkName) -> bool:
    return row.state is ObjectState.LIVE and (row.blobs[0].blob_id if row.blobs else b"") == chunk.blob_id


@dataclass(frozen=True, slots=True)
class ClaimChange:
    """`Catalog.claim` as a change, the durable writer's. `marked` rows must be live under the blob id given; `hidden` ones
    (bucket, key) must be CONDEMNED."""

    tables: CatalogRows
    marked: Sequence[ChunkName]
    hidden: Sequence[tuple[str, str]]
    now_ms: int

    def __call__(self, view: WriteView) -> list[ObjectRow]:
        """Run it; returns the rows removed, marked ones first."""
        if self.tables.guard.quiet:
            return []
        step = _Claiming(self.tables, view, self.now_ms)
        evicted = [(chunk.bucket, chunk.key, chunk.blob_id) for chunk in self.marked]
        marked = [pair for bucket, key, blob_id in evicted for pair in step.claim(bucket, key, blob_id)]
        # The removal of the others was told when they were hidden.
        hidden = [pair for bucket, key in self.hidden for pair in step.claim(bucket, key, None)]
        step.finish()
        for volatile in (True, False):
            told = [before.top for before in reversed(marked) if (before.durable is None) is volatile]
            rows = [row for row in told if row is not None]
            if rows:
                self.tables.history.removed(
                    view, rows, reason=RemovalReason.EVICTED, now_ms=self.now_ms, volatile=volatile
                )
        return [before.top for before in (*marked, *hidden) if before.top is not None]


class _Claiming:
    """One claim's view of the tables; roots are looked up once."""

    __slots__ = ("_children", "_has_volatile", "_pins", "_removal", "_roots", "_tables", "_view")

    def __init__(self, tables: CatalogRows, view: WriteView, now_ms: int) -> None:
        self._tables = tables
        self._view = view
        self._removal = BatchRemoval(tables.objects, view, now_ms=now_ms, is_all=True)
        self._roots: dict[str, bytes | None] = {}
        # A claim only takes away, so what is empty at its beginning stays so.
        self._children = chain_rows.Children(view)
        self._pins = tables.guard.over(view)
        self._has_volatile = not view.is_empty(OBJECTS_VOLATILE)

    def claim(self, bucket: str, name: str, blob_id: bytes | None) -> list[RowPair]:
        """Remove the rows of a key if nothing holds them; `blob_id` None: a hidden one. What was removed."""
        view = self._view
        if bucket not in self._roots:
            self._roots[bucket] = root_of(view, bucket)
        root = self._roots[bucket]
        if root is None:
            return []
        key = name.encode()
        before = self._tables.objects.pair(view, root, key, is_durable=not self._has_volatile)
        row = before.hidden if blob_id is None else before.live
        if row is None or (blob_id is not None and first_blob(row) != blob_id):
            return []
        if self._children.has_any(root, key) or self._pins.holds_row(bucket, name):
            return []
        # Not held by its key, so none of its blobs is.
        self._removal.take(root, key, before)
        return [before]

    def finish(self) -> None:
        """After the last claim."""
        self._removal.finish()
