"""The pure parts of the HTTP layer: chunked framing, heads in any cutting, targets for the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import pytest
from fakes import ManualClock
from hypothesis import given
from hypothesis import strategies as st

from kvobj.api.http.chunked_framing import ChunkedFraming
from kvobj.api.http.limits import HttpSettings
from kvobj.api.http.reply_writer import ReplyWriter
from kvobj.api.http.request_head import HeadError, HeadReader, ParsedHead
from kvobj.api.http.request_log import without_secrets
from kvobj.api.message import Reply
from kvobj.errors import InvalidRequestError


def decode(framing: ChunkedFraming, segments: list[bytes]) -> tuple[bytes, bytes]:
    """The data of a chunked body that arrives in these segments, and what came after its end."""
    data, after = b"", b""
    for segment in segments:
        at = 0
        while at < len(segment):
            if framing.is_ended:
                after += segment[at:]
                break
            at = framing.consume(segment, at)
            taken = segment[at : at + framing.data_left]
            if taken:
                framing.took(len(taken))
            data += taken
            at += len(taken)
    return data, after


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(whole) + 1) for place in places), len(whole)]
    return [whole[start:stop] for start, stop in pairwise(edges)]


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=200), max_size=8),
    places=st.lists(st.integers(0), max_size=20),
    after=st.binary(max_size=20),
)
def test_chunked_data_comes_out_however_it_is_cut(chunks: list[bytes], places: list[int], after: bytes) -> None:
    whole = b"".join(b"%X\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nx: y\r\n\r\n" + after
    framing = ChunkedFraming()
    assert decode(framing, cut(whole, places)) == (b"".join(chunks), after)
    assert framing.is_ended


@given(noise=st.binary(max_size=100), places=st.lists(st.integers(0), max_size=10))
def test_noise_is_refused_or_read_but_never_breaks_the_framing(noise: bytes, places: list[int]) -> None:
    framing = ChunkedFraming()
    try:
        data, after = decode(framing, cut(noise, places))
    except InvalidRequestError:
        return
    assert len(data) + len(after) <= len(noise)
    assert framing.data_left >= 0


@pytest.mark.parametrize(
    "trailers",
    [
        b"x: " + b"a" * 17_000 + b"\r\n",
        b"x: a\r\n" * 17,
        b"no colon\r\n",
        b": empty\r\n",
        b"x\x00: a\r\n",
        b"x: a\n",
        b" folded: a\r\n",
    ],
)
def test_odd_or_endless_trailers_are_refused(trailers: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode(ChunkedFraming(), [b"0\r\n" + trailers + b"\r\n"])


def test_an_endless_size_line_is_refused_before_it_ends() -> None:
    with pytest.raises(InvalidRequestError):
        ChunkedFraming().consume(b"0" * 30)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


HEAD = (
    b"PUT /b/k%2F?uploads HTTP/1.1\r\nHost: h\r\nContent-Length: 7\r\nExpect: 100-continue\r\nX-A: 1\r\nX-A: 2\r\n\r\n"
)


@given(places=st.lists(st.integers(0), max_size=12), rest=st.binary(max_size=30))
def test_a_head_is_read_however_it_is_cut(loop: asyncio.AbstractEventLoop, places: list[int], rest: bytes) -> None:
    reader = HeadReader(loop, HttpSettings(), names={})
    heads: list[ParsedHead] = []
    left = b""
    for segment in cut(b"\r\n" + HEAD + rest, places):
        if heads:
            left += segment
        elif segment:
            head, after = reader.feed(segment)
            if head is not None:
                heads.append(head)
                left = after
    (head,) = heads
    assert (head.method, head.target, head.length, head.expects_continue, head.keep_alive) == (
        "PUT",
        "/b/k%2F?uploads",
        7,
        True,
        True,
    )
    assert head.headers[-2:] == (("x-a", "1"), ("x-a", "2"))
    assert left == rest
    assert not reader.is_within_head


@given(noise=st.binary(min_size=1, max_size=200))
def test_noise_is_no_head(loop: asyncio.AbstractEventLoop, noise: bytes) -> None:
    reader = HeadReader(loop, HttpSettings(), names={})
    with suppress(HeadError):
        head, _ = reader.feed(noise)
        assert head is None


def test_names_seen_are_remembered_within_bounds(loop: asyncio.AbstractEventLoop) -> None:
    names: dict[str, str] = {}
    for index in range(2000):
        HeadReader(loop, HttpSettings(), names=names).feed(b"GET / HTTP/1.1\r\nHost: h\r\nX-%d: y\r\n\r\n" % index)
    assert len(names) <= 512


@given(
    fields=st.lists(st.tuples(st.from_regex(r"[a-z-]{1,10}", fullmatch=True), st.text(max_size=20)), max_size=5),
)
def test_a_reply_has_the_lines_it_was_given_or_is_refused(fields: list[tuple[str, str]]) -> None:
    writer = ReplyWriter(ManualClock(), logging.getLogger("test"))
    try:
        head = writer.head(Reply(200, tuple(fields), b"12345"), keep_alive=False, is_http_10=False)
    except ValueError:
        assert any(set(value) & set("\r\n\0") or max(value, default="") > "\xff" for _, value in fields)
        return
    status, *lines = head.decode("latin-1").split("\r\n")
    assert status == "HTTP/1.1 200 OK"
    assert lines[: len(fields)] == [f"{name}: {value}" for name, value in fields]
    assert lines[len(fields) : -4] == ["content-length: 5", "connection: close"]
    assert lines[-2:] == ["", ""]


@pytest.mark.parametrize(
    ("target", "logged"),
    [
        ("/b/k", "/b/k"),
        ("/b/k?list-type=2&prefix=a%20b", "/b/k?list-type=2&prefix=a%20b"),
        ("/b?X-Amz-Signature=ab&x=1", "/b?X-Amz-Signature=-&x=1"),
        ("/b?X-Amz-Date=1&X-Amz-Expires=9&X-Amz-Signature=ab", "/b?X-Amz-Date=1&X-Amz-Expires=9&X-Amz-Signature=-"),
        ("/b?X-Amz-Date=1&Signature=c&X-Amz-Signature=ab", "/b?X-Amz-Date=1&Signature=-&X-Amz-Signature=-"),
        ("/b?X-Amz-Date=1&X-Amz-Signature=ab?&x=1", "/b?X-Amz-Date=1&X-Amz-Signature=-&x=1"),
        ("/b?x-amz-security-TOKEN=ab", "/b?x-amz-security-TOKEN=-"),
        ("/b?Signature=ab%3D", "/b?Signature=-"),
        ("/b?X-Amz-Signatur%65=ab", "/b?X-Amz-Signatur%65=-"),
        ("/b?a=1&+signature+=ab", "/b?a=1&+signature+=-"),
        ("/b?a&signature", "/b?a&signature"),
    ],
)
def test_a_logged_target_holds_no_signature(target: str, logged: str) -> None:
    assert without_secrets(target) == logged
