"""The one door to LMDB: a durable and a volatile environment under one set of rules, for catalog and tier directories.

See `Database` for the writer, `ReadView` and `WriteView` for what a change may do.
"""

from kvobj.database.database import Database, SnapshotSource
from kvobj.database.environment import DISK_FLOOR_BYTES
from kvobj.database.group import Rider
from kvobj.database.opening import remove_volatile
from kvobj.database.reader_watch import ReaderWatch
from kvobj.database.reading import ReadDatabase
from kvobj.database.table import Table
from kvobj.database.table_pages import TablePages
from kvobj.database.views import ReadView, Snapshot, WriteView

__all__ = [
    "DISK_FLOOR_BYTES",
    "Database",
    "ReadDatabase",
    "ReadView",
    "ReaderWatch",
    "Rider",
    "Snapshot",
    "SnapshotSource",
    "Table",
    "TablePages",
    "WriteView",
    "remove_volatile",
]
