"""One kept connection to the remote server, and the pool of them.

Bodies are received straight into the caller's memory and sent straight from it (`kvobj.wire`). Whatever goes wrong costs the
connection: it is reset, and what was lent to it is let go of before the caller goes on. Event loop only.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Final

from kvobj.clock import Clock
from kvobj.errors import IncompleteBodyError
from kvobj.tiers.remote.faults import INVALID_CERTIFICATE, UNTRUSTED_CERTIFICATE, RemoteFault
from kvobj.wire.body_handover import ReceiveMode, Wire
from kvobj.wire.response_head import (
    CHUNK_LINE_BYTES_MAX,
    FIELDS_MAX,
    HEAD_BYTES_MAX,
    HEAD_END,
    BrokenAnswerError,
    ResponseHead,
    parse_chunk_line,
    parse_head,
)

SHARED_BYTES: Final = 64 * 1024
_IDLE_SECONDS: Final = 15.0
_UPLOAD_PATIENCE: Final = 5.0
"""A body on its way up is begun anew where one that comes down is gone on with, and a server whose disks are behind reads on only
when they are not: it may stand still for so many times as long."""
_UNKNOWN_ISSUER: Final = frozenset({2, 18, 19, 20, 21})
"""Of OpenSSL's `X509_V_ERR_...`: those that a CA bundle with the right authority would cure."""
_CRLF: Final = b"\r\n"


class StaleConnectionError(Exception):
    """A kept connection ended before a byte of an answer came: the request may be sent once more, on a new one."""


class TooLongError(Exception):
    """The answer is longer than who asked can take."""


