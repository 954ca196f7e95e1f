"""`Open`: from keys to extents, by the same rules and counted the same as GETs of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvobj.api.kv.bodies import SHORT_ID_BYTES
from kvobj.api.kv.chunk_lists import chunk_list
from kvobj.api.kv_store import ChunkStore
from kvobj.api.same_host.rights import Rights
from kvobj.arena import Lane, PinnedFrame
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import BucketRow, ObjectRow
from kvobj.codec.frame import raw_payload_offset
from kvobj.errors import InvalidRequestError, KvobjError, NoSuchBucketError, NoSuchNamespaceError
from kvobj.same_host.messages import Extent, Open, Opened
from kvobj.store.extents import ExtentLedger
from kvobj.store.places import DEFAULT_NAMESPACE, layer_span

COLD_AT_ONCE: Final = 4
"""Chunks of one call that are brought into dram at a time: each takes room there."""
SOON_SECONDS: Final = 0.25
SOON_BYTES_PER_SECOND: Final = 128 * 1024 * 1024
"""A chunk that is not in dram after so long, and as long as its bytes take at such a rate, comes over HTTP. Until an `Open` is
answered it keeps its connection from its client's other calls, and a client has four. A busy disk answers within tens of
milliseconds, and reads at that rate while it serves others; what takes longer waits for a disk that hangs, or for room in dram."""


class Reads(Protocol):
    """What is needed of the store (`api.object_store.ObjectStore`)."""

    async def pinned(self, bucket: str, key: str, pin: bytes, *, user_id: str) -> ObjectRow | None:
        """The row that a pin lets its user read."""
        ...

    async def settled(self, row: ObjectRow, *, wait: bool = True) -> ObjectRow:
        """The row with its digest, if that is known."""
        ...


@dataclass(frozen=True, slots=True)
class ExtentReads:
    """Answers `Open`s; what is not soon in dram is left to HTTP. `in_memory` says of blobs which of them dram holds; `count_hits`
    counts reads of dram and their bytes; `find_bucket` is `Catalog.bucket`; `is_far`: whether a blob that dram does not hold lies
    on no medium of this machine."""

    store: Reads
    chunks: ChunkStore
    in_memory: Callable[[Sequence[bytes]], list[bool]]
    count_hits: Callable[[int, int], None]
    find_bucket: Callable[[str], Awaitable[BucketRow | None]]
    is_far: Callable[[bytes], bool] = lambda _: False

    async def open(self, request: Open, rights: Rights, ledger: ExtentLedger) -> Opened:
        """Errors as of ?mget."""
        rows = await self._rows(request, rights)
        if rights.lane is not None:
            # After the rows were looked up: what was made anew under the name would be copied to where another user looks.
            bucket = await self.find_bucket(rights.bucket.name)
            if bucket is None or Lane.of(bucket) != rights.lane:
                raise NoSuchBucketError("no such bucket", bucket=rights.bucket.name)
        namespace: NamespaceRow | None = None
        if request.namespace is not None:
            namespace = (await self.chunks.namespace(rights.bucket, request.namespace, caller=rights.caller)).row
            rows = [
                row if row is not None and (row.namespace or DEFAULT_NAMESPACE) == namespace.name else None
                for row in rows
            ]
        spans = await self._spans(request, rights, rows) if request.layers is not None else {}
        extents: list[Extent | None] = [None] * len(rows)
        try:
            absent = await self._open_all(rows, ledger, extents)
        except BaseException:
            ledger.release([extent.handle for extent in extents if extent is not None])
            raise
        for index, (start, stop) in spans.items():
            extent = extents[index]
            if extent is not None:
                extents[index] = Extent(
                    extent.handle,
                    extent.region,
                    extent.offset + start,
                    stop - start,
                    extent.generation,
                    None,
                    extent.tier,
                )
        sizes: list[int | None] = []
        if any(extent is None for extent in extents):
            sizes = [
                None if row is None or index in absent else _size(row, spans.get(index))
                for index, row in enumerate(rows)
            ]
        return Opened(extents, sizes)

    async def _open_all(
        self, rows: Sequence[ObjectRow | None], ledger: ExtentLedger, extents: list[Extent | None]
    ) -> set[int]:
        """Fill in the extents that can be had; the positions of misses."""
        cold: list[int] = []
        absent: set[int] = set()
        hits = hit_bytes = 0
        is_slow = False
        try:
            for index, row in enumerate(rows):
                if row is None:
                    absent.add(index)
                elif ledger.can_open(row):
                    hot = ledger.open_hot(row)
                    if hot is not None:
                        hits += 1
                        hit_bytes += row.size_bytes
                        extents[index] = _extent(*hot, row)
                        if row.digest is None:
                            extents[index] = _extent(*hot, await self.store.settled(row, wait=False))
                    elif self.in_memory((row.blobs[0].blob_id,))[0]:
                        if not is_slow:
                            is_slow = not await self._open_one(index, row, ledger, extents, absent)
                    elif not self.is_far(row.blobs[0].blob_id):
                        cold.append(index)
        finally:
            self.count_hits(hits, hit_bytes)
        if cold:
            await self._open_cold(cold, rows, ledger, extents, absent)
        return absent

    async def _rows(self, request: Open, rights: Rights) -> list[ObjectRow | None]:
        keys = chunk_list(None, request.keys)
        pins = request.pins
        if not pins:
            return await self.chunks.find(rights.bucket, keys, caller=rights.caller)
        if len(pins) not in (1, len(request.keys)):
            raise InvalidRequestError("there is a pin for all keys, or one for each")
        rows: list[ObjectRow | None] = []
        for index, key in enumerate(request.keys):
            pin = pins[0] if len(pins) == 1 else pins[index]
            if pin is None:
                rows += await self.chunks.find(rights.bucket, chunk_list(None, [key]), caller=rights.caller)
            elif len(pin) != SHORT_ID_BYTES:
                rows.append(None)
            else:
                rows.append(await self._pinned(key, pin, rights))
        return rows

    async def _pinned(self, key: str, pin: bytes, rights: Rights) -> ObjectRow | None:
        row = await self.store.pinned(rights.bucket.name, key, pin, user_id=rights.user_id)
        if row is None or rights.is_owner:
            return row
        return row if await self._namespace(row, rights) is not None else None

    async def _namespace(self, row: ObjectRow, rights: Rights) -> NamespaceRow | None:
        name = row.namespace or DEFAULT_NAMESPACE
        try:
            return (await self.chunks.namespace(rights.bucket, name, caller=rights.caller)).row
        except NoSuchNamespaceError:
            return None

    async def _spans(
        self, request: Open, rights: Rights, rows: Sequence[ObjectRow | None]
    ) -> dict[int, tuple[int, int]]:
        assert request.layers is not None
        layouts: dict[str, NamespaceRow | None] = {}
        spans: dict[int, tuple[int, int]] = {}
        for index, row in enumerate(rows):
            if row is None:
                continue
            if row.namespace not in layouts:
                layouts[row.namespace] = await self._namespace(row, rights)
            layout = layouts[row.namespace]
            if layout is None:
                raise InvalidRequestError("the chunk's layout does not put layers first")
            spans[index] = layer_span(layout, row, *request.layers)
        return spans

    async def _open_cold(
        self,
        cold: Sequence[int],
        rows: Sequence[ObjectRow | None],
        ledger: ExtentLedger,
        extents: list[Extent | None],
        absent: set[int],
    ) -> None:
        turns = asyncio.Semaphore(COLD_AT_ONCE)
        is_slow = False

        async def open_in_turn(index: int) -> None:
            nonlocal is_slow
            row = rows[index]
            assert row is not None
            async with turns:
                # Behind one that is slow each would be waited for as long.
                if not is_slow and not await self._open_one(index, row, ledger, extents, absent):
                    is_slow = True

        async with asyncio.TaskGroup() as group:
            for index in cold:
                group.create_task(open_in_turn(index))

    async def _open_one(
        self, index: int, row: ObjectRow, ledger: ExtentLedger, extents: list[Extent | None], absent: set[int]
    ) -> bool:
        """Open a chunk if it is there soon; whether that was known in time."""
        try:
            # What has begun to fill goes on without who waits for it here, and the read over HTTP joins it.
            async with asyncio.timeout(SOON_SECONDS + row.size_bytes / SOON_BYTES_PER_SECOND):
                opened = await ledger.open(row)
        except TimeoutError:
            return False
        except KvobjError:
            return True  # no room now, or worse: HTTP tells
        if opened is None:
            absent.add(index)
            return True
        digest = row.digest
        if digest is None:
            try:
                digest = (await self.store.settled(row, wait=False)).digest
            except KvobjError:
                ledger.release([opened.handle])
                return True  # as above
        place = opened.place
        extents[index] = Extent(
            opened.handle, place.region, place.offset, place.size_bytes, place.generation, digest, opened.tier
        )
        return True


def _extent(handle: int, frame: PinnedFrame, row: ObjectRow) -> Extent:
    extent, size_bytes = frame.pin.extent, row.size_bytes
    offset = extent.offset + raw_payload_offset(size_bytes)
    return Extent(handle, extent.region, offset, size_bytes, extent.generation, row.digest, frame.tier)


def _size(row: ObjectRow, span: tuple[int, int] | None) -> int:
    return row.size_bytes if span is None else span[1] - span[0]
