"""The listening sockets of a server: taken over from whoever holds them across restarts, or bound here.

Who holds them may be systemd (socket units) or `kvobj serve --hold-sockets`; both speak systemd's protocol (sd_listen_fds(3)):
LISTEN_PID names the process that is meant, LISTEN_FDS counts the descriptors from 3 on, LISTEN_FDNAMES names them. A socket that
another process holds too lives on when this one ends: clients that connect meanwhile wait in its backlog instead of being refused.
Both sockets listen from the moment they are bound, so who connects during a start waits, too.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from kvobj.config.settings import ListenAddress, Settings
from kvobj.errors import ConfigurationError

FIRST_PASSED: Final = 3
BACKLOG: Final = 1024
"""Connections that the kernel completes and keeps while nobody accepts (at most net.core.somaxconn of them); past it, clients
connect again after 1, 3, 7 s … and are not refused either."""

_NAMES: Final = ("s3", "admin")


@dataclass(frozen=True, slots=True)
class Listeners:
    """Sockets that listen: at least one for S3, one for the admin port, and one for `lm://` where it is configured, which nobody
    holds across restarts. Closing them here leaves what others hold alone."""

    s3: tuple[socket.socket, ...]
    admin: socket.socket
    lm: socket.socket | None = None

    @classmethod
    def open(cls, settings: Settings, environment: Mapping[str, str]) -> Self:
        """Take over what was passed to this process, bind what was not.

        Raises `ConfigurationError` where an address cannot be bound or a passed descriptor is no listening TCP socket.
        """
        passed = _passed(environment)
        bound = [address for name in _NAMES for address in passed.get(name, ())]
        try:
            s3 = tuple(passed.get("s3", ()))
            if not s3:
                s3 = _bind_many(settings.server.listen, "server.listen", settings.server.workers)
                bound.extend(s3)
            (admin,) = passed.get("admin", ()) or (_bind(settings.admin.listen, "admin.listen"),)
            bound.append(admin)
            lm = None if settings.lm.listen is None else _bind(settings.lm.listen, "lm.listen")
        except BaseException:
            for each in bound:
                each.close()
            raise
        return cls(s3, admin, lm)

    def close_s3(self) -> None:
        """Listen no more for S3 requests, as far as this process goes. Idempotent."""
        for each in self.s3:
            each.close()

    def close_lm(self) -> None:
        """Listen no more for `lm://`. Idempotent."""
        if self.lm is not None:
            self.lm.close()

    def close(self) -> None:
        """Close all. Idempotent."""
        self.close_s3()
        self.close_lm()
        self.admin.close()


def address_of(bound: socket.socket) -> ListenAddress:
    """Where a socket listens."""
    host, port = bound.getsockname()[:2]
    return ListenAddress(host, port)


def passed_on(listeners: Listeners, process_id: int) -> dict[str, str]:
    """The variables for a process that is given the sockets from `FIRST_PASSED` on: S3's, then the admin port's."""
    names = ["s3"] * len(listeners.s3) + ["admin"]
    return {"LISTEN_PID": str(process_id), "LISTEN_FDS": str(len(names)), "LISTEN_FDNAMES": ":".join(names)}


def _passed(environment: Mapping[str, str]) -> dict[str, list[socket.socket]]:
    """The sockets meant for this process, by `_NAMES`; those without such a name in that order."""
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return {}
    count = environment.get("LISTEN_FDS", "")
    if not count.isascii() or not count.isdigit():
        raise ConfigurationError([f"LISTEN_FDS: is not a number: {count!r}"])
    names = _names(environment.get("LISTEN_FDNAMES"), int(count))
    passed: dict[str, list[socket.socket]] = {}
    try:
        for number, name in enumerate(names, FIRST_PASSED):
            passed.setdefault(name, []).append(_take_over(number, name))
    except BaseException:
        for each in (each for taken in passed.values() for each in taken):
            each.close()
        raise
    return passed


def _names(given: str | None, count: int) -> Sequence[str]:
    names = given.split(":") if given else []
    if not set(names) & set(_NAMES):  # systemd names a socket after its unit where the unit names none
        if count > len(_NAMES):
            raise ConfigurationError([f"LISTEN_FDNAMES: {count} sockets need names, s3 or admin"])
        return _NAMES[:count]
    if len(names) != count or not set(names) <= set(_NAMES) or names.count("admin") > 1:
        raise ConfigurationError([f"LISTEN_FDNAMES: must name {count} sockets s3 or (one) admin, not {given!r}"])
    return names


def _take_over(number: int, name: str) -> socket.socket:
    try:
        taken = socket.socket(fileno=number)
    except OSError as error:
        raise ConfigurationError([f"LISTEN_FDS: descriptor {number} ({name}): {error.strerror}"]) from error
    is_tcp = taken.family in (socket.AF_INET, socket.AF_INET6) and taken.type == socket.SOCK_STREAM
    if not is_tcp or not taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        taken.close()
        raise ConfigurationError([f"LISTEN_FDS: descriptor {number} ({name}): is no listening TCP socket"])
    taken.set_inheritable(False)
    return taken


def _bind_many(address: ListenAddress, path: str, count: int) -> tuple[socket.socket, ...]:
    """A socket for each worker process, all on one port: the kernel deals connections out evenly, where of processes that wait at
    one socket the one that waited last gets them all (SO_REUSEPORT, socket(7))."""
    first = _bind(address, path)
    if count == 1:
        return (first,)
    # Sockets of another server on this port would be joined silently. The first one was alone, so there is none.
    bound = address_of(first)
    first.close()
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            sockets.append(_bind(bound, path, is_shared=True))
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return tuple(sockets)


def _bind(address: ListenAddress, path: str, *, is_shared: bool = False) -> socket.socket:
    try:
        ((family, _, _, _, where), *_) = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(where)
            bound.listen(BACKLOG)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise ConfigurationError([f"{path}: cannot listen on {address}: {error.strerror}"]) from error
    return bound
