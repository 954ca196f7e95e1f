"""One connection's socket: who is at its other end, what the kernel is told and asked of it, and how it ends.

Of the two halves, `sending_half.py` has what goes out and `body_handover.py` what comes in. Event loop only.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from contextlib import suppress
from typing import cast

_TCP_INFO_SEGMENTS = struct.Struct("20xI60xI")  # rcv_mss and advmss of linux/tcp.h, struct tcp_info
# Its first byte, tcpi_state: the client has reset the connection; has ended its half of it.
_TCP_CLOSED, _TCP_CLOSE_WAIT = 7, 8
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_INT_BYTES = struct.calcsize("i")


class ConnectedSocket(asyncio.BaseProtocol):
    """What both halves of one connection share. Until the event loop has made it there is no peer and no socket."""

    __slots__ = (
        "_closed",
        "_direct",
        "_eof",
        "_has_full_segments",
        "_is_tls",
        "_long_send_bytes",
        "_lost",
        "_low_water",
        "_low_water_now",
        "_transport",
        "_welcome_bytes",
    )

    def __init__(self, *, is_direct: bool) -> None:
        """`is_direct`: bytes are received where they belong, so that to wait for many of them saves their reader something."""
        self._direct = is_direct
        self._transport: asyncio.Transport | None = None
        self._is_tls = False
        self._eof = False
        self._lost = False
        self._closed: asyncio.Event = asyncio.Event()
        self._has_full_segments = False
        self._long_send_bytes: int | None = None
        self._low_water = 0
        self._welcome_bytes = 0
        self._low_water_now = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = made = cast("asyncio.Transport", transport)
        self._is_tls = made.get_extra_info("sslcontext") is not None
        # The bodies of TLS records are copied by OpenSSL anyway, and the start-up test does not cover its buffered path.
        self._direct = self._direct and not self._is_tls

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - every way to lose it is the same to the waiters
        """See `asyncio.BaseProtocol`."""
        self._eof = self._lost = True
        self._closed.set()

    @property
    def is_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self._is_tls

    @property
    def descriptor(self) -> int:
        """The number of its file, -1 where it is closed."""
        return -1 if self._transport is None else int(self._transport.get_extra_info("socket").fileno())

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

    @property
    def bytes_in_kernel(self) -> int:
        """Bytes that have left this process and that the other side has not acknowledged; with TLS those of its records. ~1 µs."""
        if self._transport is None or self._lost or self._transport.is_closing():
            return 0
        connection = self._transport.get_extra_info("socket")
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(_INT_BYTES)), sys.byteorder)

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

    def _open_transport(self) -> asyncio.Transport:
        if self._transport is None or self._lost or self._transport.is_closing():
            raise ConnectionResetError("connection lost")
        return self._transport

    def _kernel_saw_end(self, *, or_end_of_sending: bool) -> bool:
        """Whether the client has reset the connection, by the kernel's word, which nobody has read yet. `or_end_of_sending`: or has
        ended its half of it."""
        if self._transport is None or self._lost or self._transport.is_closing():
            return False
        try:
            told = self._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        except OSError:  # no TCP
            return False
        return told[0] == _TCP_CLOSED or (or_end_of_sending and told[0] == _TCP_CLOSE_WAIT)

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
