"""What the collector asks of the catalog: may these chunks go (condemn), and take those that nothing holds (claim).

A mark says only that policy wishes a chunk gone. Every guard is asked again by the claim, in the transaction that removes the
row; from then on the removal is certain, and the blobs are queued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from operator import attrgetter, itemgetter

from kvobj.catalog import chain_rows
from kvobj.catalog.batch_removal import BatchRemoval
from kvobj.catalog.catalog_rows import CatalogRows, root_of
from kvobj.catalog.chunk_heads import RowHead, decode_row_head
from kvobj.catalog.chunk_records import live_blob_ids
from kvobj.catalog.claim_scan import ClaimedFacts, scan_children, scan_claim, scan_condemned
from kvobj.catalog.encoding import OBJECTS_VOLATILE
from kvobj.catalog.history_protocol import RemovalReason
from kvobj.catalog.history_rows import RemovedRun
from kvobj.catalog.lease_rows import PinsInView
from kvobj.catalog.object_rows import RowPair
from kvobj.catalog.rows import ChunkName, Claimed, ObjectRow, ObjectState
from kvobj.database import ReadView, WriteView

_LIVE, _HIDDEN = ObjectState.LIVE, ObjectState.CONDEMNED
NOTHING_CLAIMED = Claimed((), (), 0)
_Claimed = tuple[ObjectRow, bool]
"""A row that went, and whether it was of class `memory` and not written down."""


def first_blob(row: ObjectRow) -> bytes:
    """The blob that names the row to gc and pins; b"" for an empty object."""
    return row.blobs[0].blob_id if row.blobs else b""


def without_relied_on(
    view: ReadView, chunks: Sequence[ChunkName], is_relied_on: Callable[[ChunkName], bool] | None
) -> list[ChunkName]:
    """The chunks, children before parents, less those that something relies on (None: nothing does), or with a child row that does
    not go with them."""
    children = chain_rows.Children(view)
    found: list[ChunkName] = []
    for bucket, some in _by_bucket(chunks).items():
        root = root_of(view, bucket)
        if root is None:
            continue
        keys = [chunk.key.encode() for chunk in some]
        relied_on = None if is_relied_on is None else bytes(map(is_relied_on, some))
        goes = scan_children(view, root, keys, relied_on)
        if goes is not None:
            found += some if 0 not in goes else compress(some, goes)
            continue
        gone: set[bytes] = set()
        for chunk, key, below in zip(some, keys, children.of_many(root, keys), strict=True):
            if gone.issuperset(below) and not (is_relied_on is not None and is_relied_on(chunk)):
                gone.add(key)
                found.append(chunk)
    return found


def may_condemn(
    view: ReadView, tables: CatalogRows, chunks: Sequence[ChunkName], is_marked: Callable[[str, str], bool]
) -> list[bool]:
    """Which chunks policy may condemn, children before parents: live under this blob id, not pinned, all children marked."""
    given: dict[str, set[bytes]] = {}
    allowed: list[bool] = []
    children, pins = chain_rows.Children(view), tables.guard.over(view)
    for bucket, members in groupby(chunks, key=attrgetter("bucket")):
        some = list(members)
        root = root_of(view, bucket)
        if root is None:
            allowed += [False] * len(some)
            continue
        keys = [chunk.key.encode() for chunk in some]
        condemned = given.setdefault(bucket, set())
        answers = None if condemned else _may_all(view, root, some, pins, is_marked)
        if answers is not None:
            condemned.update(compress(keys, answers))
            allowed += answers
            continue
        live = _live_as(some, tables.objects.values(view, root, keys))
        for chunk, key, is_live, below in zip(some, keys, live, children.of_many(root, keys), strict=True):
            may = (
                is_live
                and not pins.holds_row(bucket, chunk.key)
                and (
                    condemned.issuperset(below)
                    or all(child in condemned or is_marked(bucket, child.decode()) for child in below)
                )
            )
            if may:
                condemned.add(key)
            allowed.append(may)
    return allowed


def _may_all(
    view: ReadView,
    root: bytes,
    chunks: Sequence[ChunkName],
    pins: PinsInView,
    is_marked: Callable[[str, str], bool],
) -> list[bool] | None:
    """`may_condemn` of a bucket's chunks, asked all at once. None where that gives no answer."""
    bucket, keys = chunks[0].bucket, [chunk.key.encode() for chunk in chunks]
    held = pins.held(bucket, [chunk.key for chunk in chunks])
    scanned = scan_condemned(view, root, keys, [chunk.blob_id for chunk in chunks], held)
    if scanned is None:
        return None
    may, in_doubt = scanned
    order = {key: place for place, key in enumerate(keys)} if in_doubt else {}
    for place in in_doubt:
        for child in chain_rows.children(view, root, keys[place]):
            at = order.get(child, place)
            if not (at < place and may[at]) and not is_marked(bucket, child.decode()):
                return None
    return may


