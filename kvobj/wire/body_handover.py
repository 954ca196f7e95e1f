"""One client's socket: the only module that decides into whose memory the kernel's bytes go.

A `Wire` is an `asyncio.BufferedProtocol` for its connection's whole life. Between bodies `get_buffer` answers with a small shared
buffer that heads are parsed from; while somebody fills a buffer of his own (an arena extent), `get_buffer` answers with the rest of
that buffer, so the kernel writes a body where it stays. Nothing is handed to and fro between protocols, and no parser is
attached to the socket whose state would have to be restored: the HTTP parser only ever sees a head, cut off at its blank line.
The buffer it answers with is never empty (uvloop asks once more after a body's last byte). Event loop only; one reader, one writer.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import cast

from kvobj.errors import IncompleteBodyError
from kvobj.wire.body_receivers import RECEIVED_BYTES_MIN, BodyReceivers
from kvobj.wire.body_senders import SENT_BYTES_MIN, BodySenders
from kvobj.wire.body_threads import MoveOutcome, Moving

# Pieces in which transports that copy (TLS, the stock loop) are fed: bounds what they hold.
_COPIED_PIECE_BYTES = 256 * 1024
_FIRST_BYTES = 4096
# What a head is read with on a connection whose latest body was long: the rest that comes with it would be copied three times.
_LEAD_BYTES = 4096
_LONG_BODY_BYTES = 128 * 1024
_FULL_SEGMENT_BYTES = 32 * 1024
_TCP_INFO_SEGMENTS = struct.Struct("20xI60xI")  # rcv_mss and advmss of linux/tcp.h, struct tcp_info
_LONG_VIEW_BYTES = 4 * 1024 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_INT_BYTES = struct.calcsize("i")


class ReceiveMode(StrEnum):
    """Where a body's bytes are received: straight where they belong, or into the shared buffer and copied from there."""

    DIRECT = "direct"
    COPIED = "copied"


