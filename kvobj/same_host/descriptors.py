"""Anonymous memory with seals, and Unix sockets by paths of any length.

Seals let two processes share memory without trusting each other: a sealed size cannot be cut under a reader (which would be a
SIGBUS) nor grown without bound, and a page sealed against future writes can be mapped read-only alone. Sources: fcntl(2),
memfd_create(2).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

CONTROL_BYTES: Final = 4096
_F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; Python 3.11 has no name for it
_PATH_BYTES_MAX: Final = 107
_CREDENTIALS: Final = struct.Struct("3i")

T = TypeVar("T")


def staging_memory(size_bytes: int) -> int:
    """A descriptor of zeroed memory whose size nobody can change any more. Its pages are taken as they are written."""
    return _sealed("kvobj-staging", size_bytes, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def control_page() -> tuple[int, mmap.mmap]:
    """A page that only this process can write: its descriptor, to be passed on, and the one writable mapping of it."""
    descriptor = os.memfd_create("kvobj-control", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, CONTROL_BYTES)
        page = mmap.mmap(descriptor, CONTROL_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, page


def _sealed(name: str, size_bytes: int, seals: int) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed_in_size(descriptor: int) -> bool:
    """Whether nobody can cut or grow the memory behind a descriptor: False also for what is no sealable memory."""
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & wanted == wanted
    except OSError:
        return False


def at_path(path: Path, use: Callable[[str], T]) -> T:
    """Call with an address of the socket at `path` that the kernel takes: it allows 107 bytes, so a longer one goes by way of its
    directory's descriptor."""
    name = str(path)
    if len(os.fsencode(name)) <= _PATH_BYTES_MAX:
        return use(name)
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return use(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user id of the other end, as the kernel noted them when it connected. For logs: no right follows from them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return process, user
