"""Accepting TLS connections: each has its place among the connections, and its deadline, before its handshake begins.

Event loops that accept by themselves tell of a TLS connection once its handshake is done: until then it would count as nothing, and
who opens sockets and says nothing would be bounded by open files alone. Here a socket is accepted, counted, and only then handed to
the loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvobj.api.http.admission import Admission, Place
from kvobj.api.http.instruments import HttpInstruments
from kvobj.api.http.limits import HttpSettings
from kvobj.wire.accept_loop import AcceptLoop
from kvobj.wire.body_handover import Wire

_ABORT_SECONDS: Final = 2.0
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsServing:
    """What the listeners of one server share. `make_wire` makes a wire that calls what it is given once it is connected;
    `connected` takes over wire and place, and does not raise."""

    context: ssl.SSLContext
    settings: HttpSettings
    admission: Admission
    instruments: HttpInstruments
    make_wire: Callable[[Callable[[Wire], None]], Wire]
    connected: Callable[[Wire, Place], None]
    log: logging.Logger


class TlsListener:
    """Accepts at one listening socket, of which it owns the duplicate that it is given. Event-loop-only."""

    def __init__(self, listening: socket.socket, serving: TlsServing) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._serving = serving
        self._accepting = AcceptLoop(
            listening, self._admit, waited=serving.instruments.accept_waits.inc, log=serving.log
        )
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}
        self._is_open = False

    @property
    def handshakes(self) -> tuple[asyncio.Task[None], ...]:
        """Those that go on, each done at its deadline at the latest."""
        return tuple(self._handshakes)

    def start(self) -> None:
        """Accept from here on."""
        self._listening.setblocking(False)  # noqa: FBT003 - the standard library's own signature
        self._listening.listen(self._serving.settings.listen_backlog)
        self._is_open = True
        self._accepting.start()

    def stop(self) -> None:
        """Accept no more; handshakes go on. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._accepting.stop()
        self._listening.close()

    async def aclose(self) -> None:
        """Accept no more and end all handshakes. Idempotent."""
        self.stop()
        for accepted in self._handshakes.values():
            with suppress(OSError):  # the client went this moment
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                accepted.shutdown(socket.SHUT_RDWR)  # the loop sees the end of the stream, and gives the handshake up
        if self._handshakes:
            _, pending = await asyncio.wait(self._handshakes, timeout=_ABORT_SECONDS)
            for task in pending:
                task.cancel()

    def _admit(self, accepted: socket.socket, remote: str) -> None:
        serving = self._serving
        place = serving.admission.admit(remote, is_local=_is_local(accepted, remote))
        if place is None or place.refusal:
            serving.instruments.refused_connections.inc()
        if place is None:
            _reset(accepted)
            return
        task = self._loop.create_task(self._shake_hands(accepted, place), name="tls-handshake")
        self._handshakes[task] = accepted
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._handshakes[task]
        if not task.cancelled() and task.exception() is not None:
            self._serving.log.error("a TLS handshake failed by a defect", exc_info=task.exception())

    async def _shake_hands(self, accepted: socket.socket, place: Place) -> None:
        serving, settings = self._serving, self._serving.settings
        is_handed_over = False

        def connected(wire: Wire) -> None:
            nonlocal is_handed_over
            is_handed_over = True
            serving.connected(wire, place)

        try:
            await self._loop.connect_accepted_socket(
                partial(serving.make_wire, connected),
                accepted,
                ssl=serving.context,
                ssl_handshake_timeout=settings.header_seconds,
                ssl_shutdown_timeout=settings.linger_seconds,
            )
        except OSError:  # ssl.SSLError and TimeoutError are: a client that speaks no TLS, trusts us not, or is too slow
            serving.instruments.failed_handshakes.inc()
        finally:
            if not is_handed_over:
                serving.admission.leave(place)


def _is_local(accepted: socket.socket, remote: str) -> bool:
    try:
        local = accepted.getsockname()
    except OSError:
        return False
    return isinstance(local, tuple) and str(local[0]) == remote


def _reset(accepted: socket.socket) -> None:
    with suppress(OSError):
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    accepted.close()
