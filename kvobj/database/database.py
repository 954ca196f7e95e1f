"""Two LMDB environments under one writer each: durable (its own thread, group commit) and volatile (the event loop, inline).

Guarantees: a change happens whole or not at all, also when its caller is cancelled; changes with a key in common happen in
the order they were given; a returned synced `write` survives power loss, any other returned change the process.
Crash between a durable commit and its volatile effects: the commit carries a redo record which the next open applies, so a
start sees both. While the process lives, a reader in that window sees the durable side new and the volatile side old;
where both hold a row of one name users let the volatile one win: the reader then sees the state before the
change, which nobody was told is over. Does not lock out a second process: the data directory's lock does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Self, TypeVar

import lmdb

from kvobj.clock import Clock
from kvobj.database.effects import Effects
from kvobj.database.environment import Environment, translate, translated
from kvobj.database.group import LOG_END, GroupWriter, Pending, Rider, pack_log_end
from kvobj.database.lmdb_types import Transaction
from kvobj.database.opening import (
    APPLIED,
    META_VOLATILE,
    REBUILDING,
    SNAPSHOT_DUE,
    Identity,
    align_log,
    claim_durable,
    finish_redo,
    open_volatile,
    this_boot,
    wipe_durable,
)
from kvobj.database.outbox import OUTBOX, GapWriter, OutboxWriter, open_outbox, position_mark
from kvobj.database.reader_watch import ReaderWatch
from kvobj.database.table import META, Table
from kvobj.database.views import ReadView, Snapshot, VolatileWriteView, WriteView
from kvobj.errors import BusyError, KvobjError, StoreFullError, UnavailableError
from kvobj.record_log import RecordLog, SnapshotWriter

T = TypeVar("T")

_GROUP_LIMIT: Final = 1000
_PENDING_LIMIT: Final = 65_536
_RIDERS_MAX: Final = 256
_ROOM_CHECK_INTERVAL: Final = 64
_SNAPSHOT_GROUP_ENTRIES: Final = 1000
_SNAPSHOT_GROUP_BYTES: Final = 4 * 1024 * 1024

SnapshotSource = Callable[[ReadView], Iterable[bytes]]
"""Makes the log entries that stand for the live state of one user of the database."""


class Database:
    """See the module's text. Opened, used and closed on one event loop; `read` may be used on other threads too, which are done
    with their views before `aclose`."""

    def __init__(
        self,
        *,
        durable: Environment,
        volatile: Environment,
        identity: Identity,
        volatile_fresh: bool,
        record_log: RecordLog | None,
        sync: bool,
        redo_number: int,
        outbox: OutboxWriter | GapWriter | None,
    ) -> None:
        self.has_outbox = isinstance(outbox, OutboxWriter)
        self._durable = durable
        self._volatile = volatile
        self._identity = identity
        self.volatile_fresh = volatile_fresh
        self._log = record_log
        self._sync = sync
        self._handles = {**durable.handles, **volatile.handles}
        self._executor = ThreadPoolExecutor(1, "database-writer")
        self._flusher = ThreadPoolExecutor(1, "database-flush")
        self._writer = GroupWriter(
            durable=durable,
            volatile=volatile,
            handles=self._handles,
            record_log=record_log,
            flusher=self._flusher,
            sync=sync,
            redo_number=redo_number,
            outbox=outbox,
        )
        self._settled_position = self._writer.published
        self._queue: deque[Pending] = deque()
        self._in_flight: dict[bytes, int] = {}
        # In the order they were given, by identity.
        self._riders: dict[Rider, None] = {}
        self._draining: asyncio.Task[None] | None = None
        self._failure: KvobjError | None = None
        self._writes_since_check = 0
        self._compacting = False
        self._group_watchers: list[tuple[Callable[[], None], Callable[[], None]]] = []

    @classmethod
    def open(
        cls,
        *,
        durable: Path,
        volatile: Path,
        tables: Sequence[Table],
        map_bytes: int,
        volatile_map_bytes: int,
        record_log: RecordLog | None = None,
        sync: bool = True,
        store_id: bytes | None = None,
        boot_id: str | None = None,
        rebuild: bool = False,
        outbox: Clock | None = None,
    ) -> Self:
        """Open both environments, making what is missing. Blocking; tens of milliseconds.

        `tables` are all tables of all users. Maps are sparse files that grow up to their sizes. `sync=False` flushes nothing
        (tests, imports). `store_id` is checked against the one recorded; `boot_id` defaults to the kernel's. `rebuild` starts
        over with an empty durable environment beside the record log, which stays as it is until `finish_rebuild`. `outbox`: keep
        what changes publish (`outbox` of this package), with this clock's wall time; a rebuild publishes nothing.
        Raises `CorruptionError`, `StoreFullError`, `UnavailableError`.
        """
        if rebuild:
            wipe_durable(durable)
        names = [table.name for table in tables if not table.volatile]
        if outbox is not None:
            names.append(OUTBOX.name)
        volatile_names = [table.name for table in tables if table.volatile]
        below = Environment(durable, tables=[META.name, *names], map_bytes=map_bytes, durable=True, sync=sync)
        above: Environment | None = None
        try:
            boot = boot_id if boot_id is not None else this_boot()
            identity = claim_durable(below, store_id=store_id, boot_id=boot, rebuild=rebuild, log=record_log)
            if record_log is not None and not rebuild:
                align_log(below, record_log)
            above, is_fresh = open_volatile(
                volatile,
                tables=[META_VOLATILE.name, *volatile_names],
                map_bytes=volatile_map_bytes,
                identity=identity,
            )
            redo_number = finish_redo(below, above, identity=identity, is_fresh=is_fresh)
            outbox_writer = open_outbox(below, None if rebuild else outbox)
        except BaseException:
            if above is not None:
                above.close()
            below.close()
            raise
        return cls(
            durable=below,
            volatile=above,
            identity=identity,
            volatile_fresh=is_fresh,
            record_log=None if rebuild else record_log,
            sync=sync,
            redo_number=redo_number,
            outbox=outbox_writer,
        )

    @property
    def published(self) -> int:
        """The last position given out in the outbox by groups that have settled; 0: none ever, or there is no outbox."""
        return self._settled_position

    def published_of(self, topic: str) -> int:
        """The last position given out to something of this topic (`WriteView.publish`), or a later one; of what was published
        before this start the last that had not been told by then. 0: nothing. ~0.2 µs."""
        return self._writer.published_of(topic)

    @property
    def store_id(self) -> bytes:
        """The store that both environments belong to."""
        return self._identity.store_id

    @property
    def directories(self) -> tuple[Path, Path]:
        """Where the durable and the volatile environment lie, for who reads them in another process (`ReadDatabase`)."""
        return self._durable.directory, self._volatile.directory

    def used_bytes(self) -> tuple[int, int]:
        """Bytes of pages in use in the durable and in the volatile environment."""
        with (
            translated(self._durable.directory),
            self._durable.begin() as below,
            self._volatile.begin() as above,
        ):
            return self._durable.used_bytes(below), self._volatile.used_bytes(above)

    @property
    def log_bytes(self) -> int:
        """Bytes of the record log; 0 without one."""
        return self._log.size_bytes if self._log is not None else 0

    def watch_readers(self, *, clock: Clock, log: logging.Logger) -> ReaderWatch:
        """What looks after readers that stay too long; the caller starts and closes it, before the database."""
        return ReaderWatch((self._durable, self._volatile), clock=clock, log=log)

    def read(self) -> Snapshot:
        """A snapshot of all tables for a `with`. Never waits for a writer. While it is open, pages that it sees are not
        reused: keep it short."""
        return Snapshot(self._durable, self._volatile, self._handles)

    def watch_groups(self, *, started: Callable[[], None], settled: Callable[[], None]) -> None:
        """Call `started` before a group of changes is handed to the writer thread and `settled` once readers see all of it, or
        none; both on the event loop, never overlapping. They must not raise."""
        self._group_watchers.append((started, settled))

    # -- writing -------------------------------------------------------------------------------------------------

    def write_volatile(self, change: Callable[[WriteView], T], keys: Collection[bytes] = ()) -> T:
        """Run a change inline (event-loop thread only). It may write volatile tables and read durable ones; what it raises
        undoes all of it. `keys` must not be in flight in the durable writer (RuntimeError): use `write_fast` where they may
        be. ~6 µs and what the change costs, on tmpfs."""
        if self._failure is not None:
            raise self._failure
        if keys and not self._in_flight.keys().isdisjoint(keys):
            raise RuntimeError("a key of an inline change is in flight in the durable writer")
        try:
            return self._write_inline(change)
        except lmdb.Error as error:
            raise translate(error, self._volatile.directory) from error

    def is_in_flight(self, keys: Collection[bytes]) -> bool:
        """Whether the durable writer still has a change with one of these keys (event-loop thread only)."""
        in_flight = self._in_flight
        return bool(in_flight) and not in_flight.keys().isdisjoint(keys)

    @property
    def is_idle(self) -> bool:
        """Whether the durable writer has no change with any key: then no key needs to be looked at."""
        return not self._in_flight

    async def write_fast(
        self, change: Callable[[WriteView], T], keys: Collection[bytes], *, shared: Collection[bytes] = ()
    ) -> T:
        """`write_volatile`, or `write` while one of `keys` or `shared` is in flight there: changes of a key keep their order.

        `shared` keys are waited for but not held: this change does not keep others of the same shared key off the fast
        path. They name what the change relies on and others change rarely (a bucket's existence).
        """
        in_flight = self._in_flight
        if in_flight and not (in_flight.keys().isdisjoint(keys) and in_flight.keys().isdisjoint(shared)):
            return await self.write(change, keys, synced=False)
        return self.write_volatile(change)

    async def write(self, change: Callable[[WriteView], T], keys: Collection[bytes] = (), *, synced: bool = True) -> T:
        """Run a change in the writer thread's next group; both kinds of tables may be written.

        `synced`: return once it survives power loss; otherwise once it survives the process (durable no later than the next
        synced write). The change may run more than once, and must check before it changes: a KvobjError from it means
        that it changed nothing, and is raised here. A cancelled caller does not take its change back.
        Raises `BusyError` above 65,536 waiting changes, `StoreFullError`, `UnavailableError` after a failed flush.
        """
        return await self.submit(change, keys, synced=synced)

    def submit(
        self, change: Callable[[WriteView], T], keys: Collection[bytes] = (), *, synced: bool = True
    ) -> asyncio.Future[T]:
        """`write`, enqueued before this returns: who has just decided something on the event loop lets nobody in between. The
        future is cancelled by who awaits it bare; shield it to learn when the change is over."""
        if self._failure is not None:
            raise self._failure
        if len(self._queue) >= _PENDING_LIMIT:
            raise BusyError("too many changes wait for the database", waiting=len(self._queue))
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._enqueue(Pending(change, keys=keys, synced=synced, future=future))
        return future

    @property
    def takes_riders(self) -> bool:
        """Whether `ride` is for who asks now: there was room for what is no part of making room when last looked at, and not too
        many wait. Else `write` says what is wrong."""
        return len(self._riders) < _RIDERS_MAX and not self._writer.is_full

    def ride(self, change: Callable[[WriteView], None], *, settled: Callable[[], None]) -> Rider:
        """Have a durable change made in front of the next group, of those too that wait for it already. What is given to `write`
        after this is committed with it or later, and not at all while it cannot be.

        For what matters only once another change is made: it costs no commit of its own, and until the next one it is lost with
        the process. It must not raise and must be good to run again; it puts with `headroom`, where the database `takes_riders`.
        `settled` is called on the event loop once readers see it. Raises what `write` would where nothing can be written any more.
        """
        if self._failure is not None:
            raise self._failure
        if self._writer.has_failed:
            raise UnavailableError("the database failed earlier", directory=self._durable.directory)
        rider = Rider(change, settled)
        self._riders[rider] = None
        return rider

    def is_waiting(self, rider: Rider) -> bool:
        """Whether no group has taken a rider along yet: until one does, its change may become another."""
        return rider in self._riders

    @property
    def has_failed(self) -> bool:
        """Whether nothing can be written any more, so that `ride` and `write` raise."""
        return self._failure is not None or self._writer.has_failed

    def withdraw(self, rider: Rider) -> bool:
        """Take a rider back; False where it is committed already, or on its way."""
        if rider not in self._riders:
            return False
        del self._riders[rider]
        return True

    async def land(self) -> None:
        """Return once all riders of before are committed. Raises what `write` does."""
        await self.write(_nothing, synced=False)

    async def finish_rebuild(self, record_log: RecordLog, *, log_is_whole: bool = True) -> None:
        """Make a rebuilt environment the log's own. From the next open on it is an ordinary database. `log_is_whole=False`: it
        was made from elsewhere, so that the log needs a snapshot (`log_snapshot_due`)."""
        end = await asyncio.get_running_loop().run_in_executor(self._executor, record_log.recover)

        def change(view: WriteView) -> None:
            view.put(META, LOG_END, pack_log_end(end, end), headroom=True)
            view.delete(META, REBUILDING)
            if not log_is_whole:
                view.put(META, SNAPSHOT_DUE, b"1", headroom=True)

        await self.write(change)

    async def aclose(self) -> None:
        """Finish what was accepted, flush, close both environments and the record log. Idempotent. Everything is closed also
        when the last flush fails (`UnavailableError`).

        The maps go away on the event loop's thread, between two steps of whoever reads there: what is asked of a view that is still
        open raises lmdb.Error. That takes 4 ms a GiB that was read of a file on disk, 0.1 s on tmpfs.
        """
        if self._draining is not None:
            await self._draining
        if self._riders and self._failure is None:
            with contextlib.suppress(KvobjError):  # of a database that fails: nobody was told that they are there
                await self.land()
        if isinstance(self._failure, _ClosedError):
            return
        self._failure = _ClosedError("the database is closed", directory=self._durable.directory)
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._flush)
        finally:
            self._executor.shutdown()
            self._flusher.shutdown()
            if self._log is not None:
                self._log.close()
            # Not on the writer's thread: native look-ups on this one read the maps, and do not hold the interpreter's lock.
            self._volatile.close()
            self._durable.close()

    # -- the record log's snapshot -------------------------------------------------------------------------------

    @property
    def log_snapshot_due(self) -> bool:
        """Whether the log lacks changes that the durable environment has, so that only a snapshot makes it whole again."""
        with self.read() as view:
            return self._log is not None and view.get(META, SNAPSHOT_DUE) is not None

    async def compact_log(self, sources: Sequence[SnapshotSource]) -> bool:
        """Write a snapshot of the live state into a fresh log file and drop the older ones, while commits go on.

        The sources must together make every entry that a rebuild needs. A crash at any point leaves either the old files or
        the snapshot in force. False: there is no log, or a compaction is under way.
        """
        if self._failure is not None:
            raise self._failure
        if self._log is None or self._compacting:
            return False
        self._compacting = True
        loop = asyncio.get_running_loop()
        # Its own thread: writing the state of millions of rows takes minutes, groups and flushes must not wait for it.
        with ThreadPoolExecutor(1, "database-snapshot") as executor:
            try:
                writer, view = await loop.run_in_executor(self._executor, self._begin_snapshot, self._log)
                sources = [*sources, position_mark]
                number = await loop.run_in_executor(executor, _write_snapshot, writer, view, sources)
            finally:
                self._compacting = False
        await loop.run_in_executor(self._executor, self._log.drop_before, number)
        await self.write(_clear_snapshot_due)
        return True

    def _begin_snapshot(self, log: RecordLog) -> tuple[SnapshotWriter, Snapshot]:
        """Fix the state and the log's place together; on the writer thread, so between two groups.

        The new place is durable in the environment before anything may depend on it: a start cuts off later files.
        """
        writer = log.begin_snapshot()
        try:
            with translated(self._durable.directory):
                with self._durable.begin(write=True) as transaction:
                    place = pack_log_end(log.end, log.synced)
                    transaction.put(LOG_END, place, db=self._handles[META.name])
                if self._sync:
                    self._durable.flush()
        except KvobjError:
            writer.abandon()
            raise
        return writer, self.read().__enter__()

    # -- the event loop's side of the writer -----------------------------------------------------------------------

    def _write_inline(self, change: Callable[[WriteView], T]) -> T:
        environment = self._volatile
        transaction = environment.begin(write=True)
        view = VolatileWriteView(transaction, volatile=environment, durable=self._durable, handles=self._handles)
        try:
            self._check_room(transaction, writes=1)
            result = change(view)
            transaction.commit()
        except BaseException:
            transaction.abort()
            raise
        finally:
            view.close()
        return result

    def _check_room(self, transaction: Transaction, *, writes: int) -> None:
        """Look every so often whether the volatile environment is full; each time while it is."""
        self._writes_since_check += writes
        if self._volatile.is_full or self._writes_since_check >= _ROOM_CHECK_INTERVAL:
            self._writes_since_check = 0
            self._volatile.refresh_room(transaction)

    def _enqueue(self, pending: Pending) -> None:
        self._queue.append(pending)
        in_flight, keys = self._in_flight, pending.keys
        if len(keys) > 1 and in_flight.keys().isdisjoint(keys) and len(set(keys)) == len(keys):
            in_flight.update(dict.fromkeys(keys, 1))
        else:
            for key in keys:
                in_flight[key] = in_flight.get(key, 0) + 1
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """Commit groups until none waits. What arrives during a commit is the next group: no timer."""
        loop = asyncio.get_running_loop()
        group: list[Pending] = []
        try:
            while self._queue:
                group = [self._queue.popleft() for _ in range(min(len(self._queue), _GROUP_LIMIT))]
                for started, _ in self._group_watchers:
                    started()
                riders, self._riders = list(self._riders), {}
                effects = await loop.run_in_executor(self._executor, self._writer.commit, group, riders)
                self._apply(effects)
                self._settle_riders(riders)
                self._settled_position = self._writer.published
                for _, settled in self._group_watchers:
                    settled()
                self._settle(group)
        except BaseException as error:
            self._failure = UnavailableError(
                "the database failed", directory=self._durable.directory, reason=repr(error)
            )
            for pending in [*group, *self._queue]:
                pending.error = self._failure
            self._settle([*group, *self._queue])
            self._queue.clear()
            if not isinstance(error, KvobjError):
                raise
        finally:
            self._draining = None

    def _apply(self, effects: Effects) -> None:
        """Do a durable group's volatile effects. A failure is final for this process: the next open does them."""
        if effects.is_empty():
            return
        number = self._writer.redo_number.to_bytes(8, "big")
        with translated(self._volatile.directory), self._volatile.begin(write=True) as transaction:
            self._check_room(transaction, writes=sum(map(len, effects.values.values())))
            effects.apply(transaction, self._volatile.handles)
            transaction.put(APPLIED, number, db=self._handles[META_VOLATILE.name])

    def _settle_riders(self, riders: Sequence[Rider]) -> None:
        """Those that could not be committed go on waiting, in front of those that came since."""
        left = [rider for rider in riders if not rider.is_committed]
        if left:
            self._riders = dict.fromkeys([*left, *self._riders])
        for rider in riders:
            if rider.is_committed:
                rider.settled()

    def _settle(self, group: Sequence[Pending]) -> None:
        in_flight = self._in_flight
        for pending in group:
            for key in pending.keys:
                others = in_flight.pop(key) - 1
                if others:
                    in_flight[key] = others
            if pending.future.done():
                continue
            if pending.error is not None:
                pending.future.set_exception(pending.error)
            else:
                pending.future.set_result(pending.value)

    def _flush(self) -> None:
        if not self._sync:
            return
        with translated(self._durable.directory):
            self._durable.flush()
        if self._log is not None:
            self._log.sync()


class _ClosedError(UnavailableError):
    """The database was closed by its owner."""


def _nothing(_view: WriteView) -> None:
    """A change that only has others go in front of it."""


def _clear_snapshot_due(view: WriteView) -> None:
    view.delete(META, SNAPSHOT_DUE)


def _write_snapshot(writer: SnapshotWriter, view: Snapshot, sources: Sequence[SnapshotSource]) -> int:
    """Write what the sources make of the view, then end the view. Blocking."""
    try:
        group: list[bytes] = []
        group_bytes = 0
        for source in sources:
            for entry in source(view):
                group.append(entry)
                group_bytes += len(entry)
                if len(group) >= _SNAPSHOT_GROUP_ENTRIES or group_bytes >= _SNAPSHOT_GROUP_BYTES:
                    writer.append(group)
                    group, group_bytes = [], 0
        if group:
            writer.append(group)
        return writer.finish()
    except OSError as error:
        writer.abandon()
        raise StoreFullError("no room for a snapshot of the record log", reason=error.strerror) from error
    except BaseException:
        writer.abandon()
        raise
    finally:
        view.__exit__()
