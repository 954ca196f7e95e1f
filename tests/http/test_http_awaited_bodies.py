"""Bodies whose rest is awaited: their requests go on where the last byte arrives, and what follows on them is read."""

from __future__ import annotations

import sys
from types import FrameType

from http_peers import echo, pattern, receive_all, serving

from kvobj.api.message import Reply, RequestBody, RequestHead

LONG_BYTES = 300_000


def is_within_read() -> bool:
    """Whether who asks was called where bytes are received, not woken later."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "buffer_updated":
        frame = frame.f_back
    return frame is not None


def put(body: bytes, *fields: str) -> bytes:
    lines = ["PUT /a HTTP/1.1", "host: x", f"content-length: {len(body)}", *fields]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def test_a_long_body_is_answered_where_its_last_byte_arrives() -> None:
    within: list[bool] = []

    async def handler(_head: RequestHead, body: RequestBody) -> Reply:
        assert body.length is not None
        buffer = bytearray(body.length)
        await body.receive_into(memoryview(buffer), lambda _: None)
        within.append(is_within_read())
        return Reply(200, (), bytes(buffer[-10:]))

    async with serving(handler) as served:
        peer = await served.connect()
        for seed in range(3):
            body = pattern(LONG_BYTES, seed)
            await peer.send(put(body))
            assert (await peer.answer()).body == body[-10:]
    assert within == [True] * 3


async def test_a_body_that_is_asked_for_in_pieces_goes_on_in_its_task() -> None:
    body = pattern(LONG_BYTES)

    async def handler(_head: RequestHead, content: RequestBody) -> Reply:
        buffer = bytearray(LONG_BYTES // 2)
        await content.receive_into(memoryview(buffer), lambda _: None)
        return Reply(200, (), bytes(buffer) + await receive_all(content))

    async with serving(handler) as served:
        peer = await served.connect()
        for _ in range(2):
            await peer.send(put(body))
            assert (await peer.answer()).body == body


async def test_requests_behind_a_long_body_are_read_whatever_their_size() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        for size in (LONG_BYTES, 0, 5000, 70_000, LONG_BYTES, 100):
            body = pattern(size, size)
            await peer.send(put(body, f"x-padding: {'p' * 6000}"))
            answer = await peer.answer()
            assert (answer.status, answer.body[-size:] if size else b"") == (200, body)


async def test_a_request_that_is_glued_to_a_long_body_is_answered_after_it() -> None:
    async with serving(echo) as served:
        peer = await served.connect()
        first, second = pattern(LONG_BYTES, 1), pattern(LONG_BYTES, 2)
        await peer.send(put(first) + put(second) + put(b"x"))
        assert [(await peer.answer()).body[-10:] for _ in range(3)] == [first[-10:], second[-10:], b"x"]


async def test_what_fails_in_a_body_that_is_awaited_is_answered_and_the_next_request_served() -> None:
    async def handler(head: RequestHead, body: RequestBody) -> Reply:
        assert body.length is not None

        def fail(count: int) -> None:
            if count == body.length and head.target == "/a":
                raise ValueError("no")

        await body.receive_into(memoryview(bytearray(body.length)), fail)
        return Reply(204)

    async with serving(handler) as served:
        peer = await served.connect()
        for _ in range(2):
            await peer.send(put(pattern(LONG_BYTES)))
            assert (await peer.answer()).status == 500
            await peer.send(put(pattern(LONG_BYTES)).replace(b"/a", b"/b", 1))
            assert (await peer.answer()).status == 204
