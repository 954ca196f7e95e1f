"""The reference driver's removals, recall, marks and claims: each verb one step, a subtree removed by walking all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import eq

import msgspec

from kvobj.catalog.history_protocol import RemovalReason
from kvobj.catalog.memory_namespaces import MemoryNamespaces
from kvobj.catalog.memory_tables import MemoryTables, Name, condition_error, same_blobs
from kvobj.catalog.namespace_changes import no_such_namespace
from kvobj.catalog.rows import (
    BucketKind,
    ChunkName,
    Claimed,
    DeleteOutcome,
    ObjectRow,
    ObjectState,
    RecallPage,
    WriteCondition,
    is_same_namespace,
)
from kvobj.errors import BatchTooLargeError

_CONDEMN_MAX = 1000
_RECALL_PAGE = 1000


class MemoryChains(MemoryTables):
    """See the module's text and `protocol.Catalog`."""

    _namespaces: MemoryNamespaces

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
        self._require_bucket(bucket, made_ms)
        outcomes = []
        for key, condition in zip(keys, conditions or [None] * len(keys), strict=True):
            live = self._live((bucket, key.encode()))
            if live is not None and condition_error(live, condition) is not None:
                outcomes.append(DeleteOutcome(key, None, precondition_failed=True))
                continue
            gone = self._hide((bucket, key.encode()), RemovalReason.DELETED, now_ms)
            below = tuple(row for row in gone if row.key != key)
            outcomes.append(DeleteOutcome(key, live, descendants=below))
        return outcomes

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
        self._require_bucket(bucket, made_ms)
        if namespace_root and not self._namespaces.is_meant(bucket, namespace or "", namespace_root):
            raise no_such_namespace(bucket, namespace or "")
        if self._buckets[bucket].kind is BucketKind.ORDINARY:
            return RecallPage((), None)
        names = sorted(name for name in {**self._durable, **self._volatile} if name[0] == bucket)
        names = [name for name in names if name[1] > after.encode() and self._live(name) is not None][:_RECALL_PAGE]
        recalled: list[ObjectRow] = []
        for place, name in enumerate(names):
            if len(recalled) >= limit:
                return RecallPage(tuple(recalled), names[place - 1][1].decode())
            row = self._live(name)
            if (
                row is not None
                and (namespace is None or is_same_namespace(row.namespace, namespace))
                and (writer is None or row.owner == writer)
                and (from_ms is None or row.modified_ms >= from_ms)
                and (to_ms is None or row.modified_ms < to_ms)
            ):
                recalled += self._hide(name, RemovalReason.RECALLED, now_ms)
        following = names[-1][1].decode() if len(names) == _RECALL_PAGE else None
        return RecallPage(tuple(recalled), following)

    async def drop_rows(self, rows: Sequence[ObjectRow], *, now_ms: int = 0) -> None:
        """See `Catalog.drop_rows`."""
        for row in rows:
            name = (row.bucket, row.key.encode())
            live = self._live(name)
            if live is not None and same_blobs(live, row):
                self._hide(name, RemovalReason.LOST, now_ms, is_lost=partial(eq, name))

    async def drop_orphans(self, *, now_ms: int) -> int:
        """See `Catalog.drop_orphans`."""
        dropped = 0
        for name, row in sorted({**self._durable, **self._volatile}.items()):
            if row.parent and self._top((row.bucket, row.parent.encode())) is None:
                dropped += len(self._hide(name, RemovalReason.LOST, now_ms, is_lost=lambda _: True))
        return dropped

    async def condemn(self, chunks: Sequence[ChunkName], *, not_before_boot_ms: int) -> list[bool]:
        """See `Catalog.condemn`."""
        if len(chunks) > _CONDEMN_MAX:
            raise BatchTooLargeError("too many chunks to condemn at once", limit=_CONDEMN_MAX)
        return [self._condemn(chunk, not_before_boot_ms) for chunk in chunks]

    def _condemn(self, chunk: ChunkName, not_before_boot_ms: int) -> bool:
        name = (chunk.bucket, chunk.key.encode())
        live = self._live(name)
        if live is None or _first_blob(live) != chunk.blob_id or self._leases.holds_row(chunk.bucket, chunk.key):
            return False
        if any((child[0], child[1].decode()) not in self._marks for child in self._children(name)):
            return False
        standing = self._marks.get((chunk.bucket, chunk.key))
        if standing is None or standing[1].blob_id != chunk.blob_id:
            self._marks.pop((chunk.bucket, chunk.key), None)
            self._marks[chunk.bucket, chunk.key] = (not_before_boot_ms, chunk)
        return True

    async def claim(self, *, now_boot_ms: int, limit: int = 1000, now_ms: int) -> Claimed:
        """See `Catalog.claim`."""
        if self._leases.quiet or limit <= 0:
            return Claimed((), (), 0)
        hidden = [
            name
            for name, row in {**self._durable, **self._volatile}.items()
            if row.state is ObjectState.CONDEMNED and not self._leases.holds_row(row.bucket, row.key)
        ]
        hidden.sort(key=lambda name: -self._depth(name))
        hidden = hidden[: (limit + 1) // 2]
        due = [chunk for not_before, chunk in self._marks.values() if not_before <= now_boot_ms]
        due = due[: limit - len(hidden)]
        self._forget_marks([(chunk.bucket, chunk.key) for chunk in due])
        claimed: list[ObjectRow] = []
        cleared: list[ObjectRow] = []
        for chunk in due:
            live = self._live((chunk.bucket, chunk.key.encode()))
            if live is not None and _first_blob(live) == chunk.blob_id:
                claimed += self._claim((chunk.bucket, chunk.key.encode()), now_ms, reason=RemovalReason.EVICTED)
        for name in hidden:
            cleared += self._claim(name, now_ms, reason=None)
        chunks = tuple(ChunkName(row.bucket, row.key, _first_blob(row)) for row in claimed)
        return Claimed(chunks, tuple(cleared), sum(row.size_bytes for row in (*claimed, *cleared)))

    def condemned(self) -> tuple[int, int]:
        """See `Catalog.condemned`."""
        rows = {**self._durable, **self._volatile}.values()
        return len(self._marks), sum(row.state is ObjectState.CONDEMNED for row in rows)

    # -- what the verbs are made of --------------------------------------------------------------------------------

    def _depth(self, name: Name) -> int:
        row = self._top(name)
        return 0 if row is None else row.depth

    def _claim(self, name: Name, now_ms: int, *, reason: RemovalReason | None) -> list[ObjectRow]:
        row = self._top(name)
        if row is None or self._children(name) or self._leases.holds_row(row.bucket, row.key):
            return []
        is_volatile = name not in self._durable
        self._change(name, None, None, now_ms=now_ms)
        if reason is not None:
            self._history.removed([row], reason=reason, now_ms=now_ms, volatile=is_volatile)
        return [row]

    def _hide(
        self,
        name: Name,
        reason: RemovalReason,
        now_ms: int,
        *,
        is_lost: Callable[[Name], bool] = lambda _: False,
    ) -> list[ObjectRow]:
        """Remove a row and all below it, children first; what is pinned and what is above that stays, hidden. Returns what went."""
        gone = [row for place in self._below(name) for row in self._hide_one(place, now_ms, is_lost=is_lost(place))]
        if self._buckets[name[0]].kind is BucketKind.KV:
            for row, is_volatile in gone:
                self._history.removed([row], reason=reason, now_ms=now_ms, volatile=is_volatile)
        return [row for row, _ in gone]

    def _below(self, name: Name) -> list[Name]:
        """The name and all below it, children first."""
        if self._buckets[name[0]].kind is BucketKind.ORDINARY:
            return [name]
        found, unseen = [], [name]
        while unseen:
            place = unseen.pop()
            found.append(place)
            unseen += self._children(place)
        return found[::-1]

    def _hide_one(self, name: Name, now_ms: int, *, is_lost: bool) -> list[tuple[ObjectRow, bool]]:
        row = self._live(name)
        if row is None:
            return []
        is_volatile = name not in self._durable
        is_chunk = self._buckets[name[0]].kind is BucketKind.KV
        is_held = not is_lost and self._leases.holds_row(row.bucket, row.key)
        if is_chunk and (is_held or self._children(name)):
            hidden = msgspec.structs.replace(row, state=ObjectState.CONDEMNED)
            in_memory = name in self._volatile
            self._change(name, hidden if in_memory else None, None if in_memory else hidden, now_ms=now_ms)
        else:
            self._change(name, None, None, now_ms=now_ms, is_lost=is_lost)
        self._forget_marks([(row.bucket, row.key)])
        return [(row, is_volatile)]


def _first_blob(row: ObjectRow) -> bytes:
    return row.blobs[0].blob_id if row.blobs else b""
