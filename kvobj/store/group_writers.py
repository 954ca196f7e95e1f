"""Who is writing parts of chunks that arrive in parts, so that an upload into which nothing came does not outlive its writers.

The first writer of a part begins the upload in which all parts meet, before its body. Where that is refused, or never comes whole,
the empty upload would say for hours of how many parts the chunk is, of which class and under which parent, to writers who know
better, and count among the uploads of its bucket. A writer passes twice: when it begins, and for its body. In between it counts as
one who is there, so that another, who is refused, does not take away what it begins, and others follow. Event-loop-only; every
writer of a store passes here, those of worker processes too. A process that dies leaves such an upload to its time to live.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Final, Protocol

from kvobj.catalog.protocol import Catalog
from kvobj.clock import Clock
from kvobj.errors import KvobjError
from kvobj.store.groups import group_upload_id
from kvobj.store.requests import PutRequest

EXPECTED_SECONDS: Final = 10.0
"""Between a writer's beginning and its coming for its body lies a message of its worker's, or less. One that has not come for so
long is taken to have gone; where it comes all the same it begins anew what was taken away."""

_Name = tuple[str, int, str]
"""Bucket, when it was made, upload id."""


class OnGone(Protocol):
    """Told of a bucket and key whose upload was taken away."""

    def __call__(self, bucket: str, key: str, /) -> None:
        """Must return at once."""
        ...


class GroupWriters:
    """See the module's text."""

    def __init__(
        self, catalog: Catalog, clock: Clock, *, on_gone: OnGone, expected_seconds: float = EXPECTED_SECONDS
    ) -> None:
        self._catalog = catalog
        self._clock = clock
        self._on_gone = on_gone
        self._expected_seconds = expected_seconds
        self._inside: dict[_Name, int] = {}
        """How many are there, those included who are expected for their bodies."""
        self._expected: dict[_Name, deque[asyncio.TimerHandle]] = {}
        """Those, the oldest first: which of them it is that comes makes no difference."""
        self._stored: set[_Name] = set()
        self._ending: dict[_Name, asyncio.Task[None]] = {}

    async def begin(self, request: PutRequest) -> GroupWriter:
        """A writer of a part (`request.place.group`) begins. From here on until it leaves nobody takes the upload away for being
        empty; whether it is there still is to be looked up now."""
        name = _name_of(request)
        while (ending := self._ending.get(name)) is not None:
            await asyncio.wait([ending])
        self._inside[name] = self._inside.get(name, 0) + 1
        return GroupWriter(self, name, request)

    async def enter(self, request: PutRequest) -> GroupWriter:
        """As `begin`, of a writer that began before, and comes for its body."""
        name = _name_of(request)
        expected = self._expected.get(name)
        if expected is None:  # it was expected no more
            return await self.begin(request)
        expected.popleft().cancel()
        if not expected:
            del self._expected[name]
        return GroupWriter(self, name, request)

    async def leave(self, name: _Name, request: PutRequest, *, is_stored: bool, goes_on: bool) -> None:
        """For `GroupWriter.leave`."""
        if goes_on:
            due = asyncio.get_running_loop().call_later(self._expected_seconds, self._expect_no_more, name, request)
            self._expected.setdefault(name, deque()).append(due)
            return
        if is_stored:
            self._stored.add(name)
        ending = self._count_out(name, request)
        if ending is not None:
            await asyncio.shield(ending)

    def _expect_no_more(self, name: _Name, request: PutRequest) -> None:
        """The oldest of those who are expected has not come: its request has ended."""
        expected = self._expected[name]
        expected.popleft()
        if not expected:
            del self._expected[name]
        self._count_out(name, request)

    def _count_out(self, name: _Name, request: PutRequest) -> asyncio.Task[None] | None:
        """One fewer is there. What takes the upload away, where that was the last."""
        self._inside[name] -= 1
        if self._inside[name]:
            return None
        del self._inside[name]
        if name in self._stored:
            self._stored.remove(name)
            return None
        # A task of its own: who is cancelled meanwhile has left all the same, and who enters waits for its end.
        task = self._ending[name] = asyncio.create_task(self._take_away(name, request))
        task.add_done_callback(lambda _: self._ending.pop(name))
        return task

    async def _take_away(self, name: _Name, request: PutRequest) -> None:
        bucket, made_ms, upload_id = name
        key, place = request.key, request.place
        assert place is not None
        with suppress(KvobjError):  # it has ended meanwhile, or it stays until its time is over
            if await self._catalog.upload(bucket, key, upload_id) is None:
                return
            if await self._catalog.parts(bucket, key, upload_id):
                return
            await self._catalog.abort_upload(
                bucket,
                key,
                upload_id,
                made_ms=made_ms,
                namespace_root=place.namespace_root,
                if_empty=True,
                now_ms=self._clock.now_ms(),
            )
            self._on_gone(bucket, key)


def _name_of(request: PutRequest) -> _Name:
    bucket = request.bucket
    return bucket.name, bucket.created_ms, group_upload_id(bucket.name, request.key)


class GroupWriter:
    """One of them. Made by `GroupWriters`."""

    __slots__ = ("_has_left", "_name", "_request", "_writers")

    def __init__(self, writers: GroupWriters, name: _Name, request: PutRequest) -> None:
        self._writers = writers
        self._name = name
        self._request = request
        self._has_left = False

    async def leave(self, *, is_stored: bool, goes_on: bool = False) -> None:
        """It is over, `is_stored`: its part is there; or it `goes_on`, and enters before its body. The last of an upload's writers
        takes that away if it has no part. Idempotent."""
        if not self._has_left:
            self._has_left = True
            await self._writers.leave(self._name, self._request, is_stored=is_stored, goes_on=goes_on)
