"""The LMDB catalog's removals at somebody's wish, and of what is lost: single keys, or whole subtrees of chunks in steps.

A subtree is walked first, beside everything else, and removed by changes that name every key they touch: of two changes that
concern one key the second runs behind the first. What was stored since the walk is found by another walk; after 16 walks the caller
is told to come back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final

from kvobj.catalog import chain_rows
from kvobj.catalog.catalog_rows import bucket_of, require_root
from kvobj.catalog.encoding import BUCKETS, ROOT_BYTES, decode_object
from kvobj.catalog.flight_keys import reliance_key, removal_keys, row_key
from kvobj.catalog.history_protocol import RemovalReason
from kvobj.catalog.lmdb_base import INLINE_ROWS, LmdbBase
from kvobj.catalog.namespace_changes import is_namespace_meant, no_such_namespace
from kvobj.catalog.removal_changes import DeleteChange, Descent, Doomed, DropChange, Hidden, HideChange
from kvobj.catalog.rows import (
    BucketKind,
    DeleteOutcome,
    ObjectRow,
    RecallPage,
    WriteCondition,
    is_same_namespace,
)
from kvobj.errors import BusyError, KvobjError, NoSuchBucketError

_STEP_ROWS: Final = 1000
_ROUNDS: Final = 16
_DESCENT_STEPS: Final = 65_536
_RECALL_PAGE: Final = 1000


class LmdbRemovals(LmdbBase):
    """See the module's text and `protocol.Catalog`."""

    async def delete(
        self,
        bucket: str,
        keys: Sequence[str],
        *,
        conditions: Sequence[WriteCondition | None] = (),
        made_ms: int | None = None,
        now_ms: int,
    ) -> list[DeleteOutcome]:
        """See `Catalog.delete`."""
        if self._kind(bucket) is BucketKind.ORDINARY:
            change = partial(DeleteChange, self._objects, bucket, keys, conditions, now_ms, made_ms=made_ms)
            return await self._write_fast(change, [row_key(bucket, key) for key in keys], bucket=bucket)
        given = conditions or [None] * len(keys)
        targets = [Doomed(key, (), condition) for key, condition in zip(keys, given, strict=True)]
        outcomes = await self._hide(bucket, targets, reason=RemovalReason.DELETED, now_ms=now_ms, made_ms=made_ms)
        if not all(outcome.is_gone for outcome in outcomes):
            raise BusyError("chunks are stored below faster than they can be deleted", bucket=bucket)
        return [
            DeleteOutcome(key, outcome.removed, outcome.precondition_failed, tuple(outcome.descendants))
            for key, outcome in zip(keys, outcomes, strict=True)
        ]

    async def recall(
        self,
        bucket: str,
        *,
        namespace: str | None = None,
        writer: str | None = None,
        from_ms: int | None = None,
        to_ms: int | None = None,
        after: str = "",
        limit: int = 4000,
        made_ms: int | None = None,
        namespace_root: bytes = b"",
        now_ms: int,
    ) -> RecallPage:
        """See `Catalog.recall`."""
        with self._database.read() as view:
            root = require_root(view, bucket, made_ms)
            if not is_namespace_meant(view, root, namespace or "", namespace_root):
                raise no_such_namespace(bucket, namespace or "")
        if self._kind(bucket) is BucketKind.ORDINARY:
            return RecallPage((), None)
        rows, following = await self._on_thread(self._live_page, bucket, after)
        wanted = [
            row
            for row in rows
            if (namespace is None or is_same_namespace(row.namespace, namespace))
            and (writer is None or row.owner == writer)
            and (from_ms is None or row.modified_ms >= from_ms)
            and (to_ms is None or row.modified_ms < to_ms)
        ]
        outcomes = await self._hide(
            bucket,
            [Doomed(row.key, ()) for row in wanted],
            reason=RemovalReason.RECALLED,
            now_ms=now_ms,
            limit=limit,
            made_ms=made_ms,
            namespace=namespace or "",
            namespace_root=namespace_root,
            tells_of_part=True,
        )
        recalled = tuple(row for outcome in outcomes for row in outcome.rows())
        done = [outcome.is_gone for outcome in outcomes]
        if not all(done):
            at = done.index(False)
            following = wanted[at - 1].key if at else after
        return RecallPage(recalled, following)

    def _live_page(self, bucket: str, after: str) -> tuple[list[ObjectRow], str | None]:
        start = after.encode() + b"\0" if after else b""
        with self._database.read() as view:
            items = self._objects.items(view, require_root(view, bucket), start)
            rows = [decode_object(value) for _, value in islice(items, _RECALL_PAGE)]
        return rows, rows[-1].key if len(rows) == _RECALL_PAGE else None

    async def drop_rows(self, rows: Sequence[ObjectRow], *, now_ms: int = 0) -> None:
        """See `Catalog.drop_rows`."""
        with self._database.read() as view:
            buckets = {row.bucket: bucket_of(view, row.bucket) for row in rows}
        for name, bucket in buckets.items():
            lost = [row for row in rows if row.bucket == name]
            if bucket is None:
                continue
            if bucket.row.kind is BucketKind.ORDINARY:
                await self._write_fast(
                    partial(DropChange, self._objects, lost), [row_key(name, row.key) for row in lost], bucket=name
                )
                continue
            targets = [Doomed(row.key, (), None, row) for row in lost]
            await self._hide(name, targets, reason=RemovalReason.LOST, now_ms=now_ms)

    async def drop_orphans(self, *, now_ms: int) -> int:
        """See `Catalog.drop_orphans`. Looks only at parents that were noted as exposed."""
        dropped = 0
        for bucket, keys in (await self._on_thread(self._orphans)).items():
            targets = [Doomed(key, ()) for key in keys]
            outcomes = await self._hide(bucket, targets, reason=RemovalReason.LOST, now_ms=now_ms, unpinned=True)
            dropped += sum(len(each.rows()) for each in outcomes)
        return dropped

    def _orphans(self) -> dict[str, list[str]]:
        """Children, by bucket, of parents that have no row any more."""
        orphans: dict[str, list[str]] = {}
        with self._database.read() as view:
            names = {value[:ROOT_BYTES]: name.decode() for name, value in view.range(BUCKETS)}
            for root, parent in chain_rows.exposed_parents(view):
                if root in names and self._objects.any(view, root, parent) is None:
                    children = [child.decode() for child in chain_rows.children(view, root, parent)]
                    orphans.setdefault(names[root], []).extend(children)
        return orphans

    # -- steps -----------------------------------------------------------------------------------------------------

    def _kind(self, bucket: str) -> BucketKind:
        with self._database.read() as view:
            stored = bucket_of(view, bucket)
        if stored is None:
            raise NoSuchBucketError("no such bucket", bucket=bucket)
        return stored.row.kind

    async def _hide(
        self,
        bucket: str,
        targets: Sequence[Doomed],
        *,
        reason: RemovalReason,
        now_ms: int,
        unpinned: bool = False,
        limit: int | None = None,
        made_ms: int | None = None,
        namespace: str = "",
        namespace_root: bytes = b"",
        tells_of_part: bool = False,
    ) -> list[Hidden]:
        """Hide the targets' keys with all below, in order; of those that are still live in the end `is_gone` is not set.
        `limit` bounds the rows, about. `tells_of_part`: where a step is refused, those before it are answered with, if they hid
        anything, and who goes on is refused."""
        step = partial(
            self.hide_step,
            bucket,
            reason=reason,
            now_ms=now_ms,
            unpinned=unpinned,
            made_ms=made_ms,
            namespace=namespace,
            namespace_root=namespace_root,
        )
        hiding = _Hiding(self, bucket, targets, step, limit=limit)
        try:
            for _ in range(_ROUNDS):
                if not await hiding.round():
                    break
        except KvobjError:
            if not tells_of_part or not any(each.rows() for each in hiding.outcomes):
                raise
        finally:  # earlier steps stand where a later one finds that the bucket or the namespace is another by now
            self._marks.forget(bucket, [row.key for each in hiding.outcomes for row in each.rows()])
        return hiding.outcomes

    def root_of(self, bucket: str) -> bytes:
        """The root of the bucket's trees. `NoSuchBucketError`."""
        with self._database.read() as view:
            return require_root(view, bucket)

    async def descend(self, descent: Descent, room: int) -> list[bytes]:
        """Up to `room` more keys of a subtree, the first few without a hop to the thread."""
        with self._database.read() as view:
            keys = descent.take(view, min(room, INLINE_ROWS), steps=INLINE_ROWS)
        while not descent.is_done and len(keys) < room:
            keys += await self._on_thread(self._take, descent, room - len(keys))
        return keys

    def _take(self, descent: Descent, room: int) -> list[bytes]:
        with self._database.read() as view:
            return descent.take(view, room, steps=_DESCENT_STEPS)

    async def hide_step(
        self,
        bucket: str,
        step: Sequence[Doomed],
        *,
        reason: RemovalReason,
        now_ms: int,
        unpinned: bool,
        made_ms: int | None,
        namespace: str,
        namespace_root: bytes,
    ) -> list[Hidden]:
        """Run one change, which names all its keys."""
        change = partial(
            HideChange,
            self._tables,
            bucket,
            step,
            reason,
            now_ms,
            unpinned=unpinned,
            made_ms=made_ms,
            namespace=namespace,
            namespace_root=namespace_root,
        )
        doomed = [key.decode() for each in step for key in each.keys]
        keys = removal_keys((bucket, key) for key in doomed)
        if len(doomed) > INLINE_ROWS:
            return await self._database.write(change(durable=True), keys)
        relied_on = [reliance_key(bucket, key) for key in doomed]
        return await self._write_fast(change, keys, shared=relied_on, bucket=bucket)