def _by_bucket(chunks: Sequence[ChunkName]) -> dict[str, list[ChunkName]]:
    """The chunks of each bucket, in their order."""
    found: dict[str, list[ChunkName]] = {}
    for bucket, members in groupby(chunks, key=attrgetter("bucket")):
        found.setdefault(bucket, []).extend(members)
    return found


def _live_as(chunks: Sequence[ChunkName], values: Sequence[bytes | None]) -> list[bool]:
    """Whether each of the encoded rows is live and names the chunk's first blob."""
    blob_ids = live_blob_ids(values)
    if blob_ids is not None:
        return [chunk.blob_id == blob_id for chunk, blob_id in zip(chunks, blob_ids, strict=True)]
    return [
        value is not None and _is_live_as(decode_row_head(value), chunk)
        for chunk, value in zip(chunks, values, strict=True)
    ]


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

    def __call__(self, view: WriteView) -> Claimed:
        """Run it."""
        if self.tables.guard.quiet:
            return NOTHING_CLAIMED
        step = _Claiming(self.tables, view, self.now_ms)
        scanned, others = step.claim_scanned(self.marked)
        marked = step.claim([(chunk.bucket, chunk.key, chunk.blob_id) for chunk in others])
        # The removal of the others was told when they were hidden.
        hidden = step.claim([(bucket, key, None) for bucket, key in self.hidden])
        step.finish()
        for chunks, facts in scanned:
            self._tell(view, chunks, facts)
        for volatile in (True, False):
            rows = [row for row, is_volatile in reversed(marked) if is_volatile is volatile]
            if rows:
                self.tables.history.removed(
                    view, rows, reason=RemovalReason.EVICTED, now_ms=self.now_ms, volatile=volatile
                )
        found = [chunk for chunks, _ in scanned for chunk in chunks]
        found += [ChunkName(row.bucket, row.key, first_blob(row)) for row, _ in marked]
        size_bytes = sum(facts.size_bytes for _, facts in scanned)
        size_bytes += sum(row.size_bytes for row, _ in (*marked, *hidden))
        return Claimed(tuple(found), tuple(row for row, _ in hidden), size_bytes)

    def _tell(self, view: WriteView, chunks: Sequence[ChunkName], facts: ClaimedFacts) -> None:
        """Of chunks of one bucket: parents first, as their rows were written."""
        keys = [chunk.key for chunk in reversed(chunks)]
        hashes, tokens, count = facts.hashes[::-1], facts.tokens[::-1], len(keys)
        for namespace, start, stop in reversed(facts.spaces):
            some = slice(count - stop, count - start)
            run = RemovedRun(chunks[0].bucket, namespace, keys[some], tokens[some])
            self.tables.history.removed_run(view, run, hashes[some], reason=RemovalReason.EVICTED, now_ms=self.now_ms)


