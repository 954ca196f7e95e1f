"""From a connection's bytes to one request head, by aiohttp's compiled parser (llhttp, strict), or a typed refusal.

Plain heads, which nearly all are, never get there (`plain_head`): to its URL, its multi-dictionary and the rest that nobody here
asks for it owes three quarters of what a head costs.

A parser lives for one head: it is cheap to make (0.4 µs of the 3 µs a head takes), it is fed up to the blank line and no
further, and so its idea of a body never matters. What it lets pass and we do not: a request line with other white space or
another protocol's name, a target with a fragment, a Transfer-Encoding other than plain chunked, chunked under HTTP/1.0, versions
other than 1.0 and 1.1, CONNECT, a target that is neither absolute path nor absolute URL, a Host that is none or not the URL's.
The target is never normalised. Sources: RFC 9112 §2.2, §3, §6.1, §7.2; RFC 9110 §7.2.
"""

from __future__ import annotations

import asyncio
import re
from typing import NoReturn

import msgspec
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError, LineTooLong
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage

from kvobj.api.http.limits import HttpSettings
from kvobj.api.http.plain_head import lower_name, read_plain
from kvobj.api.message import HttpFault
from kvobj.errors import ConfigurationError, InvalidRequestError

_END = b"\r\n\r\n"
_PARSER_READ_BYTES = 65536
_LONGEST_LENGTH_DIGITS = 19

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(_TOKEN + rb" [!-\"$-~]+ HTTP/1\.[01]\r\n").match
# What a request line that is refused still tells, for the answer and the log: method, target, version.
_GLIMPSE = re.compile(rb"(" + _TOKEN + rb") ([^\x00-\x20\x7f]+)(?: ([^\r\n]*))?").match
_OTHER_VERSION = re.compile(rb"HTTP/\d+\.\d+").fullmatch
_HTTP_1 = re.compile(rb"HTTP/1\.[01]").fullmatch
_FRAMING = frozenset({"host", "content-length", "transfer-encoding", "expect"})
_NO_HOST = re.compile(r"[\s/?#@\\<>\"]").search


class HeadError(InvalidRequestError):
    """A head that is refused; never leaves the HTTP layer: it is answered, then the connection closes.

    `method` and `target` are what could be read of the request line, or empty.
    """

    def __init__(self, message: str, fault: HttpFault = HttpFault.MALFORMED) -> None:
        super().__init__(message)
        self.fault = fault
        self.method = ""
        self.target = ""

    def glimpse(self, head: bytes) -> None:
        """Take method and target from the beginning of a head, as far as they can be read."""
        found = _GLIMPSE(head)
        if found is not None:
            self.method, self.target = found[1].decode("latin-1"), found[2].decode("latin-1")


