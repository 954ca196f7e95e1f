"""A database that another process writes, for reading: the same two environments, mapped read-only.

Snapshots are as fresh as the writer's own: a change that was acknowledged is in every snapshot begun afterwards. Reader slots
are the environments' own; those of a process that died are freed by the writer's `ReaderWatch`. It is opened after the
writer has, and closed before: environments that a start replaces (another boot's) are replaced by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, NoReturn, Self, cast

import lmdb

from kvobj.database.database import Database
from kvobj.database.environment import translated
from kvobj.database.lmdb_types import Handle, Transaction
from kvobj.database.table import Table
from kvobj.database.table_pages import MappedTables
from kvobj.database.views import Snapshot, WriteView
from kvobj.errors import UnavailableError

_READER_SLOTS: Final = 1024
_SPARE_TRANSACTIONS: Final = 8


class _ReadEnvironment:
    """As much of `Environment` as a snapshot needs."""

    __slots__ = ("handles", "lmdb", "mapped")

    def __init__(self, directory: Path, *, tables: Sequence[str], map_bytes: int) -> None:
        if not (directory / "data.mdb").exists():
            raise UnavailableError("there is no database to read", directory=directory)
        with translated(directory):
            self.lmdb = lmdb.open(
                str(directory),
                map_size=map_bytes,
                max_dbs=len(tables),
                max_readers=_READER_SLOTS,
                max_spare_txns=_SPARE_TRANSACTIONS,
                readonly=True,
                create=False,
            )
            try:
                self.handles: dict[str, Handle] = {
                    name: self.lmdb.open_db(name.encode(), create=False) for name in tables
                }
                self.mapped = MappedTables(self.lmdb, directory)
            except BaseException:
                self.lmdb.close()
                raise

    def begin(self) -> Transaction:
        """A snapshot."""
        return cast("Transaction", self.lmdb.begin())


class ReadDatabase(Database):
    """See the module's text. What would write raises RuntimeError: that is a defect of who asks."""

    def __init__(self, durable: _ReadEnvironment, volatile: _ReadEnvironment) -> None:
        self._read_durable = durable
        self._read_volatile = volatile
        self._handles = {**durable.handles, **volatile.handles}
        self.has_outbox = False
        self._settled_position = 0

    @classmethod
    def open_for_reading(
        cls, *, durable: Path, volatile: Path, tables: Sequence[Table], map_bytes: int, volatile_map_bytes: int
    ) -> Self:
        """Map both environments, which a writer has open. `tables`: those that are read. `UnavailableError`, `CorruptionError`."""
        names = [table.name for table in tables if not table.volatile]
        volatile_names = [table.name for table in tables if table.volatile]
        below = _ReadEnvironment(durable, tables=names, map_bytes=map_bytes)
        try:
            above = _ReadEnvironment(volatile, tables=volatile_names, map_bytes=volatile_map_bytes)
        except BaseException:
            below.lmdb.close()
            raise
        return cls(below, above)

    def read(self) -> Snapshot:
        """See `Database.read`."""
        return Snapshot(self._read_durable, self._read_volatile, self._handles)

    def write_volatile(self, change: Callable[[WriteView], object], keys: Collection[bytes] = ()) -> NoReturn:
        """Refused."""
        raise RuntimeError(f"this process only reads: {change} of {len(keys)} keys")

    def submit(
        self, change: Callable[[WriteView], object], keys: Collection[bytes] = (), *, synced: bool = True
    ) -> NoReturn:
        """Refused."""
        raise RuntimeError(f"this process only reads: {change} of {len(keys)} keys, synced={synced}")

    @property
    def is_idle(self) -> bool:
        """There is no writer here."""
        return True

    def is_in_flight(self, keys: Collection[bytes]) -> bool:
        """There is no writer here."""
        return not keys and False

    async def aclose(self) -> None:
        """Close both environments, on the event loop's thread: see `Database.aclose`."""
        self._read_durable.lmdb.close()
        self._read_volatile.lmdb.close()
