"""One client's socket: the only module that decides into whose memory the kernel's bytes go.

A `Wire` is an `asyncio.BufferedProtocol` for its connection's whole life. Between bodies `get_buffer` answers with a small shared
buffer that heads are parsed from; while somebody fills a buffer of his own (an arena extent), `get_buffer` answers with the rest of
that buffer, so the kernel writes a body where it stays. Nothing is handed to and fro between protocols, and no parser is
attached to the socket whose state would have to be restored: the HTTP parser only ever sees a head, cut off at its blank line.
The buffer it answers with is never empty (uvloop asks once more after a body's last byte). Event loop only; one reader, one writer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum

from kvobj.errors import IncompleteBodyError
from kvobj.wire.body_receivers import RECEIVED_BYTES_MIN, BodyReceivers
from kvobj.wire.body_senders import BodySenders
from kvobj.wire.body_threads import Moving
from kvobj.wire.sending_half import SendingHalf

# What a head is read with on a connection whose latest body was long: the rest that comes with it would be copied three times.
_LEAD_BYTES = 4096
_LONG_BODY_BYTES = 128 * 1024
_FULL_SEGMENT_BYTES = 32 * 1024


class ReceiveMode(StrEnum):
    """Where a body's bytes are received: straight where they belong, or into the shared buffer and copied from there."""

    DIRECT = "direct"
    COPIED = "copied"


class Wire(SendingHalf, asyncio.BufferedProtocol):
    """Reads and writes of one connection, each with at most one waiter. `shared` may be shared by all wires of a loop."""

    __slots__ = (
        "_at_once",
        "_departs_at_end",
        "_fill_waiter",
        "_held",
        "_held_from",
        "_is_reading",
        "_lead",
        "_needed",
        "_on_bytes",
        "_on_connected",
        "_on_departure",
        "_on_request",
        "_pauses_after",
        "_read_waiter",
        "_reads_on",
        "_received_from",
        "_receivers",
        "_receiving",
        "_shared",
        "_sift",
        "_sleeper",
        "_target",
        "bytes_in",
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
        super().__init__(loop, is_direct=mode is ReceiveMode.DIRECT, senders=senders)
        self._on_connected = on_connected
        self._shared = shared
        self._lead = shared
        self._is_reading = True
        self._held = b""
        self._held_from = 0
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
        self._on_departure: Callable[[], None] | None = None
        self._departs_at_end = False
        self._fill_waiter: asyncio.Future[None] | None = None
        self._receivers = receivers
        self._receiving: Moving | None = None
        self._received_from = 0
        self.filled = 0
        """Bytes that the present or latest `fill` has put into its buffer."""
        self.bytes_in = 0

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        super().connection_made(transport)
        if self._copies_writes:
            self._receivers = None
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
        if self._departs_at_end:
            self._tell_departure()
        return not self._is_tls

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        if self._receiving is not None:
            self._receiving.end()  # before the loop closes the socket
            self._receiving = None  # what nobody was told of counts as not received
        super().connection_lost(exc)
        self._wake_readers()
        self._tell_departure()

    # Departures.

    def watch_for_departure(self, on_departure: Callable[[], None], *, at_end_of_sending: bool) -> None:
        """Have it called, once, when the connection is lost, or was before; `at_end_of_sending`: also when the client has ended its
        half. For who has nothing to write, and so would not see it; until `watch_no_more`."""
        self._on_departure, self._departs_at_end = on_departure, at_end_of_sending
        if self._lost or (self._eof and at_end_of_sending):
            self._tell_departure()
        elif not self._eof and len(self._held) < len(self._shared):
            self._resume_reading()  # the event loop tells of either only where it reads

    def watch_no_more(self) -> None:
        """Whoever goes now is found by who next writes or reads. Idempotent."""
        self._on_departure, self._departs_at_end = None, False

    def look_for_departure(self) -> None:
        """Tell of a departure that the event loop does not see, since a client that sent far ahead is not read from."""
        is_unseen = self._on_departure is not None and not self._is_reading
        if is_unseen and self._kernel_saw_end(or_end_of_sending=self._departs_at_end):
            self._tell_departure()

    def _tell_departure(self) -> None:
        on_departure = self._on_departure
        self.watch_no_more()
        if on_departure is not None:
            on_departure()

    # Reading.

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
    def reads_on(self) -> bool:
        """Whether, where bytes arrive, the read was as long as it could be: more lies in the kernel most likely."""
        return self._reads_on

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

    def await_any(self) -> None:
        """Wake for whatever there is of the present body, until much of it comes at once again. A thread that receives it looks
        every so often anyway, and lowers the mark by itself."""
        if self._low_water_now and self._receiving is None:
            self._set_low_water(0)

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
