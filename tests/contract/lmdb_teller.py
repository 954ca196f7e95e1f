"""Tells the LMDB history, without a catalog: on directories that can be opened again, in another boot too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from kvobj.catalog.bucket_changes import begin_incarnation
from kvobj.catalog.encoding import BUCKETS, CATALOG_TABLES, StoredBucket, encode_stored_bucket, number_key
from kvobj.catalog.history_protocol import RemovalReason
from kvobj.catalog.history_rows import HistoryRows, RemovedRun
from kvobj.catalog.key_hash import key_hash
from kvobj.catalog.lmdb_history import LmdbHistory
from kvobj.catalog.numbers import NumberLine
from kvobj.catalog.rows import BucketKind, BucketRow, Durability, ObjectRow
from kvobj.database import Database, WriteView


class LmdbTeller:
    """A history on directories that can be opened again, told as the LMDB catalog tells: volatile rows inline."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.executor = ThreadPoolExecutor(1)

    async def open(self, *, boot_id: str = "boot") -> None:
        self.database = Database.open(
            durable=self.directory / "durable",
            volatile=self.directory / "volatile",
            tables=CATALOG_TABLES,
            map_bytes=1 << 26,
            volatile_map_bytes=1 << 26,
            sync=False,
            boot_id=boot_id,
        )
        self.numbers = NumberLine.of(self.database, await self.database.write(begin_incarnation))
        self.rows = HistoryRows(self.numbers.allocate)
        self.history = await LmdbHistory.open(self.database, self.rows, self.numbers, executor=self.executor)

    async def reopen(self, *, boot_id: str = "boot") -> None:
        await self.database.aclose()
        await self.open(boot_id=boot_id)

    async def close(self) -> None:
        await self.database.aclose()
        self.executor.shutdown()

    async def make_bucket(self, name: str) -> None:
        bucket = BucketRow(name, BucketKind.KV, "main", 1, Durability.MEMORY)

        def change(view: WriteView) -> None:
            stored = StoredBucket(number_key(self.numbers.allocate()), bucket)
            view.put(BUCKETS, name.encode(), encode_stored_bucket(stored))

        await self.database.write(change)

    async def _run(self, change: Callable[[WriteView], list[ObjectRow]], *, volatile: bool) -> list[ObjectRow]:
        return self.database.write_volatile(change) if volatile else await self.database.write(change)

    async def stored(self, rows: Sequence[ObjectRow], *, now_ms: int = 5, volatile: bool = True) -> list[ObjectRow]:
        return await self._run(partial(self.store_in, rows, now_ms, volatile), volatile=volatile)

    def store_in(self, rows: Sequence[ObjectRow], now_ms: int, volatile: bool, view: WriteView) -> list[ObjectRow]:  # noqa: FBT001
        numbered = [msgspec.structs.replace(row, sequence=self.numbers.allocate()) for row in rows]
        self.rows.stored(view, numbered, now_ms=now_ms, volatile=volatile)
        return numbered

    async def removed(
        self,
        rows: Sequence[ObjectRow],
        *,
        reason: RemovalReason = RemovalReason.DELETED,
        now_ms: int = 6,
        volatile: bool = True,
    ) -> None:
        def change(view: WriteView) -> list[ObjectRow]:
            self.rows.removed(view, rows, reason=reason, now_ms=now_ms, volatile=volatile)
            return []

        await self._run(change, volatile=volatile)

    async def removed_run(self, rows: Sequence[ObjectRow], *, now_ms: int = 6) -> None:
        run = RemovedRun(rows[0].bucket, rows[0].namespace, [row.key for row in rows], [row.tokens for row in rows])
        hashes = [key_hash(row.key.encode()) for row in rows]

        def change(view: WriteView) -> None:
            self.rows.removed_run(view, run, hashes, reason=RemovalReason.EVICTED, now_ms=now_ms)

        await self.database.write(change)

    async def made_durable(self, row: ObjectRow) -> None:
        await self.database.write(lambda view: self.rows.made_durable(view, row))

    def bound(self, max_events: int) -> None:
        self.history.max_events = max_events
