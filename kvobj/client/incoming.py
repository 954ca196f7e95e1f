"""An answer whose body is still to be read, by its length, by its chunks, or up to the connection's end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Self, TypeVar

from kvobj.client.call_scope import CallScope
from kvobj.client.wire import Wire
from kvobj.errors import UnavailableError
from kvobj.wire.response_head import (
    CHUNK_LINE_BYTES_MAX,
    FIELDS_MAX,
    HEAD_BYTES_MAX,
    BrokenAnswerError,
    ResponseHead,
    parse_chunk_line,
)

LINE_BYTES_MAX: Final = 16 * 1024 * 1024
_PIECE_BYTES: Final = 64 * 1024
_PIECE_BYTES_MAX: Final = 1024 * 1024

T = TypeVar("T")


class Incoming:
    """An answer of status 2xx or 3xx; header names are lower case. A context manager: what is left unread at its end costs the
    connection. Reading raises `UnavailableError` where the body ends early or does not come in time."""

    __slots__ = (
        "_ahead", "_deadline", "_head", "_is_chunk_open", "_is_closed", "_is_whole", "_left", "_scope", "_unavailable", "_wire",
        "headers", "status",
    )  # fmt: skip

    def __init__(
        self,
        head: ResponseHead,
        wire: Wire,
        *,
        deadline: float,
        scope: CallScope | None,
        unavailable: Callable[[Exception], UnavailableError],
    ) -> None:
        self.status = head.status
        self.headers: Mapping[str, str] = head.headers
        self._head = head
        self._wire = wire
        self._deadline = deadline
        self._scope = scope
        self._unavailable = unavailable
        self._left = head.length or 0
        self._is_whole = head.length == 0
        self._is_chunk_open = False
        self._ahead = bytearray()
        self._is_closed = False

    def allow(self, seconds: float) -> None:
        """Set another deadline, from now: what is read next of a long answer may take so long, within the call's own."""
        self._deadline = time.monotonic() + seconds
        if self._scope is not None:
            self._deadline = min(self._deadline, self._scope.deadline)

    def read(self) -> bytes:
        """All that is left."""
        return self._reading(self._all)

    def readinto(self, view: memoryview) -> None:
        """Fill the whole view."""
        try:
            self._guard()
            self._fill(view)
        except BaseException as error:
            self._fail(error)
            raise

    def read_some(self, view: memoryview) -> int:
        """Fill the beginning of a view with what comes first; how much that is, 0 at the body's end."""
        return self._reading(lambda: self._some(view, self._wire.read_some))

    def readline(self) -> bytes:
        """The next line with its end; b"" at the body's end."""
        return self._reading(self._line)

    def close(self) -> None:
        """Read no more. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._scope is not None:
            self._scope.unguard()
        if not (self._is_whole and self._head.is_kept):
            self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------
    def _guard(self) -> None:
        """The call's end ends this wait too, whatever else the call has waited for since the last one."""
        if self._scope is not None:
            self._scope.guard(self._wire.abort)

    def _reading(self, read: Callable[[], T]) -> T:
        try:
            self._guard()
            return read()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Whatever it was, an interrupt for one: nobody knows what of the body has come, so the connection ends here."""
        self._wire.close()
        if isinstance(error, (OSError, BrokenAnswerError)):
            raise self._unavailable(error) from error

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            count = self._some(view[filled:] if filled else view, self._wire.read_into)
            if not count:
                raise BrokenAnswerError(f"the body ends {len(view) - filled} bytes early")
            filled += count

    def _some(self, view: memoryview, receive: Callable[..., int]) -> int:
        if self._ahead:
            count = min(len(view), len(self._ahead))
            view[:count] = self._ahead[:count]
            del self._ahead[:count]
            return count
        if self._head.is_chunked and not self._left and not self._is_whole:
            self._next_chunk()
        if self._is_whole or not len(view):
            return 0
        is_measured = self._head.is_chunked or self._head.length is not None
        room = view[: self._left] if is_measured and self._left < len(view) else view
        count = receive(room, deadline=self._deadline)
        if is_measured:
            if not count:
                raise BrokenAnswerError("the body breaks off")
            self._left -= count
            self._is_whole = not self._left and not self._head.is_chunked
        else:
            self._is_whole = not count
        return count

    def _next_chunk(self) -> None:
        if self._is_chunk_open and self._chunk_line() != b"\r\n":
            raise BrokenAnswerError("a chunk longer than its length")
        self._left = parse_chunk_line(self._chunk_line())
        self._is_chunk_open = True
        if self._left:
            return
        for _ in range(FIELDS_MAX):  # the trailer: of no use here
            if self._wire.read_line(HEAD_BYTES_MAX, deadline=self._deadline) == b"\r\n":
                self._is_whole = True
                return
        raise BrokenAnswerError("a trailer without an end")

    def _chunk_line(self) -> bytes:
        return self._wire.read_line(CHUNK_LINE_BYTES_MAX, deadline=self._deadline)

    def _all(self) -> bytes:
        pieces: list[bytes] = []
        room = memoryview(bytearray(min(max(self._left, _PIECE_BYTES), _PIECE_BYTES_MAX)))
        while count := self._some(room, self._wire.read_into):
            pieces.append(bytes(room[:count]))
        return b"".join(pieces)

    def _line(self) -> bytes:
        room = memoryview(bytearray(_PIECE_BYTES))
        line = bytearray()
        while True:
            count = self._some(room, self._wire.read_some)
            end = bytes(room[:count]).find(b"\n") + 1
            line += room[: end or count]
            if len(line) > LINE_BYTES_MAX:
                raise BrokenAnswerError("a line that is too long")
            if end or not count:
                self._ahead[:0] = room[end:count] if end else b""
                return bytes(line)
