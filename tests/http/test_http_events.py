"""Events over real sockets: lines come as they are told, a reader that stops reading costs a page, one that goes is noticed."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from history_contract import BUCKET, chunk
from http_peers import TIMEOUT_SECONDS, Peer, serving, until
from memory_teller import MemoryTeller, memory_teller

from kvobj.api.chunk_access import ChunkAccess
from kvobj.api.kv.events import EventStream, ReaderRights
from kvobj.api.message import Reply, RequestBody, RequestHead
from kvobj.api.users import UserDirectory
from kvobj.catalog.history_protocol import EventPage
from kvobj.catalog.rows import UserRow

ALICE = UserRow("alice", "Alice", "AKALICE", "secret of alice")


async def stands() -> bool:
    return True


async def is_alice(_: str) -> UserRow:
    return ALICE


OWNER = ReaderRights(
    cast("ChunkAccess", SimpleNamespace(is_owner=True, stands=stands)),
    ALICE,
    cast("UserDirectory", SimpleNamespace(with_access_key=is_alice)),
)
GET = b"GET /cache?events&follow HTTP/1.1\r\nHost: h\r\n\r\n"


class Feed:
    """Answers every request with a stream that follows a history, and counts the streams that are open."""

    def __init__(self, teller: MemoryTeller, *, heartbeat_seconds: float = 10.0) -> None:
        self.teller = teller
        self.stopped = asyncio.Event()
        self.open = 0
        self.pages = 0
        self._heartbeat_seconds = heartbeat_seconds

    async def handle(self, _head: RequestHead, _body: RequestBody) -> Reply:
        self.open += 1
        stream = EventStream(
            cast("Any", self),
            BUCKET,
            OWNER,
            after=0,
            until=None,
            stopped=self.stopped,
            heartbeat_seconds=self._heartbeat_seconds,
            on_close=self._close,
        )
        return Reply(200, (), stream)

    def _close(self) -> None:
        self.open -= 1

    async def read(self, bucket: str | None, *, after: int, limit: int = 1000) -> EventPage:
        self.pages += 1
        return await self.teller.history.read(bucket, after=after, limit=limit)

    async def wait(self, after: int, *, timeout_seconds: float) -> bool:
        return await self.teller.history.wait(after, timeout_seconds=timeout_seconds)


async def head_of(peer: Peer) -> bytes:
    return await asyncio.wait_for(peer.reader.readuntil(b"\r\n\r\n"), TIMEOUT_SECONDS)


async def chunk_of(peer: Peer) -> bytes:
    size = int(await asyncio.wait_for(peer.reader.readuntil(b"\r\n"), TIMEOUT_SECONDS), 16)
    return (await asyncio.wait_for(peer.reader.readexactly(size + 2), TIMEOUT_SECONDS))[:-2]


async def test_events_come_as_they_are_told_and_end_with_the_server() -> None:
    feed = Feed(await memory_teller())
    async with serving(feed.handle) as served:
        peer = await served.connect()
        await peer.send(GET)
        assert b"transfer-encoding: chunked" in await head_of(peer)
        for key in ("a", "b"):
            await feed.teller.stored([chunk(key)])
            assert json.loads(await chunk_of(peer))["ids"] == [key]
        feed.stopped.set()
        assert await chunk_of(peer) == b""
        await until(lambda: feed.open == 0)


async def test_a_reader_that_went_is_noticed_by_the_next_sign_of_life() -> None:
    feed = Feed(await memory_teller(), heartbeat_seconds=0.01)
    async with serving(feed.handle) as served:
        peer = await served.connect()
        await peer.send(GET)
        assert await chunk_of_life(peer) == b"\n"
        await peer.aclose()
        await until(lambda: feed.open == 0)


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_a_reader_that_went_is_noticed_before_there_is_anything_to_tell(way: str) -> None:
    feed = Feed(await memory_teller(), heartbeat_seconds=3600.0)
    async with serving(feed.handle) as served:
        peer, other = await served.connect(), await served.connect()
        for each in (peer, other):
            await each.send(GET)
            await head_of(each)
        assert feed.open == 2
        if way == "close":
            await peer.aclose()
        else:
            peer.reset()
        await until(lambda: feed.open == 1)
        await feed.teller.stored([chunk("a")])
        assert json.loads(await chunk_of(other))["ids"] == ["a"]


async def chunk_of_life(peer: Peer) -> bytes:
    await head_of(peer)
    return await chunk_of(peer)


async def test_a_reader_that_takes_nothing_is_read_no_further_pages_for() -> None:
    feed = Feed(await memory_teller())
    # Twenty pages, far more than the socket's buffers take: 256 events of 256 ids are 4 MiB.
    keys = [chunk(f"{number:064x}") for number in range(256)]
    for _ in range(20 * 256):
        await feed.teller.removed(keys)
    async with serving(feed.handle) as served:
        peer = await served.connect()
        await peer.send(GET)
        await head_of(peer)
        await until(lambda: feed.pages >= 1)
        for _ in range(200):
            await asyncio.sleep(0)
        assert feed.pages < 10
        assert feed.open == 1
