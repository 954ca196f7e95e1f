"""Tells the reference history, without a catalog: for its contract, and for tests of who reads a history."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import msgspec
from history_contract import BUCKET, OTHER

from kvobj.catalog.history_protocol import RemovalReason
from kvobj.catalog.memory_history import MemoryHistory
from kvobj.catalog.rows import ObjectRow


class MemoryTeller:
    def __init__(self) -> None:
        self.allocate = count(1).__next__
        self.buckets: dict[str, int] = {}
        self.history = MemoryHistory(self.allocate, born=self.buckets.get)

    async def make_bucket(self, name: str) -> None:
        self.buckets[name] = self.allocate()

    async def stored(self, rows: Sequence[ObjectRow], *, now_ms: int = 5, volatile: bool = True) -> list[ObjectRow]:
        numbered = [msgspec.structs.replace(row, sequence=self.allocate()) for row in rows]
        self.history.stored(numbered, now_ms=now_ms, volatile=volatile)
        return numbered

    async def removed(
        self,
        rows: Sequence[ObjectRow],
        *,
        reason: RemovalReason = RemovalReason.DELETED,
        now_ms: int = 6,
        volatile: bool = True,
    ) -> None:
        self.history.removed(rows, reason=reason, now_ms=now_ms, volatile=volatile)

    async def removed_run(self, rows: Sequence[ObjectRow], *, now_ms: int = 6) -> None:
        await self.removed(rows, reason=RemovalReason.EVICTED, now_ms=now_ms, volatile=False)

    async def made_durable(self, row: ObjectRow) -> None:
        self.history.made_durable(row)

    def bound(self, max_events: int) -> None:
        self.history.max_events = max_events


async def memory_teller() -> MemoryTeller:
    """With both buckets of the contract."""
    teller = MemoryTeller()
    await teller.make_bucket(BUCKET)
    await teller.make_bucket(OTHER)
    return teller
