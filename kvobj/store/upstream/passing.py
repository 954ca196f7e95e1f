"""Chunks of an upstream that cannot be stored here and are handed on: read when a reader wants the bytes, checked, from memory
outside the arena. Who wants the same while they are there shares them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvobj.catalog.rows import BlobRef, BucketRow, Durability, ObjectRow
from kvobj.errors import DigestMismatchError
from kvobj.store.places import ChunkPlace
from kvobj.store.upstream.body_memory import check_digest, give_back, new_memory
from kvobj.store.upstream.client import ChunkHead, UpstreamClient
from kvobj.store.upstream.instruments import UpstreamInstruments
from kvobj.tiers.remote.faults import RemoteFault
from kvobj.tiers.remote.requests import Exchange

NOWHERE: Final = bytes(16)
"""The id of the one blob of a row that is handed on: no blob has it."""
PASSED_BYTES_MAX: Final = 256 * 2**20
"""What is handed on stays until its readers have it: no more of it at once than this."""


def is_passed(row: ObjectRow) -> bool:
    """Whether the row is of a chunk that is handed on: it is in no catalog, and its bytes are at the upstream."""
    return bool(row.blobs) and row.blobs[0].blob_id == NOWHERE


def passed_row(bucket: BucketRow, key: str, head: ChunkHead, place: ChunkPlace, *, now_ms: int) -> ObjectRow:
    """The row of a chunk that is handed on; its digest is known."""
    assert head.digest is not None
    size_bytes = head.size_bytes
    blob = BlobRef(blob_id=NOWHERE, plain_bytes=size_bytes, frame_bytes=size_bytes, digest=head.digest, codec="raw")
    return ObjectRow(
        bucket=bucket.name,
        key=key,
        blobs=(blob,),
        size_bytes=size_bytes,
        etag=f"kv{head.digest.hex()[:24]}-1",
        modified_ms=now_ms,
        owner=bucket.owner,
        durability=Durability.MEMORY,
        headers=dict(head.headers),
        metadata=dict(head.metadata),
        digest=head.digest,
        parent=place.parent,
        namespace=place.namespace.name,
        tokens=place.tokens,
    )


@dataclass(frozen=True, slots=True)
class Passed:
    """A chunk's bytes. `release` once they are not needed any more; idempotent."""

    data: memoryview
    release: Callable[[], None]


@dataclass(slots=True)
class _Shared:
    size_bytes: int
    holders: int = 0
    reading: asyncio.Task[memoryview | None] = field(init=False)


class Passing:
    """Of one bucket. Event loop only; `aclose` ends what is on its way."""

    def __init__(self, client: UpstreamClient, instruments: UpstreamInstruments) -> None:
        self._client = client
        self._instruments = instruments
        self._shared: dict[tuple[str, bytes | None, tuple[str, ...]], _Shared] = {}
        self._ending: set[asyncio.Task[memoryview | None]] = set()
        self._free_bytes = PASSED_BYTES_MAX

    async def aclose(self) -> None:
        """End what is on its way."""
        tasks = {shared.reading for shared in self._shared.values()} | self._ending
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def open(self, row: ObjectRow) -> Passed | None:
        """The bytes of the row; None where they are not there any more, there is no room, or anything fails."""
        name = (row.key, row.digest, self._client.via.came_by)
        shared = self._shared.get(name)
        if shared is None:
            if row.size_bytes > self._free_bytes:
                return None
            shared = self._shared[name] = _Shared(row.size_bytes)
            self._free_bytes -= row.size_bytes
            shared.reading = asyncio.create_task(self._read(row), name="pass-chunk")
        shared.holders += 1
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._leave(name, shared)

        data: memoryview | None = None
        try:
            data = await asyncio.shield(shared.reading)
        finally:
            if data is None:
                release()
        if data is None:
            return None
        self._instruments.chunk("passed")
        return Passed(data, release)

    def _leave(self, name: tuple[str, bytes | None, tuple[str, ...]], shared: _Shared) -> None:
        shared.holders -= 1
        if shared.holders:
            return
        del self._shared[name]
        reading = shared.reading

        def let_go(_: object) -> None:
            self._ending.discard(reading)
            self._free_bytes += shared.size_bytes

        if reading.done():
            let_go(reading)
        else:
            self._ending.add(reading)
            reading.add_done_callback(let_go)
            reading.cancel()

    async def _read(self, row: ObjectRow) -> memoryview | None:
        async def take(head: ChunkHead, exchange: Exchange) -> memoryview:
            if head.size_bytes != row.size_bytes:
                raise RemoteFault("server", "another chunk than before", is_repeatable=False)
            await fill(memory, exchange)
            return memory

        assert row.digest is not None
        until, memory = self._client.deadline(), new_memory(row.size_bytes)
        data: memoryview | None = None
        try:
            async with asyncio.timeout_at(until):
                found = await self._client.read(row.key, take, until=until)
                if found is not None:
                    await check_digest(found, row.digest, key=row.key)
                data = found
        except (RemoteFault, DigestMismatchError, TimeoutError):
            pass
        finally:
            if data is None:
                give_back(memory)
        return data


async def fill(memory: memoryview, exchange: Exchange) -> None:
    """With the exchange's body, which has this size. `RemoteFault`."""
    if memory:
        await exchange.fill(memory, _ignore)


def _ignore(_: int) -> None:
    """Bytes have arrived."""
