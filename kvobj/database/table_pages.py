"""Where the tables of an environment lie in LMDB's map, for native code that looks many keys up at once.

LMDB waits for memory a dozen times a key, one wait after the other; who reads the pages has many keys wait together, in a sixth of
the time. Pages that a snapshot sees are not written while it is open, and their format is LMDB's data version 1 for good. Where any
of that is not as it is known here there is no map, and LMDB is asked.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path
from typing import Final

import lmdb

from kvobj.database.lmdb_types import Transaction

_MAPS: Final = Path("/proc/self/maps")
_META: Final = b"\xde\xc0\xef\xbe\x01\x00\x00\x00"
"""What stands behind the head of the first page: LMDB's magic number and data version, of a little-endian machine."""
_META_AT: Final = 16
_RECORD: Final = struct.Struct("<IHHQQQQQ")


class TablePages(ctypes.Structure):
    """One table as a snapshot sees it: `table_t` of native code. Good for as long as the snapshot and the environment are open: who
    reads it holds no lock, so it is read on the thread that closes the environment, in one synchronous step with `table`, or on one
    that is waited for before (`Database`)."""

    _fields_ = (
        ("map", ctypes.c_void_p),
        ("pages", ctypes.c_uint64),
        ("root", ctypes.c_uint64),
        ("page_bytes", ctypes.c_uint32),
        ("depth", ctypes.c_uint32),
    )


class MappedTables:
    """The tables of an open environment in its map. Used as `TablePages` says."""

    __slots__ = ("_address", "_environment", "_main", "_page_bytes")

    def __init__(self, environment: lmdb.Environment, directory: Path) -> None:
        """Blocking; a millisecond."""
        self._environment = environment
        self._main = environment.open_db(None)
        self._page_bytes = int(environment.stat()["psize"])
        map_bytes = int(environment.info()["map_size"])
        self._address = _mapped_at(directory / "data.mdb", map_bytes)

    def table(self, transaction: Transaction, name: str) -> TablePages | None:
        """A table as an open transaction found it when it began, whatever a write transaction has done to it since. None where its
        pages cannot be read. lmdb.Error where the environment was closed. ~4 µs."""
        if self._address is None:
            return None
        record = transaction.get(name.encode(), None, self._main)
        if record is None or len(record) != _RECORD.size:
            return None
        _, flags, depth, *_, root = _RECORD.unpack(record)
        if flags:  # keys in another order, or several values of one
            return None
        pages = int(self._environment.info()["last_pgno"]) + 1
        return TablePages(self._address, pages, root, self._page_bytes, depth)


def _mapped_at(file: Path, map_bytes: int) -> int | None:
    """Where this process has all of a map; None where that cannot be told, or it is not of the one known form."""
    if sys.byteorder != "little" or struct.calcsize("P") != ctypes.sizeof(ctypes.c_uint64):
        return None
    try:
        path, status, maps = file.resolve(strict=True), file.stat(), _MAPS.read_bytes()
    except OSError:
        return None
    start = mapping_in(maps, path=path, device=status.st_dev, inode=status.st_ino, map_bytes=map_bytes)
    if start is None or ctypes.string_at(start + _META_AT, len(_META)) != _META:
        return None
    return start


def mapping_in(maps: bytes, *, path: Path, device: int, inode: int, map_bytes: int) -> int | None:
    """Where a process that has these `maps` has at least `map_bytes` of a file, for reading, shared, and from its beginning on."""
    known_by = b"%02x:%02x" % (os.major(device), os.minor(device))
    for line in maps.rstrip(b"\n").split(b"\n"):
        span, access, offset, held_by, number, *held_as = line.split(maxsplit=5)
        if (access, int(offset, 16), int(number)) != (b"r--s", 0, inode):
            continue
        # btrfs and overlayfs tell another device here than stat does. A file that is not there any more has another path.
        if held_by != known_by and held_as != [os.fsencode(path)]:
            continue
        start, stop = (int(each, 16) for each in span.split(b"-"))
        if stop - start >= map_bytes:
            return start
    return None
