"""aws-chunked bodies over real sockets, by Content-Length and inside Transfer-Encoding: chunked: the payload is received where it
stays and the framing taken out of it there, whatever the sizes of chunks, pieces and buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from http_peers import TIMEOUT_SECONDS, Peer, Served, pattern, serving
from s3_driver import unsigned_chunks

from kvobj.api.aws_chunked import AwsChunkedSource
from kvobj.api.message import Reply, RequestBody, RequestHead
from kvobj.errors import KvobjError
from kvobj.wire.body_handover import ReceiveMode

KIB = 1024
MIB = 1024 * KIB
TRAILER = ("x-amz-checksum-crc32", "AAAAAA==")


class Receiver:
    """A handler that takes the payload off `size` bytes of aws-chunked body, `buffer_bytes` at a time."""

    def __init__(self, size: int, buffer_bytes: int) -> None:
        self.size = size
        self.buffer_bytes = buffer_bytes
        self.payloads: list[bytes] = []
        self.announced: list[tuple[int, bytes]] = []
        self.error: KvobjError | None = None

    async def handle(self, head: RequestHead, body: RequestBody) -> Reply:
        if head.method == "GET":
            return Reply(200, (), b"still here")
        memory = bytearray(self.size)
        source = AwsChunkedSource(body, self.size, signing=None, with_trailer=True)
        try:
            for start in range(0, self.size, self.buffer_bytes):
                view = memoryview(memory)[start : start + self.buffer_bytes]
                await source.receive_into(view, self._keeper(view, start))
            assert await source.finish() == dict([TRAILER])
        except KvobjError as error:
            self.error = error
            return Reply(400, close=True)
        self.payloads.append(bytes(memory))
        return Reply(200)

    def _keeper(self, view: memoryview, start: int) -> Callable[[int], None]:
        told = 0

        def keep(count: int) -> None:
            nonlocal told
            assert told <= count <= len(view)
            self.announced.append((start + told, bytes(view[told:count])))
            told = count

        return keep


def split(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def request(body: bytes, piece_bytes: int | None) -> bytes:
    """The request whole; inside Transfer-Encoding: chunked where `piece_bytes` is given."""
    if piece_bytes is None:
        return b"PUT /b/k HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in split(body, piece_bytes))
    return b"PUT /b/k HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"


async def exchange(served: Served, sent: bytes, cuts: Sequence[int]) -> Peer:
    """Send a request in these cuts, and another one right behind it."""
    peer = await served.connect()
    sender = asyncio.ensure_future(peer.send(*(sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True))))
    assert (await peer.answer()).status == 200
    await asyncio.wait_for(sender, TIMEOUT_SECONDS)
    await peer.send(b"GET /b/k HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await peer.answer()).body == b"still here"
    return peer


@pytest.mark.parametrize("mode", [ReceiveMode.DIRECT, ReceiveMode.COPIED])
@pytest.mark.parametrize("piece_bytes", [None, 5000, 16 * KIB, 64 * KIB, 700 * KIB, 4 * MIB])
@pytest.mark.parametrize(
    ("chunk_bytes", "buffer_bytes"),
    [(8 * KIB, 3 * MIB), (64 * KIB, MIB), (64 * KIB, 100_001), (MIB, 3 * MIB), (MIB, 300_000), (3 * MIB, 3 * MIB)],
)
async def test_the_payload_lies_where_it_belongs_and_nothing_announced_is_changed_afterwards(
    mode: ReceiveMode, piece_bytes: int | None, chunk_bytes: int, buffer_bytes: int
) -> None:
    data = pattern(2 * MIB + 12_345)
    receiver = Receiver(len(data), buffer_bytes)
    sent = request(unsigned_chunks(split(data, chunk_bytes), [TRAILER]), piece_bytes)
    async with serving(receiver.handle, receive_mode=mode) as served:
        await exchange(served, sent, [])
        await exchange(served, sent, [70, 100, 150_000, 150_001, 400_000, len(sent) - 3])
    assert receiver.payloads == [data, data]
    for start, piece in receiver.announced:
        assert piece == data[start : start + len(piece)]


async def test_what_follows_the_end_of_a_chunked_body_is_the_next_request() -> None:
    data = pattern(300 * KIB)
    receiver = Receiver(len(data), len(data))
    sent = request(unsigned_chunks(split(data, 64 * KIB), [TRAILER]), 64 * KIB)
    async with serving(receiver.handle) as served:
        peer = await served.connect()
        await peer.send(sent + sent + b"GET /b/k HTTP/1.1\r\nhost: x\r\n\r\n")
        assert [(await peer.answer()).status for _ in range(2)] == [200, 200]
        assert (await peer.answer()).body == b"still here"
    assert receiver.payloads == [data, data]


@pytest.mark.parametrize("piece_bytes", [None, 64 * KIB])
async def test_a_body_that_brings_less_than_it_decodes_to_is_refused_without_waiting_for_more(
    piece_bytes: int | None,
) -> None:
    data = pattern(500 * KIB)
    receiver = Receiver(len(data) + MIB, len(data) + MIB)
    async with serving(receiver.handle) as served:
        peer = await served.connect()
        await peer.send(request(unsigned_chunks(split(data, 64 * KIB), [TRAILER]), piece_bytes))
        assert (await peer.answer()).status == 400
    assert receiver.error is not None
    assert receiver.payloads == []