class _Claiming:
    """One claim's view of the tables. What is asked of them is asked for all of a bucket's keys together; between the keys only
    what this claim takes changes."""

    __slots__ = ("_children", "_gone", "_has_volatile", "_pins", "_removal", "_tables", "_view")

    def __init__(self, tables: CatalogRows, view: WriteView, now_ms: int) -> None:
        self._tables = tables
        self._view = view
        self._removal = BatchRemoval(tables.objects, view, now_ms=now_ms, is_all=True)
        self._gone: dict[str, set[bytes]] = {}
        # A claim only takes away, so what is empty at its beginning stays so.
        self._children = chain_rows.Children(view)
        self._pins = tables.guard.over(view)
        self._has_volatile = not view.is_empty(OBJECTS_VOLATILE)

    def claim_scanned(
        self, chunks: Sequence[ChunkName]
    ) -> tuple[list[tuple[Sequence[ChunkName], ClaimedFacts]], list[ChunkName]]:
        """Remove the marked chunks, children before parents, that nothing holds: those of every bucket of which there are many,
        and whose rows are all of the usual form. What went of each such bucket; and the chunks of all others, those of a bucket in
        their order."""
        scanned: list[tuple[Sequence[ChunkName], ClaimedFacts]] = []
        others: list[ChunkName] = []
        # All are looked for before any of them goes: what is written to is not looked up in pages any more.
        found: list[tuple[bytes, list[ChunkName], list[bytes], ClaimedFacts]] = []
        for bucket, members in _by_bucket(chunks).items():
            root = root_of(self._view, bucket)
            if root is None:
                continue
            keys = [chunk.key.encode() for chunk in members]
            facts = self._scan(root, bucket, members, keys)
            if facts is None:
                others += members
            else:
                found.append((root, members, keys, facts))
        for root, members, keys, facts in found:
            gone = [members[place] for place in facts.places]
            gone_keys = [keys[place] for place in facts.places]
            if gone:
                bucket = gone[0].bucket
                self._removal.take_chunks(root, bucket, gone_keys, [chunk.blob_id for chunk in gone], facts)
                scanned.append((gone, facts))
        return scanned, others

    def _scan(
        self, root: bytes, bucket: str, chunks: Sequence[ChunkName], keys: Sequence[bytes]
    ) -> ClaimedFacts | None:
        if not self._removal.takes_chunks:
            return None
        held = self._pins.held(bucket, [chunk.key for chunk in chunks])
        return scan_claim(self._view, root, keys, [chunk.blob_id for chunk in chunks], held)

    def claim(self, names: Sequence[tuple[str, str, bytes | None]]) -> list[_Claimed]:
        """Remove the rows of each (bucket, key, first blob) that nothing holds, children before parents; blob None: a hidden one.
        What was removed."""
        removed: list[_Claimed] = []
        for bucket, members in groupby(names, key=itemgetter(0)):
            root = root_of(self._view, bucket)
            if root is not None:
                removed += self._claim_of(bucket, root, list(members))
        return removed

    def _claim_of(self, bucket: str, root: bytes, names: Sequence[tuple[str, str, bytes | None]]) -> list[_Claimed]:
        gone = self._gone.setdefault(bucket, set())
        keys = [name.encode() for _, name, _ in names]
        pairs: list[RowPair] = []
        if self._has_volatile:
            pairs = self._tables.objects.pairs(self._view, root, keys)
            tops = [before.top for before in pairs]
        else:
            tops = self._tables.objects.durable_rows(self._view, root, keys)
        taken: list[int] = []
        for place, ((_, name, blob_id), key, top, below) in enumerate(
            zip(names, keys, tops, self._children.of_many(root, keys), strict=True)
        ):
            row = top if top is not None and top.state is (_HIDDEN if blob_id is None else _LIVE) else None
            if row is None or (blob_id is not None and first_blob(row) != blob_id):
                continue
            if not gone.issuperset(below) or self._pins.holds_row(bucket, name) or key in gone:
                continue
            # Not held by its key, so none of its blobs is.
            gone.add(key)
            taken.append(place)
        taken_keys = [keys[place] for place in taken]
        rows = [row for place in taken if (row := tops[place]) is not None]
        if not self._has_volatile:
            self._removal.take_durable(root, taken_keys, rows)
            return [(row, False) for row in rows]
        befores = [pairs[place] for place in taken]
        self._removal.take_all(root, taken_keys, befores)
        return [(row, before.durable is None) for row, before in zip(rows, befores, strict=True)]

    def finish(self) -> None:
        """After the last claim."""
        self._removal.finish()
