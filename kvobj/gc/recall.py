"""Recall: removes every chunk of a writer, a namespace or a span of time, with all descendants. One job at a time.

For chunks that must not be used any more (a poisoned writer, a wrong build): what is found is hidden at once, as by DELETE; bytes
go when pins end. A job that is polled, since a million chunks take many seconds; beside requests it keeps to a rate, like the
collector. A dry run only counts, and keeps to a rate too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, ObjectRow
from kvobj.clock import Clock
from kvobj.errors import ConflictError, InvalidRequestError, KvobjError, NoSuchBucketError, NoSuchNamespaceError
from kvobj.gc.pacing import Pace

RecallState = Literal["none", "running", "done", "cancelled", "failed"]

PACE_FACTOR: Final = 4
"""Beside other work a recall goes so much faster than the collector: what must not be read any more has to go soon."""

LOOK_FACTOR: Final = 20
"""A dry run looks at so many rows in the time in which the collector removes one."""

_DEFAULT: Final = "default"
"""The namespace of chunks that name none."""


@dataclass(frozen=True, slots=True)
class RecallQuery:
    """What to recall: all given conditions hold. Times are milliseconds of wall time, `[from_ms, to_ms)` of the last change."""

    bucket: str
    namespace: str | None = None
    writer: str | None = None
    from_ms: int | None = None
    to_ms: int | None = None

    def fits(self, row: ObjectRow) -> bool:
        """Whether the row itself fits (its descendants go with it whether they fit or not)."""
        return (
            (self.namespace is None or (row.namespace or _DEFAULT) == (self.namespace or _DEFAULT))
            and (self.writer is None or row.owner == self.writer)
            and (self.from_ms is None or row.modified_ms >= self.from_ms)
            and (self.to_ms is None or row.modified_ms < self.to_ms)
        )


@dataclass(frozen=True, slots=True)
class RecallReport:
    """Progress of the last recall. A dry run counts what fits, without descendants that do not."""

    state: RecallState
    dry_run: bool = False
    bucket: str | None = None
    chunks: int = 0
    size_bytes: int = 0
    total_chunks: int = 0
    position: str = ""
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class _Meant:
    """The bucket and the namespace that a recall began in: one made anew under its name is not recalled."""

    made_ms: int
    namespace_root: bytes


class Recall:
    """See the module's text. `on_removed` is told of the rows that were hidden; `removed` is waited for, with the bucket, before
    the report says that it is done (`Store.removed`). Event-loop-only."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        clock: Clock,
        pace: Pace,
        on_removed: Callable[[Sequence[ObjectRow]], None],
        removed: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._removed = removed
        self._pace = pace
        self._catalog = catalog
        self._clock = clock
        self._on_removed = on_removed
        self._task: asyncio.Task[None] | None = None
        self._report = RecallReport("none")

    async def start(self, query: RecallQuery, *, dry_run: bool) -> RecallReport:
        """Begin. `ConflictError` while one is running, `NoSuchBucketError`, `NoSuchNamespaceError`, `InvalidRequestError` (no KV
        bucket)."""
        bucket = await self._catalog.bucket(query.bucket)
        if bucket is None:
            raise NoSuchBucketError("no such bucket", bucket=query.bucket)
        if bucket.kind is not BucketKind.KV:
            raise InvalidRequestError("only chunks of a KV bucket can be recalled", bucket=query.bucket)
        name = query.namespace or _DEFAULT
        namespace = None if name == _DEFAULT else await self._catalog.namespaces.namespace(query.bucket, name)
        if namespace is None and name != _DEFAULT:
            raise NoSuchNamespaceError("no such namespace", bucket=query.bucket, namespace=name)
        meant = _Meant(bucket.created_ms, b"" if namespace is None else namespace.root)
        total = (await self._catalog.bucket_usage(query.bucket)).objects
        if self._report.state == "running":
            raise ConflictError("a recall is running already", bucket=self._report.bucket)
        self._report = RecallReport("running", dry_run=dry_run, bucket=query.bucket, total_chunks=total)
        self._task = asyncio.create_task(self._run(query, meant, dry_run=dry_run), name="recall")
        return self._report

    def report(self) -> RecallReport:
        """How far it is."""
        return self._report

    async def finished(self) -> RecallReport:
        """Wait until no recall is running."""
        if self._task is not None:
            await asyncio.wait([self._task])
        return self._report

    async def cancel(self) -> RecallReport:
        """Stop it and wait until it has stopped; what was hidden stays hidden."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            self._end_running("cancelled")
        return self._report

    async def _run(self, query: RecallQuery, meant: _Meant, *, dry_run: bool) -> None:
        try:
            await (self._count(query) if dry_run else self._hide(query, meant))
            if self._removed is not None and not dry_run:
                await self._removed(query.bucket)
            self._end_running("done")
        except KvobjError as error:
            self._end_running("failed", str(error))
        except Exception:  # a defect: the task keeps its traceback, the report must not run for ever
            self._end_running("failed", "internal error")
            raise

    def _end_running(self, state: RecallState, failure: str | None = None) -> None:
        if self._report.state == "running":
            self._set(state=state, failure=failure)

    def _set(
        self,
        *,
        state: RecallState = "running",
        rows: Sequence[ObjectRow] = (),
        position: str | None = None,
        failure: str | None = None,
    ) -> None:
        before = self._report
        self._report = RecallReport(
            state=state,
            dry_run=before.dry_run,
            bucket=before.bucket,
            chunks=before.chunks + len(rows),
            size_bytes=before.size_bytes + sum(row.size_bytes for row in rows),
            total_chunks=before.total_chunks,
            position=before.position if position is None else position,
            failure=failure,
        )

    async def _hide(self, query: RecallQuery, meant: _Meant) -> None:
        after: str | None = ""
        while after is not None:
            started = self._clock.monotonic()
            page = await self._catalog.recall(
                query.bucket,
                namespace=query.namespace,
                writer=query.writer,
                from_ms=query.from_ms,
                to_ms=query.to_ms,
                after=after,
                limit=PACE_FACTOR * self._pace.batch,
                made_ms=meant.made_ms,
                namespace_root=meant.namespace_root,
                now_ms=self._clock.now_ms(),
            )
            self._on_removed(page.recalled)
            self._set(rows=page.recalled, position=page.next_after)
            after = page.next_after
            chunks = -(-len(page.recalled) // PACE_FACTOR)
            await self._pace.after(chunks, seconds=self._clock.monotonic() - started)

    async def _count(self, query: RecallQuery) -> None:
        after: str | None = ""
        while after is not None:
            started = self._clock.monotonic()
            page = await self._catalog.list_objects(
                query.bucket, after=after, limit=min(1000, LOOK_FACTOR * self._pace.batch)
            )
            self._set(rows=[row for row in page.rows if query.fits(row)], position=page.next_after)
            after = page.next_after
            await self._pace.after(-(-len(page.rows) // LOOK_FACTOR), seconds=self._clock.monotonic() - started)
