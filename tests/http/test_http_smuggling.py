"""Nothing of one request is ever taken for another: bodies end where their framing says, and what is unread is never a request."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from http_peers import Peer, echo, pattern, receive_all, serving, until

from kvobj.api.errors import error_reply
from kvobj.api.http import HttpSettings
from kvobj.api.message import Reply, RequestBody, RequestHead
from kvobj.errors import AccessDeniedError, KvobjError

KIB = 1024
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: h\r\n\r\n"
CHUNKED = b"PUT /first HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


def put(length: int, *fields: bytes) -> bytes:
    return b"\r\n".join([b"PUT /first HTTP/1.1", b"Host: h", b"Content-Length: %d" % length, *fields, b"", b""])


def said(error: KvobjError, head: RequestHead) -> Reply:
    return error_reply(
        error, request_id=head.request_id, host_id="HOST", resource=head.target, is_head=False, close=False
    )


async def reading(head: RequestHead, body: RequestBody) -> Reply:
    """Reads a body to its end and tells how it was."""
    try:
        content = await receive_all(body)
    except KvobjError as error:
        return said(error, head)
    return Reply(200, (("x-target", head.target),), content)


async def refusing(head: RequestHead, _body: RequestBody) -> Reply:
    """Reads no body."""
    if head.target == "/next":
        return Reply(200)
    return said(AccessDeniedError("no"), head)


MALFORMED_CHUNKS = {
    "an extension": b"5;name=value\r\nhello\r\n0\r\n\r\n",
    "an extension that hides a line end": b"5;a\nhello\r\n0\r\n\r\n",
    "an extension of the last chunk": b"5\r\nhello\r\n0;last\r\n\r\n",
    "an endless extension": b"5;" + b"a" * 100_000 + b"\r\nhello\r\n0\r\n\r\n",
    "a bare LF after a size": b"5\nhello\r\n0\r\n\r\n",
    "a bare CR after a size": b"5\rhello\r\n0\r\n\r\n",
    "two CRs after a size": b"5\r\r\nhello\r\n0\r\n\r\n",
    "a bare LF after data": b"5\r\nhello\n0\r\n\r\n",
    "no line end after data": b"5\r\nhello0\r\n\r\n",
    "more data than the size": b"5\r\nhello!\r\n0\r\n\r\n",
    "a bare LF after the last chunk": b"5\r\nhello\r\n0\n\r\n",
    "a bare LF at the end": b"5\r\nhello\r\n0\r\n\n",
    "white space before a size": b" 5\r\nhello\r\n0\r\n\r\n",
    "white space after a size": b"5 \r\nhello\r\n0\r\n\r\n",
    "a tab after a size": b"5\t\r\nhello\r\n0\r\n\r\n",
    "a negative size": b"-5\r\nhello\r\n0\r\n\r\n",
    "a signed size": b"+5\r\nhello\r\n0\r\n\r\n",
    "a prefixed size": b"0x5\r\nhello\r\n0\r\n\r\n",
    "an underlined size": b"1_0\r\n0123456789012345\r\n0\r\n\r\n",
    "an empty size": b"\r\nhello\r\n0\r\n\r\n",
    "a size of 17 digits": b"00000000000000005\r\nhello\r\n0\r\n\r\n",
    "an endless size": b"0" * 100_000,
    "a NUL in a size": b"5\0\r\nhello\r\n0\r\n\r\n",
    "a folded trailer": b"0\r\nx: y\r\n z: a\r\n\r\n",
    "a trailer with a space before its colon": b"0\r\nx : y\r\n\r\n",
    "a trailer without a colon": b"0\r\nx\r\n\r\n",
    "a trailer with a bare CR": b"0\r\nx: y\rz\r\n\r\n",
    "a trailer with a NUL": b"0\r\nx: \0\r\n\r\n",
    "a long trailer": b"0\r\nx: " + b"y" * (16 * KIB) + b"\r\n\r\n",
    "long trailers": b"0\r\n" + (b"x: " + b"y" * 2000 + b"\r\n") * 9 + b"\r\n",
    "many trailers": b"0\r\n" + b"x: y\r\n" * 17 + b"\r\n",
}


@pytest.mark.parametrize("name", list(MALFORMED_CHUNKS))
async def test_malformed_chunks_are_a_400_and_nothing_after_them_is_a_request(name: str) -> None:
    async with serving(reading) as served:
        peer = await served.connect()
        await peer.send(CHUNKED + MALFORMED_CHUNKS[name] + SMUGGLED)
        peer.writer.write_eof()
        answer = await peer.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert b"<Code>" in answer.body
        assert await peer.rest() == b""
        assert [json.loads(line)["target"] for line in served.lines] == ["/first"]


async def test_trailers_up_to_the_bounds_are_read_and_dropped() -> None:
    trailers = b"".join(b"x-%d: %s\r\n" % (index, b"y" * 1000) for index in range(16))
    async with serving(reading) as served:
        peer = await served.connect()
        await peer.send(CHUNKED + b"5\r\nhello\r\n0\r\n" + trailers + b"\r\n" + NEXT)
        assert (await peer.answer()).body == b"hello"
        assert (await peer.answer()).headers["x-target"] == "/next"


@pytest.mark.parametrize("length", [1, len(SMUGGLED), 64 * KIB, 256 * KIB])
async def test_an_unread_body_that_looks_like_requests_is_dropped_and_the_connection_goes_on(length: int) -> None:
    body = (SMUGGLED * (length // len(SMUGGLED) + 1))[:length]
    async with serving(refusing) as served:
        peer = await served.connect()
        await peer.send(put(length) + body + NEXT)
        assert (await peer.answer()).status == 403
        assert (await peer.answer()).status == 200
        assert [json.loads(line)["target"] for line in served.lines] == ["/first", "/next"]


UNDROPPABLE = {
    "long": put(HttpSettings().unread_body_bytes + 1),
    "chunked": CHUNKED + b"%x\r\n" % len(SMUGGLED),
    "chunked and broken": CHUNKED,
    "waiting for 100 Continue": put(len(SMUGGLED), b"Expect: 100-continue"),
    "chunked and waiting": CHUNKED[:-2] + b"Expect: 100-continue\r\n\r\n",
}


@pytest.mark.parametrize("name", list(UNDROPPABLE))
async def test_an_unread_body_of_unknown_or_great_length_ends_the_connection(name: str) -> None:
    async with serving(refusing) as served:
        peer = await served.connect()
        await peer.send(UNDROPPABLE[name] + SMUGGLED * 3)
        answer = await peer.answer()
        assert (answer.status, answer.headers["connection"]) == (403, "close")
        peer.writer.write_eof()
        assert await peer.rest() == b""
        assert [json.loads(line)["target"] for line in served.lines] == ["/first"]


async def test_a_body_half_read_is_dropped_and_not_a_request() -> None:
    async def handle(head: RequestHead, body: RequestBody) -> Reply:
        if head.target == "/first":
            await body.read_some(10)
        return Reply(200, (("x-target", head.target),))

    async with serving(handle) as served:
        peer = await served.connect()
        await peer.send(put(10 + len(SMUGGLED)) + b"x" * 10 + SMUGGLED + NEXT)
        assert (await peer.answer()).headers["x-target"] == "/first"
        assert (await peer.answer()).headers["x-target"] == "/next"


async def test_an_early_error_reaches_a_client_that_goes_on_sending() -> None:
    async with serving(refusing) as served:
        peer = await served.connect()
        body = pattern(8 * 1024 * KIB)  # more than both sockets hold: closing under it would take the answer away
        await peer.send(put(len(body)) + body)
        answer = await peer.answer()
        assert (answer.status, answer.headers["connection"]) == (403, "close")


async def test_an_early_error_does_not_make_the_server_read_for_ever() -> None:
    settings = HttpSettings(sweep_seconds=3600.0, linger_seconds=0.05)
    async with serving(refusing, settings) as served:
        peer = await served.connect()
        await peer.send(put(10**15))
        assert (await peer.answer()).status == 403
        await until(lambda: not served.server._connections)


async def test_pipelined_requests_of_all_framings_are_answered_in_order() -> None:
    async def handle(head: RequestHead, body: RequestBody) -> Reply:
        if head.target.endswith("0"):
            await asyncio.sleep(0)  # the others must not overtake
        return await reading(head, body)

    whole = b""
    for index in range(60):
        content = pattern(index * 37, index)
        target = b"/%d" % index
        if index % 3 == 0:
            whole += b"PUT %s HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" % target
            whole += b"".join(
                b"%x\r\n%s\r\n" % (len(content[at : at + 100]), content[at : at + 100])
                for at in range(0, len(content), 100)
            )
            whole += b"0\r\n\r\n"
        elif index % 3 == 1:
            whole += b"PUT %s HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s" % (target, len(content), content)
        else:
            whole += b"GET %s HTTP/1.1\r\nHost: h\r\n\r\n" % target
    async with serving(handle) as served:
        peer = await served.connect()
        sending = asyncio.ensure_future(_send_in_pieces(peer, whole, 1009))
        for index in range(60):
            answer = await peer.answer()
            assert answer.headers["x-target"] == f"/{index}"
            assert answer.body == (b"" if index % 3 == 2 else pattern(index * 37, index))
        await sending


@pytest.mark.parametrize("way", ["pieces", "in place"])
async def test_many_tiny_chunks_cost_their_number_and_no_more(way: str) -> None:
    """aiohttp CVE-2025-69229: what a chunk costs must not grow with how many came together."""
    calls: list[int] = []

    async def handle(head: RequestHead, body: RequestBody) -> Reply:
        if way == "pieces":
            return await reading(head, body)
        buffer = bytearray(int(head.target[1:]))
        await body.receive_into(memoryview(buffer), calls.append)
        await body.read_some(1)
        return Reply(200, (), bytes(buffer))

    async def cost(count: int) -> float:
        peer = await served.connect()
        head = CHUNKED.replace(b"/first", b"/%d" % count)
        began = time.process_time()
        await peer.send(head + b"1\r\nx\r\n" * count + b"0\r\n\r\n")
        assert (await peer.answer()).body == b"x" * count
        return time.process_time() - began

    async with serving(handle) as served:
        await cost(1000)
        few, many = await cost(4000), await cost(40_000)
        assert many < 40 * few  # ten times as many; quadratic would be a hundred times
    if way == "in place":
        assert len(calls) < 1000  # one a read, not one a chunk: each may wake the hashing
        assert calls[-1] == 40_000


async def test_a_body_read_in_small_pieces_costs_its_length_and_no_more() -> None:
    async def handle(_head: RequestHead, body: RequestBody) -> Reply:
        total = 0
        while piece := await body.read_some(16):
            assert len(piece) <= 16
            total += len(piece)
        return Reply(200, (), b"%d" % total)

    async with serving(handle) as served:
        peer = await served.connect()
        began = time.process_time()
        await peer.send(put(500_000) + pattern(500_000))
        assert (await peer.answer()).body == b"500000"
        assert time.process_time() - began < 5.0


async def test_no_body_of_a_http_10_request_is_taken_for_a_second_one() -> None:
    async with serving(refusing) as served:
        peer = await served.connect()
        await peer.send(b"PUT /first HTTP/1.0\r\nHost: h\r\nContent-Length: 35\r\n\r\n" + SMUGGLED)
        assert (await peer.answer()).status == 403
        peer.writer.write_eof()
        assert await peer.rest() == b""
        assert len(served.lines) == 1


async def test_what_follows_a_closing_request_is_not_served() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        await peer.send(b"GET /first HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" + SMUGGLED)
        assert (await peer.answer()).headers["connection"] == "close"
        assert await peer.rest() == b""
        assert len(served.lines) == 1


async def _send_in_pieces(peer: Peer, data: bytes, size: int) -> None:
    for start in range(0, len(data), size):
        await peer.send(data[start : start + size])
        await asyncio.sleep(0)
