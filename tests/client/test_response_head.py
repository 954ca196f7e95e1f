"""Heads of answers: what is one is read as it stands, anything else is refused, and nothing makes the parser fail otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.wire.response_head import BrokenAnswerError, ResponseHead, parse_chunk_line, parse_head

_names = st.from_regex(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", fullmatch=True).filter(
    lambda name: name.lower() not in ("content-length", "transfer-encoding", "connection")
)
_values = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=40).map(
    lambda value: value.strip(" \t")
)


def head(*fields: str, status: str = "HTTP/1.1 200 OK") -> bytes:
    return "\r\n".join([status, *fields, "", ""]).encode("latin-1")


@given(
    st.sampled_from(["HTTP/1.1 200 OK", "HTTP/1.1 200", "HTTP/1.0 404 ", "HTTP/1.1 503 Slow Down ~"]),
    st.dictionaries(_names.map(str.lower), _values, max_size=10),
    st.integers(0, 2**50),
)
def test_what_a_head_says_is_what_is_read(status: str, fields: dict[str, str], length: int) -> None:
    raw = head(
        *(f"{name.upper()}: \t{value} \t" for name, value in fields.items()), f"Content-Length:{length}", status=status
    )
    parsed = parse_head(raw, method="GET")
    assert parsed.status == int(status[9:12])
    assert parsed.headers == {**fields, "content-length": str(length)}
    assert parsed.length == length
    assert parsed.is_kept == status.startswith("HTTP/1.1")


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda raw: head()[:-2] + raw + b"\r\n\r\n"))
def test_any_bytes_are_a_head_or_refused(raw: bytes) -> None:
    try:
        parsed = parse_head(raw, method="GET")
    except BrokenAnswerError:
        return
    assert isinstance(parsed, ResponseHead)
    assert raw.startswith(b"HTTP/1.")
    assert raw.endswith(b"\r\n\r\n")
    assert raw.count(b"\r\n\r\n") == 1


@given(st.binary(max_size=40) | st.integers(0, 2**70).map(lambda size: f"{size:x}\r\n".encode()))
def test_any_line_is_a_chunks_length_or_refused(raw: bytes) -> None:
    try:
        size_bytes = parse_chunk_line(raw)
    except BrokenAnswerError:
        return
    assert size_bytes == int(raw.split(b";")[0], 16)


@pytest.mark.parametrize(
    "raw",
    [
        head("content-length: 5", "content-length: 5"),
        head("content-length: 5", "transfer-encoding: chunked"),
        head("content-length: +5"),
        head("content-length: 5 5"),
        head("content-length: "),
        head("content-length: " + "9" * 19),
        head("transfer-encoding: gzip, chunked"),
        head("transfer-encoding: chunked", "transfer-encoding: chunked"),
        head("transfer-encoding: chunked", status="HTTP/1.0 200 OK"),
        head("folded: a", " b"),
        head("space before : colon"),
        head("no colon"),
        head(": no name"),
        head("bare: a\nb"),
        head("bare: a\rb"),
        head("nul: \0"),
        head(status="HTTP/2 200 OK"),
        head(status="HTTP/1.1 20 OK"),
        head(status="HTTP/1.1  200 OK"),
        head(status="ICY 200 OK"),
        head(*(f"x-{number}: a" for number in range(300))),
        head().replace(b"\r\n", b"\n"),
        head() + b"x",
    ],
)
def test_what_two_readers_could_take_for_two_things_is_refused(raw: bytes) -> None:
    with pytest.raises(BrokenAnswerError):
        parse_head(raw, method="GET")


def test_how_a_body_ends_follows_from_method_status_and_fields() -> None:
    chunked = "transfer-encoding: Chunked"

    def framing(raw: bytes, method: str = "GET") -> tuple[int | None, bool, bool]:
        parsed = parse_head(raw, method=method)
        return parsed.length, parsed.is_chunked, parsed.is_kept

    assert framing(head("content-length: 7")) == (7, False, True)
    assert framing(head(chunked)) == (None, True, True)
    assert framing(head()) == (None, False, False), "up to the end of the connection"
    assert framing(head("content-length: 7"), "HEAD") == (0, False, True)
    assert framing(head(chunked), "HEAD") == (0, False, True)
    assert framing(head(status="HTTP/1.1 204 No Content")) == (0, False, True)
    assert framing(head("content-length: 9", status="HTTP/1.1 304 Not Modified")) == (0, False, True)
    assert framing(head("content-length: 7", "connection: keep-alive, Close")) == (7, False, False)
    assert framing(head("content-length: 7", status="HTTP/1.0 200 OK")) == (7, False, False)
    assert framing(head("content-length: 7", "connection: Keep-Alive", status="HTTP/1.0 200 OK")) == (7, False, True)
    assert parse_head(head(status="HTTP/1.1 100 Continue"), method="PUT").is_interim
    assert parse_head(head("a: 1", "A: 2"), method="GET").headers == {"a": "1, 2"}
