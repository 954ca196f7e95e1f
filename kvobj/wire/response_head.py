"""The head of an HTTP/1.1 answer, read strictly: what is no answer of an HTTP server is refused, never guessed at. Pure.

Source: RFC 9112, §2.1, §4, §5, §6.3 and §7.1. Stricter than it asks of a client in that a line ends in CRLF, folded lines and both
kinds of length at once are refused, and `chunked` is the one transfer coding.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import msgspec

HEAD_BYTES_MAX: Final = 64 * 1024
FIELDS_MAX: Final = 256
CHUNK_LINE_BYTES_MAX: Final = 256
HEAD_END: Final = b"\r\n\r\n"

_STATUS_LINE: Final = re.compile(r"HTTP/1\.([01]) ([1-5][0-9]{2})(?: .*)?")
_is_name: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?\r\n")
_LENGTH_DIGITS_MAX: Final = 18
_BODILESS: Final = frozenset({204, 304})
_FIRST_FINAL_STATUS: Final = 200


class BrokenAnswerError(Exception):
    """What came is not an answer, or ended too early."""


class ResponseHead(msgspec.Struct, frozen=True):
    """A parsed head. Header names are lower case, several fields of a name are joined by commas.

    `length`: bytes of the body; None where it ends with the last chunk (`is_chunked`) or with the connection. `is_kept`: whether
    another request may follow on the connection once the body is read.
    """

    status: int
    headers: dict[str, str]
    length: int | None
    is_chunked: bool
    is_kept: bool

    @property
    def is_interim(self) -> bool:
        """Whether another head follows (1xx)."""
        return self.status < _FIRST_FINAL_STATUS


def parse_head(raw: bytes | bytearray, *, method: str) -> ResponseHead:
    """A head with its blank line, and nothing behind it; `method` of the request it answers. `BrokenAnswerError`."""
    # The same lines and names come again and again: they are looked at once, not by a pattern over each head (6.8, then 5.3 µs).
    text = raw.decode("latin-1")
    lines = text.split("\r\n")
    ends = len(lines) - 1
    if not text.endswith("\r\n\r\n") or text.count("\r") != ends or text.count("\n") != ends or "\0" in text:
        raise BrokenAnswerError("no head of an HTTP answer")
    if len(lines) - 2 > FIELDS_MAX:
        raise BrokenAnswerError("a head with too many fields")
    is_http_11, status = _status_of(lines[0])
    headers: dict[str, str] = {}
    for line in lines[1:-2]:
        written, colon, value = line.partition(":")
        if not colon:
            raise BrokenAnswerError("no head of an HTTP answer")
        name, value = _name_of(written), value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    length, is_chunked = _framing(status, method, headers, is_http_11=is_http_11)
    is_kept = is_http_11
    if "connection" in headers:
        options = headers["connection"].lower().replace(" ", "").split(",")
        is_kept = "close" not in options if is_http_11 else "keep-alive" in options
    return ResponseHead(status, headers, length, is_chunked, is_kept and (is_chunked or length is not None))


@lru_cache(maxsize=64)
def _status_of(line: str) -> tuple[bool, int]:
    """Whether it is HTTP/1.1, and the status. The few lines that a server has are remembered."""
    found = _STATUS_LINE.fullmatch(line)
    if found is None:
        raise BrokenAnswerError("no head of an HTTP answer")
    return found[1] == "1", int(found[2])


@lru_cache(maxsize=256)
def _name_of(written: str) -> str:
    """A field's name in lower case. The few names that a server uses are remembered."""
    if not _is_name(written):
        raise BrokenAnswerError("no head of an HTTP answer")
    return written.lower()


def parse_chunk_line(raw: bytes | bytearray) -> int:
    """How many bytes the next chunk has; 0 is the last. The line with its CRLF; extensions are ignored. `BrokenAnswerError`."""
    line = _CHUNK_LINE.fullmatch(raw)
    if line is None:
        raise BrokenAnswerError("a chunk without its length")
    return int(line[1], 16)


def _framing(status: int, method: str, headers: dict[str, str], *, is_http_11: bool) -> tuple[int | None, bool]:
    """Length and whether chunked (RFC 9112 §6.3)."""
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if length is not None and not (length.isascii() and length.isdigit() and len(length) <= _LENGTH_DIGITS_MAX):
        raise BrokenAnswerError("a length that is none")
    if coding is not None and (length is not None or coding.lower() != "chunked" or not is_http_11):
        raise BrokenAnswerError("a transfer coding that is not chunked, or a length beside it")
    if method == "HEAD" or status < _FIRST_FINAL_STATUS or status in _BODILESS:
        return 0, False
    if coding is not None:
        return None, True
    return (None if length is None else int(length)), False
