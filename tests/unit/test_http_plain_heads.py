"""Plain heads are read without aiohttp's parser: what it takes, both read alike."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvobj.api.http import request_head
from kvobj.api.http.limits import HttpSettings
from kvobj.api.http.plain_head import read_plain
from kvobj.api.http.request_head import HeadError, HeadReader, ParsedHead


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


_NAMES = st.sampled_from(
    [
        "Host",
        "host",
        "Content-Length",
        "content-length",
        "Connection",
        "Expect",
        "Transfer-Encoding",
        "Upgrade",
        "TE",
        "Content-Encoding",
        "X-Amz-Date",
        "x-a",
        "x:",
        "Sec-WebSocket-Key1",
        "Authorization",
        "Content-Type",
    ]
) | st.sampled_from(["bad name", ""])
_VALUES = (
    st.sampled_from(
        [
            "h",
            "127.0.0.1:9000",
            "0",
            "7",
            "007",
            "+7",
            "7,7",
            "99999999999999999999",
            "close",
            "Keep-Alive",
            "keep-alive",
            "gzip",
            "100-continue",
            "100-Continue",
            "chunked",
            "websocket",
            "h/x",
            "1_0",
            "ä",
        ]
    )
    | st.sampled_from(["", " x", "x ", "x\ty", "a  b", "a\x00b"])
    | st.text(st.characters(max_codepoint=0xFF, exclude_characters="\r\n"), max_size=8)
)
_FIELDS = st.lists(st.tuples(_NAMES, st.sampled_from([": ", ":", ":  ", " : "]), _VALUES), max_size=5)
_LINES = st.sampled_from(["GET", "PUT", "OPTIONS", "get", "M-SEARCH"]).flatmap(
    lambda method: st.sampled_from(
        [
            "/",
            "/b/k",
            "//h/k",
            "/b/k%2F?x=y&z",
            "/b/a b",
            "/b#f",
            "*",
            "http://h/k",
            "/b/k[1]",
            "/ä",
            "/?",
            "/b/%zz",
            "/a;b:c@d",
        ]
    ).flatmap(
        lambda target: st.sampled_from(["1.1", "1.0", "2.0"]).map(lambda version: f"{method} {target} HTTP/{version}")
    )
)


def verdict(reader: HeadReader, head: bytes) -> tuple[ParsedHead | None, bytes] | str:
    try:
        return reader.feed(head)
    except HeadError as error:
        return error.fault.name


@given(line=_LINES, fields=_FIELDS)
@example(
    line="PUT /b/k HTTP/1.1",
    fields=[("Host", ": ", "h"), ("Content-Length", ": ", "7"), ("Expect", ": ", "100-continue")],
)
@example(line="PUT /b/k HTTP/1.1", fields=[("Host", ": ", "h"), ("Transfer-Encoding", ": ", "chunked")])
@example(
    line="PUT /b/k HTTP/1.1",
    fields=[("Host", ": ", "h"), ("Transfer-Encoding", ": ", "chunked"), ("Expect", ": ", "100-Continue")],
)
@example(
    line="PUT /b/k HTTP/1.1",
    fields=[("Host", ": ", "h"), ("Transfer-Encoding", ": ", "chunked"), ("Content-Length", ": ", "7")],
)
@example(line="GET /b/k HTTP/1.1", fields=[("Host", ": ", "h"), ("host", ": ", "g")])
@example(line="GET /b/k HTTP/1.1", fields=[("Host", ": ", "h"), ("Connection", ": ", "close")])
@example(line="GET /b/k HTTP/1.1", fields=[("x-a", ": ", "h")])
def test_the_short_way_reads_a_head_as_the_parser_does(
    loop: asyncio.AbstractEventLoop, line: str, fields: list[tuple[str, str, str]]
) -> None:
    text = line + "\r\n" + "".join([f"{name}{colon}{value}\r\n" for name, colon, value in fields]) + "\r\n"
    head = text.encode("latin-1")
    told = verdict(HeadReader(loop, HttpSettings(), names={}), head)
    if not isinstance(told, str) and told[0] is not None:
        assert told[0].raw in {b"", head}
        told = replace(told[0], raw=b""), told[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_head, "read_plain", lambda *_: None)
        assert told == verdict(HeadReader(loop, HttpSettings(), names={}), head)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /bucket/key?list-type=2 HTTP/1.1\r\nHost: h\r\nUser-Agent: Boto3/1.40 md/Botocore#1.40\r\nX-Amz-Date: d\r\n\r\n",
        b"PUT /bucket/a%20key HTTP/1.1\r\nhost: h:9000\r\ncontent-length: 4096\r\nConnection: Keep-Alive\r\n\r\n",
        b"PUT /bucket/key HTTP/1.1\r\nHost: h\r\nContent-Encoding: aws-chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_what_sdks_send_is_read_the_short_way(head: bytes) -> None:
    read = read_plain(head, {})
    assert read is not None
    assert "host" in read[2]


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 7\r\n\r\n",
        b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: Chunked\r\n\r\n",
        b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding:chunked\r\n\r\n",
        b"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTrailer: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nHost: g\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\nX: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : h\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\x80 HTTP/1.1\r\nHost: h\r\n\r\n",
    ],
)
def test_what_two_parsers_might_read_differently_is_left_to_the_strict_one(head: bytes) -> None:
    assert read_plain(head, {}) is None


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_the_bytes_of_a_posts_head_are_not_kept_where_a_body_of_unknown_length_follows(
    loop: asyncio.AbstractEventLoop, method: str
) -> None:
    # A call that is repeated is answered from them alone, and the chunks behind it would be read as the next one.
    reader = HeadReader(loop, HttpSettings(), names={})
    sent = method.encode() + b" / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    head, rest = reader.feed(sent + b"0\r\n\r\n")
    assert head is not None
    assert (head.length, head.raw, rest) == (None, sent if method == "PUT" else b"", b"0\r\n\r\n")


def test_more_fields_than_allowed_are_refused_in_plain_heads_too(loop: asyncio.AbstractEventLoop) -> None:
    reader = HeadReader(loop, HttpSettings(header_fields=3), names={})
    fields = b"".join(b"X-%d: y\r\n" % index for index in range(4))
    with pytest.raises(HeadError, match="too many header fields"):
        reader.feed(b"GET / HTTP/1.1\r\n" + fields + b"\r\n")
