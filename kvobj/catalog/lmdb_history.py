"""The history of the LMDB catalog: `history_protocol.History` over the tables that `HistoryRows` writes.

Guarantees: a page never goes past `NumberLine.floor`, so nothing appears behind a reader; what retention or power loss took is
covered by a mark (`_FORGOTTEN`, in the tables themselves), so that no reader takes a hole for silence. Event loop only, but
for the longer reads, which run on the given pool. Does not own the database.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, Self

from kvobj.catalog.encoding import (
    BUCKETS,
    EVENTS,
    EVENTS_VOLATILE,
    INCARNATION_SHIFT,
    REMOVALS,
    REMOVALS_BY_TIME,
    ROOT_BYTES,
    number_key,
)
from kvobj.catalog.history_protocol import EventPage, EventRow, RemovalRow
from kvobj.catalog.history_rows import (
    HistoryRows,
    decode_event,
    decode_removal,
    removal_key,
    unpack_removal_time,
    without_first_removals,
)
from kvobj.catalog.listing import merged
from kvobj.catalog.numbers import NumberLine
from kvobj.database import Database, ReadView, Table, WriteView

DEFAULT_MAX_EVENTS: Final = 1_000_000

# Marks sort before every number, and are in the table of what they speak of, so that they live exactly as long.
_FORGOTTEN: Final = b"\0"
"""Up to this number, events (or removals) may have been forgotten."""
_WRITTEN_DOWN: Final = b"\0\0"
"""In EVENTS: a clean stop left nothing in the volatile table."""

_INLINE_EVENTS: Final = 64
_SCAN_FACTOR: Final = 4
_VOLATILE_STEP: Final = 200
"""Deletions of one inline change: 200 take about half a millisecond of the event loop."""
_DURABLE_STEP: Final = 1000


class LmdbHistory:
    """See the module's text and `History`. `max_events` bounds events, and removals apart from them, at the next trim."""

    def __init__(
        self,
        database: Database,
        rows: HistoryRows,
        numbers: NumberLine,
        *,
        executor: Executor,
        max_events: int = DEFAULT_MAX_EVENTS,
    ) -> None:
        self._database = database
        self._rows = rows
        self._numbers = numbers
        self._executor = executor
        self.max_events = max_events
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._waiters: set[asyncio.Future[None]] = set()
        self._is_untold = False
        self._woken_at = 0
        rows.on_told = self._on_told
        database.watch_groups(started=_nothing, settled=self._on_settled)

    @classmethod
    async def open(
        cls,
        database: Database,
        rows: HistoryRows,
        numbers: NumberLine,
        *,
        executor: Executor,
        max_events: int = DEFAULT_MAX_EVENTS,
    ) -> Self:
        """Start: marks what the last power loss took. On the event loop, after `NumberLine.of`."""
        history = cls(database, rows, numbers, executor=executor, max_events=max_events)
        await history._mark_losses()
        return history

    async def _mark_losses(self) -> None:
        floor = self._numbers.floor()
        # At the first start of all there was nothing to lose.
        is_fresh = self._database.volatile_fresh and floor >> INCARNATION_SHIFT > 1
        mark = number_key(floor)

        def change(view: WriteView) -> None:
            if view.get(EVENTS, _WRITTEN_DOWN) is not None:
                view.delete(EVENTS, _WRITTEN_DOWN)
            elif is_fresh:
                view.put(EVENTS, _FORGOTTEN, mark, headroom=True)
            if is_fresh:
                view.put(REMOVALS_BY_TIME, _FORGOTTEN, mark, headroom=True)

        with self._database.read() as view:
            was_written_down = view.get(EVENTS, _WRITTEN_DOWN) is not None
        if is_fresh or was_written_down:
            await self._database.write(change)

    # -- reading -------------------------------------------------------------------------------------------------

    async def read(self, bucket: str | None, *, after: int, limit: int = 1000) -> EventPage:
        """See `History.read`."""
        self._on_settled()  # what was told so far is in this page: nobody who reads on from it waits for that
        floor = self._numbers.floor()  # before the snapshot: what is told up to here is in it
        page = self._read(bucket, after, floor, min(limit, _INLINE_EVENTS), _INLINE_EVENTS)
        if not page.more or limit <= _INLINE_EVENTS:
            return page
        read = partial(self._read, bucket, after, floor, limit, _SCAN_FACTOR * limit)
        return await self._loop.run_in_executor(self._executor, read)

    def _read(self, bucket: str | None, after: int, floor: int, limit: int, scan_limit: int) -> EventPage:
        with self._database.read() as view:
            born = 0
            if bucket is not None:
                root = _root(view, bucket)
                if root is None:
                    return EventPage((), 0, floor)
                born = int.from_bytes(root, "big")
            forgotten = max(_marked(view, EVENTS, _FORGOTTEN), _marked(view, EVENTS_VOLATILE, _FORGOTTEN))
            first_kept = forgotten + 1 if forgotten > born else 0
            start, stop = number_key(max(after, born) + 1), number_key(floor + 1)
            told = merged(view.range(EVENTS_VOLATILE, start, stop), view.range(EVENTS, start, stop))
            events: list[EventRow] = []
            last = after
            for place, (_, value) in enumerate(told):
                if len(events) == limit or place == scan_limit:
                    return EventPage(tuple(events), first_kept, last, more=True)
                event = decode_event(value)
                last = event.sequence
                if bucket is None or event.bucket == bucket:
                    events.append(event)
        return EventPage(tuple(events), first_kept, max(floor, after))

    def last_sequence(self) -> int:
        """See `History.last_sequence`."""
        return self._numbers.floor()

    def kept(self) -> int:
        """See `History.kept`; marks of what was forgotten count too."""
        with self._database.read() as view:
            return view.count(EVENTS) + view.count(EVENTS_VOLATILE)

    async def why_removed(self, bucket: str, key: str) -> RemovalRow | None:
        """See `History.why_removed`."""
        with self._database.read() as view:
            root = _root(view, bucket)
            value = view.get(REMOVALS, removal_key(bucket, key))
        removal = None if value is None else decode_removal(value)
        if root is None or removal is None or removal.sequence < int.from_bytes(root, "big"):
            return None
        return removal

    async def remembers_all(self, bucket: str) -> bool:
        """See `History.remembers_all`."""
        with self._database.read() as view:
            root = _root(view, bucket)
            return root is not None and int.from_bytes(root, "big") > _marked(view, REMOVALS_BY_TIME, _FORGOTTEN)

    # -- waiting -------------------------------------------------------------------------------------------------

    async def wait(self, after: int, *, timeout_seconds: float) -> bool:
        """See `History.wait`."""
        self._on_settled()
        if self._woken_at > after:
            return True
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_seconds):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True

    def _on_told(self) -> None:
        """A change tells of something; it is not over yet. Of the durable writer's, `_on_settled` follows."""
        self._is_untold = True
        if self._waiters and threading.get_ident() == self._loop_thread:
            self._loop.call_soon(self._on_settled)

    def _on_settled(self) -> None:
        """What was told can be read, but for what was told inline while a durable group holds the floor: its end comes here too."""
        if not self._is_untold or self._numbers.is_held:
            return
        self._is_untold = False
        self._woken_at = self._numbers.floor()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- telling and forgetting -----------------------------------------------------------------------------------

    async def tell_cleared(self, bucket: str, namespace: str, *, now_ms: int) -> None:
        """See `History.tell_cleared`."""

        def change(view: WriteView) -> None:
            self._rows.cleared(view, bucket, namespace, now_ms=now_ms)

        await self._database.write(change)

    async def trim(self, *, now_ms: int, retention_ms: int, limit: int = 10_000) -> int:
        """See `History.trim`. Durable deletions are not flushed: power loss brings a few back."""
        due = await self._loop.run_in_executor(self._executor, self._due, now_ms - retention_ms, limit)
        for start in range(0, len(due.volatile), _VOLATILE_STEP):
            self._database.write_volatile(
                partial(_forget_events, EVENTS_VOLATILE, due.volatile[start : start + _VOLATILE_STEP])
            )
            await asyncio.sleep(0)
        removals = 0
        for key, names in due.removals:
            for start in range(0, len(names), _VOLATILE_STEP):
                self._database.write_volatile(partial(_forget_removals, key, names[start : start + _VOLATILE_STEP]))
                await asyncio.sleep(0)
            removals += len(names)
        for start in range(0, len(due.durable), _DURABLE_STEP):
            await self._database.write(
                partial(_forget_events, EVENTS, due.durable[start : start + _DURABLE_STEP]), synced=False
            )
        return len(due.volatile) + len(due.durable) + removals

    def _due(self, kept_since_ms: int, limit: int) -> _Due:
        with self._database.read() as view:
            surplus = view.count(EVENTS) + view.count(EVENTS_VOLATILE) - self.max_events
            volatile, durable = view.range(EVENTS_VOLATILE, _FIRST), view.range(EVENTS, _FIRST)
            tagged = merged(_tagged(volatile, EVENTS_VOLATILE), _tagged(durable, EVENTS))
            due = _Due([], [], [])
            for place, (key, (value, table)) in enumerate(islice(tagged, limit)):
                if place >= surplus and decode_event(value).time_ms >= kept_since_ms:
                    break
                (due.volatile if table is EVENTS_VOLATILE else due.durable).append(key)
            limit -= len(due.volatile) + len(due.durable)
            # A key that was removed more than once has one removal and several times.
            surplus_times = view.count(REMOVALS_BY_TIME) - self.max_events
            surplus = view.count(REMOVALS) - self.max_events
            found = 0
            for place, (key, value) in enumerate(view.range(REMOVALS_BY_TIME, _FIRST)):
                time_ms, names = unpack_removal_time(value)
                if found >= limit or (place >= surplus_times and found >= surplus and time_ms >= kept_since_ms):
                    break
                due.removals.append((key, names[: limit - found]))
                found += len(names)
        return due

    async def write_down(self, *, limit: int = 200_000) -> bool:
        """See `History.write_down`."""
        moved = 0
        while moved <= limit:
            with self._database.read() as view:
                keys = [key for key, _ in islice(view.range(EVENTS_VOLATILE, _FIRST), _DURABLE_STEP)]
            if not keys:
                await self._database.write(_mark_written_down)
                return True
            await self._database.write(partial(_move_down, keys), synced=False)
            moved += len(keys)
        return False