class ParsedHead(msgspec.Struct, frozen=True):
    """One request head. `length` is None under Transfer-Encoding: chunked, and 0 where there is no body. `expects_continue`: the
    client asks to be told to continue, be it with an empty body."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    length: int | None
    keep_alive: bool
    expects_continue: bool
    is_http_10: bool
    raw: bytes = b""
    """See `RequestHead.raw`."""


class _NoFlowControl(BaseProtocol):
    """Stands where the parser expects a protocol: it is never given a body to hold back."""

    __slots__ = ()

    def pause_reading(self) -> None:
        """Nothing flows."""

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002 - aiohttp's signature
        """Nothing flows."""


class HeadReader:
    """Cuts heads out of segments and parses them. One a connection."""

    __slots__ = (
        "_checked_bytes",
        "_fields_max",
        "_head_bytes_max",
        "_line_bytes_max",
        "_loop",
        "_names",
        "_partial",
        "_protocol",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, settings: HttpSettings, *, names: dict[str, str]) -> None:
        """`names` caches lower-case header names and may be shared by all connections."""
        self._loop = loop
        self._line_bytes_max = settings.request_line_bytes
        self._head_bytes_max = settings.head_bytes
        self._fields_max = settings.header_fields
        self._names = names
        self._partial = b""
        self._checked_bytes = 0
        self._protocol = _NoFlowControl(loop)

    @property
    def is_within_head(self) -> bool:
        """Whether a head has begun and not ended."""
        return bool(self._partial)

    def overdue(self) -> HeadError:
        """The refusal of a head that has begun and does not end."""
        error = HeadError("no complete request head in time", HttpFault.TIMEOUT)
        error.glimpse(self._partial)
        return error

    def feed(self, segment: bytes) -> tuple[ParsedHead | None, bytes]:
        """Take a segment; return the head it completes, if any, and the bytes after it. Raises `HeadError`."""
        # The blank line may straddle two segments.
        searched = max(0, len(self._partial) - len(_END))
        if self._partial:
            segment = self._partial + segment
        elif segment[:1] in (b"\r", b"\n"):
            segment = segment.lstrip(b"\r\n")  # RFC 9112 §2.2: blank lines before a request line are ignored
        end = segment.find(_END, searched)
        try:
            if end < 0:
                self._partial = segment
                self._check_beginning(segment)
                return None, b""
            self._partial = b""
            self._checked_bytes = 0
            end += len(_END)
            self._check_size(segment, end)
            plain = self._plain(segment if end == len(segment) else segment[:end])
            if plain is not None:
                return plain, segment[end:]
            if _REQUEST_LINE(segment) is None:
                _refuse_line(segment)
            message = self._parse(segment if end == len(segment) else segment[:end])
            return self._check(message), segment[end:]
        except HeadError as error:
            error.glimpse(segment)
            raise

    def _plain(self, head: bytes) -> ParsedHead | None:
        """The head, if it is a plain one."""
        read = read_plain(head, self._names)
        if read is None or len(read[2]) > self._fields_max or "host" not in read[2]:
            return None
        method, target, fields = read
        length: int | None = None if "transfer-encoding" in fields else 0
        _check_field("host", fields["host"])
        if "content-length" in fields:
            value = fields["content-length"]
            if not value.isdigit():
                return None
            length = _length(value)
        expects_continue = "expect" in fields and fields["expect"].lower() == "100-continue"
        return ParsedHead(
            method=method,
            target=target,
            headers=tuple(fields.items()),
            length=length,
            keep_alive=True,
            expects_continue=expects_continue,
            is_http_10=False,
            raw=head if length is not None or method == "PUT" else b"",
        )

    def _check_beginning(self, segment: bytes) -> None:
        """Refuse what is no HTTP now and not at the deadline. Parsing again from the start keeps this rare path simple; at
        doubled sizes only, or a head sent byte by byte would cost its length squared."""
        self._check_size(segment, len(segment))
        if len(segment) < 2 * self._checked_bytes:
            return
        self._checked_bytes = len(segment)
        if b"\r\n" in segment and _REQUEST_LINE(segment) is None:
            _refuse_line(segment)
        self._parse(segment)

    def _check_size(self, segment: bytes, size: int) -> None:
        limit = self._line_bytes_max
        if size > limit and segment.find(b"\r\n", 0, limit) < 0:
            raise HeadError("the request line is too long", HttpFault.LINE_TOO_LONG)
        if size > self._head_bytes_max:
            raise HeadError("the request head is too long", HttpFault.HEAD_TOO_LONG)

    def _parse(self, head: bytes) -> RawRequestMessage | None:
        """The message; None where the head is not complete."""
        parser = HttpRequestParser(
            self._protocol,
            self._loop,
            _PARSER_READ_BYTES,
            max_line_size=self._line_bytes_max,
            max_field_size=self._head_bytes_max,
            max_headers=self._fields_max,
        )
        try:
            messages = parser.feed_data(head)[0]
        except LineTooLong as error:
            raise HeadError("the request line is too long", HttpFault.LINE_TOO_LONG) from error
        except HttpProcessingError as error:
            reason = error.message.split("\n", 1)[0].rstrip(":.")
            if reason == "Too many headers received":
                raise HeadError("too many header fields", HttpFault.HEAD_TOO_LONG) from error
            if reason == "Invalid method encountered" and _GLIMPSE(head) is not None:
                raise HeadError("unknown method", HttpFault.UNKNOWN_METHOD) from error
            if isinstance(error, InvalidURLError) or " url" in reason:
                raise _bad_target() from error
            raise HeadError(reason) from error
        except ValueError as error:  # yarl, on a target that is no URL
            raise _bad_target() from error
        return messages[0][0] if messages else None

    def _check(self, message: RawRequestMessage | None) -> ParsedHead:
        if message is None:
            raise HeadError("the request head could not be read")
        length: int | None = 0
        expects_continue = False
        headers = []
        for raw_name, raw_value in message.raw_headers:
            raw = raw_name.decode("latin-1")
            name = self._names.get(raw) or lower_name(raw, self._names)
            value = raw_value.decode("latin-1")
            headers.append((name, value))
            if name in _FRAMING:
                if name == "content-length":
                    length = _length(value)
                elif name == "expect":
                    expects_continue = value.lower() == "100-continue"
                else:
                    _check_field(name, value)
        is_http_10 = message.version.minor == 0
        if message.chunked:
            if is_http_10:
                raise HeadError("chunked bodies need HTTP/1.1")
            length = None
        target = message.path
        if target[0] != "/" or message.method == "CONNECT":
            target = _from_absolute_form(message.method, target, headers)
        return ParsedHead(
            method=message.method,
            target=target,
            headers=tuple(headers),
            length=length,
            keep_alive=not message.should_close,
            expects_continue=expects_continue and not is_http_10,
            is_http_10=is_http_10,
        )


def require_compiled_parser() -> None:
    """Refuse to serve with aiohttp's pure-Python parser, which is laxer and slower. Raises `ConfigurationError`."""
    if HttpRequestParser.__module__ != "aiohttp._http_parser":
        raise ConfigurationError(["aiohttp's compiled HTTP parser is missing"])


