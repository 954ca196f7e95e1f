"""What a start does with what an earlier process left in memory, before anything is served.

Class `memory` survives the death of the process: its rows are in the catalog's volatile environment and its frames in
the adopted arena. Each such row is checked against the tiers; one whose bytes did not survive is dropped, one that does
becomes dirty again and goes back to write-behind. What the arena's directory says of a blob is what was so when it was
put: whether it has a home copy by now is asked of the home tier, whether its frame was sealed is seen in its header. Frames
whose digest was still being computed are hashed first. Rows that a DELETE has hidden while a pin holds them are treated no
differently: the pin's holder may still read them. Where the memory itself is lost, so are its rows: chunks that were durable
but followed on one of them go too, since a chunk that is found has its ancestors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, Protocol

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BlobRef, ObjectRow
from kvobj.clock import Clock
from kvobj.codec.frame import has_header, raw_payload_offset, seal_raw
from kvobj.errors import FrameCorruptError
from kvobj.ids import BlobId
from kvobj.store.hashing import BlobHash
from kvobj.store.placement import DirtyTier
from kvobj.store.write_behind import WriteBehind
from kvobj.tiers.protocol import Tier

BATCH_ROWS: Final = 256


class AdoptedTier(DirtyTier, Protocol):
    """A cache tier that may have been adopted from an earlier process."""

    def unsealed(self) -> frozenset[BlobId]:
        """Blobs whose frame header may not be written yet."""
        ...

    def is_sealed(self, blob_id: BlobId) -> bool:
        """Whether the held blob's frame header is written."""
        ...

    def dirty(self) -> list[BlobId]:
        """Blobs that are thought to have no home copy."""
        ...

    def mark_written_down(self, blob_ids: Iterable[BlobId]) -> None:
        """The blobs have home copies, so their frames are sealed."""
        ...


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """Rows of class `memory` that were found, and what became of them. `dropped_orphans`: durable chunks without their parents."""

    rows: int
    hashed_blobs: int
    dropped_rows: int
    dropped_orphans: int = 0


class Recovery:
    """One pass over the volatile rows. Used once, before the server accepts requests.

    `home` is what a blob may have been written down to: where there is a remote tier, both (`tiers.layered_home`), since nvme's
    copy may have left by now. `memory_is_lost`: the catalog's volatile environment is new (power loss, or a clean stop, which
    leaves nothing in it).
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        cache: AdoptedTier,
        home: Tier,
        write_behind: WriteBehind,
        hash_executor: Executor,
        clock: Clock,
        memory_is_lost: bool,
    ) -> None:
        self._catalog = catalog
        self._cache = cache
        self._home = home
        self._write_behind = write_behind
        self._executor = hash_executor
        self._clock = clock
        self._memory_is_lost = memory_is_lost
        self._hashed = 0

    async def run(self) -> RecoveryReport:
        """Do it; see the module's text."""
        settled = await self._settle_marks()
        lost: list[ObjectRow] = []
        # Hidden rows too: their pins outlived the process as they did.
        found = [row async for row in self._catalog.scan_objects(volatile_only=True, with_hidden=True)]
        found.sort(key=lambda row: row.sequence)  # commit order: parents are written down before their children
        for row in found:
            if all(blob.blob_id in settled for blob in row.blobs) or await self._adopt(row.blobs):
                self._write_behind.enqueue(row)
            else:
                lost.append(row)
        for start in range(0, len(lost), BATCH_ROWS):
            await self._catalog.drop_rows(lost[start : start + BATCH_ROWS], now_ms=self._clock.now_ms())
        orphans = await self._catalog.drop_orphans(now_ms=self._clock.now_ms()) if self._memory_is_lost else 0
        async for part in self._catalog.scan_parts():
            await self._adopt(part.blobs)
        return RecoveryReport(
            rows=len(found), hashed_blobs=self._hashed, dropped_rows=len(lost), dropped_orphans=orphans
        )

    async def _settle_marks(self) -> set[bytes]:
        """Compare the marks with the home tier and the frames; the blobs that are known to be whole, here and only here."""
        # What is dirty was adopted in the order of ids: there is next to nothing left to sort.
        doubtful = sorted(dict.fromkeys([*self._cache.dirty(), *self._cache.unsealed()]))
        not_home = set(await self._home.missing(doubtful))
        self._cache.mark_written_down([blob_id for blob_id in doubtful if blob_id not in not_home])
        await self._note_seals(not_home & self._cache.unsealed())
        return set(not_home.intersection(self._cache.dirty()) - self._cache.unsealed())

    async def _note_seals(self, unsealed: set[BlobId]) -> None:
        for blob_id in unsealed:
            frame = await self._cache.get(blob_id)
            if frame is None:
                continue
            is_sealed = has_header(frame.view)
            frame.release()
            if is_sealed:
                self._cache.mark_sealed(blob_id)

    async def _adopt(self, blobs: tuple[BlobRef, ...]) -> bool:
        """Whether every blob is somewhere; those without a home copy are dirty and sealed after this."""
        ids = [BlobId(blob.blob_id) for blob in blobs]
        not_home = set(await self._home.missing(ids))
        if not_home and await self._cache.missing(sorted(not_home)):
            return False
        for blob_id, blob in zip(ids, blobs, strict=True):
            if blob_id in not_home:
                self._cache.mark_dirty(blob_id)
                if not self._cache.is_sealed(blob_id):
                    await self._seal(blob)
                    self._cache.mark_sealed(blob_id)
        return True

    async def _seal(self, blob: BlobRef) -> None:
        frame = await self._cache.get(BlobId(blob.blob_id))
        if frame is None:
            raise FrameCorruptError("an adopted blob vanished", blob_id=blob.blob_id.hex())
        try:
            offset = raw_payload_offset(blob.plain_bytes)
            hashing = BlobHash(frame.writable[offset : offset + blob.plain_bytes])
            await asyncio.get_running_loop().run_in_executor(self._executor, hashing.advance, blob.plain_bytes, None)
            assert hashing.digest is not None
            seal_raw(frame.writable, plain_bytes=blob.plain_bytes, digest=hashing.digest, block_crcs=hashing.block_crcs)
            self._hashed += 1
        finally:
            frame.release()
