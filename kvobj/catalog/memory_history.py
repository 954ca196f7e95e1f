"""The history of the reference driver: `history_protocol.History` over two dicts, which says what the other drivers must answer.

Events of volatile rows lie in a dict of their own, so that `lose_power` can take them. Every verb runs without a pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvobj.catalog.history_protocol import EventPage, EventRow, EventType, RemovalReason, RemovalRow
from kvobj.catalog.history_rows import removed_events, stored_events
from kvobj.catalog.rows import ObjectRow


class MemoryHistory:
    """See the module's text. `allocate` draws the catalog's numbers. `born` is the number that a bucket was made with, None where
    there is no such bucket."""

    def __init__(
        self,
        allocate: Callable[[], int],
        *,
        born: Callable[[str], int | None] = lambda _: 0,
        max_events: int = 1_000_000,
    ) -> None:
        self._allocate = allocate
        self._born = born
        self.max_events = max_events
        self._durable: dict[int, EventRow] = {}
        self._volatile: dict[int, EventRow] = {}
        self._removals: dict[tuple[str, str], RemovalRow] = {}
        self._forgotten = 0
        self._removals_forgotten = 0
        self._told = asyncio.Event()
        self._last_told = 0

    def lose_power(self) -> None:
        """Forget what is told of volatile rows, and why rows went."""
        self._volatile.clear()
        self._removals.clear()
        self._forgotten = self._removals_forgotten = self._allocate()

    # -- what the catalog's verbs call ------------------------------------------------------------------------------

    def stored(self, rows: Sequence[ObjectRow], *, now_ms: int, volatile: bool) -> None:
        """See `HistoryRows.stored`."""
        for event in stored_events(rows, now_ms=now_ms):
            self._tell(event, volatile=volatile)

    def removed(self, rows: Sequence[ObjectRow], *, reason: RemovalReason, now_ms: int, volatile: bool) -> None:
        """See `HistoryRows.removed`."""
        for event in removed_events(rows, self._allocate, reason=reason, now_ms=now_ms):
            self._tell(event, volatile=volatile)
            for key in event.keys:
                # Put in again at the end: the dict is in the order of the removals.
                self._removals.pop((event.bucket, key), None)
                self._removals[event.bucket, key] = RemovalRow(reason, now_ms, event.namespace, event.sequence)

    def made_durable(self, row: ObjectRow) -> None:
        """See `HistoryRows.made_durable`."""
        event = self._volatile.pop(row.sequence, None)
        if event is not None:
            self._durable[event.sequence] = event

    def _tell(self, event: EventRow, *, volatile: bool) -> None:
        (self._volatile if volatile else self._durable)[event.sequence] = event
        self._last_told = max(self._last_told, event.sequence)
        self._told.set()

    # -- History -----------------------------------------------------------------------------------------------------

    async def read(self, bucket: str | None, *, after: int, limit: int = 1000) -> EventPage:
        """See `History.read`."""
        floor = self._allocate()
        born = 0 if bucket is None else self._born(bucket)
        if born is None:
            return EventPage((), 0, floor)
        told = {**self._durable, **self._volatile}
        events = [
            told[number]
            for number in sorted(told)
            if number > max(after, born) and bucket in {None, told[number].bucket}
        ]
        first_kept = self._forgotten + 1 if self._forgotten > born else 0
        if len(events) > limit:
            return EventPage(tuple(events[:limit]), first_kept, events[limit - 1].sequence, more=True)
        return EventPage(tuple(events), first_kept, max(floor, after))

    def last_sequence(self) -> int:
        """See `History.last_sequence`."""
        return self._allocate()

    def kept(self) -> int:
        """See `History.kept`."""
        return len(self._durable) + len(self._volatile)

    async def wait(self, after: int, *, timeout_seconds: float) -> bool:
        """See `History.wait`."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._last_told <= after:
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            return False
        return True

    async def tell_cleared(self, bucket: str, namespace: str, *, now_ms: int) -> None:
        """See `History.tell_cleared`."""
        self._tell(EventRow(self._allocate(), now_ms, EventType.CLEARED, bucket, namespace), volatile=False)

    async def why_removed(self, bucket: str, key: str) -> RemovalRow | None:
        """See `History.why_removed`."""
        removal, born = self._removals.get((bucket, key)), self._born(bucket)
        return None if removal is None or born is None or removal.sequence < born else removal

    async def remembers_all(self, bucket: str) -> bool:
        """See `History.remembers_all`."""
        born = self._born(bucket)
        return born is not None and born >= self._removals_forgotten

    async def trim(self, *, now_ms: int, retention_ms: int, limit: int = 10_000) -> int:
        """See `History.trim`."""
        kept_since_ms = now_ms - retention_ms
        forgotten = 0
        numbers = sorted([*self._durable, *self._volatile])
        for place, number in enumerate(numbers[:limit]):
            event = self._durable.get(number) or self._volatile[number]
            if place >= len(numbers) - self.max_events and event.time_ms >= kept_since_ms:
                break
            self._durable.pop(number, None)
            self._volatile.pop(number, None)
            self._forgotten = max(self._forgotten, number)
            forgotten += 1
        removals = list(self._removals.items())
        for place, (name, removal) in enumerate(removals[: limit - forgotten]):
            if place >= len(removals) - self.max_events and removal.when_ms >= kept_since_ms:
                break
            del self._removals[name]
            self._removals_forgotten = max(self._removals_forgotten, removal.sequence)
            forgotten += 1
        return forgotten

    async def write_down(self, *, limit: int = 200_000) -> bool:
        """See `History.write_down`."""
        if len(self._volatile) > limit:
            return False
        self._durable |= self._volatile
        self._volatile.clear()
        return True
