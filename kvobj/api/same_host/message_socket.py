"""A Unix stream socket on the event loop, message by message, with descriptors on the way out.

What can be answered at once is, where it arrives; the rest is read by a task. A peer that sends many messages at once has a turn of
the event loop for some of them, and then others have theirs.

Bounded: what a peer sends ahead of what is being served stays in the kernel once a message's worth has arrived here, and how long a
message may be is said by whoever serves it. A peer that reads no replies is given up after a while. Descriptors that a peer sends
are closed by the kernel: nothing here asks for them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Final

from kvobj.errors import InvalidRequestError, UnavailableError
from kvobj.same_host.framing import LENGTH_BYTES, Unframer, framed

SEND_SECONDS: Final = 10.0
TURN_SECONDS: Final = 0.001
"""A peer has so much of the event loop at a time, and the end of the message it is in: others wait so long for each of its like."""
_READ_BYTES: Final = 64 * 1024
_READS_AT_ONCE: Final = 8
"""Of a peer that goes on sending; then others have their turn."""


def _no_answer(_: bytes) -> bytes | None:
    return None


def _nothing() -> None:
    return


class MessageSocket:
    """Owns a connected socket, and takes messages of at most `bytes_max` (`allow`: of others). Event-loop-only; one task reads.

    `on_end` is called at once when the peer is gone, also while a message is being served. `answer_now` is asked about each message
    that arrives while the task waits for one: its answer, empty for none, or None where the task is to have the message. `answered`
    is called when such an answer is on its way, and when all that came at once has been asked about."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        bytes_max: int,
        on_end: Callable[[], None],
        answer_now: Callable[[bytes], bytes | None] = _no_answer,
        answered: Callable[[], None] = _nothing,
    ) -> None:
        connection.setblocking(False)  # noqa: FBT003 - the standard library's own signature
        self._socket = connection
        self._descriptor = connection.fileno()
        self._on_end = on_end
        self._answer_now = answer_now
        self._answered = answered
        self._next: bytes | None = None
        self._unsent = b""
        self._unframer = Unframer(bytes_max)
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Future[None] | None = None
        self._turn_until = 0.0
        self._is_ended = False
        self._is_heard = True
        self._is_reading = True
        self._is_closed = False
        self._loop.add_reader(self._descriptor, self._on_readable)

    def allow(self, bytes_max: int) -> None:
        """Take messages of up to so many bytes from now on."""
        self._unframer.bytes_max = bytes_max

    async def read(self) -> bytes | None:
        """The next message; None once the peer has ended. `InvalidRequestError` for a length that no message has.

        Others have their turn first where this peer has had its own: never before a message that is waited for."""
        while True:
            if self._unsent:
                unsent, self._unsent = self._unsent, b""
                await self._send_rest(unsent)
            if self._next is None and self._unframer.buffered_bytes:
                if self._loop.time() >= self._turn_until:
                    await asyncio.sleep(0)
                    self._begin_turn()
                self._answer_some()
                if self._unsent:
                    continue
            message, self._next = self._next, None
            if message is None:
                message = self._unframer.take()
            if message is not None or self._is_ended:
                return message
            await self._more()
            self._begin_turn()

    async def wait_end(self) -> None:
        """Return once the peer has ended, and for no other reason: whatever it says from now on, or has said and nobody has read,
        is thrown away, and what it has not taken of its replies is not sent any more."""
        self._is_heard = False
        self._drop()
        while not self._is_ended:
            await self._more()

    async def _more(self) -> None:
        """Wait until something has arrived, or the peer has ended."""
        if not self._is_reading and not self._is_closed:
            self._is_reading = True
            self._loop.add_reader(self._descriptor, self._on_readable)
        self._arrived = self._loop.create_future()
        await self._arrived

    async def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message; with its first byte go the descriptors, which stay the caller's. `UnavailableError` where the peer does
        not read, or is gone."""
        data = framed(message)
        if descriptors:
            try:
                sent = socket.send_fds(self._socket, [data], list(descriptors))
            except OSError as error:
                raise _unread(error) from error
        else:
            sent = self._send_some(data)
        if sent < len(data):
            await self._send_rest(data[sent:])

    def send_now(self, message: bytes) -> None:
        """Send what the kernel takes of a message now; the rest goes before the next message is read. `UnavailableError` where the
        peer is gone."""
        data = framed(message)
        self._unsent += data[self._send_some(data) :]

    def _send_some(self, data: bytes) -> int:
        """Send what the kernel takes now; how much that was."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _unread(error) from error

    async def _send_rest(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._loop.sock_sendall(self._socket, data)
        except (OSError, TimeoutError) as error:
            raise _unread(error) from error

    def close(self) -> None:
        """Close the socket, and keep nothing of what came by it, nor whom it told. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_reading:
            self._loop.remove_reader(self._descriptor)
        self._socket.close()
        self._drop()
        # Its owner's methods: a cycle, which would be found only after many others like it, as the objects are few.
        self._on_end = self._answered = _nothing
        self._answer_now = _no_answer
        self._end()

    def _drop(self) -> None:
        self._unframer.clear()
        self._next = None
        self._unsent = b""

    def _on_readable(self) -> None:
        # To the end of what is there: a peer that closed with replies unread is an error of the socket, of which uvloop tells once.
        if self._arrived is not None:
            self._begin_turn()
        for _ in range(_READS_AT_ONCE):
            if not self._read_some():
                return
        self._loop.remove_reader(self._descriptor)  # whoever is told anew is told of what there is
        self._loop.add_reader(self._descriptor, self._on_readable)

    def _read_some(self) -> bool:
        """Take in what one read brings; False where there is nothing, or nothing is to be read before somebody waits for it."""
        try:
            data = self._socket.recv(min(_READ_BYTES, LENGTH_BYTES + self._unframer.bytes_max))
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._descriptor)
            self._is_reading = False
            self._end()
            self._on_end()
            return False
        if not self._is_heard:
            return True
        self._unframer.feed(data)
        if self._unframer.buffered_bytes > self._unframer.bytes_max:
            self._loop.remove_reader(self._descriptor)
            self._is_reading = False
        if self._arrived is not None and not self._answer_some():
            self._wake()
        return self._is_reading and not self._is_closed

    def _begin_turn(self) -> None:
        self._turn_until = self._loop.time() + TURN_SECONDS

    def _answer_some(self) -> bool:
        """Answer what can be answered now, to the turn's end; False where the task has to look, in another."""
        try:
            while (message := self._unframer.take()) is not None:
                answer = self._answer_now(message)
                if answer is None:
                    self._next = message
                    return False
                if answer:
                    data = framed(answer)
                    self._unsent = data[self._send_some(data) :]
                    self._answered()
                    if self._unsent:
                        return False
                if self._unframer.buffered_bytes and self._loop.time() >= self._turn_until:
                    return False
        except InvalidRequestError:
            return False  # a length that no message has: `read` tells
        except UnavailableError:
            self._on_end()  # whether the peer is gone, or only reads no more, is seen where it is read of
        finally:
            self._answered()
        return self._is_reading

    def _end(self) -> None:
        self._is_ended = True
        self._wake()

    def _wake(self) -> None:
        arrived, self._arrived = self._arrived, None
        if arrived is not None and not arrived.done():
            arrived.set_result(None)


def _unread(error: OSError | TimeoutError) -> UnavailableError:
    return UnavailableError("the same-host client does not read", reason=str(error))
