"""What crosses the line between the HTTP layer and the S3 layer: a request head, a body to pull, a reply to send.

The HTTP layer (`kvobj.api.http`) knows sockets and aiohttp and no S3; the S3 layer knows no aiohttp. Header names are lower case,
values are str decoded as latin-1 exactly as they arrived; the target is the raw request target, never normalised.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from enum import Enum
from typing import Protocol

import msgspec

from kvobj.wire.joined_chunks import JoinChunks, Sift


class RequestHead(msgspec.Struct, frozen=True):
    """A request without its body. `headers` keeps order and repeats; `target` is the raw origin-form request target."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    request_id: str
    remote: str
    is_tls: bool = False
    waited_ms: int = 0
    """How long ago it arrived, where it was laid aside."""
    raw: bytes = b""
    """The head as it arrived, where it was a plain one (`plain_head`); of a POST only where its body has a length."""

    def header(self, name: str) -> str | None:
        """The value of the first header of this (lower-case) name, or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class ByteSource(Protocol):
    """Bytes that arrive in order and are received straight into somebody's memory."""

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """Fill the whole buffer. `on_bytes(n)` is called on the event loop each time the first n bytes are there (n grows).

        Raises `IncompleteBodyError` when the source ends before the buffer is full. Cancel-safe: after it
        raises or is cancelled, nobody writes to the buffer any more.
        """
        ...


class RequestBody(ByteSource, Protocol):
    """The body of one request as framed by HTTP (Content-Length or chunked), not yet by S3 (aws-chunked)."""

    @property
    def length(self) -> int | None:
        """Content-Length, or None under Transfer-Encoding: chunked. 0 for no body."""
        ...

    async def read_some(self, limit: int) -> bytes:
        """Between 1 and `limit` bytes, or b"" at the end."""
        ...

    def take_whole(self) -> bytes | None:
        """All of the body where it is here, was not read from yet and the client waits for nothing; None, and nothing was taken,
        where it is not."""
        ...

    async def accept(self) -> None:
        """Say that the body is wanted: sends `100 Continue` if the client waits for it. Reading does this by itself."""
        ...


class SiftedBody(Protocol):
    """A `RequestBody` whose content may be looked at, and shortened, as it arrives."""

    async def receive_sifted(self, buffer: memoryview, join: JoinChunks, sift: Sift) -> int:
        """Fill the buffer, of at least one byte, and have `sift` look at what is there whenever more has come; what it takes out
        makes room for more. Returns how many bytes it left: fewer than the buffer has where it wants no more, or where what
        comes next has to be asked for again. `join` is what takes out the framing of HTTP. Raises as `receive_into` does, also
        where what is left of the content cannot fill the buffer."""
        ...


class BodyStream(Protocol):
    """A reply's body that is sent view by view, without copies."""

    @property
    def length(self) -> int | None:
        """Exact number of bytes that the views sum to; None where it is known only at the end: the reply is then chunked, and
        each view is sent at once as a chunk of its own."""
        ...

    def views(self) -> AsyncIterator[memoryview]:
        """Views in order. Each stays valid until the next is asked for: the HTTP layer asks only when all of the former
        has left the process. An exception means that the reply cannot be completed: the connection is reset."""
        ...

    async def aclose(self) -> None:
        """Release everything held. Called exactly once, whatever happened."""
        ...


class WholeStream(BodyStream, Protocol):
    """A body that may be one view already, which spares a short reply what sending view by view costs."""

    def whole(self) -> memoryview | None:
        """All of it, valid until `aclose`; None where some is still to come or to be decoded. Instead of `views`."""
        ...


def whole_of(stream: BodyStream) -> memoryview | None:
    """The body as one view, where it is one (`WholeStream`)."""
    of_stream: Callable[[], memoryview | None] | None = getattr(stream, "whole", None)
    view = None if of_stream is None else of_stream()
    if view is not None and len(view) != stream.length:
        raise RuntimeError("a body stream has another length than it said")
    return view


class BurstStream(BodyStream, Protocol):
    """A body of unknown length of which several views may be there at once, each with a few bytes in front of it: they go out as
    one chunk, for one hand-over and one wake of the client."""

    def bursts(self) -> AsyncIterator[Sequence[tuple[bytes, memoryview]]]:
        """What `views` has, in bursts of (bytes in front, view), either of which may be empty. All of a burst stays valid until the
        next is asked for, as a view of `views` does."""
        ...


class Reply(msgspec.Struct, frozen=True):
    """A whole answer. Content-Length, Date, Server and Connection are added by the HTTP layer.

    `content_length` overrides the body's length in the header (HEAD replies carry the object's length and no body).
    `close` asks for the connection to be closed after the reply. `log` fields are added to the request's log line. `ready` are more
    header fields, as text (`ready_fields`): for replies that say the same again and again.
    """

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | BodyStream = b""
    content_length: int | None = None
    close: bool = False
    log: dict[str, object] = {}
    ready: str = ""


def ready_fields(headers: Iterable[tuple[str, str]]) -> str:
    """Header fields as they are sent, each with its line break. ValueError where one is impossible."""
    lines = list(map(": ".join, headers))
    text = "\r\n".join([*lines, ""])
    if text.count("\n") != len(lines) or text.count("\r") != len(lines) or "\0" in text:
        raise ValueError("a reply's header field holds a line break or a NUL")
    return text


class RepeatedAnswer(msgspec.Struct, frozen=True):
    """The answer to a request of few bytes, with what the request's line in the log says of it. `reply` is a 200 without a body,
    with all its fields in `ready`, Content-Length too; `body` follows it."""

    method: str
    target: str
    bytes_in: int
    reply: Reply
    body: bytes


class RepeatedRequests(Protocol):
    """Requests that many clients send again and again and that are small: they are answered from their bytes. Those that nobody
    hurries for may be laid aside for a moment to be answered together. Event-loop-only."""

    @property
    def looks_like(self) -> Callable[[bytes], object | None]:
        """What tells by the first bytes whether it may be one (None: it is none), in a fraction of a microsecond."""
        ...

    def answer(self, request: bytes, request_id: str, *, waited_ms: int) -> RepeatedAnswer | None:
        """What the handler would answer to these bytes, which arrived so long ago; None: nothing was done, and the handler is to
        answer. What it raises is a defect, behind which the request may have been done: its connection ends."""
        ...


Handler = Callable[[RequestHead, RequestBody], Awaitable[Reply]]
"""The S3 layer's entry. It never raises but for cancellation: errors are replies."""


class HttpFault(Enum):
    """Why the HTTP layer answers a request by itself, each with its HTTP status."""

    MALFORMED = "malformed", 400
    BAD_TARGET = "bad target", 400
    LINE_TOO_LONG = "request line too long", 414
    HEAD_TOO_LONG = "head too long", 400
    UNKNOWN_METHOD = "unknown method", 405
    UNKNOWN_VERSION = "unknown version", 505
    TIMEOUT = "timeout", 400
    INCOMPLETE_BODY = "incomplete body", 400
    BUSY = "busy", 503
    DEFECT = "defect", 500

    @property
    def status(self) -> int:
        """The HTTP status of the answer."""
        return self.value[1]


class Refusal(msgspec.Struct, frozen=True):
    """What the HTTP layer answers by itself. `detail` may be told to the client; method and raw target are empty where the
    request was not read so far."""

    fault: HttpFault
    detail: str
    request_id: str
    method: str = ""
    target: str = ""


RenderRefusal = Callable[[Refusal], Reply]
"""Says it in the words of the protocol above HTTP. It never raises."""