_FIRST: Final = number_key(0)


class _Due(NamedTuple):
    """Keys of what a trim forgets; of removals by time with the keys in REMOVALS that each names."""

    volatile: list[bytes]
    durable: list[bytes]
    removals: list[tuple[bytes, list[bytes]]]


def _root(view: ReadView, bucket: str) -> bytes | None:
    """The number a bucket was made with: what is told of it has higher ones, what a bucket of the same name left has lower."""
    value = view.get(BUCKETS, bucket.encode())
    return None if value is None else value[:ROOT_BYTES]


def _marked(view: ReadView, table: Table, mark: bytes) -> int:
    return int.from_bytes(view.get(table, mark) or b"", "big")


def _tagged(items: Iterator[tuple[bytes, bytes]], table: Table) -> Iterator[tuple[bytes, tuple[bytes, Table]]]:
    return ((key, (value, table)) for key, value in items)


def _raise_mark(view: WriteView, table: Table, number: bytes) -> None:
    if number > (view.get(table, _FORGOTTEN) or b""):
        view.put(table, _FORGOTTEN, number, headroom=True)


def _forget_events(table: Table, keys: list[bytes], view: WriteView) -> None:
    _raise_mark(view, table, keys[-1])
    for key in keys:
        view.delete(table, key)


def _forget_removals(number: bytes, names: list[bytes], view: WriteView) -> None:
    """Forget the first removals of an event, of which `names` are the keys."""
    value = view.get(REMOVALS_BY_TIME, number)
    if value is None:
        return
    forgotten = False
    for name in names:
        removal = view.get(REMOVALS, name)
        # A key removed again since then is remembered by its later removal.
        if removal is not None and number_key(decode_removal(removal).sequence) == number[: len(_FIRST)]:
            view.delete(REMOVALS, name)
            forgotten = True
    rest = without_first_removals(value, len(names))
    if rest:
        view.put(REMOVALS_BY_TIME, number, rest, headroom=True)
    else:
        view.delete(REMOVALS_BY_TIME, number)
    if forgotten:
        _raise_mark(view, REMOVALS_BY_TIME, number[: len(_FIRST)])


def _move_down(keys: list[bytes], view: WriteView) -> None:
    for key in keys:
        value = view.get(EVENTS_VOLATILE, key)
        if value is not None:
            view.put(EVENTS, key, value, headroom=True)
            view.delete(EVENTS_VOLATILE, key)


def _mark_written_down(view: WriteView) -> None:
    mark = max(_marked(view, EVENTS, _FORGOTTEN), _marked(view, EVENTS_VOLATILE, _FORGOTTEN))
    if mark:
        view.put(EVENTS, _FORGOTTEN, number_key(mark), headroom=True)
    view.put(EVENTS, _WRITTEN_DOWN, b"1", headroom=True)


def _nothing() -> None:
    """Of a group's beginning there is nothing to tell."""
