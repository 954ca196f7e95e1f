"""The check at start that decides how bodies are received: a request, its body and a second request over a real socket.

Receiving in place rests on how an event loop treats buffered protocols. Where the round trip does not give the right bytes, bodies
are received through the shared buffer and copied: slower and otherwise the same.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from kvobj.wire.body_handover import ReceiveMode, Wire

_BODY_BYTES = 300_000
_SHARED_BYTES = 16 * 1024
_TIMEOUT_SECONDS = 5.0
_HEAD = b"PUT /first HTTP/1.1\r\n\r\n"
_NEXT = b"GET /second HTTP/1.1\r\n\r\n"


async def choose_receive_mode(
    log: logging.Logger, round_trip: Callable[[], Awaitable[None]] | None = None
) -> ReceiveMode:
    """DIRECT when the round trip works on the running loop, else COPIED, with a warning."""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            await (round_trip or receive_in_place)()
    except Exception:  # whatever goes wrong, the other mode serves
        log.warning("bodies cannot be received in place on this event loop: they will be copied", exc_info=True)
        return ReceiveMode.COPIED
    return ReceiveMode.DIRECT


async def receive_in_place() -> None:
    """The round trip over loopback, in place. Raises whatever goes wrong."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.settimeout(0)
        await _round_trip(listener, client)


async def _round_trip(listener: socket.socket, client: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    connected: asyncio.Future[Wire] = loop.create_future()
    shared = memoryview(bytearray(_SHARED_BYTES))
    body = (bytes(range(251)) * (_BODY_BYTES // 251 + 1))[:_BODY_BYTES]
    server = await loop.create_server(
        lambda: Wire(loop, connected.set_result, shared=shared, mode=ReceiveMode.DIRECT), sock=listener.dup()
    )
    sending: asyncio.Task[None] | None = None
    try:
        await loop.sock_connect(client, listener.getsockname())
        wire = await connected
        # More than any socket buffer's first window, in one go: head and first bytes together, the next request glued on.
        sending = asyncio.ensure_future(loop.sock_sendall(client, _HEAD + body + _NEXT))
        seen = b""
        while len(seen) < len(_HEAD):
            seen += await wire.read_segment()
        wire.push_back(seen[len(_HEAD) :])
        received = bytearray(_BODY_BYTES)
        half = _BODY_BYTES // 2
        with memoryview(received) as view:
            await wire.fill(view[:half], lambda _: None)
            await wire.fill(view[half:], lambda _: None)
        await sending
        after = b""
        while len(after) < len(_NEXT):
            after += await wire.read_segment()
        if bytes(received) != body or after != _NEXT:
            raise RuntimeError("received bytes differ from those sent")
        wire.reset()
        await wire.wait_closed()
    finally:
        if sending is not None:
            sending.cancel()
        server.close()
        await server.wait_closed()
