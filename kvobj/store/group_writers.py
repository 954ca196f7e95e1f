"""Who is writing parts of chunks that arrive in parts, so that an upload into which nothing came does not outlive its writers.

The first writer of a part begins the upload in which all parts meet, before its body. Where that is refused, or never comes whole,
the empty upload would say for hours of how many parts the chunk is, of which class and under which parent, to writers who know
better, and count among the uploads of its bucket. Event-loop-only; every writer of a store passes here, those of worker processes
too. A process that dies leaves such an upload to its time to live.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from kvobj.catalog.protocol import Catalog
from kvobj.clock import Clock
from kvobj.errors import KvobjError
from kvobj.store.groups import group_upload_id
from kvobj.store.requests import PutRequest

_Name = tuple[str, int, str]
"""Bucket, when it was made, upload id."""


class OnGone(Protocol):
    """Told of a bucket and key whose upload was taken away."""

    def __call__(self, bucket: str, key: str, /) -> None:
        """Must return at once."""
        ...


class GroupWriters:
    """See the module's text."""

    def __init__(self, catalog: Catalog, clock: Clock, *, on_gone: OnGone) -> None:
        self._catalog = catalog
        self._clock = clock
        self._on_gone = on_gone
        self._inside: dict[_Name, int] = {}
        self._stored: set[_Name] = set()
        self._ending: dict[_Name, asyncio.Task[None]] = {}

    async def enter(self, request: PutRequest) -> GroupWriter:
        """A writer of a part (`request.place.group`) begins. From here on until it leaves nobody takes the upload away for being
        empty; whether it is there still is to be looked up now."""
        name = (request.bucket.name, request.bucket.created_ms, group_upload_id(request.bucket.name, request.key))
        while (ending := self._ending.get(name)) is not None:
            await asyncio.wait([ending])
        self._inside[name] = self._inside.get(name, 0) + 1
        return GroupWriter(self, name, request)

    async def leave(self, name: _Name, request: PutRequest, *, is_stored: bool, goes_on: bool) -> None:
        """For `GroupWriter.leave`."""
        if is_stored:
            self._stored.add(name)
        self._inside[name] -= 1
        if self._inside[name]:
            return
        del self._inside[name]
        if name in self._stored:
            self._stored.remove(name)
            return
        if goes_on:
            return
        # A task of its own: who is cancelled here has left all the same, and who enters meanwhile waits for its end.
        task = self._ending[name] = asyncio.create_task(self._take_away(name, request))
        task.add_done_callback(lambda _: self._ending.pop(name))
        await asyncio.shield(task)

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


class GroupWriter:
    """One of them. Made by `GroupWriters.enter`."""

    __slots__ = ("_has_left", "_name", "_request", "_writers")

    def __init__(self, writers: GroupWriters, name: _Name, request: PutRequest) -> None:
        self._writers = writers
        self._name = name
        self._request = request
        self._has_left = False

    async def leave(self, *, is_stored: bool, goes_on: bool = False) -> None:
        """It is over. `is_stored`: its part is there. The last of an upload's writers takes that away if it has no part, unless it
        `goes_on`, and enters again before its body (it finds out then what became of the upload meanwhile). Idempotent."""
        if not self._has_left:
            self._has_left = True
            await self._writers.leave(self._name, self._request, is_stored=is_stored, goes_on=goes_on)
