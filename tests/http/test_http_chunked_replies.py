"""Replies whose length is known only at their end: framed as chunks, each sent at once, cut when they fail."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from certificates import Authority
from http_peers import TIMEOUT_SECONDS, Peer, Served, pattern, serving, until

from kvobj.api.message import Handler, Reply, RequestBody, RequestHead
from kvobj.errors import BusyError, FrameCorruptError, KvobjError, TierUnavailableError


class Unmeasured:
    """A stream that does not know its length, over one buffer that is overwritten as soon as it may be."""

    length = None

    def __init__(self, contents: list[bytes], *, fail_after: int | None = None) -> None:
        self._contents = contents
        self._fail_after = fail_after
        self._memory = memoryview(bytearray(max(map(len, contents), default=0)))
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.closed = 0

    async def views(self) -> AsyncIterator[memoryview]:
        for index, content in enumerate(self._contents):
            if index == self._fail_after:
                raise RuntimeError("the medium failed")
            if index:
                await self.go_on.wait()
            self._memory[: len(content)] = content
            yield self._memory[: len(content)]
            self._memory[:] = b"\xee" * len(self._memory)

    async def aclose(self) -> None:
        self.closed += 1


def answering(stream: Unmeasured) -> Handler:
    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        return Reply(200, (), stream)

    return handle


async def read_head(peer: Peer) -> bytes:
    return await asyncio.wait_for(peer.reader.readuntil(b"\r\n\r\n"), TIMEOUT_SECONDS)


async def read_chunk(peer: Peer) -> bytes:
    size = int(await asyncio.wait_for(peer.reader.readuntil(b"\r\n"), TIMEOUT_SECONDS), 16)
    data = await asyncio.wait_for(peer.reader.readexactly(size + 2), TIMEOUT_SECONDS)
    assert data[-2:] == b"\r\n"
    return data[:-2]


async def test_an_unmeasured_stream_is_chunked_and_the_connection_goes_on() -> None:
    contents = [b"a", pattern(16 * 1024), b"", pattern(3_000_000, 2), pattern(16 * 1024 + 1, 3)]
    stream = Unmeasured(contents)
    async with serving(answering(stream)) as served:
        peer = await served.connect()
        for _ in range(2):
            await peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            head = await read_head(peer)
            assert b"transfer-encoding: chunked" in head
            assert b"content-length" not in head
            received = []
            while chunk := await read_chunk(peer):
                received.append(chunk)
            assert received == [content for content in contents if content]
    assert stream.closed == 2


@pytest.mark.parametrize("size", [1, 100_000])
async def test_a_chunk_is_whole_at_the_client_while_the_next_is_not_there_yet(size: int) -> None:
    stream = Unmeasured([pattern(size), b"last"])
    stream.go_on.clear()
    async with serving(answering(stream)) as served:
        peer = await served.connect()
        await peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        await read_head(peer)
        assert await read_chunk(peer) == pattern(size)
        stream.go_on.set()
        assert await read_chunk(peer) == b"last"
        assert await read_chunk(peer) == b""


class Bursts(Unmeasured):
    """The same, each view but the second led by its number, and so many of them in a burst."""

    def __init__(self, contents: list[bytes], size: int) -> None:
        super().__init__(contents)
        self._bursts = [range(len(contents))[start : start + size] for start in range(0, len(contents), size)]

    async def bursts(self) -> AsyncIterator[list[tuple[bytes, memoryview]]]:
        for indexes in self._bursts:
            memory = [bytearray(self._contents[index]) for index in indexes]
            leads = [b"" if index == 1 else b"<%d>" % index for index in indexes]
            yield [(lead, memoryview(content)) for lead, content in zip(leads, memory, strict=True)]
            for content in memory:
                content[:] = b"\xee" * len(content)


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_what_comes_in_a_burst_is_one_chunk_with_what_leads_each_view(size: int) -> None:
    contents = [pattern(100), pattern(70_000, 2), pattern(3_000_000, 3), b"", pattern(900, 4)]
    parts = [b"<0>" + contents[0], contents[1], b"<2>" + contents[2], b"<3>", b"<4>" + contents[4]]
    async with serving(answering(Bursts(contents, size))) as served:
        peer = await served.connect()
        await peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        await read_head(peer)
        received = []
        while chunk := await read_chunk(peer):
            received.append(chunk)
    assert received == [b"".join(parts[start : start + size]) for start in range(0, len(parts), size)]


async def test_an_unmeasured_stream_that_fails_is_reset_and_never_ended() -> None:
    stream = Unmeasured([b"first", b"second"], fail_after=1)
    async with serving(answering(stream)) as served:
        peer = await served.connect()
        await peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert await peer.is_cut()
    assert stream.closed == 1


async def test_to_http_10_the_end_of_the_connection_is_the_end_of_an_unmeasured_stream() -> None:
    stream = Unmeasured([b"one", b"two"])
    async with serving(answering(stream)) as served:
        peer = await served.connect()
        await peer.send(b"GET / HTTP/1.0\r\nHost: h\r\nConnection: keep-alive\r\n\r\n")
        head, _, body = (await peer.rest()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == b"onetwo"


# -- clients that go while nothing comes -------------------------------------------------------------------------------


class Live(Unmeasured):
    """Has sent its first view, and waits for others to bring the second."""

    is_live = True

    def __init__(self) -> None:
        super().__init__([b"first", b"second"])
        self.go_on.clear()


async def begun(served: Served, ending: bytes = b" HTTP/1.1\r\nHost: h\r\n\r\n") -> Peer:
    peer = await served.connect()
    await peer.send(b"GET /" + ending)
    await asyncio.wait_for(peer.reader.readuntil(b"first"), TIMEOUT_SECONDS)
    return peer


async def is_over(served: Served, stream: Unmeasured) -> None:
    """The stream is closed, its connection gone, and it was no error."""
    await until(lambda: stream.closed == 1 and not served.server._connections)
    assert [line for line in served.lines if not line.startswith("{")] == []


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("way", ["close", "reset", "end of sending"])
async def test_a_live_stream_is_closed_when_its_client_goes_though_nothing_comes(way: str, version: bytes) -> None:
    before = asyncio.all_tasks()
    stream = Live()
    async with serving(answering(stream)) as served:
        peer = await begun(served, b" HTTP/%s\r\nHost: h\r\n\r\n" % version)
        if way == "close":
            await peer.aclose()
        elif way == "reset":
            peer.reset()
        else:
            peer.writer.write_eof()
        await is_over(served, stream)
    assert asyncio.all_tasks() <= before


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_over_tls_too_a_live_stream_is_closed_when_its_client_goes(way: str, tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    authority.sign().write(tmp_path / "tls.pem", tmp_path / "tls.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.pem", tmp_path / "tls.key")
    stream = Live()
    async with serving(answering(stream), server_context=context, client_context=authority.client_context()) as served:
        peer = await begun(served)
        if way == "close":
            await peer.aclose()
        else:
            peer.reset()
        await is_over(served, stream)


async def test_of_a_client_that_only_ended_its_sending_a_stream_of_what_is_there_goes_on_and_of_one_that_reset_ends() -> (
    None
):
    stream = Unmeasured([b"first", b"second"])
    stream.go_on.clear()
    async with serving(answering(stream)) as served:
        peer, gone = await begun(served), await begun(served)
        peer.writer.write_eof()
        await until(lambda: any(each.wire.is_at_end for each in served.server._connections))
        gone.reset()
        await until(lambda: stream.closed == 1)
        stream.go_on.set()
        assert (await peer.rest()).endswith(b"second\r\n0\r\n\r\n")
        await until(lambda: stream.closed == 2)


@pytest.mark.parametrize("way", ["close", "reset"])
async def test_a_client_that_sent_far_ahead_is_found_gone_though_it_is_not_read_from(way: str) -> None:
    stream = Live()
    async with serving(answering(stream)) as served:
        ahead = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 4000  # more than a connection may have unread
        peer = await begun(served, b" HTTP/1.1\r\nHost: h\r\n\r\n" + ahead)
        (connection,) = served.server._connections
        await until(lambda: not connection.wire._is_reading)
        if way == "close":
            await peer.aclose()
        else:
            peer.reset()
        served.server.sweep()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not stream.closed:
                await asyncio.sleep(0)
                served.server.sweep()
        await is_over(served, stream)


async def test_a_client_that_has_gone_before_the_first_view_is_found_gone() -> None:
    stream, may_answer = Live(), asyncio.Event()

    async def handle(_head: RequestHead, _body: RequestBody) -> Reply:
        await may_answer.wait()
        return Reply(200, (), stream)

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        await until(lambda: any(each.is_in_flight for each in served.server._connections))
        (connection,) = served.server._connections
        await peer.aclose()
        await until(lambda: connection.wire.is_at_end)
        may_answer.set()
        await is_over(served, stream)


class Records(logging.Handler):
    """Keeps records as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class Failing(Unmeasured):
    """It fails before its second view."""

    error: KvobjError

    async def views(self) -> AsyncIterator[memoryview]:
        yield memoryview(b"first")
        raise self.error


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (BusyError("no room came free in time"), "WARNING"),
        (TierUnavailableError("the remote failed", operation="GetObject"), "WARNING"),
        (FrameCorruptError("block checksum mismatch", block=1), "ERROR"),
    ],
)
async def test_a_reply_that_is_cut_off_by_what_is_no_defect_is_one_line_of_the_log(
    error: KvobjError, level: str
) -> None:
    stream, kept = Failing([b"first"]), Records()
    stream.error = error
    log = logging.getLogger("kvobj-test-http.errors")
    log.addHandler(kept)
    try:
        async with serving(answering(stream)) as served:
            peer = await served.connect()
            await peer.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            assert await peer.is_cut()
    finally:
        log.removeHandler(kept)
    assert stream.closed == 1
    (record,) = kept.records
    assert (record.levelname, record.exc_info) == (level, None)
    assert record.getMessage() == f"a reply was cut off: {error}"
