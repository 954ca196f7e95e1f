"""From a `Reply` to bytes on a `Wire`: builds the head, sends head and body in one write, streams views without copies.

A view is asked for only when the former one has left the process. A stream that fails after the head was sent resets the
connection: a client never takes half an object for a whole one. Head fields are checked against response splitting.
A stream whose end nobody knows may wait long for its next view: it is ended as soon as its client has gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from email.utils import formatdate
from http import HTTPStatus
from itertools import chain
from typing import Protocol

from kvobj.api.message import BodyStream, Reply, whole_of
from kvobj.clock import Clock
from kvobj.errors import CapacityError, CorruptionError, UnavailableError
from kvobj.wire.body_handover import Wire

_REASONS = {status.value: status.phrase for status in HTTPStatus}
# Up to here a body is joined to its head and copied once; that is cheaper than gathering two pieces.
_JOINED_BYTES = 64 * 1024
_JOINED_CHUNK_BYTES = 16 * 1024
_BODILESS = frozenset({204, 304})


class LiveStream(BodyStream, Protocol):
    """A body of unknown length that waits for what others do, for as long as its reader stays. A client that has shut its sending
    half, and could only wait, is taken to have gone: of most that closed their connection nothing else is seen."""

    is_live: bool


class ReplyWriter:
    """Writes replies. Stateless but for the Date line, so one serves all connections of a server."""

    __slots__ = ("_clock", "_date_line", "_date_second", "_log")

    def __init__(self, clock: Clock, log: logging.Logger) -> None:
        self._clock = clock
        self._log = log
        self._date_second = -1
        self._date_line = ""

    def head(self, reply: Reply, *, keep_alive: bool, is_http_10: bool) -> bytes:
        """The bytes of status line and header fields, blank line included. Raises `ValueError` on an impossible field."""
        status = reply.status
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}"]
        lines += map(": ".join, reply.headers)
        if status not in _BODILESS and status >= HTTPStatus.OK:
            length = content_length(reply)
            if length is not None:
                lines.append(f"content-length: {length}")
            elif not is_http_10:  # to HTTP/1.0 the end of the connection is the end of the reply
                lines.append("transfer-encoding: chunked")
        if not keep_alive:
            lines.append("connection: close")
        elif is_http_10:
            lines.append("connection: keep-alive")
        count = len(lines)
        text = "\r\n".join(lines)
        if text.count("\n") != count - 1 or text.count("\r") != count - 1 or "\0" in text:
            raise ValueError("a reply's header field holds a line break or a NUL")
        return f"{text}\r\n{reply.ready}{self._date_and_server()}\r\n".encode("latin-1")

    def ready_head(self, reply: Reply) -> bytes:
        """`head` of a 200 that has all its fields, its length too, in `ready`. The connection is kept."""
        return f"HTTP/1.1 200 OK\r\n{reply.ready}{self._date_and_server()}\r\n".encode("latin-1")

    async def send(self, wire: Wire, reply: Reply, head: bytes, *, is_head: bool, is_http_10: bool = False) -> bool:
        """Send it; False when it could not be sent whole, and the connection is then gone.

        A stream is closed in the end whatever happens, and not before its last view is out of use.
        """
        body = reply.body
        if isinstance(body, bytes):
            return await self._send_bytes(wire, head, b"" if is_head or reply.status in _BODILESS else body)
        is_whole = False
        try:
            if is_head or reply.status in _BODILESS or body.length == 0:
                return await self._send_bytes(wire, head, b"")
            whole = whole_of(body)
            if whole is not None and len(whole) <= _JOINED_BYTES:
                wire.write(head + whole)
                await wire.flush()
            elif whole is not None:
                await wire.send(head, whole)
            elif body.length is None:
                async with _until_departure(wire, body):
                    await (_send_views if is_http_10 else _send_chunks)(wire, head, body)
            else:
                await _send_views(wire, head, body)
            is_whole = True
        except ConnectionError:
            return False
        except (CapacityError, UnavailableError, CorruptionError) as error:
            # No defect: there is much to do, a tier does not answer, or what it gives is damaged, which somebody should know.
            level = logging.ERROR if isinstance(error, CorruptionError) else logging.WARNING
            self._log.log(level, "a reply was cut off: %s", error)
            return False
        except Exception:  # noqa: BLE001 - whatever the store failed with, the reply is cut and the connection reset
            self._log.exception("a reply could not be completed")
            return False
        finally:
            if not is_whole and not is_head and reply.status not in _BODILESS and body.length != 0:
                wire.reset()
                await wire.wait_closed()
            await body.aclose()
        return True

    async def _send_bytes(self, wire: Wire, head: bytes, body: bytes) -> bool:
        try:
            if len(body) <= _JOINED_BYTES:
                wire.write(head + body if body else head)
                await wire.flush()
            else:
                await wire.send(head, memoryview(body))
        except ConnectionError:
            return False
        return True

    def _date_and_server(self) -> str:
        second = self._clock.now_ms() // 1000
        if second != self._date_second:
            self._date_second = second
            self._date_line = f"date: {formatdate(second, usegmt=True)}\r\nserver: kvobj\r\n"
        return self._date_line


def content_length(reply: Reply) -> int | None:
    """The length that a reply announces; None: it is not known before its end."""
    if reply.content_length is not None:
        return reply.content_length
    body = reply.body
    return len(body) if isinstance(body, bytes) else body.length


@asynccontextmanager
async def _until_departure(wire: Wire, stream: BodyStream) -> AsyncIterator[None]:
    """End what is done within, wherever it waits, once the client has gone: `ConnectionResetError`. No task of its own for that:
    what waits is cancelled as by a deadline that is set at that moment."""
    loop, stay = asyncio.get_running_loop(), asyncio.timeout(None)
    try:
        async with stay:
            wire.watch_for_departure(
                lambda: stay.reschedule(loop.time()), at_end_of_sending=getattr(stream, "is_live", False)
            )
            try:
                yield
            finally:
                wire.watch_no_more()
    except TimeoutError as error:
        if stay.expired():
            raise ConnectionResetError("the client has gone") from error
        raise


async def _send_views(wire: Wire, head: bytes, stream: BodyStream) -> None:
    remaining = stream.length
    views: AsyncIterator[memoryview] = stream.views()
    try:
        async for view in views:
            if not len(view):
                continue
            if remaining is not None:
                remaining -= len(view)
                if remaining < 0:
                    raise RuntimeError("a body stream is longer than it said")
            await wire.send(head, view)
            head = b""
    finally:
        await _close(views)
    if remaining:
        raise RuntimeError("a body stream is shorter than it said")
    if head:
        wire.write(head)
        await wire.flush()


async def _send_chunks(wire: Wire, head: bytes, stream: BodyStream) -> None:
    """Transfer-Encoding: chunked (RFC 9112 §7.1), a chunk a view, or a burst of them. The head does not wait for the first view,
    nor a chunk's end for the next one: a stream of events may rest for long."""
    of_stream: Callable[[], AsyncIterator[Sequence[tuple[bytes, memoryview]]]] | None
    of_stream = getattr(stream, "bursts", None)
    bursts = _one_by_one(stream) if of_stream is None else of_stream()
    wire.write(head)
    try:
        async for burst in bursts:
            size = sum(len(lead) + len(view) for lead, view in burst)
            if not size:
                continue
            if size <= _JOINED_CHUNK_BYTES:
                wire.write(b"".join([b"%x\r\n" % size, *chain.from_iterable(burst), b"\r\n"]))
                await wire.flush()
            else:
                (lead, view), *rest = burst
                await wire.send_burst([(b"%x\r\n%s" % (size, lead), view), *rest])
                wire.write(b"\r\n")
    finally:
        await _close(bursts)
    wire.write(b"0\r\n\r\n")
    await wire.flush()


async def _one_by_one(stream: BodyStream) -> AsyncIterator[Sequence[tuple[bytes, memoryview]]]:
    views: AsyncIterator[memoryview] = stream.views()
    try:
        async for view in views:
            yield ((b"", view),)
    finally:
        await _close(views)


async def _close(views: AsyncIterator[object]) -> None:
    # A generator left in the middle would otherwise be finalised by the garbage collector, after the stream is closed.
    close = getattr(views, "aclose", None)
    if close is not None:
        await close()
