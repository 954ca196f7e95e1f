"""Learns at a start what lies at home already: in commit order, for want of better knowledge, in slices between requests."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, Durability, ObjectRow
from kvobj.gc.home_chunks import HomeChunks, lasting_blob
from kvobj.ids import BlobId

LOAD_STEP: Final = 100
"""A millisecond of the event loop: the first requests of a start come while this goes on."""
_FOUND: Final = struct.Struct(">Q16s")  # commit number, name: sorts in commit order

Absent = Callable[[Sequence[BlobId]], Awaitable[Sequence[BlobId]]]
"""Which of the blobs are not in nvme."""


class HomeLoading:
    """One pass over the catalog. `on_chunk` is told of every chunk at home but for those that `spares` says, which are left out.

    Where there is a remote, `absent` says what has left nvme, and `on_object` is told of the objects of ordinary buckets that are
    there. All chunks count as used when this began, a chain's end longest ago. Used once.
    """

    def __init__(
        self,
        chunks: HomeChunks,
        *,
        boot_ms: Callable[[], int],
        on_chunk: Callable[[ObjectRow], None] = lambda _: None,
        spares: Callable[[ObjectRow], bool] = lambda _: False,
        absent: Absent | None = None,
        on_object: Callable[[ObjectRow], None] | None = None,
    ) -> None:
        self._chunks = chunks
        self._boot_ms = boot_ms
        self._on_chunk = on_chunk
        self._spares = spares
        self._absent = absent
        self._on_object = on_object
        self._began_ms = boot_ms()
        self._kinds: dict[str, BucketKind] = {}
        self._found: list[bytes] = []

    async def run(self, catalog: Catalog) -> None:
        """Read everything, then tell policy."""
        self._kinds = {bucket.name: bucket.kind for bucket in await catalog.buckets()}
        async for rows in self._pages(catalog):
            await self._learn(rows)
            await asyncio.sleep(0)
        self._found.sort()
        for number, entry in enumerate(self._found):
            if number % LOAD_STEP == 0:
                await asyncio.sleep(0)
            self._chunks.learnt(entry[8:], began_ms=self._began_ms, boot_ms=self._boot_ms())

    async def _pages(self, catalog: Catalog) -> AsyncIterator[list[ObjectRow]]:
        """The rows that something is to be learnt from."""
        page: list[ObjectRow] = []
        async for row in catalog.scan_objects():
            if row.durability is Durability.MEMORY or not row.blobs or not self._is_wanted(row):
                continue
            page.append(row)
            if len(page) == LOAD_STEP:
                yield page
                page = []
        yield page

    def _is_wanted(self, row: ObjectRow) -> bool:
        if self._kinds.get(row.bucket) is BucketKind.KV:
            return not self._spares(row)
        return self._on_object is not None

    async def _learn(self, rows: Sequence[ObjectRow]) -> None:
        shared = [BlobId(lasting_blob(row)) for row in rows if row.durability is Durability.SHARED]
        gone = set(await self._absent(shared)) if shared and self._absent is not None else set()
        for row in rows:
            is_away = lasting_blob(row) in gone
            if self._kinds.get(row.bucket) is BucketKind.KV:
                self._learn_chunk(row, is_away=is_away)
            elif self._on_object is not None and not is_away:
                self._on_object(row)

    def _learn_chunk(self, row: ObjectRow, *, is_away: bool) -> None:
        if not is_away:
            self._on_chunk(row)
        name = self._chunks.learn(row, boot_ms=self._began_ms, is_away=is_away)
        if name is not None:
            self._found.append(_FOUND.pack(row.sequence, name))
