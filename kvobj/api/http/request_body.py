"""The two ways HTTP/1.1 frames a body, as `kvobj.api.message.RequestBody`s that are pulled from a `Wire`.

Both receive straight into the caller's memory, and both say 100 Continue at the first wish for a byte, never before. A body is
only good while its request is served: later reads raise, since the bytes on the wire would be another request's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvobj.api.http.chunked_framing import ChunkedFraming
from kvobj.errors import IncompleteBodyError, InvalidRequestError
from kvobj.wire.body_handover import Wire
from kvobj.wire.joined_chunks import NO_LIMIT, JoinChunks, JoinedChunks, Sift, is_cut_off, native_joiner

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# How much of many short chunks is received at once: enough for few calls, and still in the cache when its gaps are closed.
_WINDOW_BYTES = 1024 * 1024
# The end of one chunk, the size line of the next, and some: these bytes are moved.
_LINE_BYTES = 32


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
            self._wire.write(CONTINUE)

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

    def take_whole(self) -> bytes | None:
        """See `RequestBody.take_whole`."""
        held, start = self._wire.peek()
        end = start + self._length
        if end > len(held) or self._remaining != self._length or self._awaits_continue or self._is_expired:
            return None
        whole = held[start:end]
        self._wire.advance(end)
        self._took(self._length)
        return whole

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
            await wire.fill(buffer, on_bytes, has_more=len(buffer) < self._remaining)
        finally:
            self._took(wire.filled)

    async def receive_sifted(self, buffer: memoryview, join: JoinChunks, sift: Sift) -> int:  # noqa: ARG002 - no framing here
        """See `SiftedBody.receive_sifted`."""
        if len(buffer) > self._remaining:
            raise IncompleteBodyError(
                "the body is shorter than expected", remaining=self._remaining, expected=len(buffer)
            )
        await self.accept()
        wire = self._wire
        filled = 0

        def sifted(end: int) -> tuple[int, int]:
            nonlocal filled
            self._took(end - filled)
            filled = end  # also where that fails
            filled, goes_on = sift(end)
            # Where content is short of what is asked for, the bytes behind it are the next request's.
            return filled, len(buffer) if goes_on and len(buffer) - filled <= self._remaining else filled

        try:
            await wire.fill(buffer, _tell_nobody, has_more=True, sift=sifted)
        finally:
            self._took(wire.filled - filled)
        return filled

    def _took(self, count: int) -> None:
        self._remaining -= count
        self.received += count

    async def _read_some(self, limit: int) -> bytes:
        segment = await self._wire.read_some(min(limit, self._remaining))
        if not segment:
            raise IncompleteBodyError("the client went in the middle of the body", remaining=self._remaining)
        self._took(len(segment))
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
        segment = await self._wire.read_some(min(limit, self._framing.data_left))
        if not segment:
            raise self._gone()
        self._took(len(segment))
        return segment

    def take_whole(self) -> bytes | None:
        """See `RequestBody.take_whole`: nobody knows how much it is."""
        return None

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `ByteSource.receive_into`."""
        filled = 0
        if self._awaits_continue or self._is_expired:
            await self.accept()
        while filled < len(buffer):
            if self._is_broken:
                raise InvalidRequestError("malformed chunked body")
            if self._framing.is_ended:
                raise IncompleteBodyError("the body is shorter than expected", received=filled, expected=len(buffer))
            before = filled
            if self._wire.has_unread:
                filled = self._take_held(buffer, filled)
            else:
                filled = await self._receive_in_place(buffer, filled, on_bytes)
            # Of many small chunks that came together the receiver is told once, or each would cost it a call.
            if filled > before:
                on_bytes(filled)

    async def receive_sifted(self, buffer: memoryview, join: JoinChunks, sift: Sift) -> int:
        """See `SiftedBody.receive_sifted`. Framing of HTTP is taken out first, in the same turn."""
        framing, wire = self._framing, self._wire
        if not framing.is_within_chunks or self._awaits_continue or self._is_expired:
            await self._reach_data()
        if self._is_broken:
            raise InvalidRequestError("malformed chunked body")
        if framing.is_ended:
            raise IncompleteBodyError("the body is shorter than expected", expected=len(buffer))
        filled, rest = 0, b""

        def sifted(end: int) -> tuple[int, int]:
            nonlocal filled, rest
            joined = join(buffer[filled:end], JoinedChunks(0, 0, framing.data_left, framing.data_left, 0), NO_LIMIT, 0)
            framing.skipped(joined.chunk_left)
            self.received += joined.filled
            rest = bytes(buffer[filled + joined.at : end])
            filled += joined.filled
            goes_on = is_cut_off(rest, _LINE_BYTES)
            if joined.filled:
                filled, wants_more = sift(filled)
                goes_on = goes_on and wants_more
            end = filled + len(rest)
            buffer[filled:end] = rest
            return end, len(buffer) if goes_on else end

        try:
            await wire.fill(buffer, _tell_nobody, has_more=True, sift=sifted)
        except BaseException:
            self._is_broken = True  # bytes came of which nobody knows what they are
            raise
        # What is cut off, or left by the joiner, is read line by line: asked again, it would leave the same.
        wire.push_back(rest)
        self._look_ahead()
        return filled

    async def _receive_in_place(self, buffer: memoryview, filled: int, on_bytes: Callable[[int], None]) -> int:
        """Receive the next bytes, framing and data, to where the data belongs, and close the gaps that the framing leaves; returns
        how far the buffer is filled then.

        Of a long chunk only the framing behind it comes along, so that its data is not moved; of short ones, many come at once.
        """
        framing, wire = self._framing, self._wire
        left = framing.data_left
        room = max(left, _WINDOW_BYTES) if self.received else 0
        window = buffer[filled : filled + room + _LINE_BYTES]
        # The end of a line follows a chunk for certain, and what follows that may be the end of the body.
        needed = min(len(window), left + 2) if left else 1
        told = partial(_report, on_bytes, filled, left) if left else _tell_nobody
        await wire.fill(window, told, at_least=needed, has_more=True)
        came, start, at = wire.filled, filled, 0
        join = native_joiner()
        while at < came and not framing.is_ended:
            if join is not None and framing.data_left and came - at > framing.data_left + _LINE_BYTES:
                before = JoinedChunks(at, filled - start, framing.data_left, framing.data_left, 0)
                joined = join(window[:came], before, NO_LIMIT, 0)
                framing.skipped(joined.chunk_left)
                self.received += start + joined.filled - filled
                at, filled = joined.at, start + joined.filled
            elif framing.data_left:
                count = min(framing.data_left, came - at)
                if start + at > filled:
                    buffer[filled : filled + count] = window[at : at + count]
                self._took(count)
                filled += count
                at += count
            else:
                at += self._framing_of(bytes(window[at : min(came, at + _LINE_BYTES)]))
        wire.push_back(bytes(window[at:came]))
        return filled

    def _take_held(self, buffer: memoryview, filled: int) -> int:
        """Copy data from all chunks that are here, in one pass over them; returns how far the buffer is filled then."""
        framing, wire = self._framing, self._wire
        held, at = wire.peek()
        source = memoryview(held)
        try:
            while filled < len(buffer) and at < len(held):
                if not framing.data_left:
                    at = self._framing_of(held, at)
                    if framing.is_ended:
                        break
                count = min(len(buffer) - filled, framing.data_left, len(held) - at)
                if count:
                    buffer[filled : filled + count] = source[at : at + count]
                    self._took(count)
                    filled += count
                    at += count
        finally:
            wire.advance(at)
        return filled

    def _took(self, count: int) -> None:
        self._framing.took(count)
        self.received += count

    def _framing_of(self, segment: bytes, start: int = 0) -> int:
        """Read framing from `start` on; returns where it ends."""
        try:
            return self._framing.consume(segment, start)
        except InvalidRequestError:
            self._is_broken = True
            raise

    async def _reach_data(self) -> bool:
        """Read framing until data is next (True) or the body has ended (False)."""
        if self._awaits_continue or self._is_expired:
            await self.accept()
        framing = self._framing
        while not framing.data_left and not framing.is_ended:
            if self._is_broken:
                raise InvalidRequestError("malformed chunked body")
            if not await self._wire.arrive():
                raise self._gone()
            self._consume()
        return not framing.is_ended

    def _look_ahead(self) -> None:
        """Take in framing that is already here: the end often lies right behind the last byte."""
        framing, wire = self._framing, self._wire
        while wire.has_unread and not (framing.data_left or framing.is_ended or self._is_broken):
            try:
                self._consume()
            except InvalidRequestError:
                return

    def _consume(self) -> None:
        held, at = self._wire.peek()
        self._wire.advance(self._framing_of(held, at))

    def _gone(self) -> IncompleteBodyError:
        return IncompleteBodyError("the client went in the middle of the body", received=self.received)


def _report(on_bytes: Callable[[int], None], before: int, limit: int, count: int) -> None:
    """Tell the receiver of a whole buffer about a piece that starts at `before` and of which `limit` bytes are data."""
    on_bytes(before + min(count, limit))


def _tell_nobody(_count: int) -> None:
    """Nothing is known of the bytes yet."""
