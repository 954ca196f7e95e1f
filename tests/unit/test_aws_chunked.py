import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_driver import ALICE, FakeBody, chunk_key, signed_chunks, unsigned_chunks

from kvobj.api.aws_chunked import MAX_LINE_BYTES, AwsChunkedSource
from kvobj.api.errors import S3Error
from kvobj.api.sigv4 import ChunkSigning
from kvobj.errors import IncompleteBodyError, KvobjError

STAMP = "20260102T030405Z"
SEED = "5" * 64
SIGNING = ChunkSigning(chunk_key(ALICE, STAMP), SEED, STAMP, "20260102/us-east-1/s3/aws4_request")
CHUNK = 8192


async def take(
    data: bytes,
    size_bytes: int,
    *,
    signing: ChunkSigning | None = None,
    with_trailer: bool = True,
    buffers: int = 1 << 30,
    step: int = 1 << 20,
    chunked: bool = False,
) -> tuple[bytes, dict[str, str], list[int]]:
    source = AwsChunkedSource(
        FakeBody(data, step=step, chunked=chunked), size_bytes, signing=signing, with_trailer=with_trailer
    )
    out = bytearray(size_bytes)
    told: list[int] = []
    for start in range(0, size_bytes, buffers):
        view = memoryview(out)[start : start + buffers]
        counts: list[int] = []
        await source.receive_into(view, counts.append)
        assert counts == sorted(counts)
        assert counts[-1] == len(view)
        told += [start + count for count in counts]
    trailers = await source.finish()
    return bytes(out), trailers, told


def signed(pieces: list[bytes], trailer: tuple[str, str] | None = None) -> bytes:
    return signed_chunks(pieces, user=ALICE, seed=SEED, stamp=STAMP, trailer=trailer)


