"""The two ways HTTP/1.1 frames a body, as `kvobj.api.message.RequestBody`s that are pulled from a `Wire`.

Both receive straight into the caller's memory, and both say 100 Continue at the first wish for a byte, never before. A body is
only good while its request is served: later reads raise, since the bytes on the wire would be another request's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvobj.api.http.body_handover import Wire
from kvobj.api.http.chunked_framing import ChunkedFraming
from kvobj.errors import IncompleteBodyError, InvalidRequestError

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _Body:
    """What both have in common: the answer to Expect, and the end of use."""

    __slots__ = ("_awaits_continue", "_is_expired", "_wire", "received")

    def __init__(self, wire: Wire, *, expects_continue: bool) -> None:
        self._wire = wire
        self._awaits_continue = expects_continue
        self._is_expired = False
        self.received = 0
        """Bytes of content that were taken."""

    async def accept(self) -> None:
        """See `RequestBody.accept`."""
        if self._is_expired:
            raise IncompleteBodyError("the request of this body is over")
        if self._awaits_continue:
            self._awaits_continue = False
            self._wire.write(_CONTINUE)

    def expire(self) -> None:
        """End the handler's use of it: the request is over."""
        self._is_expired = True


class LengthBody(_Body):
    """A body of `length` bytes (Content-Length), 0 for none."""

    __slots__ = ("_length", "_remaining")

    def __init__(self, wire: Wire, length: int, *, expects_continue: bool) -> None:
        super().__init__(wire, expects_continue=expects_continue)
        self._length = length
        self._remaining = length

    @property
    def length(self) -> int:
        """See `RequestBody.length`."""
        return self._length

    @property
    def is_finished(self) -> bool:
        """Whether every byte of it has been taken, so that the next request may be read."""
        return not self._remaining

    def can_be_dropped(self, limit: int) -> bool:
        """Whether the rest is at most `limit` bytes, and the client sends it unasked."""
        return self._remaining <= limit and not self._awaits_continue

    async def drop(self) -> None:
        """Read and forget the rest. Raises `IncompleteBodyError`."""
        while self._remaining and await self._read_some(self._remaining):
            pass

    async def read_some(self, limit: int) -> bytes:
        """See `RequestBody.read_some`."""
        if not self._remaining:
            return b""
        await self.accept()
        return await self._read_some(limit)

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `ByteSource.receive_into`."""
        if not len(buffer):
            return
        if len(buffer) > self._remaining:
            raise IncompleteBodyError(
                "the body is shorter than expected", remaining=self._remaining, expected=len(buffer)
            )
        await self.accept()
        wire = self._wire
        try:
            await wire.fill(buffer, on_bytes)
        finally:
            self._remaining -= wire.filled
            self.received += wire.filled

    async def _read_some(self, limit: int) -> bytes:
        segment = await self._wire.read_segment()
        if not segment:
            raise IncompleteBodyError("the client went in the middle of the body", remaining=self._remaining)
        most = min(limit, self._remaining)
        if len(segment) > most:
            self._wire.push_back(segment[most:])
            segment = segment[:most]
        self._remaining -= len(segment)
        self.received += len(segment)
        return segment


class ChunkedBody(_Body):
    """A body under Transfer-Encoding: chunked. After malformed framing every read raises `InvalidRequestError`."""

    __slots__ = ("_framing", "_is_broken")

    length: None = None

    def __init__(self, wire: Wire, *, expects_continue: bool) -> None:
        super().__init__(wire, expects_continue=expects_continue)
        self._framing = ChunkedFraming()
        self._is_broken = False

    @property
    def is_finished(self) -> bool:
        """Whether its end has been seen, so that the next request may be read; looks at what is there, without waiting."""
        self._look_ahead()
        return self._framing.is_ended

    def can_be_dropped(self, limit: int) -> bool:  # noqa: ARG002 - nobody knows how long it is
        """Never, since it cannot be told."""
        return False

    async def drop(self) -> None:
        """Nothing: never asked for, since `can_be_dropped` is False."""

    async def read_some(self, limit: int) -> bytes:
        """See `RequestBody.read_some`."""
        if not await self._reach_data():
            return b""
        segment = await self._next_segment()
        most = min(limit, self._framing.data_left)
        if len(segment) > most:
            self._wire.push_back(segment[most:])
            segment = segment[:most]
        self._took(len(segment))
        return segment

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `ByteSource.receive_into`."""
        filled = 0
        wire = self._wire
        while filled < len(buffer):
            if not await self._reach_data():
                raise IncompleteBodyError("the body is shorter than expected", received=filled, expected=len(buffer))
            stop = min(len(buffer), filled + self._framing.data_left)
            try:
                await wire.fill(buffer[filled:stop], partial(_report, on_bytes, filled))
            finally:
                filled += wire.filled
                self._took(wire.filled)

    def _took(self, count: int) -> None:
        if count:
            self._framing.took(count)
            self.received += count

    async def _reach_data(self) -> bool:
        """Read framing until data is next (True) or the body has ended (False)."""
        await self.accept()
        framing = self._framing
        while not framing.data_left and not framing.is_ended:
            if self._is_broken:
                raise InvalidRequestError("malformed chunked body")
            self._consume(await self._next_segment())
        return not framing.is_ended

    def _look_ahead(self) -> None:
        """Take in framing that is already here: the end often lies right behind the last byte."""
        framing, wire = self._framing, self._wire
        while wire.has_unread and not (framing.data_left or framing.is_ended or self._is_broken):
            try:
                self._consume(wire.take_unread())
            except InvalidRequestError:
                return

    def _consume(self, segment: bytes) -> None:
        try:
            at = self._framing.consume(segment)
        except InvalidRequestError:
            self._is_broken = True
            raise
        self._wire.push_back(segment[at:])

    async def _next_segment(self) -> bytes:
        segment = await self._wire.read_segment()
        if not segment:
            raise IncompleteBodyError("the client went in the middle of the body", received=self.received)
        return segment


def _report(on_bytes: Callable[[int], None], before: int, count: int) -> None:
    """Tell the receiver of a whole buffer about a piece that starts at `before`."""
    on_bytes(before + count)
