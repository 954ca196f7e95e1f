"""Makes lossy copies at home coarser where their namespace has come to say so, further down the same ladder (`eq57` → `eq4`).

One at a time, and at most half of a core's time. A coarser copy is another blob: it is put, then the row names it in place of the
finer one, which is queued for deletion, in one transaction. A process that dies before leaves a blob that no row names, which the
sweep after the next start takes, and the start finds the chunk again; one that dies after leaves nothing to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from kvobj.background import BackgroundWorker
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import LossyCopy, ObjectRow
from kvobj.clock import Clock
from kvobj.errors import CapacityError, KvobjError, StoreFullError, TierUnavailableError
from kvobj.ids import BlobId
from kvobj.store.lossy_namespaces import LossyNamespaces
from kvobj.store.placement import ReadTier
from kvobj.store.transcoding import Transcoder
from kvobj.store.transcoding_home import CodedTier
from kvobj.store.transcoding_rules import CodingRules
from kvobj.tiers.coded_frames import is_coarser
from kvobj.tiers.in_use import BlobsInUse
from kvobj.tiers.protocol import BlobNames

WAITING_MAX: Final = 100_000
"""Chunks remembered at once; where there are more, the catalog is looked through again after these."""
REST_FACTOR: Final = 1.0
"""After each chunk it rests so many times as long as it worked."""
_NO_ROOM_SECONDS: Final = 0.25
_FULL_SECONDS: Final = 10.0
_LOOK_STEP: Final = 1000


@dataclass(frozen=True, slots=True)
class DemotionCounts:
    """Chunks that wait for a coarser copy, and since the start those that got one and those whose copy stays as it is."""

    waiting: int
    done: int
    failed: int


class HomeDemotion(BackgroundWorker):
    """See the module's text. `allocate` gives blob ids, `on_queued` is told that blobs were queued for deletion, `lossy` of the
    namespaces whose chunks have lossy copies. Event-loop-only."""

    worker_name = "home-demotion"

    def __init__(
        self,
        *,
        catalog: Catalog,
        home: CodedTier,
        read: ReadTier,
        transcoder: Transcoder,
        rules: CodingRules,
        in_use: BlobsInUse,
        allocate: Callable[[], BlobId],
        on_queued: Callable[[], None],
        clock: Clock,
        log: logging.Logger,
        lossy: LossyNamespaces,
        sleep: Callable[[float], asyncio.Future[None]] | None = None,
    ) -> None:
        super().__init__()
        self._catalog = catalog
        self._home = home
        self._read = read
        self._transcoder = transcoder
        self._rules = rules
        self._in_use = in_use
        self._allocate = allocate
        self._on_queued = on_queued
        self._clock = clock
        self._log = log
        self._lossy = lossy
        self._sleep = asyncio.sleep if sleep is None else sleep
        self._waiting: dict[tuple[str, str], None] = {}
        self._must_look = False
        self._wanted = asyncio.Event()
        self._done = 0
        self._failed = 0

    @property
    def counts(self) -> DemotionCounts:
        """How far it is."""
        return DemotionCounts(len(self._waiting), self._done, self._failed)

    def look(self) -> None:
        """Settings of a namespace were changed, or the store has started: look through the catalog soon."""
        self._must_look = True
        self._wanted.set()

    async def _run(self) -> None:
        while True:
            if not self._waiting and not self._must_look:
                self._wanted.clear()
                await self._wanted.wait()
            began = self._clock.monotonic()
            try:
                pause_seconds = await self.step()
            except KvobjError as error:
                self._log.warning("lossy copies could not be looked through, will retry: %s", error)
                self._must_look, pause_seconds = True, 1.0
            await self._sleep(pause_seconds + REST_FACTOR * (self._clock.monotonic() - began))

    async def step(self) -> float:
        """Look through the catalog if that is due, then make one copy coarser; how many seconds to wait before the next step."""
        if self._must_look:
            self._must_look = False
            await self._find()
        name = next(iter(self._waiting), None)
        if name is None:
            return 0.0
        try:
            is_done = await self._demote(*name)
        except CapacityError as error:
            return _FULL_SECONDS if isinstance(error, StoreFullError) else _NO_ROOM_SECONDS
        except KvobjError as error:
            self._log.warning("a lossy copy stays as it is bucket=%s key=%s: %s", *name, error)
            self._failed += 1
            is_done = False
        del self._waiting[name]
        self._done += is_done
        return 0.0

    async def _find(self) -> None:
        seen = 0
        async for row in self._catalog.scan_objects():
            seen += 1
            if seen % _LOOK_STEP == 0:
                await asyncio.sleep(0)
            if row.lossy is None:
                continue
            self._lossy.note(row.bucket, row.namespace)
            if await self._wanted_codec(row) is None:
                continue
            if len(self._waiting) >= WAITING_MAX:
                self._must_look = True
                return
            self._waiting[row.bucket, row.key] = None

    async def _wanted_codec(self, row: ObjectRow) -> str | None:
        """The codec in which the copy is to lie, where that is further down its ladder than it lies now."""
        if row.lossy is None:
            return None
        coding = await self._rules.of_row(row, self._home.name)
        return coding.codec if coding is not None and is_coarser(coding.codec, row.lossy.codec) else None

    async def _demote(self, bucket: str, key: str) -> bool:
        (row,) = await self._catalog.lookup(bucket, [key])
        codec = None if row is None else await self._wanted_codec(row)
        if row is None or row.lossy is None or codec is None:
            return False  # it was deleted or changed meanwhile
        held = row.blob_ids
        self._in_use.hold(held)
        try:
            copy = await self._made(row, row.lossy, codec)
            (is_named,) = await self._catalog.raise_durability([msgspec.structs.replace(row, lossy=copy)])
            if not is_named:
                await self._catalog.queue_blobs([copy.blob_id], now_ms=self._clock.now_ms())
        finally:
            self._in_use.release(held)
        self._on_queued()
        return is_named

    async def _made(self, row: ObjectRow, finer: LossyCopy, codec: str) -> LossyCopy:
        """The coarser copy, in the home tier already. It is raised where the finer one cannot be read."""
        frame = await self._read.get_stored(BlobId(finer.blob_id), finer.codec)
        if frame is None:
            raise TierUnavailableError("its frame cannot be read")
        try:
            await frame.complete()
            coded = await self._transcoder.demote(frame, codec, tier=self._home.name, may_wait=False)
        finally:
            frame.release()
        head, blob_id = coded.head, self._allocate()
        try:
            names = BlobNames(row.bucket, row.key)
            await self._home.put_coded(blob_id, coded.frame, names, plain_bytes=head.plain_bytes)
        finally:
            coded.frame.release()
        return LossyCopy(
            blob_id=bytes(blob_id),
            plain_bytes=head.plain_bytes,
            frame_bytes=coded.frame.frame_bytes,
            digest=head.digest,
            codec=head.codec,
            max_error=head.max_error,
            profile=finer.profile,
        )
