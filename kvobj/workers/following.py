"""Following an upload through a worker: the store process follows it, and its bytes come over the pair, one copy more each.

Implements `store.following.Followed` on the worker's side; `FollowedStreams` is the store process's. Event-loop-only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from kvobj.catalog.rows import BucketRow
from kvobj.errors import InvalidRequestError
from kvobj.store.following import Followed, Following, Span
from kvobj.workers.calls import FollowedUpload, StoreCalls
from kvobj.workers.channel import Channel

_PIECE_BYTES: Final = 256 * 1024
_FOUND_MAX: Final = 1024


class RemoteFollowing:
    """As much of `store.following.Following` as the API needs."""

    def __init__(self, channel: Channel, calls: StoreCalls) -> None:
        self._channel = channel
        self._calls = calls

    async def find(self, bucket: BucketRow, key: str) -> Followed | None:
        """See `Following.find`."""
        found = await self._calls.follow(bucket, key)
        return None if found is None else RemoteFollowed(self._calls, found, self._end)

    def _end(self, handle: int) -> None:
        self._channel.tell("unfollow", handle)


class RemoteFollowed:
    """See `Followed`."""

    def __init__(self, calls: StoreCalls, found: FollowedUpload, end: Callable[[int], None]) -> None:
        self._calls = calls
        self._end = end
        self._handle = found.handle
        self.namespace = found.namespace
        self.tokens = found.tokens
        self.parent = found.parent
        self.size_bytes = found.size_bytes
        self.group_parts = found.group_parts
        self.in_parts = found.in_parts

    async def views(
        self, span: Span | None, *, part_sizes: Sequence[int] | None = None
    ) -> AsyncGenerator[memoryview, None]:
        """See `Followed.views`."""
        sizes = None if part_sizes is None else list(part_sizes)
        try:
            await self._calls.begin_follow(self._handle, span, sizes)
            while (piece := await self._calls.next_followed(self._handle)) is not None:
                yield memoryview(piece)
        finally:
            self._end(self._handle)


@dataclass(slots=True)
class _Stream:
    followed: Followed
    views: AsyncGenerator[memoryview, None] | None = None
    rest: memoryview = field(default_factory=lambda: memoryview(b""))
    reader: asyncio.Task[object] | None = None
    """Who is in `views` now: they cannot be closed before it has left them."""


class FollowedStreams:
    """What one worker follows, under handles; in the store process."""

    def __init__(self, following: Following) -> None:
        self._following = following
        self._next_handle = 1
        self._streams: dict[int, _Stream] = {}

    def __len__(self) -> int:
        """How many are read: one that was only found holds nothing."""
        return sum(stream.views is not None for stream in self._streams.values())

    async def find(self, bucket: BucketRow, key: str) -> FollowedUpload | None:
        """See `StoreCalls.follow`."""
        found = await self._following.find(bucket, key)
        if found is None:
            return None
        handle = self._next_handle
        self._next_handle += 1
        self._streams[handle] = _Stream(found)
        if len(self._streams) > _FOUND_MAX:  # what was found and not read: the reader may not, or did not want to
            oldest = next((each for each, stream in self._streams.items() if stream.views is None), None)
            if oldest is not None:
                del self._streams[oldest]
        return FollowedUpload(
            handle,
            found.namespace,
            found.tokens,
            found.parent,
            found.size_bytes,
            found.group_parts,
            found.in_parts,
        )

    def begin(self, handle: int, span: Span | None, part_sizes: Sequence[int] | None) -> None:
        """See `StoreCalls.begin_follow`."""
        stream = self._get(handle)
        stream.views = stream.followed.views(span, part_sizes=part_sizes)

    async def next(self, handle: int) -> bytes | None:
        """See `StoreCalls.next_followed`."""
        stream = self._get(handle)
        assert stream.views is not None
        stream.reader = asyncio.current_task()
        try:
            while not stream.rest:
                view = await anext(stream.views, None)
                if view is None:
                    return None
                stream.rest = view
        finally:
            stream.reader = None
        piece, stream.rest = bytes(stream.rest[:_PIECE_BYTES]), stream.rest[_PIECE_BYTES:]
        return piece

    async def end(self, handle: int) -> None:
        """See `StoreCalls.unfollow`. An unknown handle is ignored."""
        stream = self._streams.get(handle)
        if stream is not None and stream.reader is not None:
            if not stream.reader.cancelling():
                stream.reader.cancel()
            await asyncio.wait([stream.reader])
        stream = self._streams.pop(handle, None)  # only now: where the wait is cut short, `aclose` ends it
        if stream is not None and stream.views is not None:
            async with aclosing(stream.views):
                stream.rest = memoryview(b"")

    def _get(self, handle: int) -> _Stream:
        stream = self._streams.get(handle)
        if stream is None:
            raise InvalidRequestError("no such stream", handle=handle)
        return stream

    async def aclose(self) -> None:
        """The worker is gone, and no call of it runs any more."""
        for handle in list(self._streams):
            await self.end(handle)