def _refuse_line(head: bytes) -> NoReturn:
    """Say what is wrong with the request line."""
    raise _line_error(head[: head.index(b"\r\n")])


def _line_error(line: bytes) -> HeadError:
    found = _GLIMPSE(line)
    if found is None:
        return HeadError("malformed request line")
    version = found[3]
    if found.end() < len(line):  # a control character, in the target or behind the version
        return _bad_target() if version is None else HeadError("malformed request line")
    if version is None or (_OTHER_VERSION(version) and not _HTTP_1(version)):
        # Without any version it is HTTP/0.9.
        return HeadError("only HTTP/1.0 and HTTP/1.1 are spoken here", HttpFault.UNKNOWN_VERSION)
    return _bad_target() if _HTTP_1(version) else HeadError("malformed request line")


def _bad_target() -> HeadError:
    return HeadError("malformed request target", HttpFault.BAD_TARGET)


def _check_field(name: str, value: str) -> None:
    if name == "host" and _NO_HOST(value) is not None:
        raise HeadError("malformed Host")
    if name == "transfer-encoding" and value.lower() != "chunked":
        raise HeadError("the transfer encoding is not plain chunked")


def _length(value: str) -> int:
    if len(value) > _LONGEST_LENGTH_DIGITS:
        raise HeadError("the content length is too large")
    return int(value)


def _from_absolute_form(method: str, target: str, headers: list[tuple[str, str]]) -> str:
    """Path and query, byte for byte, of a target in absolute-form (RFC 9112 §3.2.2).

    Its authority must be what Host says, which is signed; where HTTP/1.0 sends no Host it becomes one.
    """
    if method == "CONNECT":
        raise HeadError("unknown method", HttpFault.UNKNOWN_METHOD)
    scheme, separator, rest = target.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        raise _bad_target()
    cut = min((at for at in (rest.find("/"), rest.find("?")) if at >= 0), default=len(rest))
    authority, origin = rest[:cut], rest[cut:]
    host = next((value for name, value in headers if name == "host"), None)
    if host is None:
        if _NO_HOST(authority) is not None:
            raise _bad_target()
        headers.append(("host", authority))
    elif host.lower() != authority.lower():
        raise HeadError("the request target and Host name different servers")
    return origin if origin[:1] == "/" else "/" + origin
