"""What one HTTP server allows: sizes, counts and deadlines, in one frozen value, and the gate in front of its handler.

Everything a client can make the server hold or wait for has its bound here. The gate bounds how many requests are in
the handler at once and how many wait for that; who finds the queue full, or waits too long, is told to come back later.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import deque
from dataclasses import dataclass

_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Limits of one `HttpServer`. `name` is the component in its metrics' names: `kvobj_<name>_requests_total`."""

    name: str = "s3"
    request_line_bytes: int = 8 * _KIB
    head_bytes: int = 40 * _KIB
    """Request line and header fields together: 8 KiB and 32 KiB."""
    header_fields: int = 100
    header_seconds: float = 10.0
    keep_alive_seconds: float = 60.0
    body_stall_seconds: float = 30.0
    """The span over which a client that sends a body must deliver at least `body_stall_bytes`."""
    body_stall_bytes: int = 8 * _KIB
    send_stall_seconds: float = 60.0
    """How long a client may take nothing of a reply."""
    unread_body_bytes: int = 1024 * _KIB
    """A body that the handler left unread is read and dropped up to here, for the sake of the connection."""
    linger_seconds: float = 2.0
    """How long a connection that is being closed under an unread body is read, so that the reply is not lost to a reset."""
    linger_bytes: int = 128 * 1024 * _KIB
    """How much of it: what a client sends without asking first, as of a chunk that exists, which it would send again whole."""
    connections: int = 1024
    address_connections: int = 512
    """Of one client's address, or IPv6 network of 64 bits; clients on this machine, which share one, have no such bound."""
    refused_connections: int = 64
    """How many connections past `connections`, or past one address's, are answered 503; any further one is reset."""
    handler_requests: int = 512
    queued_requests: int = 512
    queue_seconds: float = 10.0
    parting_seconds: float = 1.0
    """How long a drain waits for the next request of clients that sent one lately, so as to tell them that it is the last."""
    parting_stall_seconds: float = 5.0
    """What the deadlines of a request are shortened to after that: who sends nothing, or takes nothing, has all others wait."""
    listen_backlog: int = 1024
    local_send_bytes: int | None = 256 * _KIB
    """The kernel's send buffer for long replies to clients on this machine; None, and those of all others, are left to the
    kernel to adapt. An adapted one grows to 4 MiB and out of the core's cache: an 8 MiB GET then ran at 0.94 of a bare socket,
    with this at 1.3."""
    local_low_water_bytes: int = 512 * _KIB
    """How much of a long body must be there before it is read, for clients on this machine. Each wake costs 15 µs, and without
    it one comes with 128 KiB: an 8 MiB PUT then ran at 0.74 of a bare socket, with this at 0.85. Not
    for others, who may be slow."""
    local_welcome_bytes: int = 4096 * _KIB
    """How much of a body the kernel takes in and acknowledges while its head is dealt with (`Wire.welcome`): more than such a
    client sends in that time, 0.3 to 0.5 ms. Shorter bodies are in the kernel by then anyway: those of 1 MiB took 7 % longer."""
    receive_buffer_bytes: int = 64 * _KIB
    """The buffer, shared by all connections, that heads and copied bodies are read into, and what a connection may hold unread."""
    sender_threads: int = 4
    """How many long replies at once are sent beside the event loop, which sends all others (`BodySenders`). Seen on two cores, four
    connections, 8 MiB: 0.84 of a bare socket without, 1.14 with them."""
    receiver_threads: int = 0
    """How many long bodies at once are received beside the event loop, which receives all others (`BodyReceivers`)."""
    sweep_seconds: float = 1.0
    """How often deadlines are checked: their resolution."""


def address_group(remote: str) -> str:
    """What counts as one client: an IPv4 address, also one mapped into IPv6, or the network of 64 bits that one IPv6 host gets."""
    try:
        address = ipaddress.ip_address(remote)
    except ValueError:
        return remote
    if isinstance(address, ipaddress.IPv4Address):
        return remote
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(address) >> 64 << 64))


class RequestGate:
    """At most `running` requests at once and `queued` waiting for up to `seconds`, first come, first served."""

    __slots__ = ("_free", "_queued", "_seconds", "_turns")

    def __init__(self, *, running: int, queued: int, seconds: float) -> None:
        self._free = running
        self._queued = queued
        self._seconds = seconds
        self._turns: deque[asyncio.Future[None]] = deque()

    def enter_now(self) -> bool:
        """Take a slot that is free, to be given back by `leave`; False where it would have to be waited for."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def enter(self) -> bool:
        """Take a slot, to be given back by `leave`; False when there is none to be had."""
        if self.enter_now():
            return True
        if len(self._turns) >= self._queued:
            return False
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            async with asyncio.timeout(self._seconds):
                await turn
        except TimeoutError:
            return not turn.cancelled()  # it may have come at the same moment
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave()
            raise
        finally:
            if turn in self._turns:
                self._turns.remove(turn)
        return True

    def leave(self) -> None:
        """Give a slot back: to who waits longest, if anybody does."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
