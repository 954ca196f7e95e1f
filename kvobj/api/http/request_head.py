"""From a connection's bytes to one request head, by aiohttp's compiled parser (llhttp, strict), or a typed refusal.

A parser lives for one head: it is cheap to make (0.4 µs of the 3 µs a head takes), it is fed up to the blank line and no
further, and so its idea of a body never matters. What it lets pass and we do not: a Transfer-Encoding other than plain chunked,
chunked under HTTP/1.0, versions other than 1.0 and 1.1, CONNECT, a target that is neither absolute path nor absolute URL.
The target is never normalised.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage

from kvobj.api.http.limits import HttpSettings
from kvobj.errors import ConfigurationError, InvalidRequestError

_END = b"\r\n\r\n"
_KNOWN_NAMES_MAX = 512
_NAME_BYTES_MAX = 64
_PARSER_READ_BYTES = 65536
_LONGEST_LENGTH_DIGITS = 19


class HeadError(InvalidRequestError):
    """A head that is refused; never leaves the HTTP layer: it is answered with `status` and `code`, then the connection closes."""

    def __init__(self, message: str, *, status: int = 400, code: str = "InvalidRequest") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class ParsedHead:
    """One request head. `length` is None under Transfer-Encoding: chunked, and 0 where there is no body."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    length: int | None
    keep_alive: bool
    expects_continue: bool
    is_http_10: bool


class _NoFlowControl(BaseProtocol):
    """Stands where the parser expects a protocol: it is never given a body to hold back."""

    __slots__ = ()

    def pause_reading(self) -> None:
        """Nothing flows."""

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002 - aiohttp's signature
        """Nothing flows."""


class HeadReader:
    """Cuts heads out of segments and parses them. One a connection."""

    __slots__ = ("_checked_bytes", "_loop", "_names", "_partial", "_protocol", "_settings")

    def __init__(self, loop: asyncio.AbstractEventLoop, settings: HttpSettings, *, names: dict[bytes, str]) -> None:
        """`names` caches lower-case header names and may be shared by all connections."""
        self._loop = loop
        self._settings = settings
        self._names = names
        self._partial = b""
        self._checked_bytes = 0
        self._protocol = _NoFlowControl(loop)

    @property
    def is_within_head(self) -> bool:
        """Whether a head has begun and not ended."""
        return bool(self._partial)

    def feed(self, segment: bytes) -> tuple[ParsedHead | None, bytes]:
        """Take a segment; return the head it completes, if any, and the bytes after it. Raises `HeadError`."""
        # The blank line may straddle two segments.
        searched = max(0, len(self._partial) - len(_END))
        if self._partial:
            segment = self._partial + segment
        elif segment[:1] in (b"\r", b"\n"):
            segment = segment.lstrip(b"\r\n")  # RFC 9112 §2.2: blank lines before a request line are ignored
        end = segment.find(_END, searched)
        if end < 0:
            self._partial = segment
            self._check_size(segment, len(segment))
            # What is not HTTP at all is refused now, not at the deadline. Parsing again from the start keeps this rare path
            # simple; at doubled sizes only, or a head sent byte by byte would cost its length squared.
            if len(segment) >= 2 * self._checked_bytes:
                self._checked_bytes = len(segment)
                self._parse(segment)
            return None, b""
        self._partial = b""
        self._checked_bytes = 0
        end += len(_END)
        self._check_size(segment, end)
        message = self._parse(segment if end == len(segment) else segment[:end])
        if message is None:
            raise HeadError("the request head could not be read")
        return self._check(message), segment[end:]

    def _check_size(self, segment: bytes, size: int) -> None:
        limit = self._settings.request_line_bytes
        if size > limit and segment.find(b"\r\n", 0, limit) < 0:
            raise HeadError("the request line is too long", status=414, code="RequestURITooLong")
        if size > self._settings.head_bytes:
            raise HeadError("the request headers are too long", code="RequestHeaderSectionTooLarge")

    def _parse(self, head: bytes) -> RawRequestMessage | None:
        parser = HttpRequestParser(
            self._protocol,
            self._loop,
            _PARSER_READ_BYTES,
            max_line_size=self._settings.request_line_bytes,
            max_field_size=self._settings.head_bytes,
            max_headers=self._settings.header_fields,
        )
        try:
            messages, _, _ = parser.feed_data(head)
        except LineTooLong as error:
            raise HeadError("the request line is too long", status=414, code="RequestURITooLong") from error
        except HttpProcessingError as error:
            reason = error.message.split("\n", 1)[0].rstrip(":")
            if reason == "Too many headers received":
                raise HeadError("too many header fields", code="RequestHeaderSectionTooLarge") from error
            raise HeadError(f"malformed request: {reason}") from error
        except ValueError as error:  # yarl, on a target that is no URL
            raise HeadError("malformed request target", code="InvalidURI") from error
        return messages[0][0] if messages else None

    def _check(self, message: RawRequestMessage) -> ParsedHead:
        version = message.version
        if version.major != 1 or version.minor not in (0, 1):
            raise HeadError("only HTTP/1.0 and HTTP/1.1 are spoken here", status=505, code="InvalidRequest")
        length: int | None = 0
        expects_continue = False
        headers = []
        for raw_name, raw_value in message.raw_headers:
            name = self._names.get(raw_name) or self._remember(raw_name)
            value = raw_value.decode("latin-1")
            headers.append((name, value))
            if name == "content-length":
                if len(value) > _LONGEST_LENGTH_DIGITS:
                    raise HeadError("the content length is too large")
                length = int(value)
            elif name == "transfer-encoding" and value.lower() != "chunked":
                raise HeadError("the transfer encoding is not understood", status=501, code="NotImplemented")
            elif name == "expect":
                expects_continue = value.lower() == "100-continue"
        is_http_10 = version.minor == 0
        if message.chunked:
            if is_http_10:
                raise HeadError("chunked bodies need HTTP/1.1")
            length = None
        return ParsedHead(
            method=message.method,
            target=_origin_form(message.method, message.path),
            headers=tuple(headers),
            length=length,
            keep_alive=not message.should_close,
            expects_continue=expects_continue and not is_http_10 and length != 0,
            is_http_10=is_http_10,
        )

    def _remember(self, raw_name: bytes) -> str:
        name = raw_name.decode("latin-1").lower()
        if len(raw_name) <= _NAME_BYTES_MAX:
            if len(self._names) >= _KNOWN_NAMES_MAX:
                self._names.clear()
            self._names[raw_name] = name
        return name


def require_compiled_parser() -> None:
    """Refuse to serve with aiohttp's pure-Python parser, which is laxer and slower. Raises `ConfigurationError`."""
    if HttpRequestParser.__module__ != "aiohttp._http_parser":
        raise ConfigurationError(["aiohttp's compiled HTTP parser is missing"])


def _origin_form(method: str, target: str) -> str:
    """Path and query of a target in origin-form or absolute-form (RFC 9112 §3.2), byte for byte."""
    if method == "CONNECT":
        raise HeadError("this method is not allowed", status=405, code="MethodNotAllowed")
    if target[:1] == "/":
        return target
    scheme, separator, rest = target.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        raise HeadError("the request target is neither a path nor a URL", code="InvalidURI")
    cuts = [cut for cut in (rest.find("/"), rest.find("?")) if cut >= 0]
    if not cuts:
        return "/"
    origin = rest[min(cuts) :]
    return origin if origin[0] == "/" else "/" + origin
