"""Watches who reads LMDB for too long: an open read transaction keeps every page freed since from being used again.

Guarantees: the slots of dead processes are freed within 10 s. While a reader stays for longer than that, an environment whose file
has grown since, and to nine tenths of its map, counts as full (`Environment.refresh_room`), so that deletes keep their room; after
30 s it is said in the log, in `status` and by a metric, with the process that it is. Readers are never cut off: what they
see must stay as it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kvobj.background import BackgroundWorker
from kvobj.clock import Clock
from kvobj.database.environment import Environment, translated
from kvobj.errors import KvobjError

INTERVAL_SECONDS: Final = 10.0
STUCK_SECONDS: Final = 30.0
_IDLE: Final = "-"

_Reader = tuple[str, str, int]


@dataclass(slots=True)
class _Watched:
    """An environment and since when its readers, by (process, thread, transaction), have been behind."""

    environment: Environment
    behind: dict[_Reader, float] = field(default_factory=dict)

    def look(self, now: float) -> None:
        readers = set(_readers(self.environment.lmdb.readers()))
        newest = self.environment.lmdb.info()["last_txnid"]
        self.behind = {each: self.behind.get(each, now) for each in readers if each[2] < newest}
        since = min(self.behind.values(), default=now)
        if now - since < INTERVAL_SECONDS:
            if self.environment.held_at_page is not None:
                self.environment.held_at_page = None
                with self.environment.begin() as transaction:
                    self.environment.refresh_room(transaction)
        elif self.environment.held_at_page is None:
            self.environment.held_at_page = self.environment.lmdb.info()["last_pgno"]


class ReaderWatch(BackgroundWorker):
    """See the module's text. One worker, event-loop-only; a look costs some 20 µs. It must be closed before the database."""

    worker_name = "database-readers"

    def __init__(self, environments: Iterable[Environment], *, clock: Clock, log: logging.Logger) -> None:
        super().__init__()
        self._watched = [_Watched(environment) for environment in environments]
        self._clock = clock
        self._log = log
        self._told: set[_Reader] = set()
        self.dead_readers = 0
        """Slots of dead processes that were freed since the start."""

    async def _run(self) -> None:
        while True:
            try:
                self.look()
            except KvobjError as error:
                self._log.warning("the database's readers could not be looked at, will retry: %s", error)
            await asyncio.sleep(INTERVAL_SECONDS)

    def look(self) -> None:
        """Free what dead processes hold, and see who else has been reading since the last look. Raises as LMDB fails."""
        now = self._clock.monotonic()
        for watched in self._watched:
            with translated(watched.environment.directory):
                self.dead_readers += watched.environment.lmdb.reader_check()
                watched.look(now)
        stuck = {reader: note for watched in self._watched for reader, note in self._stuck(watched, now)}
        for reader in stuck.keys() - self._told:
            self._log.warning("%s", stuck[reader])
        self._told = set(stuck)

    @property
    def oldest_seconds(self) -> float:
        """For how long the reader that is furthest behind has been seen; 0: none was seen twice."""
        now = self._clock.monotonic()
        return max((now - since for watched in self._watched for since in watched.behind.values()), default=0.0)

    def notes(self) -> tuple[str, ...]:
        """A sentence for each reader that has been there for longer than 30 s."""
        now = self._clock.monotonic()
        return tuple(note for watched in self._watched for _, note in self._stuck(watched, now))

    @staticmethod
    def _stuck(watched: _Watched, now: float) -> list[tuple[_Reader, str]]:
        name = watched.environment.directory
        return [
            (reader, f"a reader of {name} keeps its pages from being used again: {_who(reader[0])}")
            for reader, since in watched.behind.items()
            if now - since >= STUCK_SECONDS
        ]


def _who(process: str) -> str:
    return "this process" if int(process) == os.getpid() else f"process {process}"


def _readers(table: str) -> list[_Reader]:
    """LMDB's own table of readers: a line for each slot in use, its process, thread, and transaction, "-" for none (lmdb.h,
    mdb_reader_list)."""
    lines = (line.split() for line in table.splitlines()[1:])
    return [(process, thread, int(transaction)) for process, thread, transaction in lines if transaction != _IDLE]