class Wire(asyncio.BufferedProtocol):
    """Reads and writes of one connection, each with at most one waiter. `shared` may be shared by all wires of a loop."""

    __slots__ = (
        "_at_once",
        "_closed",
        "_copies_writes",
        "_direct",
        "_eof",
        "_fill_waiter",
        "_flush_waiter",
        "_has_full_segments",
        "_held",
        "_held_from",
        "_is_reading",
        "_is_tls",
        "_lead",
        "_long_send_bytes",
        "_loop",
        "_lost",
        "_low_water",
        "_low_water_now",
        "_needed",
        "_on_bytes",
        "_on_connected",
        "_on_request",
        "_pauses_after",
        "_read_waiter",
        "_reads_on",
        "_received_from",
        "_receivers",
        "_receiving",
        "_senders",
        "_sending",
        "_shared",
        "_sift",
        "_sleeper",
        "_target",
        "_transport",
        "_welcome_bytes",
        "_write_paused",
        "bytes_in",
        "bytes_out",
        "filled",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_connected: Callable[[Wire], None],
        *,
        shared: memoryview,
        mode: ReceiveMode,
        senders: BodySenders | None = None,
        receivers: BodyReceivers | None = None,
    ) -> None:
        """`senders`, `receivers`: who takes long bodies off the event loop; None: nobody."""
        self._loop = loop
        self._on_connected = on_connected
        self._shared = shared
        self._lead = shared
        self._direct = mode is ReceiveMode.DIRECT
        self._transport: asyncio.Transport | None = None
        self._is_tls = False
        self._copies_writes = True
        self._is_reading = True
        self._held = b""
        self._held_from = 0
        self._eof = False
        self._lost = False
        self._closed: asyncio.Event = asyncio.Event()
        self._target: memoryview | None = None
        self._needed = 0
        self._pauses_after = False
        self._on_bytes: Callable[[int], None] | None = None
        self._sift: Callable[[int], tuple[int, int]] | None = None
        self._read_waiter: asyncio.Future[None] | None = None
        self._at_once: Callable[[], bool] | None = None
        self._on_request: Callable[[bytes], bool] | None = None
        self._sleeper: tuple[asyncio.Future[None], Callable[[], bool]] | None = None
        self._reads_on = False
        self._has_full_segments = False
        self._fill_waiter: asyncio.Future[None] | None = None
        self._flush_waiter: asyncio.Future[MoveOutcome | None] | None = None
        self._senders = senders
        self._sending: Moving | None = None
        self._receivers = receivers
        self._receiving: Moving | None = None
        self._received_from = 0
        self._write_paused = False
        self._long_send_bytes: int | None = None
        self._low_water = 0
        self._welcome_bytes = 0
        self._low_water_now = 0
        self.filled = 0
        """Bytes that the present or latest `fill` has put into its buffer."""
        self.bytes_in = 0
        self.bytes_out = 0

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = made = cast("asyncio.Transport", transport)
        self._is_tls = made.get_extra_info("sslcontext") is not None
        # uvloop writes a memoryview from where it lies and keeps what the kernel did not take as a reference, not as a copy.
        self._copies_writes = self._is_tls or not type(made).__module__.startswith("uvloop")
        if self._copies_writes:
            self._senders = self._receivers = None
        # The bodies of TLS records are copied by OpenSSL anyway, and the start-up test does not cover its buffered path.
        self._direct = self._direct and not self._is_tls
        # A view may be overwritten once it has left the process, so `flush` must mean: nothing is left in the transport. TLS
        # transports pause at >= high and would pause for ever at 0.
        made.set_write_buffer_limits(high=1 if self._is_tls else 0, low=0)
        self._on_connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """See `asyncio.BufferedProtocol`: the unfilled rest of the buffer being filled, else the shared one. Never empty."""
        target = self._target
        if target is not None and self._direct:
            return target[self.filled :]
        return self._lead if target is None else self._shared

    def buffer_updated(self, nbytes: int) -> None:
        """See `asyncio.BufferedProtocol`."""
        self.bytes_in += nbytes
        target = self._target
        if target is None:
            # The event loop reads on at once where a read was as long as it could be.
            self._reads_on = self._direct and nbytes == len(self._lead)
            self._hold(self._shared[:nbytes])
            self._reads_on = False
            return
        if not self._direct:
            nbytes = self._copied(target, nbytes)
        self._filled_by(nbytes)

    def _filled_by(self, nbytes: int) -> None:
        """So many more bytes lie in the buffer that is being filled."""
        self.filled += nbytes
        waiter, on_bytes = self._fill_waiter, self._on_bytes
        if self._sift is not None and not self._sifted(self._sift, waiter):
            return
        remaining = self._needed - self.filled
        if self._receiving is not None:
            pass  # the thread sees to it
        elif remaining < self._low_water_now:
            self._set_low_water(0)
        elif nbytes >= _FULL_SEGMENT_BYTES and not self._low_water_now:
            self._await_much(remaining)
        if remaining <= 0:
            self._end_fill()
        if waiter is None or on_bytes is None or waiter.done():
            return
        try:
            on_bytes(self.filled)
        except Exception as error:  # noqa: BLE001 - the filler's own callback failed: he gets it, not the event loop
            self._target = None
            waiter.set_exception(error)
            self._fill_ended()
            return
        if self._target is None:
            waiter.set_result(None)
            self._fill_ended()

    def _copied(self, target: memoryview, nbytes: int) -> int:
        """Copy what has come into the shared buffer; how much of it that is, the rest is held."""
        taken = min(nbytes, len(target) - self.filled)
        target[self.filled : self.filled + taken] = self._shared[:taken]
        if taken < nbytes:
            self._hold(self._shared[taken:nbytes])
        return taken

    def _sifted(self, sift: Callable[[int], tuple[int, int]], waiter: asyncio.Future[None] | None) -> bool:
        """Have framing taken out of what has come; False where the fill is over by that."""
        if waiter is None or waiter.done():
            self._end_fill()  # nobody takes more, and no buffer may be empty: what comes is held
            return False
        try:
            self.filled, self._needed = sift(self.filled)
        except Exception as error:  # noqa: BLE001 - as that of `on_bytes`
            self._target = None
            waiter.set_exception(error)
            self._fill_ended()
            return False
        if self._held:  # received by way of the shared buffer: it comes first
            self._needed = self.filled
        return True

    def _end_fill(self) -> None:
        self._target = None
        if self._pauses_after:
            self._pause_reading()

    def eof_received(self) -> bool:
        """See `asyncio.BufferedProtocol`. The sending half stays open: a client may shut its own and still await the reply."""
        self._eof = True
        self._wake_readers()
        return not self._is_tls

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - every way to lose it is the same to the waiters
        """See `asyncio.BaseProtocol`."""
        self._eof = self._lost = True
        # Before the loop closes the socket.
        if self._sending is not None:
            self._sending.end()
        if self._receiving is not None:
            self._receiving.end()
            self._receiving = None  # what nobody was told of counts as not received
        self._closed.set()
        self._wake_readers()
        self._wake_flusher(ConnectionResetError("connection lost"))

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._write_paused = False
        self._wake_flusher(None)

    # Reading.

    @property
    def is_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self._is_tls

    @property
    def is_asleep(self) -> bool:
        """Whether who waits in `arrive` has not been woken."""
        return self._read_waiter is not None and not self._read_waiter.done()

    @property
    def is_awaiting_bytes(self) -> bool:
        """Whether somebody waits for the client to send."""
        return self._read_waiter is not None or self._fill_waiter is not None

    @property
    def filling(self) -> asyncio.Future[None] | None:
        """What the present `fill` waits for, if there is one."""
        return self._fill_waiter

    @property
    def has_unread(self) -> bool:
        """Whether received bytes lie here that nobody has taken yet."""
        return bool(self._held)

    @property
    def is_at_end(self) -> bool:
        """Whether the client will send no more and all it sent was taken."""
        return self._eof and not self._held

    async def read_segment(self) -> bytes:
        """Some bytes, at most twice the shared buffer's size, or b"" when the client sends no more."""
        if not self._held and not self._eof:
            await self.arrive()
        return self.take_unread()

    async def read_some(self, limit: int) -> bytes:
        """As `read_segment`, at most `limit` bytes: the rest stays unread and is not copied."""
        if not self._held and not self._eof:
            await self.arrive()
        start = self._held_from
        some = self._held[start : start + limit]
        self.advance(start + len(some))
        return some

    def take_unread(self) -> bytes:
        """What has been received and not yet taken, without waiting."""
        segment, start = self._held, self._held_from
        self._held = b""
        self._held_from = 0
        return segment[start:] if start else segment

    def peek(self) -> tuple[bytes, int]:
        """What `take_unread` would give, and from where on, without copying; `advance` tells how far it was used."""
        return self._held, self._held_from

    def advance(self, position: int) -> None:
        """Take what lies before `position` of what `peek` gave."""
        if position < len(self._held):
            self._held_from = position
        else:
            self._held = b""
            self._held_from = 0

    def push_back(self, rest: bytes) -> None:
        """Return the end of what `read_segment` gave, to be read first."""
        if rest:
            self._held = rest + self.take_unread() if self._held else rest

    async def arrive(self, at_once: Callable[[], bool] | None = None) -> bool:
        """Wait until there is something unread; False when the client sends no more.

        `at_once` is called where bytes arrive, before who waits is woken. It may take them and have the wait go on (True), and may
        read and write as one who has been woken; it does not raise. Where it leaves a `fill` that waits for more, it is called
        again when that has all its bytes, or none can be put there; where no more come, who waits here is woken instead.
        """
        if not self._held and not self._eof:
            if self._low_water_now:
                self._set_low_water(0)
            self._resume_reading()
            waiter = self._read_waiter = self._loop.create_future()
            self._at_once = at_once
            try:
                await waiter
            finally:
                if self._read_waiter is waiter:
                    self._read_waiter = None
                self._at_once = self._sleeper = None
        return bool(self._held)

    def watch(self, on_request: Callable[[bytes], bool]) -> None:
        """Have it called from now on with what lies unread, where bytes arrive for who waits in `arrive` with an `at_once`, before
        that. True: they were taken, or are to lie there until `look_again`, or more of them, or the end; `at_once` is not called
        then. It may read and write, and does not raise."""
        self._on_request = on_request

    async def fill(
        self,
        buffer: memoryview,
        on_bytes: Callable[[int], None],
        *,
        at_least: int | None = None,
        has_more: bool = False,
        sift: Callable[[int], tuple[int, int]] | None = None,
    ) -> None:
        """Fill `buffer` (bytes, not empty) from what is held, then from the socket. `on_bytes(n)`: the first n are there.

        `at_least`: it is enough when so many bytes are there (1 or more), though it takes what else has come; None: all.
        `sift(n)`: told of the same before, it may take bytes out of them, and answers how many it leaves, and how many are enough.
        `has_more`: another `fill` follows, so nothing is read ahead of it (uvloop would, since it asks again after a full buffer).
        Once it has returned, raised or been cancelled nothing writes to the buffer; `filled` says how far it got.
        Raises `IncompleteBodyError` when the client goes before that.
        """
        held, start = self._held, self._held_from
        self.filled = taken = min(len(held) - start, len(buffer))
        if taken:
            buffer[:taken] = held if taken == len(held) else held[start : start + taken]
            self.advance(start + taken)
            if sift is None:
                on_bytes(taken)
        needed = len(buffer) if at_least is None else at_least
        if taken and sift is not None:
            self.filled, needed = sift(taken)
            taken = self.filled
            if self._held:
                return
        if taken >= needed:
            return
        if self._eof:
            raise IncompleteBodyError("the client went in the middle of the body", received=taken, expected=needed)
        self._on_bytes = on_bytes
        self._sift = sift
        self._needed = needed
        self._pauses_after = has_more
        self._target = buffer
        self._fill_waiter = waiter = self._loop.create_future()
        self._lead = self._shared[:_LEAD_BYTES] if self._direct and len(buffer) >= _LONG_BODY_BYTES else self._shared
        try:
            if self._low_water_now or not self._reads_on:
                self._await_much(needed - taken)
            self._begin_receiving(taken)
            await waiter
        finally:
            self._end_receiving()
            self._target = self._on_bytes = self._sift = self._fill_waiter = None
            if self._low_water_now:
                self._set_low_water(0)
        if self.filled < self._needed:
            raise IncompleteBodyError(
                "the client went in the middle of the body", received=self.filled, expected=self._needed
            )

    def _begin_receiving(self, taken: int) -> None:
        """Have the rest of what is being filled received: by a thread if that is worth it and one is free, else by the event
        loop."""
        receivers, transport = self._receivers, self._transport
        if (
            receivers is not None
            and self._sift is None
            and self._needed - taken >= RECEIVED_BYTES_MIN
            and transport is not None
            and not transport.is_closing()
            and not receivers.is_alone(self)
        ):
            assert self._target is not None
            self._pause_reading()
            descriptor = transport.get_extra_info("socket").fileno()
            if not self._low_water_now:
                self._await_much(self._needed - taken)
            rest = self._target[taken : self._needed]
            self._received_from = taken
            self._receiving = receivers.begin(
                descriptor, rest, low_water=self._low_water_now, on_moved=self._on_received
            )
        if self._receiving is None:
            self._resume_reading()

    def _on_received(self) -> None:
        """The thread has received more, or is done: with all of it, or since the client is slow or gone; then the event loop goes
        on, which sees."""
        receiving = self._receiving
        if receiving is None:
            return
        end = self._received_from + receiving.moved
        if end < self._needed and not receiving.ended.done():
            self._filled_to(end)
            return
        self._receiving = None
        end = self._received_from + receiving.end()
        if end < self._needed or not self._pauses_after:
            self._resume_reading()
        self._filled_to(end)

    def _filled_to(self, end: int) -> None:
        nbytes = end - self.filled
        if nbytes:
            self.bytes_in += nbytes
            self._filled_by(nbytes)

    def _end_receiving(self) -> None:
        """From here on no thread writes to the buffer that is being filled."""
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            end = self._received_from + receiving.end()
            self.bytes_in += end - self.filled
            self.filled = end

    def fail_reader(self, error: Exception) -> None:
        """End the present wait for the client's bytes, if there is one, with `error`."""
        for waiter in (self._read_waiter, self._fill_waiter):
            if waiter is not None and not waiter.done():
                waiter.set_exception(error)
        self._wake_sleeper()

    def _hold(self, segment: memoryview) -> None:
        self._held = self.take_unread() + segment if self._held else bytes(segment)
        if len(self._held) >= len(self._shared):
            self._pause_reading()
        waiter, at_once, on_request = self._read_waiter, self._at_once, self._on_request
        if waiter is None or waiter.done():
            return
        if at_once is None:
            waiter.set_result(None)
            return
        if on_request is not None and on_request(self._held):
            return
        self._read_waiter = self._at_once = None  # it may wait for bytes of its own
        self._go_on(waiter, at_once)

    def look_again(self) -> None:
        """Call `at_once` of who waits in `arrive` for what lies here, as if it had arrived now."""
        waiter, at_once = self._read_waiter, self._at_once
        if at_once is not None and self.is_asleep and waiter is not None:
            self._read_waiter = self._at_once = None
            self._go_on(waiter, at_once)

    def _go_on(self, waiter: asyncio.Future[None], at_once: Callable[[], bool]) -> None:
        if not at_once():
            if not waiter.done():
                waiter.set_result(None)
        elif self._fill_waiter is not None:
            self._sleeper = waiter, at_once
        else:
            self._read_waiter, self._at_once = waiter, at_once
            if self._low_water_now:
                self._set_low_water(0)
            self._resume_reading()

    def _fill_ended(self) -> None:
        """Where `at_once` had left the fill: go on there."""
        sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None and not sleeper[0].done():
            self._go_on(*sleeper)

    def _wake_sleeper(self) -> None:
        sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None and not sleeper[0].done():
            sleeper[0].set_result(None)

    def _pause_reading(self) -> None:
        if self._is_reading and self._transport is not None and not self._transport.is_closing():
            self._is_reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._is_reading and self._transport is not None and not self._transport.is_closing():
            self._is_reading = True
            self._transport.resume_reading()

    def _wake_readers(self) -> None:
        for waiter in (self._read_waiter, self._fill_waiter):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        self._wake_sleeper()

    # Writing.

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

    @property
    def bytes_in_kernel(self) -> int:
        """Bytes that have left this process and that the other side has not acknowledged; with TLS those of its records. ~1 µs."""
        if self._transport is None or self._lost or self._transport.is_closing():
            return 0
        connection = self._transport.get_extra_info("socket")
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(_INT_BYTES)), sys.byteorder)

    def write(self, data: bytes) -> None:
        """Send or queue a few bytes. Raises `ConnectionResetError` when the connection is gone."""
        self._open_transport().write(data)
        self.bytes_out += len(data)
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
                    view = view[await self._send_beside(view, senders) :]
            if len(view):
                self._open_transport().write(view)
            await self.flush()
            return
        for start in range(0, len(view), _COPIED_PIECE_BYTES):
            self.write(head + bytes(view[start : start + _COPIED_PIECE_BYTES]))
            head = b""
            await self.flush()

    def _send_now(self, view: memoryview) -> int:
        """Give the kernel what it takes of the view; how much that was. Nothing may wait in the transport."""
        try:
            return os.write(self._open_transport().get_extra_info("socket").fileno(), view)
        except BlockingIOError:
            return 0
        except OSError as error:  # a pipe that is broken, a peer that answers no more: to all callers one thing
            raise ConnectionResetError("connection lost") from error

    async def _send_beside(self, view: memoryview, senders: BodySenders) -> int:
        """Have a thread send the view; how much of it has left, the rest being the event loop's."""
        descriptor = self._open_transport().get_extra_info("socket").fileno()
        sending = senders.begin(descriptor, view)
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

    def _open_transport(self) -> asyncio.Transport:
        if self._transport is None or self._lost or self._transport.is_closing():
            raise ConnectionResetError("connection lost")
        return self._transport

    def _wake_flusher(self, error: Exception | None) -> None:
        waiter = self._flush_waiter
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)

    # The kernel's side.

    def tune(self, *, send_bytes: int | None, low_water_bytes: int, welcome_bytes: int = 0) -> None:
        """Fix the kernel's send buffer from the first long view on (None: it adapts), and wake for a long body only when so much of
        it is there (0: any). `welcome_bytes`: how much of one that is no shorter is acknowledged before anybody reads it
        (`welcome`; 0: no more than the kernel does by itself)."""
        self._long_send_bytes = send_bytes
        self._low_water = low_water_bytes if self._direct else 0
        self._welcome_bytes = welcome_bytes if self._low_water else 0

    def welcome(self, size_bytes: int) -> None:
        """A body of so many bytes is on its way, and its reader has something else to do first: until the next wait for bytes, the
        kernel is to take in and acknowledge what comes.

        It acknowledges at once what is less than somebody waits for, and the rest only when that is read. A client whose congestion
        control goes by how fast bytes are acknowledged (BBR) takes the pause for a slow line, and sends the body at that rate:
        8 MiB behind a pause of 0.4 ms came in 2.5 ms, so in 1.9.
        """
        if 0 < self._welcome_bytes <= size_bytes and not self._eof and self._sees_full_segments():
            self._set_low_water(self._welcome_bytes)

    def acknowledge(self) -> None:
        """Have the kernel tell the client at once what has come. For protocols where a client sends a small piece behind another
        without waiting for a reply: it would keep the second one back (Nagle) until the first is acknowledged, 40 ms later."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def await_any(self) -> None:
        """Wake for whatever there is of the present body, until much of it comes at once again. A thread that receives it looks
        every so often anyway, and lowers the mark by itself."""
        if self._low_water_now and self._receiving is None:
            self._set_low_water(0)

    def _fix_send_buffer(self) -> None:
        # Once fixed, the kernel never adapts it again: so not before this connection carries something long. A 1 MiB view
        # goes out in one piece of an adapted buffer in 0.51 to 0.55 ms, through a fixed one in 0.74 to 0.85.
        size, self._long_send_bytes = self._long_send_bytes, None
        if size is not None and self._transport is not None:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)

    def _await_much(self, remaining: int) -> None:
        if self._low_water and remaining > self._low_water and self._sees_full_segments():
            self._set_low_water(self._low_water)
        elif self._low_water_now:
            self._set_low_water(0)

    def _sees_full_segments(self) -> bool:
        # Only where full segments were seen. The kernel also wakes a reader once the window it offers is less than one segment, but
        # of the size that it has seen: after small ones, sender and reader would wait for each other until the sender's probe,
        # 200 ms later (awscrt: HEAD, then PUT, on one connection).
        if not self._has_full_segments and self._transport is not None and not self._transport.is_closing():
            connection = self._transport.get_extra_info("socket")
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SEGMENTS.size)
            seen, full = _TCP_INFO_SEGMENTS.unpack(told)
            self._has_full_segments = seen >= full  # it may shrink again; the window stays larger than one
        return self._has_full_segments

    def _set_low_water(self, size: int) -> None:
        self._low_water_now = size
        if self._transport is not None and not self._transport.is_closing():
            # The kernel caps it at half its receive buffer, and an end of stream wakes regardless.
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(size, 1))

    # Ending.

    @property
    def remote(self) -> str:
        """The client's address, without its port; empty when unknown."""
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else ""

    @property
    def is_local(self) -> bool:
        """Whether the client is on this machine: both ends have the same address."""
        local = None if self._transport is None else self._transport.get_extra_info("sockname")
        return isinstance(local, tuple) and str(local[0]) == self.remote

    def finish_sending(self) -> None:
        """Shut the sending half once all is sent, so that the client sees the end while its own bytes still drain."""
        if not self._is_tls and self._transport is not None and not self._transport.is_closing():
            with suppress(OSError):  # the client has reset the connection, which is not told yet
                self._transport.write_eof()

    def close(self) -> None:
        """Close once everything written has been sent."""
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Close at once, and so that the client cannot take what it has for a whole reply (RST instead of FIN)."""
        if self._transport is None or self._lost:
            return
        connection = self._transport.get_extra_info("socket")
        if connection is not None and not self._transport.is_closing():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the event loop is done with the connection: from then on nothing refers to what was written."""
        await self._closed.wait()
