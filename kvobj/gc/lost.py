"""What becomes of an object whose bytes no tier has any more, or none that check out.

A chunk is dropped with its descendants: it can be computed again, and its row would keep others from storing it. An object of
an ordinary bucket stays, and is counted, for an operator to see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, ObjectRow
from kvobj.clock import Clock

LISTED_MAX: Final = 1000


class LostObjects:
    """Shared by scrub and reconcile. `on_removed` is told of rows that were dropped. Event-loop-only."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        clock: Clock,
        on_removed: Callable[[Sequence[ObjectRow]], None],
        log: logging.Logger,
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._on_removed = on_removed
        self._log = log
        self._listed: dict[tuple[str, str], str] = {}
        self.dropped_chunks = 0

    def __len__(self) -> int:
        """How many objects of ordinary buckets are known to be lost (at most `LISTED_MAX` are remembered)."""
        return len(self._listed)

    async def note(self, row: ObjectRow, problem: str) -> bool:
        """The row's bytes are lost. False where it was deleted or changed meanwhile, which is no loss."""
        (current,) = await self._catalog.lookup(row.bucket, [row.key])
        if current is None or current.blob_ids != row.blob_ids:
            return False  # also one whose lossy copy was made, or made anew, since the row was read
        bucket = await self._catalog.bucket(row.bucket)
        if bucket is not None and bucket.kind is BucketKind.KV:
            self._log.error("a chunk is lost and is dropped bucket=%s key=%s: %s", row.bucket, row.key, problem)
            await self._catalog.drop_rows([current], now_ms=self._clock.now_ms())
            self.dropped_chunks += 1
            self._on_removed([current])
            return True
        if (row.bucket, row.key) not in self._listed:
            self._log.error("an object is lost bucket=%s key=%s: %s", row.bucket, row.key, problem)
        if len(self._listed) < LISTED_MAX:
            self._listed[row.bucket, row.key] = problem
        return True

    def found(self, row: ObjectRow) -> None:
        """The row's bytes are there."""
        if self._listed:
            self._listed.pop((row.bucket, row.key), None)
