"""Reads a range of an object as parallel ranged GETs straight into memory, and tells how far its front has come.

A long range's front is a small part: it is whole, and checked and sent on, while those that share connection and cores with it
still come. Each part is hedged, resumed at the byte that it reached, and held against what was asked for: another status, range or
length is that part's failure, never bytes in the wrong place. What the bytes are is the caller's to check.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from kvobj.task_endings import ended
from kvobj.tiers.protocol import ByteRange
from kvobj.tiers.remote.faults import RemoteFault
from kvobj.tiers.remote.parts import read_spans
from kvobj.tiers.remote.requests import Exchange, RemoteRequest, Requests

PARTS_AT_ONCE: Final = 8

_PARTIAL: Final = 206
_WHOLE: Final = 200
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")

T = TypeVar("T")


class RangedReader:
    """Reads of one bucket. `part_bytes`: what one request asks for at most."""

    def __init__(self, requests: Requests, *, part_bytes: int) -> None:
        self._requests = requests
        self._part_bytes = part_bytes

    async def read(
        self, key: str, byte_range: ByteRange, into: memoryview, on_filled: Callable[[int], None], *, until: float
    ) -> bool:
        """Fill `into`, as long as the range and not empty; False where there is no such object. `on_filled(n)`: the first n bytes
        are there, n ascending. When it returns or raises nothing writes to `into` any more. Raises `RemoteFault`."""
        spans = read_spans(len(into), self._part_bytes)
        views = [into[span.start : span.stop] for span in spans]
        front = _Front([len(view) for view in views], on_filled)
        parts = [
            _Part(self._requests, key, byte_range.start + span.start, view, front=front, index=index)
            for index, (span, view) in enumerate(zip(spans, views, strict=True))
        ]
        try:
            await all_done([part.read(until=until) for part in parts], at_once=PARTS_AT_ONCE)
        except RemoteFault as fault:
            if is_missing(fault):
                return False
            raise
        return True


def is_missing(fault: RemoteFault) -> bool:
    """Whether the server says that there is no such object: it says so by name, a bare 404 may be anybody's."""
    return fault.code == "NoSuchKey"


async def all_done(works: Sequence[Coroutine[Any, Any, T]], *, at_once: int) -> list[T]:
    """The results of all, in order, some at once; on the first failure, or when cancelled, the others are cancelled and waited
    for."""
    if len(works) == 1:
        return [await works[0]]
    waiting = list(enumerate(works))
    waiting.reverse()
    results: dict[int, T] = {}

    async def worker() -> None:
        while waiting:
            number, work = waiting.pop()
            results[number] = await work

    tasks = [asyncio.ensure_future(worker()) for _ in range(min(at_once, len(works)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for _, work in waiting:
            work.close()
        waiting.clear()
        await ended(tasks)
    return [results[number] for number in range(len(works))]


class _Front:
    """How far the parts reach without a gap."""

    __slots__ = ("_at", "_before", "_filled", "_report", "_sizes")

    def __init__(self, sizes: list[int], report: Callable[[int], None]) -> None:
        self._sizes = sizes
        self._filled = [0] * len(sizes)
        self._report = report
        self._at = 0
        self._before = 0

    def reached(self, index: int, count: int) -> None:
        """The first `count` bytes of a part are there."""
        self._filled[index] = count
        if index != self._at:
            return
        while self._at < len(self._sizes) and self._filled[self._at] == self._sizes[self._at]:
            self._before += self._sizes[self._at]
            self._at += 1
        more = self._filled[self._at] if self._at < len(self._sizes) else 0
        self._report(self._before + more)


class _Part:
    """One part, and how far it has come."""

    __slots__ = ("_front", "_index", "_into", "_key", "_reached", "_requests", "_start")

    def __init__(
        self, requests: Requests, key: str, start: int, into: memoryview, *, front: _Front, index: int
    ) -> None:
        self._requests = requests
        self._key = key
        self._start = start
        self._into = into
        self._front = front
        self._index = index
        self._reached = 0

    async def read(self, *, until: float) -> None:
        """To its end."""
        await self._requests.repeated("GetObject", self._attempt, until=until)

    async def _attempt(self) -> None:
        first, last = self._start + self._reached, self._start + len(self._into) - 1
        request = RemoteRequest("GetObject", "GET", self._key, headers={"range": f"bytes={first}-{last}"})
        exchange = await self._requests.begin_hedged(request)
        before = self._reached
        try:
            _check(exchange, first, last)
            await exchange.fill(self._into[before:], lambda count: self._came(before + count))
        except BaseException:
            await exchange.end()
            raise
        exchange.finish()

    def _came(self, count: int) -> None:
        self._reached = count
        self._front.reached(self._index, count)


def _check(exchange: Exchange, first: int, last: int) -> None:
    """That the body which follows is these bytes. The whole object in place of all of it is right, too."""
    head = exchange.head
    found = _CONTENT_RANGE.fullmatch(head.headers.get("content-range", ""))
    is_range = head.status == _PARTIAL and found is not None and (int(found[1]), int(found[2])) == (first, last)
    is_whole = head.status == _WHOLE and first == 0
    if not (is_range or is_whole) or head.length != last - first + 1:
        is_short = found is not None and found[3] != "*" and int(found[3]) <= last
        raise RemoteFault(
            "client" if is_short else "server",
            f"asked for bytes {first}-{last}, answered {head.status} with {head.length} bytes, "
            f"range {head.headers.get('content-range', 'none')[:60]}",
            status=head.status,
            is_repeatable=not is_short,
        )
