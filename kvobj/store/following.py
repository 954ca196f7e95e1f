"""Reading a chunk while it is still being uploaded: by a PUT as its bytes are received, by parts as each of them is stored.

What is seen here is no chunk yet. A reader is given bytes early and told at the end whether they count: the stream ends when the
upload has become the chunk, and fails where it was given up, another writer's bytes won, or nothing came in time. A range of parts
that several writers bring (`kv-api` §4) ends with its last part: parts are hashed when they are stored, and the first stands.

Nothing is held beside what is being sent: of a PUT a pin on its memory, of a part its blobs. A writer never waits for a reader.
Event-loop-only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Final, Protocol, cast

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BlobRef, BucketRow, ObjectRow, PartRow, UploadRow
from kvobj.errors import NoSuchUploadError, UnavailableError
from kvobj.store.arriving import Arrival, ArrivalState, ArrivingKeys, KeyWatch
from kvobj.store.groups import group_upload_id
from kvobj.store.places import DEFAULT_NAMESPACE
from kvobj.store.reader import ObjectReader

PROGRESS_SECONDS: Final = 30.0
"""A stream of which nothing new has come for so long fails."""
POLL_SECONDS: Final = 0.25
"""Uploads that end in another way than by a call of this process, by their time to live for one, are seen so late."""
TOLD_SECONDS: Final = 2.0
"""Between a chunk's becoming visible and the word of which parts it was made lies one turn of the event loop, or a few."""
_UPLOADS_LOOKED_AT: Final = 16

Span = tuple[int, int]
OpenRow = Callable[[ObjectRow, int, int], Awaitable[ObjectReader | None]]
OpenBlobs = Callable[[Sequence[BlobRef], int, int], Awaitable[ObjectReader | None]]
LookUp = Callable[[str, str], Awaitable[ObjectRow | None]]


class Followed(Protocol):
    """A chunk on its way in. What it will be as far as its writer has said so; nothing is held until `views` is iterated."""

    @property
    def namespace(self) -> str:
        """Name of the namespace that it is written into."""
        ...

    @property
    def tokens(self) -> int:
        """How many tokens it covers; 0 where that is not told."""
        ...

    @property
    def parent(self) -> str | None:
        """As in `ObjectRow`."""
        ...

    @property
    def size_bytes(self) -> int | None:
        """Its size; None where only the layout can say it."""
        ...

    @property
    def group_parts(self) -> int:
        """In how many parts of several writers it comes; 0: in no such parts."""
        ...

    @property
    def in_parts(self) -> bool:
        """Whether it will lie in parts."""
        ...

    def views(self, span: Span | None, *, part_sizes: Sequence[int] | None = None) -> AsyncGenerator[memoryview, None]:
        """Its bytes, or those of the span, as they come; each view is valid until the next is asked for. `part_sizes`: of its
        parts, where a layout tells them: then the span's parts need not wait for those before. `UnavailableError` where the
        bytes that were given are no chunk's."""
        ...