class _Hiding:
    """One call's progress: which targets still stand, and what went so far."""

    def __init__(
        self,
        catalog: LmdbRemovals,
        bucket: str,
        targets: Sequence[Doomed],
        run: Callable[[Sequence[Doomed]], Awaitable[list[Hidden]]],
        *,
        limit: int | None,
    ) -> None:
        """`run` hides one step."""
        self.outcomes = [Hidden() for _ in targets]
        self._catalog = catalog
        self._bucket = bucket
        self._targets = targets
        self._run = run
        self._step_rows = _STEP_ROWS if limit is None else min(_STEP_ROWS, limit)
        self._steps = None if limit is None else -(-limit // _STEP_ROWS)
        self._step: list[tuple[int, Doomed]] = []
        self._room = self._step_rows

    async def round(self) -> bool:
        """Walk below every target that still stands and hide what is found; whether another round is needed and allowed."""
        root = self._catalog.root_of(self._bucket)
        # Targets may lie below one another (a page of a recall): what is to go anyway is walked once. Not where a target may
        # stay: then its subtree is walked again from above.
        may_stay = any(target.condition is not None or target.lost is not None for target in self._targets)
        covered: set[bytes] | None = None if may_stay or len(self._targets) == 1 else set()
        for number, target in enumerate(self._targets):
            if self.outcomes[number].is_gone:
                continue
            descent = Descent(root, target.key.encode(), covered)
            while not descent.is_done and not self.outcomes[number].is_gone:
                keys = await self._catalog.descend(descent, self._room)
                self._step.append((number, Doomed(target.key, keys, target.condition, target.lost)))
                self._room -= len(keys)
                if not self._room:
                    await self._flush()
                    if self._steps == 0:
                        return False
        await self._flush()
        return self._steps != 0 and not all(outcome.is_gone for outcome in self.outcomes)

    async def _flush(self) -> None:
        step, self._step, self._room = self._step, [], self._step_rows
        if not step:
            return
        if self._steps is not None:
            self._steps -= 1
        results = await self._run([doomed for _, doomed in step])
        for (number, _), result in zip(step, results, strict=True):
            outcome = self.outcomes[number]
            outcome.descendants += result.descendants
            outcome.removed = outcome.removed or result.removed
            outcome.precondition_failed = result.precondition_failed
            outcome.is_gone = result.is_gone