class RemoteConnection:
    """One request at a time: `ask`, then read the body whole or `discard`."""

    __slots__ = ("is_fresh", "is_sent", "last_used", "wire")

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.is_fresh = True
        self.is_sent = True
        """Whether all of the latest request has left: another may follow only then."""
        self.last_used = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent: nothing unasked came, and the server has not closed."""
        return self.is_sent and not self.wire.is_at_end and not self.wire.has_unread

    async def ask(self, head: bytes, body: memoryview, *, method: str, stall_seconds: float) -> ResponseHead:
        """Send a request, and read the head of its answer, which may come before all of the body is sent: then the rest is not.

        Raises `StaleConnectionError`, `BrokenAnswerError`, OSError, and `RemoteFault` where the server's side takes no byte of the
        body for `_UPLOAD_PATIENCE` times `stall_seconds`. After anything raised, cancellation included, the connection is to be
        discarded.
        """
        wire = self.wire
        if not len(body):
            try:
                wire.write(head)
            except ConnectionError:
                raise self._ended() from None
            return await self._read_head(method)
        self.is_sent = False
        sending = asyncio.ensure_future(wire.send(head, body))
        reading = asyncio.ensure_future(self._read_head(method))
        try:
            await self._while_it_moves(sending, reading, _UPLOAD_PATIENCE * stall_seconds)
            answered = await reading  # also where sending failed: who refuses a body may have answered before closing
            self.is_sent = sending.done() and sending.exception() is None
            return answered
        finally:
            for task in (sending, reading):
                task.cancel()
            await asyncio.wait((sending, reading))
            for task in (sending, reading):
                if not task.cancelled():
                    task.exception()

    async def read_all(self, head: ResponseHead, limit: int) -> bytes:
        """The body, of `limit` bytes at most. Raises `TooLongError`, `BrokenAnswerError`, `IncompleteBodyError`."""
        if head.length is not None and head.length > limit:
            raise TooLongError(f"an answer of {head.length} bytes, more than {limit}")
        if head.is_chunked:
            return await self._read_chunks(limit)
        wire, pieces, size = self.wire, [], 0
        while head.length is None or size < head.length:
            piece = await wire.read_some(limit + 1 if head.length is None else head.length - size)
            if not piece:
                if head.length is None:
                    break
                raise IncompleteBodyError("the answer breaks off", received=size, expected=head.length)
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise TooLongError(f"an answer of more than {limit} bytes")
        return b"".join(pieces)

    async def fill(self, into: memoryview, on_filled: Callable[[int], None]) -> None:
        """Receive the whole body in place: `into` is as long as it is. `on_filled(n)`: its first n bytes are there."""
        await self.wire.fill(into, on_filled)

    async def discard(self) -> None:
        """End it; when this returns nothing refers to what was sent or filled. Not to be cancelled half-way: callers shield it."""
        self.wire.reset()
        await self.wire.wait_closed()

    async def _while_it_moves(
        self, sending: asyncio.Future[None], reading: asyncio.Future[ResponseHead], span_seconds: float
    ) -> None:
        """Return once the answer is there, the server's side has taken all of the body, or sending has failed. `RemoteFault` where
        it took nothing of it in a whole span. How long a server thinks about a body that it has is not judged here."""
        loop, wire = asyncio.get_running_loop(), self.wire
        while not reading.done():
            is_sent = sending.done()
            taken, in_kernel = wire.bytes_taken, wire.bytes_in_kernel
            if is_sent and (sending.cancelled() or sending.exception() is not None or not in_kernel):
                return
            due = loop.time() + span_seconds
            awaited = (reading,) if is_sent else (sending, reading)
            await asyncio.wait(awaited, timeout=span_seconds, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() or sending.done() is not is_sent:
                continue
            # Where this loop itself was held up, nothing was handed to the kernel meanwhile: another span.
            is_late = loop.time() - due > span_seconds / 4
            if not is_late and (wire.bytes_taken, wire.bytes_in_kernel) == (taken, in_kernel):
                raise RemoteFault("timeout", "the server takes nothing of the body")

    async def _read_head(self, method: str) -> ResponseHead:
        wire = self.wire
        gathered = b""
        while True:
            while (end := gathered.find(HEAD_END)) < 0:
                if len(gathered) > HEAD_BYTES_MAX:
                    raise BrokenAnswerError("a head that does not end")
                segment = await wire.read_segment()
                if not segment:
                    if gathered:
                        raise BrokenAnswerError("the answer's head breaks off")
                    raise self._ended()
                gathered += segment
            end += len(HEAD_END)
            head = parse_head(gathered[:end], method=method)
            gathered = gathered[end:]
            if not head.is_interim:
                wire.push_back(gathered)
                return head

    def _ended(self) -> Exception:
        return ConnectionResetError("closed before an answer") if self.is_fresh else StaleConnectionError()

    async def _read_chunks(self, limit: int) -> bytes:
        body = bytearray()
        while left := parse_chunk_line(await self._line(CHUNK_LINE_BYTES_MAX)):
            if len(body) + left > limit:
                raise TooLongError(f"an answer of more than {limit} bytes")
            while left:
                piece = await self.wire.read_some(left)
                if not piece:
                    raise IncompleteBodyError("the answer breaks off", received=len(body))
                body += piece
                left -= len(piece)
            if await self._line(len(_CRLF)) != _CRLF:
                raise BrokenAnswerError("a chunk longer than its length")
        for _ in range(FIELDS_MAX):
            if await self._line(HEAD_BYTES_MAX) == _CRLF:
                return bytes(body)
        raise BrokenAnswerError("a trailer without an end")

    async def _line(self, limit: int) -> bytes:
        wire, line = self.wire, b""
        while True:
            if not await wire.arrive():
                raise IncompleteBodyError("the answer breaks off")
            held, start = wire.peek()
            end = held.find(b"\n", start) + 1
            line += held[start : end or len(held)]
            wire.advance(end or len(held))
            if len(line) > limit:
                raise BrokenAnswerError("a line that does not end")
            if end:
                return line


class ConnectionPool:
    """Connections to one server. `take` gives a kept one where there is one; the caller bounds how many are out at once."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None,
        mode: ReceiveMode,
        connect_seconds: float,
        clock: Clock,
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._mode = mode
        self._connect_seconds = connect_seconds
        self._clock = clock
        self._shared = memoryview(bytearray(SHARED_BYTES))
        self._idle: deque[RemoteConnection] = deque()
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.made = 0
        """Connections ever made."""
        self.open = 0
        """Connections that are open, in use or idle."""

    async def take(self, *, is_fresh: bool = False) -> RemoteConnection:
        """A connection; `is_fresh`: a new one. `RemoteFault` where none can be made in time."""
        now = self._clock.monotonic()
        while self._idle and now - self._idle[0].last_used > _IDLE_SECONDS:
            self.drop(self._idle.popleft())
        while self._idle and not is_fresh:
            connection = self._idle.pop()  # the one used last: others grow old, and are closed
            if connection.is_usable:
                return connection
            self.drop(connection)
        return await self._connect()

    def give(self, connection: RemoteConnection) -> None:
        """Keep a connection whose answer was read to its end."""
        if self._is_closed or not connection.is_usable:
            self.drop(connection)
            return
        connection.is_fresh = False
        connection.last_used = self._clock.monotonic()
        self._idle.append(connection)

    def drop(self, connection: RemoteConnection) -> None:
        """End a connection that nothing was lent to, without waiting for it."""
        task = asyncio.ensure_future(connection.discard())
        self._ending.add(task)
        task.add_done_callback(self._ended)

    async def end(self, connection: RemoteConnection) -> None:
        """End a connection in the middle of an exchange: when this returns or raises, nothing refers to what was lent to it."""
        self.drop(connection)
        is_cancelled = False
        waiting = asyncio.ensure_future(connection.wire.wait_closed())
        while not waiting.done():
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError

    async def aclose(self) -> None:
        """Close what is idle; what is out is ended when it comes back."""
        self._is_closed = True
        while self._idle:
            self.drop(self._idle.pop())
        if self._ending:
            await asyncio.wait(self._ending)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        self.open -= 1

    async def _connect(self) -> RemoteConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, wire = await loop.create_connection(
                    lambda: Wire(loop, _nothing, shared=self._shared, mode=self._mode),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._host if self._tls is not None else None,
                )
        except TimeoutError as error:
            raise RemoteFault("timeout", f"no connection to {self._host}:{self._port} in time") from error
        except ssl.SSLCertVerificationError as error:
            code = UNTRUSTED_CERTIFICATE if error.verify_code in _UNKNOWN_ISSUER else INVALID_CERTIFICATE
            raise RemoteFault("refused", error.verify_message, code=code, is_repeatable=False) from error
        except OSError as error:
            raise RemoteFault("network", f"no connection to {self._host}:{self._port}: {error}") from error
        self.made += 1
        self.open += 1
        return RemoteConnection(wire)


def _nothing(_: Wire) -> None:
    return