class Following:
    """Finds what is being uploaded. A part of `Store`, which gives it its own ways to look up and to read."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        arriving: ArrivingKeys,
        look_up: LookUp,
        open_row: OpenRow,
        open_blobs: OpenBlobs,
        progress_seconds: float = PROGRESS_SECONDS,
    ) -> None:
        self._catalog = catalog
        self.arriving = arriving
        self.look_up = look_up
        self.open_row = open_row
        self.open_blobs = open_blobs
        self.progress_seconds = progress_seconds
        self.is_stopping = False
        self.followers = 0
        """How many are given bytes now, or wait for them."""

    async def find(self, bucket: BucketRow, key: str) -> Followed | None:
        """What somebody uploads under the key: the PUT that has come furthest, else parts, else the oldest multipart upload.
        Nothing of another bucket than this one, which the reader was let into, whatever has its name by now; nor of a namespace
        whose name is another's by now, who uses which is not who used that."""
        name = bucket.name
        arrivals = [
            each
            for each in self.arriving.of(name, key)
            if each.is_whole_chunk and each.is_alive and bucket.is_still(each.request.bucket)
        ]
        if arrivals:
            arrival = max(arrivals, key=lambda each: each.filled)
            place = arrival.request.place
            if place is None or await self._is_standing(name, place.namespace.name, place.namespace_root):
                return FollowedPut(self, arrival)
        upload = await self._catalog.upload(name, key, group_upload_id(name, key))
        if upload is None:
            page = await self._catalog.list_uploads(name, key_prefix=key, limit=_UPLOADS_LOOKED_AT)
            uploads = [each for each in page.rows if each.key == key]
            upload = min(uploads, key=lambda each: each.initiated_ms, default=None)
        if upload is None or not bucket.is_still(await self._catalog.bucket(name)):
            return None
        if not await self._is_standing(name, upload.namespace, upload.namespace_root):
            return None
        return FollowedParts(self, self._catalog, bucket, upload)

    async def _is_standing(self, bucket: str, name: str, namespace_root: bytes) -> bool:
        """Whether the namespace of this root is still what its name means; `default`, which has no root, is."""
        if not namespace_root:
            return name in ("", DEFAULT_NAMESPACE)
        standing = await self._catalog.namespaces.namespace(bucket, name)
        return standing is not None and standing.root == namespace_root

    @contextmanager
    def follower(self) -> Iterator[None]:
        """One more of `followers` while it lasts."""
        self.followers += 1
        try:
            yield
        finally:
            self.followers -= 1

    def stop(self) -> None:
        """Let nobody wait any more for parts that are not on their way: the server drains. Idempotent."""
        self.is_stopping = True
        self.arriving.tell_all()


class FollowedPut:
    """A chunk that comes in one body. Implements `Followed`."""

    in_parts = False
    group_parts = 0

    def __init__(self, following: Following, arrival: Arrival) -> None:
        self._following = following
        self._arrival = arrival
        place = arrival.request.place
        self.namespace = DEFAULT_NAMESPACE if place is None else place.namespace.name
        self.tokens = 0 if place is None else place.tokens
        self.parent = None if place is None else place.parent
        self.size_bytes: int | None = arrival.request.size_bytes

    async def views(
        self,
        span: Span | None,
        *,
        part_sizes: Sequence[int] | None = None,  # noqa: ARG002 - it has none
    ) -> AsyncGenerator[memoryview, None]:
        """See `Followed.views`."""
        start, stop = (0, self._arrival.request.size_bytes) if span is None else span
        with self._following.follower():
            async with aclosing(self._views(start, stop)) as views:
                async for view in views:
                    yield view

    async def _views(self, start: int, stop: int) -> AsyncGenerator[memoryview, None]:
        arrival = self._arrival
        await self._until(lambda: arrival.is_seen)
        shared = arrival.share()
        if shared is not None:
            pin, payload = shared
            try:
                while start < stop:
                    position = start
                    await self._until(lambda: arrival.filled > position)  # noqa: B023 - awaited here
                    upto = min(arrival.filled, stop)
                    yield payload[start:upto]
                    start = upto
            finally:
                pin.release()
        else:
            async with aclosing(self._blobs(start, stop)) as views:
                async for view in views:
                    yield view
        await self._until(lambda: arrival.state is ArrivalState.STORED)

    async def _blobs(self, start: int, stop: int) -> AsyncGenerator[memoryview, None]:
        """A body of several blobs is given blob by blob, as each of them lies in a tier."""
        arrival, offset = self._arrival, 0
        for index, size_bytes in enumerate(arrival.sizes):
            low, high = max(start - offset, 0), min(stop - offset, size_bytes)
            offset += size_bytes
            if low >= high:
                continue
            await self._until(lambda: len(arrival.refs) > index)  # noqa: B023 - awaited here
            reader = await self._following.open_blobs([arrival.refs[index]], low, high)
            async with aclosing(_read(reader)) as views:
                async for view in views:
                    yield view

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if self._arrival.state is not ArrivalState.ARRIVING:
                raise UnavailableError("the upload that was followed was given up")
            if not await self._arrival.changed(self._following.progress_seconds):
                raise UnavailableError("nothing came of the upload that was followed")


