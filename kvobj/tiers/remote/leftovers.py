"""Finds and removes what is on the remote and nobody's: blobs that nothing names, and uploads of parts that nobody goes on with.

Crashes, cancelled puts and lost answers leave such. No age is looked at. A blob is left over if nothing names its id and this
process is not just bringing it there; an upload, if its blob is not one that this process is putting, nor of another process that
is known to be alive. Only keys that `names` gives are judged: whatever else lies under the prefix is counted and left alone.

The order makes it safe, page by page. A page is listed; then its ids are held against what this process has under way; then it is
seen that the store is still this process's, so that nothing listed can be of whoever goes on with it; then it is asked what names
the ids; then the rest is deleted. What is under way is named before it is under way no more.

A pass over everything also sets the directory right: what lies there unknown is noted, what it holds to be there and is not is
forgotten, so that it counts as missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from kvobj.clock import Clock
from kvobj.errors import RemoteRefusedError
from kvobj.ids import BlobId, epoch_of
from kvobj.tiers.remote.bucket import RemoteUpload
from kvobj.tiers.remote.directory import RemoteDirectory, RemotePlace
from kvobj.tiers.remote.names import RemoteNames
from kvobj.tiers.remote.object_bucket import ObjectBucket

PAGE_BLOBS: Final = 1000
"""As many as one LIST tells and one DeleteObjects takes."""
# After each page it rests so many times as long as it worked.
REST_FACTOR: Final = 1.0

IsNamed = Callable[[Sequence[BlobId]], Awaitable[AbstractSet[BlobId]]]
"""Those of the ids that anything names: a row, its lossy copy, a part, an entry of the delete or of the remote queue. What it says
must be no older than its call."""
IsInFlight = Callable[[BlobId], bool]
"""Whether this process has something under way with the id: from when it may be put until something names it."""


@dataclass(slots=True)
class LeftoverCounts:
    """What one sweep saw and did. `noted`: named blobs that this node had not known to be there. `foreign`: keys under the prefix
    of blobs, and uploads, that are none of ours. `skipped_uploads`: those that somebody goes on with. `vanished`: blobs that the
    directory held to be there, wrongly."""

    blobs: int = 0
    frame_bytes: int = 0
    removed_blobs: int = 0
    removed_bytes: int = 0
    aborted_uploads: int = 0
    skipped_uploads: int = 0
    noted: int = 0
    vanished: int = 0
    foreign: int = 0


class Leftovers:
    """See the module's text. Event-loop-only; sweeps take turns. `still_ours` is asked before anything is removed
    (`StoreIdentity.check`); `totals` sums up all sweeps."""

    def __init__(
        self,
        bucket: ObjectBucket,
        directory: RemoteDirectory,
        names: RemoteNames,
        *,
        still_ours: Callable[[], Awaitable[bool]],
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bucket = bucket
        self._directory = directory
        self._names = names
        self._still_ours = still_ours
        self._clock = clock
        self._sleep = sleep
        self._turn = asyncio.Lock()
        self.totals = LeftoverCounts()

    async def sweep(
        self,
        is_named: IsNamed,
        is_mine_in_flight: IsInFlight,
        *,
        epochs: Sequence[int] | None = None,
        live_epochs: Collection[int] = (),
        is_putting: IsInFlight | None = None,
    ) -> LeftoverCounts:
        """Remove what is left over of the blobs of these session epochs, or of all; and uploads that nobody goes on with.

        `is_putting`: whether this process is bringing the blob there at this moment, so that an upload of it may be under way; by
        default that is taken for so of all that is in flight. What is of `live_epochs`, other processes' that write under this
        prefix now, is left alone. Holds a page at a time. Raises what the server answers with, and `RemoteRefusedError` where the
        store is somebody else's by now; what was removed stays so.
        """
        async with self._turn:
            counts = LeftoverCounts()
            try:
                await self._abort_uploads(is_putting or is_mine_in_flight, live_epochs, counts)
                prefixes = [self._names.blobs] if epochs is None else [self._names.of_epoch(each) for each in epochs]
                after = b""
                for prefix in prefixes:
                    started = self._clock.monotonic()
                    async for page in self._pages(prefix, counts):
                        await self._judge(page, is_named, is_mine_in_flight, live_epochs, counts)
                        if epochs is None:
                            await self._drop_vanished(after, page, counts)
                            after = page[-1][0]
                        await self._sleep((self._clock.monotonic() - started) * REST_FACTOR)
                        started = self._clock.monotonic()
                if epochs is None:
                    await self._drop_vanished(after, [], counts)
            finally:
                self._add(counts)
            return counts

    async def _pages(self, prefix: str, counts: LeftoverCounts) -> AsyncIterator[list[tuple[BlobId, RemotePlace]]]:
        page: list[tuple[BlobId, RemotePlace]] = []
        async for found in self._bucket.list(prefix):
            named = self._names.parse(found.key)
            if named is None:
                counts.foreign += 1
                continue
            counts.blobs += 1
            counts.frame_bytes += found.size_bytes
            page.append((named.blob_id, RemotePlace(found.size_bytes, named.name)))
            if len(page) == PAGE_BLOBS:
                yield page
                page = []
        if page:
            yield page

    async def _judge(
        self,
        page: list[tuple[BlobId, RemotePlace]],
        is_named: IsNamed,
        is_mine_in_flight: IsInFlight,
        live_epochs: Collection[int],
        counts: LeftoverCounts,
    ) -> None:
        doubtful = [
            (blob_id, place)
            for blob_id, place in page
            if epoch_of(blob_id) not in live_epochs and not is_mine_in_flight(blob_id)
        ]
        await self._check_ours()
        named = await is_named([blob_id for blob_id, _ in doubtful])
        known = self._directory.find_many([blob_id for blob_id, _ in doubtful])
        unheard = {blob_id: place for blob_id, place in doubtful if blob_id in named and blob_id not in known}
        await self._directory.note_many(unheard)
        counts.noted += len(unheard)
        left = [(blob_id, place) for blob_id, place in doubtful if blob_id not in named]
        if not left:
            return
        await self._bucket.delete([self._names.key(blob_id, place.name) for blob_id, place in left])
        await self._directory.forget([blob_id for blob_id, _ in left])
        counts.removed_blobs += len(left)
        counts.removed_bytes += sum(place.frame_bytes for _, place in left)

    async def _drop_vanished(
        self, after: bytes, page: list[tuple[BlobId, RemotePlace]], counts: LeftoverCounts
    ) -> None:
        """Forget blobs behind `after`, up to the page's last, or all where it is empty, that were not listed and are not there."""
        listed = {blob_id for blob_id, _ in page}
        last = page[-1][0] if page else None
        while known := self._directory.blob_ids(after, limit=PAGE_BLOBS):
            inside = [blob_id for blob_id in known if last is None or blob_id <= last]
            # One that has come since its page was listed is there all the same: each is asked about.
            gone = [blob_id for blob_id in inside if blob_id not in listed and not await self._is_there(blob_id)]
            if gone:
                await self._check_ours()
                await self._directory.forget(gone)
                counts.vanished += len(gone)
            if len(inside) < len(known):
                return
            after = known[-1]

    async def _is_there(self, blob_id: BlobId) -> bool:
        found = [each.key async for each in self._bucket.list(self._names.of_blob(blob_id))]
        return any(self._names.parse(key) is not None for key in found)

    async def _abort_uploads(
        self, is_putting: IsInFlight, live_epochs: Collection[int], counts: LeftoverCounts
    ) -> None:
        page: list[RemoteUpload] = []
        async for upload in self._bucket.list_uploads(self._names.prefix):
            named = self._names.parse(upload.key)
            if named is None:
                counts.foreign += 1
            elif epoch_of(named.blob_id) in live_epochs or is_putting(named.blob_id):
                counts.skipped_uploads += 1
            else:
                page.append(upload)
            if len(page) == PAGE_BLOBS:
                await self._abort(page, counts)
                page = []
        await self._abort(page, counts)

    async def _abort(self, uploads: Sequence[RemoteUpload], counts: LeftoverCounts) -> None:
        if uploads:
            await self._check_ours()
        for upload in uploads:
            await self._bucket.abort(upload)
            counts.aborted_uploads += 1

    async def _check_ours(self) -> None:
        if not await self._still_ours():
            raise RemoteRefusedError("the remote is not this store's to write to", reason="fenced")

    def _add(self, counts: LeftoverCounts) -> None:
        for name in LeftoverCounts.__slots__:
            setattr(self.totals, name, getattr(self.totals, name) + getattr(counts, name))
