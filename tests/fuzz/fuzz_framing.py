"""Fuzz targets for bodies: the aws-chunked decoder and the framing of Transfer-Encoding: chunked.

A case's first line says how it is to be read, the rest are the bytes that arrive. What must hold: only typed refusals; the verdict
does not depend on how the bytes were cut into reads; unsigned framing is read as a decoder that sees all of it at once reads it, and
so it is by the body that receives through a connection's wire, in place, with the framing of many chunks taken out in native code;
and of signed framing nothing ever comes out but what was signed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterable
from random import Random
from typing import Any, Final, TypeVar

from fuzz_mutation import Mutator
from fuzz_signing import SCOPE, SIGNING_KEY, STAMP, signed_chunks, unsigned_chunks

from kvobj.api.aws_chunked import AwsChunkedSource
from kvobj.api.errors import describe
from kvobj.api.http.chunked_framing import ChunkedFraming
from kvobj.api.http.request_body import ChunkedBody
from kvobj.api.sigv4 import ChunkSigning
from kvobj.errors import IncompleteBodyError, InvalidRequestError, KvobjError
from kvobj.wire.body_handover import ReceiveMode, Wire

T = TypeVar("T")
_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})\r\n").match
_TRAILER_LINE: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00-\x08\x0a-\x1f\x7f]*\r\n").match
SEED: Final = "5" * 64
SIGNING: Final = ChunkSigning(SIGNING_KEY, SEED, STAMP, SCOPE)
MAX_PAYLOAD_BYTES: Final = 1 << 20
_TOKENS: Final = (
    b"\r\n", b"0\r\n", b"0\r\n\r\n", b"\r\n\r\n", b"1\r\n", b"a\r\n", b"2000\r\n", b"ffffffffffffffff\r\n", b"00000000000000000\r\n",
    b";chunk-signature=", b";a=b", b"5" * 64, b"x-amz-checksum-crc32:AAAAAA==\r\n", b"x-amz-trailer-signature:", b"a:b\r\n", b":",
    b"x:" + b"y" * 8200 + b"\r\n", b"x:" + b"y" * 8600 + b"\r\n", b"x" * 200 + b":\r\n", b" ", b"\t",
)  # fmt: skip
_DIRECTIVE: Final = re.compile(
    rb"(unsigned|signed|trailer) size=(\d{1,7}) steps=(\d{1,6}),(\d{1,6}) buffer=(\d{1,7})\Z"
)


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing: no event loop is needed."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    work.close()
    raise AssertionError("the body was waited for")


class StepBody:
    """A request body that arrives in pieces of `first`, then `step` bytes."""

    def __init__(self, data: bytes, *, length: int | None, first: int, step: int) -> None:
        self._data = data
        self._at = 0
        self._steps = [first]
        self._step = step
        self.length = length

    def take_whole(self) -> bytes | None:
        return None

    async def accept(self) -> None:
        """Nobody waits for a 100 here."""

    async def read_some(self, limit: int) -> bytes:
        step = self._steps.pop() if self._steps else self._step
        piece = self._data[self._at : self._at + min(limit, max(1, step))]
        self._at += len(piece)
        return piece

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        filled = 0
        while filled < len(buffer):
            piece = await self.read_some(len(buffer) - filled)
            if not piece:
                raise IncompleteBodyError("the body ended early")
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
            on_bytes(filled)


def decode(
    data: bytes, mode: bytes, size: int, *, first: int, step: int, buffer: int, has_length: bool = True
) -> tuple[bytes, dict[str, str]] | None:
    """Payload and trailers, or None where it is refused. Raises what no decoder may. `has_length`: the body tells its own."""
    body = StepBody(data, length=len(data) if has_length else None, first=first, step=step)
    source = AwsChunkedSource(
        body, size, signing=None if mode == b"unsigned" else SIGNING, with_trailer=mode != b"signed"
    )
    out = bytearray(size)
    view = memoryview(out)
    try:
        for start in range(0, size, max(1, buffer)):
            counts: list[int] = []
            piece = view[start : start + max(1, buffer)]
            finish(source.receive_into(piece, counts.append))
            assert counts[-1] == len(piece)
            assert counts == sorted(counts)
        trailers = finish(source.finish())
    except KvobjError as error:
        require_refusal(error)
        return None
    return bytes(out), trailers


def decode_at_once(data: bytes, size: int) -> tuple[bytes, dict[str, str]] | None:
    """What unsigned framing means, by another way: one look at all of it."""
    at, payload, last = 0, b"", 8192
    while True:
        line, found, _ = data[at : at + 8300].partition(b"\r\n")
        if not found or not re.fullmatch(rb"[0-9A-Fa-f]{1,16}", line):
            return None
        length = int(line, 16)
        at += len(line) + 2
        if length == 0:
            break
        if length > size - len(payload) or last < 8192 or data[at + length : at + length + 2] != b"\r\n":
            return None
        payload += data[at : at + length]
        at, last = at + length + 2, length
    front, found, rest = data[at - 2 :].partition(b"\r\n\r\n")
    if not found or rest or len(payload) != size or len(front) > 16 * 1024 + 40:
        return None
    trailers: dict[str, str] = {}
    for line in front[2:].split(b"\r\n") if front else []:
        field = re.fullmatch(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}):[ \t]*([\x20-\x7e]*?)[ \t]*", line)
        if field is None or len(line) > 8256 or field[1].decode().lower() in (*trailers, "x-amz-trailer-signature"):
            return None
        trailers[field[1].decode().lower()] = field[2].decode()
    return (payload, trailers) if len(trailers) <= 16 else None


class AwsChunkedTarget:
    """The aws-chunked decoder, in its three modes."""

    name = "aws-chunked"
    modules = ("kvobj/api/aws_chunked.py",)

    def __init__(self) -> None:
        random = Random(1)
        self._plain: list[tuple[bytes, bytes, bytes, bytes]] = []
        for mode in (b"unsigned", b"signed", b"trailer"):
            for sizes in (
                (5,),
                (),
                (8192, 3),
                (8192, 8192, 8192),
                (8192,) * 9,
                (8192, 70_000, 100),
                (9000, 8192, 1),
                (20_000,),
                (100, 5),
            ):
                pieces = [random.randbytes(size) if size > 5 else b"hello"[:size] for size in sizes]
                trailer = [("x-amz-checksum-crc32", "NhCmhg==")]
                several = [(f"x-{index}", "v" * index) for index in range(5)]
                for trailers in ([], trailer, several):
                    body = (
                        unsigned_chunks(pieces, trailers)
                        if mode == b"unsigned"
                        else signed_chunks(pieces, seed=SEED, trailers=None if mode == b"signed" else trailers)
                    )
                    self._plain.append((mode, b"".join(pieces), body, b"+"))
        self._bodies = [body for _, _, body, _ in self._plain]
        self._signed = {payload for mode, payload, _, _ in self._plain if mode != b"unsigned"}

    def seeds(self) -> list[bytes]:
        return [
            self._directive(mode, len(payload), 1 << 16, 1 << 16, 1 << 19) + body
            for mode, payload, body, _ in self._plain
        ]

    def make(self, random: Random) -> bytes:
        mode, payload, body, _ = random.choice(self._plain)
        size = len(payload)
        if random.random() < 0.92:
            body = Mutator(random, _TOKENS).change(body, self._bodies, most=3)
        if random.random() < 0.1:
            size = max(0, size + random.choice((-8192, -1, 1, 3, 8192)))
        steps = (random.choice((1, 2, 3, 511, 512, 8192, 65536)), random.choice((1, 7, 100, 512, 8192, 65536)))
        if len(body) > 2000 and steps[1] < 100:
            steps = (steps[0], 100)
        return self._directive(mode, size, *steps, random.choice((1000, 8192, 65536))) + body

    @staticmethod
    def _directive(mode: bytes, size: int, first: int, step: int, buffer: int) -> bytes:
        return b"%s size=%d steps=%d,%d buffer=%d\n" % (mode, size, first, step, buffer)

    def run(self, case: bytes) -> str:
        line, _, data = case.partition(b"\n")
        found = _DIRECTIVE.match(line)
        if found is None:
            return "no case"
        mode, size = found[1], min(int(found[2]), MAX_PAYLOAD_BYTES)
        first, step, buffer = int(found[3]), int(found[4]), int(found[5])
        result = decode(data, mode, size, first=first, step=step, buffer=buffer)
        for other in (
            decode(data, mode, size, first=1 << 16, step=1 << 16, buffer=1 << 20),
            decode(data, mode, size, first=first, step=step, buffer=buffer, has_length=False),
            decode(data, mode, size, first=1 << 20, step=1 << 20, buffer=1 << 20, has_length=False),
        ):
            assert result == other, "the verdict depends on how the bytes were cut"
        if mode == b"unsigned":
            assert result == decode_at_once(data, size), "another decoder reads it otherwise"
        elif result is not None:
            assert result[0] in self._signed, "what nobody signed came out"
        return f"{mode.decode()} {'refused' if result is None else 'read'}"


def chunked(sizes: Iterable[int]) -> bytes:
    """A chunked body of so many bytes a chunk, no two alike."""
    random = Random(2)
    return b"".join(b"%x\r\n%s\r\n" % (size, random.randbytes(size)) for size in sizes) + b"0\r\n\r\n"


class HttpChunkedTarget:
    """Transfer-Encoding: chunked: the framing by itself, and the body that is received from a wire."""

    name = "http-chunked"
    modules = ("kvobj/api/http/chunked_framing.py", "kvobj/api/http/request_body.py:ChunkedBody._receive_in_place")
    _SEEDS: Final = (
        b"0\r\n\r\n",
        b"5\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\r\nA\r\n0123456789\r\n0\r\na: b\r\nc:\td\r\n\r\n",
        b"1f4\r\n" + b"x" * 500 + b"\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
        b"0\r\n" + b"n: v\r\n" * 16 + b"\r\n",
        b"0\r\n" + b"n: v\r\n" * 17 + b"\r\n",
        b"0\r\nn:" + b"v" * 16_400 + b"\r\n\r\n",
        b"5;a=b\r\nhello\r\n0\r\n\r\n",
        b"0000000000000005\r\nhello\r\n0\r\n\r\n",
        b"00000000000000005\r\nhello\r\n0\r\n\r\n",
        b"5\nhello\n0\n\n",
        b"5\r\nhello0\r\n\r\n",
        b"-1\r\n\r\n",
        chunked(range(1, 60, 3)),
        chunked([1, 200, 1, 1, 300, 16, 7] * 3) + b"GET / HTTP/1.1\r\n\r\n",
    )

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.close()  # its futures are waited for by hand

    def seeds(self) -> list[bytes]:
        return [b"%d\n" % step + seed for seed in self._SEEDS for step in (1, 3, 100_000)]

    def make(self, random: Random) -> bytes:
        seed = random.choice(self._SEEDS)
        data = Mutator(random, _TOKENS).change(seed, self._SEEDS) if random.random() < 0.9 else seed
        return b"%d %d\n" % (random.choice((1, 2, 3, 17, 100, 4096)), random.choice((1, 20, 150, 1000, 65536))) + data

    def run(self, case: bytes) -> str:
        line, _, data = case.partition(b"\n")
        words = [*line.split(), b"65536"][:2]
        step, buffer = (int(word) if word.isdigit() and len(word) < 7 else 1 for word in words)
        step = max(1, step, len(data) // 2000)
        buffer = max(1, buffer, len(data) // 200)
        result, other = self._read(data, step), self._read(data, len(data) + 1)
        assert result == other, "the verdict depends on how the bytes were cut"
        whole = None if isinstance(result, str) else result
        assert whole == self._read_at_once(data), "another decoder reads it otherwise"
        for mode in ReceiveMode:
            assert whole == self._receive(data, step, buffer, whole, mode), "received, it is read otherwise"
        return result if isinstance(result, str) else "whole"

    def _receive(
        self, data: bytes, step: int, buffer: int, whole: tuple[bytes, bytes] | None, mode: ReceiveMode
    ) -> tuple[bytes, bytes] | None:
        """What a wire that `step` bytes at a time come from gives, in pieces of `buffer`; None where it is refused."""
        expected = b"" if whole is None else whole[0]
        size = len(data) + 1 if whole is None else len(expected)
        wire = Wire(self._loop, lambda _: None, shared=memoryview(bytearray(4096)), mode=mode)
        body = ChunkedBody(wire, expects_continue=False)
        content = memoryview(bytearray(size))

        async def receive_all() -> None:
            for start in range(0, size, buffer):
                piece, told = content[start : start + buffer], [0]

                def tell(count: int, piece: memoryview = piece, start: int = start, told: list[int] = told) -> None:
                    assert told[-1] <= count <= len(piece), "told of more or less than there is"
                    told.append(count)
                    assert whole is None or piece[:count] == expected[start : start + count], "told too early"

                await body.receive_into(piece, tell)
                assert told[-1] == len(piece), "not told of all"
            assert not await body.read_some(1)

        try:
            at = self._feed(receive_all(), wire, data, step)
        except (InvalidRequestError, IncompleteBodyError):
            return None
        assert body.is_finished
        assert body.received == size
        return bytes(content), wire.take_unread() + data[at:]

    @staticmethod
    def _feed(work: Coroutine[Any, Any, None], wire: Wire, data: bytes, step: int) -> int:
        """Run what waits for bytes to its end; returns how many of them it was given."""
        at = 0
        while True:
            try:
                waiter = work.send(None)
            except StopIteration:
                return at
            while not waiter.done():
                room = wire.get_buffer(-1)
                count = min(step, len(room), len(data) - at)
                if not count:
                    assert at == len(data), "no room for what comes"
                    wire.eof_received()
                    continue
                room[:count] = data[at : at + count]
                at += count
                wire.buffer_updated(count)

    @staticmethod
    def _read(data: bytes, step: int) -> tuple[bytes, bytes] | str:
        """Content and what follows the body, or why there is none."""
        framing, content, at, end = ChunkedFraming(), b"", 0, 0
        steps = 0
        while not framing.is_ended:
            steps += 1
            assert steps <= 3 * len(data) + 10, "no progress"
            if at == end:
                if end >= len(data):
                    return "unfinished"
                end = min(len(data), end + step)
            if framing.data_left:
                count = min(framing.data_left, end - at)
                content += data[at : at + count]
                framing.took(count)
                at += count
                continue
            try:
                moved = framing.consume(data[at:end])
            except InvalidRequestError:
                return "refused"
            assert 0 <= moved <= end - at
            at += moved
        return content, data[at:]

    @staticmethod
    def _read_at_once(data: bytes) -> tuple[bytes, bytes] | None:
        at, content = 0, b""
        while True:
            found = _SIZE_LINE(data, at)
            if found is None:
                return None
            at, size = found.end(), int(found[1], 16)
            if not size:
                break
            if data[at + size : at + size + 2] != b"\r\n":
                return None
            content += data[at : at + size]
            at += size + 2
        start = at
        for _ in range(17):
            if data[at : at + 2] == b"\r\n":
                return (content, data[at + 2 :]) if at + 2 - start <= 16 * 1024 else None
            found = _TRAILER_LINE(data, at)
            if found is None:
                return None
            at = found.end()
        return None


def require_refusal(error: KvobjError) -> None:
    """AssertionError unless it is one of the refusals that a client's mistake may lead to."""
    status = describe(error)[1]
    if not (400 <= status < 500 or status == 501):
        raise AssertionError(f"a {status}") from error
