"""Accepting at a listening socket by hand: what cannot be accepted for want of descriptors waits in the kernel's backlog.

Event loops that accept by themselves do less then: libuv, which is under uvloop, accepts and closes all that wait, so as not to be
woken again, and tells nobody.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

_ACCEPTED_A_TURN: Final = 64
_PAUSE_SECONDS: Final = 1.0
_TOLD_SECONDS: Final = 60.0
"""A shortage is told of once a minute: it comes and goes with every connection that ends."""
# No descriptor or memory to be had (accept(2)): the connection waits in the backlog, and so do we.
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class AcceptLoop:
    """Hands each connection on, with its client's address, to `accepted`. `waited` is told each time that none could be accepted;
    it is tried again every second. The socket, which listens and does not block, stays the caller's. Event-loop-only."""

    def __init__(
        self,
        listening: socket.socket,
        accepted: Callable[[socket.socket, str], None],
        *,
        waited: Callable[[], None],
        log: logging.Logger,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._accepted = accepted
        self._waited = waited
        self._log = log
        self._resuming: asyncio.TimerHandle | None = None
        self._is_open = False
        self._told_at = float("-inf")

    def start(self) -> None:
        """Accept from here on. Idempotent."""
        if not self._is_open:
            self._is_open = True
            self._resume()

    def stop(self) -> None:
        """Accept no more until the next `start`. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        self._loop.remove_reader(self._listening)

    def _resume(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        """Take what waits, in bounded turns: other events of the loop come between."""
        for _ in range(_ACCEPTED_A_TURN):
            if not self._is_open:
                return
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._wait(str(error.strerror))
                    return
                continue  # the client went while it waited (ECONNABORTED and the network's own errors, accept(2))
            accepted.setblocking(False)  # noqa: FBT003 - the standard library's own signature
            self._accepted(accepted, str(address[0]) if isinstance(address, tuple) else "")

    def _wait(self, reason: str) -> None:
        self._waited()
        now = self._loop.time()
        if now - self._told_at >= _TOLD_SECONDS:
            self._told_at = now
            self._log.warning("no connection can be accepted for now, clients wait: %s", reason)
        self._loop.remove_reader(self._listening)
        self._resuming = self._loop.call_later(_PAUSE_SECONDS, self._resume)