class FollowedParts:
    """A chunk that comes in parts: of several writers (`group_parts`), or of S3's multipart upload. Implements `Followed`."""

    in_parts = True
    size_bytes: int | None = None

    def __init__(self, following: Following, catalog: Catalog, bucket: BucketRow, upload: UploadRow) -> None:
        """`bucket`: the one that the upload is in. Nothing is given of another that has its name later."""
        self._following = following
        self._catalog = catalog
        self._bucket = bucket
        self._upload = upload
        self._seen: dict[int, tuple[int, PartRow]] = {}  # by number: where it begins, and the part
        self.namespace = upload.namespace or DEFAULT_NAMESPACE
        self.tokens = upload.tokens
        self.parent = upload.parent
        self.group_parts = upload.group_parts

    async def views(
        self, span: Span | None, *, part_sizes: Sequence[int] | None = None
    ) -> AsyncGenerator[memoryview, None]:
        """See `Followed.views`. Of S3's parts number 1 is first, then 2: who leaves numbers out is followed after Complete."""
        watch = self._following.arriving.watch(self._upload.bucket, self._upload.key)
        try:
            with self._following.follower():
                async with aclosing(self._sent(watch, span, part_sizes)) as views:
                    async for view in views:
                        yield view
        finally:
            self._following.arriving.unwatch(watch)

    async def _sent(
        self, watch: KeyWatch, span: Span | None, part_sizes: Sequence[int] | None
    ) -> AsyncGenerator[memoryview, None]:
        start, stop = (0, None) if span is None else span
        offset, number, row = 0, 1, None
        while row is None and (stop is None or offset < stop) and not 0 < self.group_parts < number:
            if part_sizes is not None and offset + part_sizes[number - 1] <= start:
                offset, number = offset + part_sizes[number - 1], number + 1
                continue
            found = await self._next(watch, number)
            if isinstance(found, ObjectRow):
                row = found
                break
            low = max(start - offset, 0)
            high = found.size_bytes if stop is None else min(stop - offset, found.size_bytes)
            self._seen[number] = offset, found
            if low < high:
                async with aclosing(self._views_of(found, low, high)) as views:
                    async for view in views:
                        yield view
            offset, number = offset + found.size_bytes, number + 1
        if row is None and span is not None and self.group_parts:
            return
        async with aclosing(self._rest(watch, row, max(offset, start), stop)) as rest:
            async for view in rest:
                yield view

    def _views_of(self, part: PartRow, low: int, high: int) -> AsyncGenerator[memoryview, None]:
        following = self._following

        async def views() -> AsyncGenerator[memoryview, None]:
            reader = await following.open_blobs(part.blobs, low, high)
            async with aclosing(_read(reader)) as inner:
                async for view in inner:
                    yield view

        return views()

    async def _rest(
        self, watch: KeyWatch, row: ObjectRow | None, position: int, stop: int | None
    ) -> AsyncGenerator[memoryview, None]:
        """What the chunk has beyond what was sent; nothing at all, where the parts made it, but proof that they did."""
        if row is None:
            found = await self._next(watch, None)
            assert isinstance(found, ObjectRow)
            row = found
        await self._prove(watch, row)
        end = row.size_bytes if stop is None else stop
        if position > end or end > row.size_bytes:
            raise UnavailableError("the chunk is another than the parts that were followed")
        if position < end:
            reader = await self._following.open_row(row, position, end)
            async with aclosing(_read(reader)) as views:
                async for view in views:
                    yield view

    async def _next(self, watch: KeyWatch, number: int | None) -> PartRow | ObjectRow:
        """Part `number`, once it is stored, or the chunk, once that is live. None: only the chunk."""
        loop = asyncio.get_running_loop()
        begun, known = loop.time(), -1
        while True:
            turn = watch.turn
            parts = await self._parts()
            await self._require_same_bucket()
            if parts is not None:
                by_number = self._checked(parts)
                if number is not None and number in by_number:
                    return by_number[number]
            row = await self._following.look_up(self._upload.bucket, self._upload.key)
            if row is not None:  # of these parts, or another writer's
                await self._require_same_bucket()
                return row
            if parts is None:
                raise UnavailableError("the upload that was followed was given up")
            if len(parts) != known:
                begun, known = loop.time(), len(parts)  # later parts are progress too
            if self._following.is_stopping or loop.time() - begun >= self._following.progress_seconds:
                raise UnavailableError("nothing came of the upload that was followed")
            await watch.changed_since(turn, POLL_SECONDS)

    async def _require_same_bucket(self) -> None:
        """Called after a look-up: where the bucket is the same still, what was found is of it. One that was made anew under its
        name may be another user's."""
        if not self._bucket.is_still(await self._catalog.bucket(self._bucket.name)):
            raise UnavailableError("the bucket of the upload that was followed is gone")

    def _checked(self, parts: Sequence[PartRow]) -> dict[int, PartRow]:
        """The parts by number. `UnavailableError` where one that was seen is another now."""
        by_number = {part.number: part for part in parts}
        for seen, (_, part) in self._seen.items():
            if seen not in by_number or by_number[seen].blobs != part.blobs:
                raise UnavailableError("a part that was followed was replaced")
        return by_number

    async def _parts(self) -> tuple[PartRow, ...] | None:
        """The parts that are stored; None where the upload is over. Another of the same name is another upload."""
        upload = self._upload
        if not await self._is_on():
            return None
        try:
            parts = await self._catalog.parts(upload.bucket, upload.key, upload.upload_id)
        except NoSuchUploadError:
            return None
        # Once more: it may have become the chunk in between, and another writer have begun the next under its id.
        return parts if await self._is_on() else None

    async def _is_on(self) -> bool:
        """Whether what its id names is the same upload still."""
        upload = self._upload
        now = await self._catalog.upload(upload.bucket, upload.key, upload.upload_id)
        return now is not None and (now.initiated_ms, now.group_parts) == (upload.initiated_ms, upload.group_parts)

    async def _prove(self, watch: KeyWatch, row: ObjectRow) -> None:
        """Raise `UnavailableError` unless the chunk begins with the parts that were sent."""
        if not self._seen:
            return
        told_by = asyncio.get_running_loop().time() + TOLD_SECONDS
        while not self._are_in(row.blobs) and not self._are_in([blob for part in watch.made_of for blob in part.blobs]):
            left = told_by - asyncio.get_running_loop().time()
            if not row.parts or watch.made_of or left <= 0:
                raise UnavailableError("the chunk was made of other bytes than those that were followed")
            await watch.changed(left)

    def _are_in(self, blobs: Sequence[BlobRef]) -> bool:
        """Whether the blobs of the parts that were seen are among these, each where it was taken to lie."""
        places, offset = {}, 0
        for blob in blobs:
            places[blob.blob_id] = offset
            offset += blob.plain_bytes
        for begin, part in self._seen.values():
            offset = begin
            for blob in part.blobs:
                if places.get(blob.blob_id) != offset:
                    return False
                offset += blob.plain_bytes
        return True


async def _read(reader: ObjectReader | None) -> AsyncGenerator[memoryview, None]:
    """The reader's views; it is closed at the end. None: the bytes are gone."""
    if reader is None:
        raise UnavailableError("the bytes that were followed are gone")
    try:
        views: AsyncIterator[memoryview] = reader.views()
        async with aclosing(cast("AsyncGenerator[memoryview, None]", views)) as inner:
            async for view in inner:
                yield view
    finally:
        await reader.aclose()
