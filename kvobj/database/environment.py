"""One LMDB environment: how it is opened, how full it is, and LMDB's errors in our words.

Guarantees: directory 0700 and files 0600; 1,024 reader slots, those of dead processes freed at open; `is_full` turns true while
there is still room for what deletes need (gc-protocol §7.1: at MAP_FULL a freed page is of use only a transaction later).
Does not know who may write when.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import lmdb

from kvobj.database.lmdb_types import Handle, Transaction
from kvobj.database.table_pages import MappedTables
from kvobj.errors import CorruptionError, KvobjError, StoreFullError, UnavailableError

_READER_SLOTS: Final = 1024
_SPARE_TRANSACTIONS: Final = 8
_FULL_SHARE: Final = 0.9
DISK_FLOOR_BYTES: Final = 16 * 1024 * 1024
"""Below this much free disk, puts are refused, so that deletes and the commit's own pages still fit."""


class Environment:
    """An open environment and the handles of its tables by name."""

    def __init__(self, directory: Path, *, tables: Sequence[str], map_bytes: int, durable: bool, sync: bool) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        self.directory = directory
        self.is_full = False
        self.held_at_page: int | None = None
        """Where the file ended when a reader was found that keeps freed pages from use (`ReaderWatch`); None: there is none."""
        self._map_bytes = map_bytes
        with translated(directory):
            # metasync=False: a commit flushes its data, `env.sync(True)` the meta page, once a group. The volatile environment
            # lies in shared memory, where there is nothing to flush. No writemap: a full tmpfs would be a SIGBUS.
            self.lmdb = lmdb.open(
                str(directory),
                map_size=map_bytes,
                max_dbs=len(tables),
                max_readers=_READER_SLOTS,
                max_spare_txns=_SPARE_TRANSACTIONS,
                metasync=False,
                sync=durable and sync,
                mode=0o600,
            )
            try:
                self.lmdb.reader_check()
                self.handles: dict[str, Handle] = {name: self.lmdb.open_db(name.encode()) for name in tables}
                self._page_bytes = int(self.lmdb.stat()["psize"])
                self.mapped = MappedTables(self.lmdb, directory)
                with self.begin() as transaction:
                    self.refresh_room(transaction)
            except BaseException:
                self.lmdb.close()
                raise

    def begin(self, *, write: bool = False) -> Transaction:
        """Begin a transaction: a snapshot to read (~1 µs), or the environment's one write transaction."""
        return cast("Transaction", self.lmdb.begin(write=write))

    def flush(self) -> None:
        """Flush pages and meta page, whatever the environment's flags. Raises lmdb.Error."""
        self.lmdb.sync(True)  # noqa: FBT003 - LMDB's own signature

    def used_bytes(self, transaction: Transaction) -> int:
        """Bytes of pages in use by tables; free pages within the file do not count."""
        pages = 0
        for handle in self.handles.values():
            stat = transaction.stat(handle)
            pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return int(pages) * self._page_bytes

    def refresh_room(self, transaction: Transaction) -> None:
        """Look anew whether puts must be refused. ~1 µs a table."""
        disk = os.statvfs(self.directory)
        self.is_full = (
            max(self.used_bytes(transaction), self._held_bytes()) > self._map_bytes * _FULL_SHARE
            or disk.f_bavail * disk.f_frsize < DISK_FLOOR_BYTES
        )

    def _held_bytes(self) -> int:
        """What the file takes, where it has to grow because of a reader; else 0. That it grew says that what was free before the
        reader is used up."""
        if self.held_at_page is None:
            return 0
        last_page = int(self.lmdb.info()["last_pgno"])
        return (last_page + 1) * self._page_bytes if last_page > self.held_at_page else 0

    def close(self) -> None:
        """Unmap and close, freeing transactions that are open. On the event loop's thread, while no other one looks anything up in
        `mapped` or has a transaction in use."""
        self.lmdb.close()


def is_lack_of_room(error: lmdb.Error) -> bool:
    """Whether LMDB failed for lack of room, in which case the environment is as good as before."""
    return isinstance(error, lmdb.MapFullError | lmdb.DiskError | lmdb.TxnFullError)


def translate(error: lmdb.Error, directory: Path) -> KvobjError:
    """The error of ours that says how to react to one of LMDB's."""
    if is_lack_of_room(error):
        return StoreFullError("no room in the database", directory=directory)
    if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError | lmdb.VersionMismatchError):
        return CorruptionError(
            "the database is damaged: rebuild it (kvobj-admin rebuild, with --config and the server's configuration)",
            directory=directory,
            reason=str(error),
        )
    message = "the database failed"
    if _has_no_disk(directory):  # LMDB says no more than that a write failed
        message = f"{message}: its file system is full"
    return UnavailableError(message, directory=directory, reason=str(error))


def _has_no_disk(directory: Path) -> bool:
    try:
        disk = os.statvfs(directory)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < DISK_FLOOR_BYTES


@contextmanager
def translated(directory: Path) -> Iterator[None]:
    """Raise LMDB's errors as ours."""
    try:
        yield
    except lmdb.Error as error:
        raise translate(error, directory) from error
