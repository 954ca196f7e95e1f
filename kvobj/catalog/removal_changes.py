"""Removal of objects at somebody's wish or because their bytes are lost, as changes; see `object_changes` for how they run.

In ordinary buckets a row simply goes. In KV buckets it takes its descendants along, children first, so that no step leaves a
hole; what a pin holds stays as a CONDEMNED row, and so does all above it. A change only touches the keys that it was given, since
these are what others wait for: a child that was committed meanwhile keeps its ancestors live, until the next round finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvobj.catalog import chain_rows
from kvobj.catalog.batch_removal import BatchRemoval
from kvobj.catalog.catalog_rows import CatalogRows, require_root, root_of
from kvobj.catalog.history_protocol import RemovalReason
from kvobj.catalog.namespace_changes import is_namespace_meant, no_such_namespace
from kvobj.catalog.object_changes import AT_ONCE_MS, NeedsDurableError, failed_condition, same_blobs
from kvobj.catalog.object_rows import NO_ROWS, ObjectRows, RowPair
from kvobj.catalog.rows import DeleteOutcome, ObjectRow, ObjectState, WriteCondition
from kvobj.database import ReadView, WriteView


@dataclass(frozen=True, slots=True)
class DeleteChange:
    """`Catalog.delete` as a change."""

    objects: ObjectRows
    bucket: str
    keys: Sequence[str]
    conditions: Sequence[WriteCondition | None]
    now_ms: int
    durable: bool
    made_ms: int | None = None

    def __call__(self, view: WriteView) -> list[DeleteOutcome]:
        """Run it."""
        root = require_root(view, self.bucket, self.made_ms)
        outcomes: list[DeleteOutcome] = []
        hidden: dict[bytes, RowPair] = {}
        conditions = self.conditions or [None] * len(self.keys)
        for key, condition in zip(self.keys, conditions, strict=True):
            encoded = key.encode()
            before = NO_ROWS if encoded in hidden else self.objects.pair(view, root, encoded)
            live = before.live
            # Of a key that is absent nothing is judged: the outcome says that nothing was there, which is for the caller to judge.
            if live is not None and failed_condition(live, condition) is not None:
                outcomes.append(DeleteOutcome(key, None, precondition_failed=True))
                continue
            if before.durable is not None and not self.durable:
                raise NeedsDurableError("a row is durable")
            if live is not None:
                hidden[encoded] = before
            outcomes.append(DeleteOutcome(key, live))
        for encoded, before in hidden.items():
            self.objects.change(view, root, encoded, before, NO_ROWS)
            self.objects.queue_replaced(view, before, NO_ROWS, now_ms=self.now_ms)
        return outcomes


@dataclass(frozen=True, slots=True)
class DropChange:
    """`Catalog.drop_rows` as a change. An older durable row under a dropped volatile one goes too: bytes of an earlier PUT are
    no answer to a GET after a later one."""

    objects: ObjectRows
    rows: Sequence[ObjectRow]
    durable: bool

    def __call__(self, view: WriteView) -> None:
        """Run it."""
        doomed: dict[tuple[bytes, bytes], RowPair] = {}
        for row in self.rows:
            root = root_of(view, row.bucket)
            key = row.key.encode()
            before = NO_ROWS if root is None else self.objects.pair(view, root, key)
            if root is None or before.live is None or not same_blobs(before.live, row):
                continue
            if before.durable is not None and not self.durable:
                raise NeedsDurableError("a row is durable")
            doomed[root, key] = before
        for (root, key), before in doomed.items():
            self.objects.change(view, root, key, before, NO_ROWS)
            self.objects.queue_replaced(view, before, NO_ROWS, now_ms=AT_ONCE_MS)


@dataclass(slots=True)
class Doomed:
    """A key that is to go, and which keys go before it in this step.

    `keys` are in the order of removal, children first; the last is the key itself where the step is its last one. `lost`: the row
    whose bytes are gone: nothing happens unless it is still there, and no pin keeps it.
    """

    key: str
    keys: Sequence[bytes]
    condition: WriteCondition | None = None
    lost: ObjectRow | None = None


@dataclass(slots=True)
class Hidden:
    """What became of one `Doomed`. `is_gone`: the key is not live any more, or must not go."""

    removed: ObjectRow | None = None
    descendants: list[ObjectRow] = field(default_factory=list)
    precondition_failed: bool = False
    is_gone: bool = False

    def rows(self) -> list[ObjectRow]:
        """All rows that went."""
        return [*self.descendants, *([self.removed] if self.removed is not None else [])]


@dataclass(frozen=True, slots=True)
class HideChange:
    """One step of `Catalog.delete` and its like in a KV bucket. `unpinned`: pins keep nothing (who held them lost the chain).
    `namespace_root`: nothing goes, and `NoSuchNamespaceError`, where `namespace` is another one by now (`is_namespace_meant`)."""

    tables: CatalogRows
    bucket: str
    doomed: Sequence[Doomed]
    reason: RemovalReason
    now_ms: int
    durable: bool
    unpinned: bool = False
    made_ms: int | None = None
    namespace: str = ""
    namespace_root: bytes = b""

    def __call__(self, view: WriteView) -> list[Hidden]:
        """Run it."""
        root = require_root(view, self.bucket, self.made_ms)
        if not is_namespace_meant(view, root, self.namespace, self.namespace_root):
            raise no_such_namespace(self.bucket, self.namespace)
        told: tuple[list[ObjectRow], list[ObjectRow]] = ([], [])
        removal = BatchRemoval(self.tables.objects, view, now_ms=self.now_ms)
        outcomes = [self._hide(view, root, doomed, told, removal) for doomed in self.doomed]
        removal.finish()
        for rows, volatile in zip(told, (True, False), strict=True):
            if rows:
                rows.reverse()  # parents first, as events tell of chains
                self.tables.history.removed(view, rows, reason=self.reason, now_ms=self.now_ms, volatile=volatile)
        return outcomes

    def _hide(
        self,
        view: WriteView,
        root: bytes,
        doomed: Doomed,
        told: tuple[list[ObjectRow], list[ObjectRow]],
        removal: BatchRemoval,
    ) -> Hidden:
        name = doomed.key.encode()
        live = self.tables.objects.live(view, root, name)
        if live is None or (doomed.lost is not None and not same_blobs(live, doomed.lost)):
            return Hidden(is_gone=True)
        # Of a key that is absent nothing is judged: the outcome says that nothing was there, which is for the caller to judge.
        if failed_condition(live, doomed.condition) is not None:
            return Hidden(precondition_failed=True, is_gone=True)
        outcome = Hidden()
        for key in doomed.keys:
            is_itself = key == name
            row = self._remove(view, root, key, told, removal, is_lost=is_itself and doomed.lost is not None)
            if row is not None and is_itself:
                outcome.removed, outcome.is_gone = row, True
            elif row is not None:
                outcome.descendants.append(row)
        return outcome

    def _remove(
        self,
        view: WriteView,
        root: bytes,
        key: bytes,
        told: tuple[list[ObjectRow], list[ObjectRow]],
        removal: BatchRemoval,
        *,
        is_lost: bool,
    ) -> ObjectRow | None:
        """Remove or hide one row; None where there is none, or a live child keeps it."""
        objects = self.tables.objects
        before = objects.pair(view, root, key)
        live = before.live
        if live is None:
            return None
        if before.durable is not None and not self.durable:
            raise NeedsDurableError("a row is durable")
        below = chain_rows.children(view, root, key)
        if any(objects.live(view, root, child) is not None for child in below):
            return None
        ignores_pins = is_lost or self.unpinned
        if below or (not ignores_pins and self.tables.guard.holds_row(view, self.bucket, live.key)):
            hidden = msgspec.structs.replace(live, state=ObjectState.CONDEMNED)
            after = RowPair(None, hidden) if before.volatile is None else RowPair(hidden, None)
            objects.change(view, root, key, before, after)
            objects.queue_replaced(view, before, after, now_ms=self.now_ms, may_be_pinned=True)
        else:
            removal.take(root, key, before)
        told[before.durable is not None].append(live)
        return live


class Descent:
    """Walks a key and all its descendants, children first, in portions, each over a view of its own.

    What it gives may be out of date; `HideChange` looks again. Memory: the keys of the children along one path. `covered`: keys
    that earlier walks have given; they and what is below them are left out, and those of this walk are added.
    """

    __slots__ = ("_covered", "_path", "_root")

    def __init__(self, root: bytes, key: bytes, covered: set[bytes] | None = None) -> None:
        self._root = root
        self._covered = covered
        self._path: list[tuple[bytes, list[bytes] | None]] = [(key, None)]

    @property
    def is_done(self) -> bool:
        """Whether everything was given, the key itself last."""
        return not self._path

    def take(self, view: ReadView, limit: int, *, steps: int) -> list[bytes]:
        """Up to `limit` more keys, looking at the children of at most `steps`."""
        found: list[bytes] = []
        path, covered = self._path, self._covered
        while path and len(found) < limit:
            key, below = path[-1]
            if below is None:
                if covered is not None and key in covered:
                    path.pop()
                    continue
                if not steps:
                    break
                steps -= 1
                below = chain_rows.children(view, self._root, key)
                path[-1] = (key, below)
            if below:
                path.append((below.pop(), None))
            else:
                path.pop()
                found.append(key)
                if covered is not None:
                    covered.add(key)
        return found
