"""The durable writer: takes a group of changes through record log, commit and flush, on its own thread.

Guarantees: a change of the group is durable whole or not at all; one change that fails in a way of its own (a fault, no room)
does not take its neighbours down: the group is then rolled back and each change commits alone. Lack of room leaves everything
as it was. A failed flush is final: what lies on the disk is not known any more.
Does not touch the volatile environment: it returns the effects to be applied by the event loop.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Final

import lmdb
import msgspec

from kvobj.database.effects import Effects, Redo
from kvobj.database.environment import Environment, translate
from kvobj.database.lmdb_types import Handle, Transaction
from kvobj.database.outbox import GapWriter, OutboxWriter
from kvobj.database.table import META
from kvobj.database.views import DurableWriteView, Publication, WriteView
from kvobj.errors import KvobjError, UnavailableError
from kvobj.record_log import LogPosition, RecordLog

LOG_END: Final = b"log_end"
REDO: Final = b"redo"
_LOG_END: Final = struct.Struct(">QQQQ")
_encode = msgspec.msgpack.Encoder().encode


class Pending:
    """A change on its way: its future belongs to the event loop, `value` and `error` are set by the writer thread."""

    __slots__ = ("change", "error", "future", "keys", "synced", "value")

    def __init__(
        self, change: Callable[[WriteView], Any], *, keys: Collection[bytes], synced: bool, future: asyncio.Future[Any]
    ) -> None:
        self.change = change
        self.keys = keys
        self.synced = synced
        self.future = future
        self.value: Any = None
        self.error: Exception | None = None


class Rider:
    """A change that goes in front of the next group (`Database.ride`). `is_committed` is set by the writer thread."""

    __slots__ = ("change", "is_committed", "settled")

    def __init__(self, change: Callable[[WriteView], None], settled: Callable[[], None]) -> None:
        self.change = change
        self.settled = settled
        self.is_committed = False


class GroupWriter:
    """Commits groups. One thread at a time; `flusher` runs the log's flush beside LMDB's."""

    def __init__(
        self,
        *,
        durable: Environment,
        volatile: Environment,
        handles: Mapping[str, Handle],
        record_log: RecordLog | None,
        flusher: Executor,
        sync: bool,
        redo_number: int,
        outbox: OutboxWriter | GapWriter | None = None,
    ) -> None:
        self._durable = durable
        self._volatile = volatile
        self._handles = handles
        self._log = record_log
        self._flusher = flusher
        self._sync = sync
        self._failed = False
        self._outbox = outbox
        self._has_published = False
        self.redo_number = redo_number

    @property
    def published(self) -> int:
        """The last position of the outbox; to be read between groups."""
        return self._outbox.position if isinstance(self._outbox, OutboxWriter) else 0

    def published_of(self, topic: str) -> int:
        """See `OutboxWriter.position_of`; on any thread."""
        return self._outbox.position_of(topic) if isinstance(self._outbox, OutboxWriter) else 0

    @property
    def has_failed(self) -> bool:
        """Whether nothing can be committed any more; on any thread."""
        return self._failed

    @property
    def is_full(self) -> bool:
        """Whether the group before was refused puts for lack of room; on any thread."""
        return self._durable.is_full or (self._log is not None and self._log.is_short)

    def commit(self, group: Sequence[Pending], riders: Sequence[Rider] = ()) -> Effects:
        """Commit what can be committed; each change gets its value or its error. Returns the effects, which must be applied
        before the next group (their redo record has number `redo_number`). No change is committed without the riders."""
        if self._failed:
            _fail_all(group, UnavailableError("the database failed earlier", directory=self._durable.directory))
            return Effects()
        effects = Effects()
        self._has_published = False
        try:
            flush = self._attempt(group, effects, riders=riders, may_flush=True)
        except Exception:  # noqa: BLE001 - whatever one change did wrong, the others are entitled to their own try
            effects, flush = self._attempt_each(group, riders), None
        is_promised = self._has_published or any(pending.synced and pending.error is None for pending in group)
        if is_promised and self._sync:
            try:
                self._durable.flush()
                if flush is not None:
                    flush.result()
                elif self._log is not None:
                    self._log.sync()
            except (lmdb.Error, KvobjError) as error:
                self._failed = True
                _fail_all(group, UnavailableError("a flush failed", directory=self._durable.directory, reason=error))
                return Effects()
        if not effects.is_empty():
            self.redo_number += 1
        return effects

    def _attempt_each(self, group: Sequence[Pending], riders: Sequence[Rider]) -> Effects:
        effects = Effects()
        for pending in group:
            trial = msgspec.msgpack.decode(_encode(effects), type=Effects)
            try:
                self._attempt([pending], trial, riders=riders, may_flush=False)
            except lmdb.Error as error:
                pending.error = translate(error, self._durable.directory)
            except Exception as error:  # noqa: BLE001 - handed to whoever gave the change
                pending.error = error
            else:
                effects = trial
                riders = ()
        return effects

    def _attempt(
        self, group: Sequence[Pending], effects: Effects, *, riders: Sequence[Rider], may_flush: bool
    ) -> Future[None] | None:
        snapshot = self._volatile.begin()
        transaction = self._durable.begin(write=True)
        log_before = self._log.end if self._log is not None else None
        flush: Future[None] | None = None
        try:
            entries, published = self._run(group, effects, riders=riders, transaction=transaction, snapshot=snapshot)
            if published and self._outbox is not None:
                mark = self._outbox.write(transaction, published)
                if mark is not None:
                    entries.append(mark)
            if not effects.is_empty():
                redo = _encode(Redo(self.redo_number + 1, effects))
                transaction.put(REDO, redo, db=self._handles[META.name])
            if self._log is not None and entries:
                end = self._log.append(entries)
                transaction.put(LOG_END, pack_log_end(end, self._log.synced), db=self._handles[META.name])
                if may_flush and self._sync and (published or any(pending.synced for pending in group)):
                    flush = self._flusher.submit(self._log.sync)
            transaction.commit()
        except BaseException:
            transaction.abort()
            if flush is not None:
                flush.exception()
            if self._log is not None and log_before is not None and self._log.end != log_before:
                self._log.take_back(log_before)
            raise
        finally:
            snapshot.abort()
        self._committed(riders, published)
        return flush

    def _committed(self, riders: Sequence[Rider], published: Sequence[Publication]) -> None:
        for rider in riders:
            rider.is_committed = True
        if published and self._outbox is not None:
            self._outbox.committed()
            self._has_published = True

    def _run(
        self,
        group: Sequence[Pending],
        effects: Effects,
        *,
        riders: Sequence[Rider],
        transaction: Transaction,
        snapshot: Transaction,
    ) -> tuple[list[bytes], Sequence[Publication]]:
        """Run the changes over one view; returns their log entries, and what they publish."""
        self._durable.refresh_room(transaction)
        entries: list[bytes] = []
        published: list[Publication] | None = None if self._outbox is None else []
        view = DurableWriteView(
            transaction,
            snapshot,
            effects=effects,
            entries=entries,
            published=published,
            handles=self._handles,
            mapped=self._durable.mapped,
            volatile_mapped=self._volatile.mapped,
            durable_is_full=self.is_full,
            volatile_is_full=self._volatile.is_full,
        )
        for rider in riders:
            rider.change(view)
        for pending in group:
            pending.value = pending.error = None
            before = len(entries)
            told_before = 0 if published is None else len(published)
            try:
                pending.value = pending.change(view)
            except KvobjError as error:
                pending.error = error
                del entries[before:]
                if published:
                    del published[told_before:]
        view.finish()
        return entries, published or ()


def pack_log_end(end: LogPosition, synced: LogPosition) -> bytes:
    """The stored form of how far the log belongs to the environment, and how far it is known to be good."""
    return _LOG_END.pack(end.file_number, end.offset, synced.file_number, synced.offset)


def unpack_log_end(value: bytes) -> tuple[LogPosition, LogPosition]:
    """See `pack_log_end`."""
    end_file, end_offset, synced_file, synced_offset = _LOG_END.unpack(value)
    return LogPosition(end_file, end_offset), LogPosition(synced_file, synced_offset)


def _fail_all(group: Sequence[Pending], error: KvobjError) -> None:
    for pending in group:
        pending.error = error
