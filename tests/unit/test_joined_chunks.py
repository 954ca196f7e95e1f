"""Framing that is taken out of memory in one native call: only what is plainly right, and never more than the caller allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.wire.joined_chunks import NO_LIMIT, JoinChunks, JoinedChunks, native_joiner

native = native_joiner()
pytestmark = pytest.mark.skipif(native is None, reason="no native library")


def joined(data: bytes, first: int, *, limit: int = NO_LIMIT, minimum: int = 0) -> tuple[bytes, bytes, JoinedChunks]:
    """The data that was joined, what follows where it stopped, and its word; `data` begins with a chunk of `first` bytes."""
    join: JoinChunks | None = native
    assert join is not None
    memory = bytearray(data)
    end = join(memoryview(memory), JoinedChunks(0, 0, first, first, 1), limit, minimum)
    return bytes(memory[: end.filled]), data[end.at :], end


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8), st.integers(0, 60), st.sampled_from("xX"))
def test_chunks_are_joined_up_to_where_what_has_come_ends(chunks: list[bytes], cut: int, digits: str) -> None:
    framed = chunks[0] + b"".join(b"\r\n" + format(len(each), digits).encode() + b"\r\n" + each for each in chunks[1:])
    came = framed[: max(1, len(framed) - cut)]
    data, rest, end = joined(came, len(chunks[0]))
    assert b"".join(chunks).startswith(data)
    assert len(rest) <= len(b"\r\n12c\r\n")
    if not cut:
        assert (data, rest, end.chunk_left, end.chunks) == (b"".join(chunks), b"", 0, len(chunks))
        assert end.chunk_bytes == len(chunks[-1])


@pytest.mark.parametrize(
    "next_chunk",
    [
        b"\r\n0\r\n\r\n",
        b"\r\n5;a=b\r\nabcde",
        b"\r\n 5\r\nabcde",
        b"\r\n\r\nabcde",
        b"\n5\nabcde",
        b"\r\n5\nabcde",
        b"\r\n+5\r\nabcde",
        b"\r\n00000000000000005\r\nabcde",
        b"ab5\r\nabcde",
    ],
)
def test_what_is_the_end_or_not_a_chunk_is_left_to_the_caller(next_chunk: bytes) -> None:
    data, rest, end = joined(b"first" + next_chunk, 5)
    assert (data, rest) == (b"first", next_chunk)
    assert (end.chunk_left, end.chunk_bytes, end.chunks) == (0, 5, 1)


def test_a_chunk_beyond_the_limit_or_behind_one_that_is_too_small_is_left_to_the_caller() -> None:
    framed = b"abcd\r\n3\r\nefg\r\n2\r\nhi"
    assert joined(framed, 4, limit=8)[:2] == (b"abcdefg", b"\r\n2\r\nhi")
    assert joined(framed, 4, limit=9)[:2] == (b"abcdefghi", b"")
    assert joined(framed, 4, minimum=4)[:2] == (b"abcdefg", b"\r\n2\r\nhi")
    assert joined(framed, 4, minimum=5)[:2] == (b"abcd", b"\r\n3\r\nefg\r\n2\r\nhi")


def test_the_largest_sizes_do_not_overflow() -> None:
    data, rest, end = joined(b"a\r\nfffffffffffffff0\r\nbcd", 1)
    assert (data, rest, end.chunk_left) == (b"abcd", b"", 2**64 - 16 - 3)
    assert joined(b"a\r\nffffffffffffffff\r\nbcd", 1)[1] == b"\r\nffffffffffffffff\r\nbcd"
    assert joined(b"a\r\nfffffffffffffff0\r\nbcd", 1, limit=2**40)[1] == b"\r\nfffffffffffffff0\r\nbcd"
