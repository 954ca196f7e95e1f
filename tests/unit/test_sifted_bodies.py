"""Framing that is taken out of a body while it arrives, aws-chunked by Content-Length and inside Transfer-Encoding: chunked: the
same payload, or a refusal, as where it is read line by line, however the bytes come; and what follows the body is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from s3_driver import FakeBody, unsigned_chunks

from kvobj.api.aws_chunked import AwsChunkedSource
from kvobj.api.http.request_body import ChunkedBody, LengthBody
from kvobj.api.message import RequestBody
from kvobj.errors import KvobjError
from kvobj.wire.body_handover import ReceiveMode, Wire
from kvobj.wire.joined_chunks import native_joiner

CHUNK = 8192
TRAILER = ("x-amz-checksum-crc32", "AAAAAA==")
NEXT = b"GET /next HTTP/1.1\r\n\r\n"
TOKENS = (
    b"\r\n",
    b"0\r\n",
    b"0\r\n\r\n",
    b"2000\r\n",
    b"\r\n2000\r\n",
    b"ffffffffffffffff\r\n",
    b"\n",
    b";a=b",
    b"x" * 200,
)
pytestmark = pytest.mark.skipif(native_joiner() is None, reason="no native library")


async def taken(body: RequestBody, size: int, buffer: int) -> tuple[bytes, dict[str, str]]:
    """Payload and trailers; what is told of is there by then, and never changed."""
    source = AwsChunkedSource(body, size, signing=None, with_trailer=True)
    out = bytearray(size)
    told: list[tuple[int, bytes]] = []
    for start in range(0, size, buffer):
        piece = memoryview(out)[start : start + buffer]
        await source.receive_into(piece, _keeper(piece, start, told))
        assert sum(len(each) for _, each in told) == start + len(piece)
    trailers = await source.finish()
    for at, each in told:
        assert bytes(out[at : at + len(each)]) == each
    return bytes(out), trailers


def _keeper(piece: memoryview, start: int, told: list[tuple[int, bytes]]) -> Callable[[int], None]:
    before = 0

    def keep(count: int) -> None:
        nonlocal before
        assert before <= count <= len(piece)
        told.append((start + before, bytes(piece[before:count])))
        before = count

    return keep


def fed(work: Coroutine[Any, Any, Any], wire: Wire, data: bytes, steps: list[int]) -> tuple[Any, bytes]:
    """What the work comes to while the bytes arrive in such steps, and those that it took no notice of."""
    at, turn = 0, 0
    while True:
        try:
            waiter = work.send(None)
        except StopIteration as stop:
            return stop.value, wire.take_unread() + data[at:]
        while not waiter.done():
            room = wire.get_buffer(-1)
            assert len(room), "no room for what comes"
            count = min(steps[turn % len(steps)], len(room), len(data) - at)
            turn += 1
            if not count:
                wire.eof_received()
                continue
            room[:count] = data[at : at + count]
            at += count
            wire.buffer_updated(count)


class ByLine:
    """A body that cannot be sifted."""

    def __init__(self, body: RequestBody) -> None:
        self.length = body.length
        self.accept = body.accept
        self.take_whole = body.take_whole
        self.read_some = body.read_some
        self.receive_into = body.receive_into


def in_pieces(framed: bytes, piece: int) -> bytes:
    """As Transfer-Encoding: chunked."""
    pieces = [framed[start : start + piece] for start in range(0, len(framed), piece)]
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"


def received(
    sent: bytes,
    size: int,
    *,
    steps: list[int],
    buffer: int,
    is_chunked: bool,
    mode: ReceiveMode,
    is_sifted: bool = True,
) -> tuple[tuple[bytes, dict[str, str]], bytes] | None:
    """What comes out of the body of a connection, and what follows it; None where it is refused."""
    loop = asyncio.new_event_loop()
    loop.close()  # its futures are waited for by hand
    wire = Wire(loop, lambda _: None, shared=memoryview(bytearray(4096)), mode=mode)
    body: LengthBody | ChunkedBody = LengthBody(wire, len(sent), expects_continue=False)
    if is_chunked:
        body = ChunkedBody(wire, expects_continue=False)
    try:
        read = taken(body if is_sifted else ByLine(body), size, buffer)
        found, rest = fed(read, wire, sent + NEXT, steps)
    except KvobjError:
        return None
    assert body.is_finished
    assert rest.endswith(NEXT)
    return found, rest


def read_by_line(framed: bytes, size: int) -> tuple[bytes, dict[str, str]] | None:
    """The same by a body that cannot be sifted."""
    try:
        return asyncio.run(taken(FakeBody(framed, step=1 << 20, chunked=False), size, 1 << 20))
    except KvobjError:
        return None


@given(
    sizes=st.lists(st.integers(CHUNK, 3 * CHUNK), min_size=1, max_size=6),
    last=st.integers(1, 40),
    token=st.sampled_from(TOKENS),
    where=st.none() | st.tuples(st.integers(0, 100_000), st.integers(0, 12)),
    off=st.sampled_from((0, 0, 0, 0, 1, -1, 9000)),
    steps=st.lists(st.sampled_from((1, 2, 5, 9, 500, CHUNK, 60_000)), min_size=1, max_size=4),
    buffer=st.sampled_from((1000, CHUNK, 30_001, 1 << 20)),
    piece=st.sampled_from((0, 0, 3000, CHUNK + 8, 50_000)),
    mode=st.sampled_from(ReceiveMode),
)
@example(
    sizes=[CHUNK] * 3,
    last=1,
    token=b"\n",
    where=None,
    off=0,
    steps=[9],
    buffer=1 << 20,
    piece=0,
    mode=ReceiveMode.DIRECT,
)
@example(
    sizes=[CHUNK] * 3,
    last=3,
    token=b"\r\n0\r\n",
    where=(CHUNK + 6, 8),
    off=0,
    steps=[60_000],
    buffer=1 << 20,
    piece=3000,
    mode=ReceiveMode.DIRECT,
)
@example(
    sizes=[CHUNK],
    last=1,
    token=b"\n",
    where=None,
    off=0,
    steps=[60_000],
    buffer=1 << 20,
    piece=CHUNK + 11,  # between it and the next one is more than there is room for
    mode=ReceiveMode.DIRECT,
)
@settings(deadline=None, max_examples=120)
def test_what_is_sifted_is_what_is_read_line_by_line(
    *,
    sizes: list[int],
    last: int,
    token: bytes,
    where: tuple[int, int] | None,
    off: int,
    steps: list[int],
    buffer: int,
    piece: int,
    mode: ReceiveMode,
) -> None:
    data = bytes(index * 7 % 251 for index in range(sum(sizes) + last))
    cuts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    chunks = [data[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(data)], strict=True)]
    framed = unsigned_chunks(chunks, [TRAILER])
    if where is not None:  # something of it is another thing
        at = where[0] % len(framed)
        framed = framed[:at] + token + framed[at + where[1] :]
    size = max(1, len(data) + off)
    steps = [max(step, len(framed) // 500) for step in steps]
    expected = read_by_line(framed, size)
    sent = in_pieces(framed, piece) if piece else framed
    found = received(sent, size, steps=steps, buffer=buffer, is_chunked=bool(piece), mode=mode)
    assert found == (None if expected is None else (expected, NEXT))
    if where is None and not off:
        assert expected == (data, dict([TRAILER]))


@given(
    sizes=st.lists(st.integers(CHUNK, 2 * CHUNK), min_size=1, max_size=4),
    token=st.sampled_from(TOKENS),
    where=st.tuples(st.integers(0, 100_000), st.integers(0, 12)),
    is_at_an_end=st.booleans(),
    steps=st.lists(st.sampled_from((3, 500, CHUNK, 60_000)), min_size=1, max_size=3),
    piece=st.sampled_from((3000, CHUNK + 8, 50_000)),
    mode=st.sampled_from(ReceiveMode),
)
@settings(deadline=None, max_examples=80)
def test_framing_of_http_that_is_not_as_it_should_be_is_seen_as_where_it_is_read_by_line(
    *,
    sizes: list[int],
    token: bytes,
    where: tuple[int, int],
    is_at_an_end: bool,
    steps: list[int],
    piece: int,
    mode: ReceiveMode,
) -> None:
    data = bytes(index * 7 % 251 for index in range(sum(sizes)))
    sent = in_pieces(unsigned_chunks([data[: sizes[0]], data[sizes[0] :]], [TRAILER]), piece)
    at = where[0] % len(sent)
    if is_at_an_end:
        at = max(0, sent.find(b"\r\n", at))
    sent = sent[:at] + token + sent[at + where[1] :]
    steps = [max(step, len(sent) // 300) for step in steps]
    sifted, by_line = (
        received(sent, len(data), steps=steps, buffer=1 << 20, is_chunked=True, mode=mode, is_sifted=is_sifted)
        for is_sifted in (True, False)
    )
    assert sifted == by_line


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(
    "beginning", [b"x" * 200, b"0\r\n\r\n", b"\r\n2000\r\n", b"2000;a=b\r\n", b"2000\n", b"ffffffffffffffff\r\n"]
)
def test_a_body_whose_first_chunk_has_no_right_header_is_refused(beginning: bytes, *, is_chunked: bool) -> None:
    sent = beginning + bytes(9 * CHUNK)
    for step in (1 << 20, 3):
        steps = [len(beginning) + 3, step] if step > CHUNK else [step] * 100 + [CHUNK]
        refused = received(
            in_pieces(sent, len(sent)) if is_chunked else sent,
            9 * CHUNK,
            steps=steps,
            buffer=1 << 20,
            is_chunked=is_chunked,
            mode=ReceiveMode.DIRECT,
        )
        assert refused is None


@pytest.mark.parametrize("piece", [0, 5000])
def test_a_client_that_goes_in_the_middle_is_told_apart_from_one_that_has_sent_all(piece: int) -> None:
    data = bytes(5 * CHUNK)
    framed = unsigned_chunks([data[:CHUNK]] * 5, [TRAILER])
    loop = asyncio.new_event_loop()
    loop.close()
    wire = Wire(loop, lambda _: None, shared=memoryview(bytearray(4096)), mode=ReceiveMode.DIRECT)
    body = ChunkedBody(wire, expects_continue=False) if piece else LengthBody(wire, len(framed), expects_continue=False)
    sent = b"%x\r\n" % len(framed) + framed if piece else framed
    with pytest.raises(KvobjError, match="client went"):
        fed(taken(body, len(data), len(data)), wire, sent[:20_000], [7000])
    assert not body.is_finished


@pytest.mark.parametrize("is_chunked", [False, True])
def test_what_a_receiver_fails_with_ends_the_body_and_leaves_none_of_it_to_the_next_request(
    *, is_chunked: bool
) -> None:
    framed = unsigned_chunks([bytes(CHUNK)] * 20, [TRAILER])
    loop = asyncio.new_event_loop()
    loop.close()
    wire = Wire(loop, lambda _: None, shared=memoryview(bytearray(4096)), mode=ReceiveMode.DIRECT)
    body = (
        ChunkedBody(wire, expects_continue=False)
        if is_chunked
        else LengthBody(wire, len(framed), expects_continue=False)
    )
    sent = in_pieces(framed, 9000) if is_chunked else framed
    source = AwsChunkedSource(body, 20 * CHUNK, signing=None, with_trailer=True)

    def fail(count: int) -> None:
        if count > 5 * CHUNK:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        fed(source.receive_into(memoryview(bytearray(20 * CHUNK)), fail), wire, sent, [7000])
    assert not body.is_finished
    if isinstance(body, LengthBody):
        rest = framed[body.received :]
        assert fed(_rest_of(body), wire, rest + NEXT, [7000]) == (rest, NEXT)
        assert body.is_finished


async def _rest_of(body: LengthBody) -> bytes:
    rest = b""
    while some := await body.read_some(1 << 20):
        rest += some
    return rest


class _OpenTransport(asyncio.Transport):
    """Takes every call and moves nothing."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def test_a_fill_that_failed_and_is_filled_in_the_same_turn_leaves_no_empty_buffer() -> None:
    wire = Wire(
        asyncio.get_running_loop(), lambda _: None, shared=memoryview(bytearray(65536)), mode=ReceiveMode.DIRECT
    )
    wire.connection_made(_OpenTransport())
    target = memoryview(bytearray(1000))
    filling = asyncio.ensure_future(wire.fill(target, lambda _: None, has_more=True, sift=lambda count: (count, 1000)))
    await asyncio.sleep(0)
    wire.fail_reader(KvobjError("stalled"))
    assert len(wire.get_buffer(-1)) == 1000
    wire.buffer_updated(1000)
    assert len(wire.get_buffer(-1)) > 0
    with pytest.raises(KvobjError, match="stalled"):
        await filling