def split(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@given(
    data=st.binary(max_size=5 * CHUNK),
    chunk_bytes=st.integers(CHUNK, 4 * CHUNK),
    buffers=st.integers(1000, 3 * CHUNK),
    step=st.integers(1, 3 * CHUNK),
    is_signed=st.booleans(),
    chunked=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_the_payload_comes_out_however_it_was_cut(
    *, data: bytes, chunk_bytes: int, buffers: int, step: int, is_signed: bool, chunked: bool
) -> None:
    pieces = split(data, chunk_bytes)
    trailer = ("x-amz-checksum-crc32", "AAAAAA==")
    body = signed(pieces, trailer) if is_signed else unsigned_chunks(pieces, [trailer])
    step = max(step, len(body) // 200)
    found = asyncio.run(
        take(body, len(data), signing=SIGNING if is_signed else None, buffers=buffers, step=step, chunked=chunked)
    )
    assert found[:2] == (data, dict([trailer]))


async def test_one_chunk_may_be_the_whole_unsigned_body() -> None:
    data = bytes(range(256)) * 70_000
    assert (await take(unsigned_chunks([data]), len(data)))[0] == data


async def test_a_signed_chunk_is_announced_only_when_it_is_whole_and_right() -> None:
    pieces = [b"a" * CHUNK, b"b" * CHUNK, b"c" * 10]
    data = b"".join(pieces)
    _, _, told = await take(signed(pieces), len(data), signing=SIGNING, with_trailer=False, step=100)
    assert told == [CHUNK, 2 * CHUNK, len(data)]


@pytest.mark.parametrize("position", [100, CHUNK + 200, -300])
async def test_a_flipped_byte_in_a_signed_chunk_is_refused_before_it_is_announced(position: int) -> None:
    pieces = [b"a" * CHUNK, b"b" * CHUNK]
    body = bytearray(signed(pieces))
    body[position] ^= 1
    source = AwsChunkedSource(FakeBody(bytes(body)), 2 * CHUNK, signing=SIGNING, with_trailer=False)
    told: list[int] = []
    with pytest.raises(KvobjError):
        await source.receive_into(memoryview(bytearray(2 * CHUNK)), told.append)
    assert all(count < 2 * CHUNK for count in told)


async def test_chunks_in_another_order_or_from_another_seed_are_refused() -> None:
    pieces = [b"a" * CHUNK, b"b" * CHUNK]
    with pytest.raises(S3Error, match="signature"):
        await take(
            signed_chunks(pieces, user=ALICE, seed="6" * 64, stamp=STAMP),
            2 * CHUNK,
            signing=SIGNING,
            with_trailer=False,
        )
    body = signed(pieces)
    first_end = body.index(b"\r\n") + 2 + CHUNK + 2
    second_end = first_end + body[first_end:].index(b"\r\n") + 2 + CHUNK + 2
    swapped = body[first_end:second_end] + body[:first_end] + body[second_end:]
    with pytest.raises(S3Error, match="signature"):
        await take(swapped, 2 * CHUNK, signing=SIGNING, with_trailer=False)


async def test_the_zero_chunk_and_the_trailer_must_be_signed() -> None:
    body = signed([b"abc"], ("x-amz-checksum-crc32", "AAAAAA=="))
    assert (await take(body, 3, signing=SIGNING))[1] == {"x-amz-checksum-crc32": "AAAAAA=="}
    with pytest.raises(S3Error, match="signature"):
        await take(body.replace(b"AAAAAA==", b"BAAAAA=="), 3, signing=SIGNING)
    start = body.index(b"x-amz-trailer-signature")
    with pytest.raises(S3Error, match="signature"):
        await take(body[:start] + b"\r\n", 3, signing=SIGNING)
    plain = signed([b"abc"])
    zero = plain.index(b"0;chunk-signature=")
    with pytest.raises(S3Error, match="signature"):
        await take(
            plain[:zero] + b"0;chunk-signature=" + b"0" * 64 + b"\r\n\r\n", 3, signing=SIGNING, with_trailer=False
        )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"3\r\nabc",
        b"3\r\nabc\r\n",
        b"3\r\nabc\r\n0\r\n",
        b"3\r\nab\r\n0\r\n\r\n",
        b"4\r\nabcd\r\n0\r\n\r\n",
        b"2\r\nab\r\n0\r\n\r\n",
        b"3\r\nabc\r\n0\r\n\r\nmore",
        b"3\r\nabc\r\n0\r\n\r\n0\r\n\r\n",
        b"3\nabc\n0\n\n",
        b"3\r\nabcX0\r\n\r\n",
        b"0x3\r\nabc\r\n0\r\n\r\n",
        b"+3\r\nabc\r\n0\r\n\r\n",
        b"-3\r\nabc\r\n0\r\n\r\n",
        b" 3\r\nabc\r\n0\r\n\r\n",
        b"3 \r\nabc\r\n0\r\n\r\n",
        b"3;ext=1\r\nabc\r\n0\r\n\r\n",
        b"3;chunk-signature=" + b"0" * 64 + b"\r\nabc\r\n0\r\n\r\n",
        b"\r\n3\r\nabc\r\n0\r\n\r\n",
        b"ffffffffffffffff\r\nabc\r\n0\r\n\r\n",
        b"00000000000000003\r\nabc\r\n0\r\n\r\n",
        b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\n",
        b"3\r\nabc\r\n0\r\nbad trailer\r\n\r\n",
        b"3\r\nabc\r\n0\r\na:1\r\na:2\r\n\r\n",
        b"3\r\nabc\r\n0\r\na:\x01\r\n\r\n",
        b"3\r\nabc\r\n0\r\n" + b"".join(b"a%d:1\r\n" % index for index in range(17)) + b"\r\n",
        b"3\r\nabc\r\n0\r\na:" + b"1" * 20_000 + b"\r\n\r\n",
        b"3\r\nabc\r\n0\r\nx-amz-trailer-signature:" + b"0" * 64 + b"\r\n\r\n",
    ],
)
async def test_malformed_framing_is_refused(body: bytes) -> None:
    for step in (1, 7, 1 << 20):
        with pytest.raises((S3Error, IncompleteBodyError)):
            await take(body, 3, step=step)


async def test_a_line_without_end_is_bounded() -> None:
    body = FakeBody(b"1" * (1 << 20))
    with pytest.raises(S3Error):
        await AwsChunkedSource(body, 3, signing=None, with_trailer=True).receive_into(
            memoryview(bytearray(3)), lambda _: None
        )
    assert body.unread_bytes > (1 << 20) - 2 * MAX_LINE_BYTES


async def test_a_signed_chunk_that_is_too_large_is_refused_before_it_is_read() -> None:
    size_bytes = 17 << 20
    body = FakeBody(f"{size_bytes:x};chunk-signature={'0' * 64}\r\n".encode())
    with pytest.raises(S3Error, match="too large"):
        await AwsChunkedSource(body, size_bytes, signing=SIGNING, with_trailer=False).receive_into(
            memoryview(bytearray(64)), lambda _: None
        )


async def test_only_the_last_chunk_may_be_small() -> None:
    pieces = [b"a" * 100, b"b" * 100]
    with pytest.raises(S3Error) as caught:
        await take(signed(pieces), 200, signing=SIGNING, with_trailer=False)
    assert (caught.value.code, caught.value.status) == ("InvalidChunkSizeError", 403)


async def test_trailers_without_being_announced_by_the_mode_are_refused() -> None:
    body = signed([b"abc"])[:-2] + b"x-amz-checksum-crc32:AAAAAA==\r\n\r\n"
    with pytest.raises(S3Error) as caught:
        await take(body, 3, signing=SIGNING, with_trailer=False)
    assert caught.value.code == "MalformedTrailerError"


@given(st.binary(max_size=200), st.integers(0, 20), st.booleans())
@settings(deadline=None)
def test_any_bytes_are_a_body_or_a_refusal(data: bytes, size_bytes: int, is_signed: bool) -> None:  # noqa: FBT001 - drawn
    with contextlib.suppress(S3Error, IncompleteBodyError):
        asyncio.run(take(data, size_bytes, signing=SIGNING if is_signed else None))
