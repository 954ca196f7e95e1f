"""The half of a connection that sends: what has been written, how much of it has left this process, and who sends long bodies.

With uvloop a view is written from where it lies; other transports copy and are fed in pieces. Event loop only; one writer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from kvobj.wire.body_senders import SENT_BYTES_MIN, BodySenders
from kvobj.wire.body_threads import MoveOutcome, Moving
from kvobj.wire.connected_socket import ConnectedSocket

# Pieces in which transports that copy (TLS, the stock loop) are fed: bounds what they hold.
_COPIED_PIECE_BYTES = 256 * 1024
_FIRST_BYTES = 4096
_LONG_VIEW_BYTES = 4 * 1024 * 1024


class SendingHalf(ConnectedSocket):
    """Writes of one connection, with at most one waiter."""

    __slots__ = ("_copies_writes", "_flush_waiter", "_loop", "_senders", "_sending", "_write_paused", "bytes_out")

    def __init__(self, loop: asyncio.AbstractEventLoop, *, is_direct: bool, senders: BodySenders | None) -> None:
        """`senders`: who takes long bodies off the event loop; None: nobody."""
        super().__init__(is_direct=is_direct)
        self._loop = loop
        self._copies_writes = True
        self._flush_waiter: asyncio.Future[MoveOutcome | None] | None = None
        self._senders = senders
        self._sending: Moving | None = None
        self._write_paused = False
        self.bytes_out = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        super().connection_made(transport)
        made = cast("asyncio.Transport", transport)
        # uvloop writes a memoryview from where it lies and keeps what the kernel did not take as a reference, not as a copy.
        self._copies_writes = self._is_tls or not type(made).__module__.startswith("uvloop")
        if self._copies_writes:
            self._senders = None
        # A view may be overwritten once it has left the process, so `flush` must mean: nothing is left in the transport. TLS
        # transports pause at >= high and would pause for ever at 0.
        made.set_write_buffer_limits(high=1 if self._is_tls else 0, low=0)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        super().connection_lost(exc)
        if self._sending is not None:
            self._sending.end()  # before the loop closes the socket
        self._wake_flusher(ConnectionResetError("connection lost"))

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._write_paused = False
        self._wake_flusher(None)

    @property
    def is_flushing(self) -> bool:
        """Whether something that was written is still to leave this process."""
        return self._flush_waiter is not None or self._write_paused

    @property
    def bytes_taken(self) -> int:
        """Bytes that have left this process, ever."""
        pending = 0 if self._transport is None or self._lost else self._transport.get_write_buffer_size()
        if self._sending is not None:
            pending += self._sending.left
        return self.bytes_out - pending

    def write(self, data: bytes) -> None:
        """Send or queue a few bytes. Raises `ConnectionResetError` when the connection is gone."""
        self._open_transport().write(data)
        self.bytes_out += len(data)
        self._note_turn()

    def _note_turn(self) -> None:
        senders = self._senders
        if senders is not None and senders.latest is not self:
            senders.latest, senders.in_turn = self, 0

    async def send(self, head: bytes, view: memoryview) -> None:
        """Send head and view as one write where the loop can, and return once both have left this process."""
        if not self._copies_writes:
            transport = self._open_transport()
            self.bytes_out += len(head) + len(view)
            if self._long_send_bytes is not None and len(view) >= _LONG_VIEW_BYTES:
                self._fix_send_buffer()
            if head:
                # Head and the view's first page in one write, the rest in the next. The client wakes while the rest is copied:
                # 1 MiB takes 190 µs so, 400 µs gathered in one call, 450 µs with the head on its own.
                transport.write(head + view[:_FIRST_BYTES])
                view = view[_FIRST_BYTES:]
            senders = self._senders
            if len(view) >= SENT_BYTES_MIN and senders is not None:
                await self.flush()
                if senders.is_alone(self, len(view)):
                    view = view[self._send_now(view) :]
                if len(view) >= SENT_BYTES_MIN:
                    whole = view
                    view = view[await self._sent_beside(lambda descriptor: senders.begin(descriptor, whole)) :]
            if len(view):
                self._open_transport().write(view)
            await self.flush()
            return
        for start in range(0, len(view) or 1, _COPIED_PIECE_BYTES):
            self.write(head + bytes(view[start : start + _COPIED_PIECE_BYTES]))
            head = b""
            await self.flush()

    async def send_burst(self, pieces: Sequence[tuple[bytes, memoryview]]) -> None:
        """Send pieces one after the other, of each the bytes in front of its view and the view, and return once all have left this
        process. A thread takes all of them at once: each of 1 MiB by itself takes longer to hand over than to send."""
        if self._copies_writes or len(pieces) == 1:
            for lead, view in pieces:
                await self.send(lead, view)
            return
        parts = [part for piece in pieces for part in piece if len(part)]
        size_bytes = sum(map(len, parts))
        self._note_turn()
        await self.flush()  # first: what counts as taken is what left of `bytes_out`
        self._open_transport()
        self.bytes_out += size_bytes
        sent, senders = 0, self._senders
        if senders is not None and size_bytes >= SENT_BYTES_MIN:
            if self._long_send_bytes is not None and size_bytes >= _LONG_VIEW_BYTES:
                self._fix_send_buffer()
            sent = await self._sent_beside(lambda descriptor: senders.begin_parts(descriptor, parts))
        self._open_transport().writelines(_behind(parts, sent))
        await self.flush()

    def _send_now(self, view: memoryview) -> int:
        """Give the kernel what it takes of the view; how much that was. Nothing may wait in the transport."""
        try:
            return os.write(self._open_transport().get_extra_info("socket").fileno(), view)
        except BlockingIOError:
            return 0
        except OSError as error:  # a pipe that is broken, a peer that answers no more: to all callers one thing
            raise ConnectionResetError("connection lost") from error

    async def _sent_beside(self, begin: Callable[[int], Moving | None]) -> int:
        """Have a thread send what `begin` gives it for a socket; how much of that has left, the rest being the event loop's."""
        sending = begin(self._open_transport().get_extra_info("socket").fileno())
        if sending is None:
            return 0
        self._sending, self._flush_waiter = sending, sending.ended
        try:
            outcome = await sending.ended
        finally:
            self._sending = self._flush_waiter = None
            sent = sending.end()
        if outcome is MoveOutcome.FAILED:
            raise ConnectionResetError("connection lost")
        return sent

    async def flush(self) -> None:
        """Wait until everything written has left this process. Raises `ConnectionResetError` when it cannot."""
        if self._lost:
            raise ConnectionResetError("connection lost")
        if self._write_paused:
            self._flush_waiter = waiter = self._loop.create_future()
            try:
                await waiter
            finally:
                self._flush_waiter = None

    def _wake_flusher(self, error: Exception | None) -> None:
        waiter = self._flush_waiter
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


def _behind(parts: Sequence[bytes | memoryview], sent: int) -> Iterator[memoryview]:
    """What is left of the parts once so many of their bytes have been sent."""
    for part in parts:
        if sent < len(part):
            yield memoryview(part)[sent:]
        sent = max(0, sent - len(part))
