"""Reads the runs of matches from the LMDB catalog: finds them, and reads all their rows where somebody wants them.

On the event loop, long lists in slices of half a millisecond: the work is Python's, and a thread would take the interpreter
away from the loop for ten times as long. What a slice finds is rescued in it; who pins looks at it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

from kvobj.catalog.catalog_rows import require_root
from kvobj.catalog.chunk_heads import ChunkHead, MatchedChunk, live_head, matched_chunks
from kvobj.catalog.chunk_list import ChunkList, IdList
from kvobj.catalog.chunk_records import ChunkRecords, find_records, scan_records
from kvobj.catalog.matching import Probe, Run, begins_chain, match_chain, walk
from kvobj.catalog.object_rows import ObjectRows
from kvobj.catalog.rows import ObjectRow, is_same_namespace
from kvobj.database import Database, ReadView, Snapshot
from kvobj.ids.chain_sums import running_sums

_WALK_SLICE: Final = 128
_HASH_SLICE: Final = 512
_ROWS_SLICE: Final = 512


@dataclass(slots=True)
class FoundRun:
    """A run and its last row. `view`: the snapshot in which all of it was found; None if it took several."""

    run: Run
    tail: ObjectRow | None
    view: Snapshot | None


class RunReader:
    """See the module's text. `forget_marks` and `is_claiming` are those of `LmdbLeases`. Snapshots lie on the caller's stack."""

    def __init__(
        self,
        database: Database,
        objects: ObjectRows,
        forget_marks: Callable[[Sequence[tuple[str, str]]], None],
        is_claiming: Callable[[str, str], bool],
    ) -> None:
        self._database = database
        self._objects = objects
        self._forget_marks = forget_marks
        self._is_claiming = is_claiming

    async def search(
        self, views: ExitStack, bucket: str, chunks: ChunkList, *, namespace: str | None, one_by_one: bool
    ) -> FoundRun:
        """Find the run: in one synchronous step if it is one chain of chunk ids, or short. The caller rescues what the last
        slice found. Of another `namespace` is absent. `one_by_one`: trust no sum."""
        view = views.enter_context(self._database.read())
        root = require_root(view, bucket)
        probe: Probe = partial(self._probe, view, root, bucket, namespace)
        whole: Snapshot | None = view
        run = Run()
        if not one_by_one and begins_chain(chunks, probe):
            if isinstance(chunks, IdList) or len(chunks) <= _HASH_SLICE:
                sums = running_sums(chunks.lanes(0, len(chunks)))
            else:
                sums = running_sums(await _lanes_in_slices(chunks))
                whole, (view, root, probe) = None, self._anew(views, bucket, namespace)
            run = match_chain(chunks, probe, sums)
        while not walk(run, chunks, probe, limit=_WALK_SLICE):
            self._forget_marks([(bucket, head.key) for head in run.targets[-_WALK_SLICE:]])
            await asyncio.sleep(0)
            whole, (view, root, probe) = None, self._anew(views, bucket, namespace)
        tail = self._objects.live(view, root, run.targets[-1].key.encode()) if run.targets else None
        return FoundRun(run, tail, whole)

    def _anew(self, views: ExitStack, bucket: str, namespace: str | None) -> tuple[Snapshot, bytes, Probe]:
        """A fresh view in place of those open."""
        views.close()
        view = views.enter_context(self._database.read())
        root = require_root(view, bucket)
        return view, root, partial(self._probe, view, root, bucket, namespace)

    def _probe(self, view: ReadView, root: bytes, bucket: str, namespace: str | None, key: str) -> ChunkHead | None:
        if self._is_claiming(bucket, key):
            return None
        head = live_head(view, self._objects, root, key)
        if head is None or namespace is None or is_same_namespace(head.namespace, namespace):
            return head
        return None

    async def rows(
        self, views: ExitStack, bucket: str, chunks: ChunkList, search: FoundRun
    ) -> Sequence[MatchedChunk] | None:
        """The rows of a run, in slices, all of one snapshot: the run's own if there is one. None if one is not live (there)."""
        view = search.view or self._anew(views, bucket, None)[0]
        root = require_root(view, bucket)
        pages: list[bytes] = []
        rows: list[MatchedChunk] = []
        for start in range(0, search.run.matched, _ROWS_SLICE):
            await asyncio.sleep(0)
            stop = min(start + _ROWS_SLICE, search.run.matched)
            page = None if rows else find_records(self._objects.pages(view), root, chunks, start, stop)
            if page is None:  # one is gone, not live, or of a form not known there; or there is no map
                values = self._values(view, root, chunks, start, stop)
                page = None if rows else scan_records(values)
                if page is None:
                    live = matched_chunks(value for value in values if value is not None)
                    if len(live) < stop - start:
                        return None
                    rows += ChunkRecords(chunks, pages)
                    pages.clear()
                    rows += live
                    continue
            pages.append(page)
        return tuple(rows) if rows else ChunkRecords(chunks, pages)

    def _values(self, view: ReadView, root: bytes, chunks: ChunkList, start: int, stop: int) -> list[bytes | None]:
        """Encoded rows."""
        joined, ends = chunks.joined_keys(start, stop)
        return self._objects.values(view, root, [joined[begin:end] for begin, end in pairwise((0, *ends))])


async def _lanes_in_slices(chunks: ChunkList) -> bytes:
    """`lanes` of all keys of a list, which are hashed for it."""
    slices: list[bytes] = []
    for start in range(0, len(chunks), _HASH_SLICE):
        slices.append(chunks.lanes(start, min(start + _HASH_SLICE, len(chunks))))
        await asyncio.sleep(0)
    return b"".join(slices)
