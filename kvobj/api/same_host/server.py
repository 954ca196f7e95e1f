"""The Unix socket of the same-host path: it takes connections, looks after their leases, and ends them all at a stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvobj.api.same_host.connection import Connection, Parts
from kvobj.background import BackgroundWorker
from kvobj.errors import UnavailableError
from kvobj.same_host.descriptors import at_path, peer_of

BACKLOG: Final = 128
STRANGERS_MAX: Final = 32
"""Connections whose `Hello` has not been accepted. A client says it at once: the one that has waited longest gives way."""
_PAUSE_SECONDS: Final = 1.0
# No descriptor or memory to be had (accept(2)): the connection waits in the backlog, and so do we.
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LOOKS_A_LEASE: Final = 8
_LOOK_SECONDS_MAX: Final = 1.0


class SameHostServer(BackgroundWorker):
    """See the module's text. `lease_seconds` sets how often leases are looked at; `connections_max` are open at most, and more are
    closed at once, unless one of those is a stranger's yet: their clients use HTTP."""

    worker_name = "same-host leases"

    def __init__(
        self, path: Path, parts: Parts, *, lease_seconds: float, connections_max: int, log: logging.Logger
    ) -> None:
        super().__init__()
        self.path = path
        self._parts = parts
        self._look_seconds = min(_LOOK_SECONDS_MAX, lease_seconds / _LOOKS_A_LEASE)
        self._connections_max = connections_max
        self._log = log
        self._listener: socket.socket | None = None
        self._bound = (0, 0)
        """Device and inode of the socket's name."""
        self._resuming: asyncio.TimerHandle | None = None
        self._connections: dict[Connection, None] = {}
        """In the order in which they came."""

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    def listen(self) -> None:
        """Bind the socket, in place of one that an earlier process left, and take connections.

        `UnavailableError` where that cannot be, as where another process listens at it.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            if self.path.exists() and stat.S_ISSOCK(self.path.stat().st_mode):
                _require_nobody_listens(self.path)
                self.path.unlink(missing_ok=True)
            at_path(self.path, listener.bind)
            self._bound = _identity(self.path)
            # Anybody may knock: the token decides.
            self.path.chmod(0o666)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise UnavailableError(
                "the same-host socket cannot be bound", path=str(self.path), reason=str(error)
            ) from error
        self._listener = listener
        self._resume()
        self.start()

    async def aclose(self) -> None:
        """Take no more, revoke and end all. Idempotent."""
        listener, self._listener = self._listener, None
        if self._resuming is not None:
            self._resuming.cancel()
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            # Before it is closed: no other file has its number till then.
            with suppress(OSError):  # a name that stays is replaced at the next start
                if _identity(self.path) == self._bound:  # else it is another's by now
                    self.path.unlink()
            listener.close()
        await super().aclose()
        self._parts.arena.keep_outside()
        connections = list(self._connections)
        for connection in connections:
            connection.end()
        # Side by side: those whose writers stall are waited for together. And all of them, whatever becomes of one.
        ended = await asyncio.gather(*(connection.aclose() for connection in connections), return_exceptions=True)
        for each in ended:
            if isinstance(each, BaseException):
                raise each

    def _resume(self) -> None:
        assert self._listener is not None
        self._resuming = None
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._pause(error)
            return  # else it is gone again
        os.set_inheritable(connection.fileno(), False)  # noqa: FBT003 - the standard library's own signature
        if not self._has_place():
            connection.close()
            return
        served = Connection(connection, self._parts, peer=peer_of(connection))
        self._connections[served] = None
        served.start(self._forget)

    def _pause(self, error: OSError) -> None:
        """The listener stays readable: it would be asked again at every turn of the event loop."""
        assert self._listener is not None
        self._log.warning("no same-host connection can be accepted for now: %s", error.strerror)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        self._resuming = loop.call_later(_PAUSE_SECONDS, self._resume)

    def _has_place(self) -> bool:
        """Whether there is a place for one more: also one that a stranger has had longest, whose connection is ended."""
        strangers = [each for each in self._connections if each.is_strange]
        if len(self._connections) < self._connections_max and len(strangers) < STRANGERS_MAX:
            return True
        if not strangers:
            return False
        strangers[0].end()
        return True

    def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._look_seconds)
            for connection in [each for each in self._connections if each.is_overdue]:
                self._log.warning("a same-host client has not renewed its lease: what it holds is revoked")
                connection.end()


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _require_nobody_listens(path: Path) -> None:
    """OSError where somebody takes connections at the socket, or nobody can tell."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as asking:
        try:
            at_path(path, asking.connect)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:  # more wait there than are taken
            pass
    raise OSError(errno.EADDRINUSE, "another process listens there")
