"""What a reader sees and what a change may do. The same change runs on either kind of write view.

Guarantees: a view is a snapshot; the volatile one is taken first, then the durable one (a row that moves down is in at least one
of them). Values are copies. Views end with their `with` or their change; a range must be used up before, and
nothing may be written while one is being iterated.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat, takewhile
from typing import Protocol, Self

from kvobj.database.effects import Effects, add_in, delete_all, overlaid, put_all, summed, unpack_counters
from kvobj.database.environment import Environment
from kvobj.database.lmdb_types import Cursor, Handle, Transaction
from kvobj.database.page_lookups import MANY, find_values, find_values_under
from kvobj.database.table import Table
from kvobj.database.table_pages import MappedTables, TablePages
from kvobj.errors import StoreFullError

Handles = Mapping[str, Handle]
Publication = tuple[bytes, str]
"""What a change publishes: its content, and its topic."""


class ReadView(Protocol):
    """A snapshot of all tables."""

    def get(self, table: Table, key: bytes) -> bytes | None:
        """The value of a key, or None."""
        ...

    def get_many(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, or None. Half the cost of `get` a key, a tenth where there are many and no change of this view's
        group has written to the table."""
        ...

    def range(
        self, table: Table, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values with start <= key < stop (to the end if None) in key order, or in the opposite order."""
        ...

    def under(self, table: Table, prefix: bytes, *, limit: int | None = None) -> list[tuple[bytes, bytes]]:
        """Keys and values of the first keys that begin with `prefix`, in key order: for a few keys, at half the cost of `range`."""
        ...

    def values_under(self, table: Table, prefixes: Sequence[bytes]) -> list[list[bytes]]:
        """Of each prefix the values of all keys that begin with it, in key order: `under` for many, at half the cost of each,
        or less as of `get_many`."""
        ...

    def pages(self, table: Table) -> TablePages | None:
        """Where the table's pages lie, for native code: see `TablePages` for how long. None where they cannot be read, or are not
        what this view sees."""
        ...

    def count(self, table: Table) -> int:
        """How many keys the table has, without this change's own effects on volatile tables."""
        ...

    def is_empty(self, table: Table) -> bool:
        """Whether the table has no key; in doubt, as where this change has taken the last one away, it has one."""
        ...

    def counters(self, table: Table, key: bytes) -> tuple[int, ...]:
        """What `WriteView.add` summed up; () if all are zero."""
        ...


class WriteView(ReadView, Protocol):
    """A snapshot that a change may write to. It must check before it changes: what it raises undoes nothing."""

    def put(self, table: Table, key: bytes, value: bytes, *, headroom: bool = False) -> None:
        """Set a value. `StoreFullError` above 90 % of the map, or on a full disk, unless the put is part of making room
        (`headroom`: queue entries, free extents)."""
        ...

    def delete(self, table: Table, key: bytes) -> bool:
        """Remove a key; whether it was there."""
        ...

    def put_many(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None:
        """`put` of each, as part of making room: half the cost of one by one."""
        ...

    def delete_many(self, table: Table, keys: Sequence[bytes]) -> None:
        """`delete` of each that is there: two thirds of the cost of one by one."""
        ...

    def add(self, table: Table, key: bytes, amounts: Sequence[int]) -> None:
        """Add to a row of signed 64-bit counters. Additions of both writers to one volatile key never race, unlike
        get and put; a table of counters is written by nothing else."""
        ...

    def log(self, entry: bytes) -> None:
        """Append an entry to the record log with this change, if the database keeps one. Durable changes only."""
        ...

    def log_many(self, entries: Iterable[bytes]) -> None:
        """`log` of each."""
        ...

    def publish(self, content: bytes, *, topic: str = "") -> None:
        """Put an entry into the outbox with this change, if the database was opened with one. Durable changes only. `topic`: what
        `Database.published_of` may be asked for later, "" for what nobody asks for."""
        ...


class ReadEnvironment(Protocol):
    """As much of an environment as a snapshot needs."""

    mapped: MappedTables

    def begin(self) -> Transaction:
        """A snapshot of its tables."""
        ...


class Snapshot:
    """A `ReadView` for a `with` statement. Opening and closing costs ~2 µs."""

    __slots__ = ("_durable", "_durable_environment", "_handles", "_volatile", "_volatile_environment")

    def __init__(self, durable: ReadEnvironment, volatile: ReadEnvironment, handles: Handles) -> None:
        self._durable_environment = durable
        self._volatile_environment = volatile
        self._handles = handles

    def __enter__(self) -> Self:
        self._volatile = self._volatile_environment.begin()
        self._durable = self._durable_environment.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._durable.abort()
        self._volatile.abort()

    def get_once(self, above: Table, below: Table, key: bytes) -> bytes | None:
        """Instead of a `with`: the value of a key in a volatile table, else in a durable one, in a view that ends here. A third of
        the cost: the durable environment is looked at only then, which is later, so that no row that moves down is missed."""
        transaction = self._volatile_environment.begin()
        try:
            value = transaction.get(key, None, self._handles[above.name])
        finally:
            transaction.abort()
        if value is not None:
            return value
        transaction = self._durable_environment.begin()
        try:
            return transaction.get(key, None, self._handles[below.name])
        finally:
            transaction.abort()

    def get_alone(self, table: Table, key: bytes) -> bytes | None:
        """Instead of a `with`: the value of a key in a durable table, in a view that ends here. Half the cost."""
        transaction = self._durable_environment.begin()
        try:
            return transaction.get(key, None, self._handles[table.name])
        finally:
            transaction.abort()

    def pages(self, table: Table) -> TablePages | None:
        """See `ReadView.pages`."""
        if table.volatile:
            return self._volatile_environment.mapped.table(self._volatile, table.name)
        return self._durable_environment.mapped.table(self._durable, table.name)

    def get(self, table: Table, key: bytes) -> bytes | None:
        """See `ReadView.get`."""
        transaction = self._volatile if table.volatile else self._durable
        return transaction.get(key, None, self._handles[table.name])

    def get_many(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `ReadView.get_many`."""
        pages = self.pages(table) if len(keys) >= MANY else None
        transaction = self._volatile if table.volatile else self._durable
        return _get_many(transaction, keys, self._handles[table.name], pages)

    def range(
        self, table: Table, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """See `ReadView.range`."""
        transaction = self._volatile if table.volatile else self._durable
        return range_of(transaction, self._handles[table.name], start=start, stop=stop, reverse=reverse)

    def under(self, table: Table, prefix: bytes, *, limit: int | None = None) -> list[tuple[bytes, bytes]]:
        """See `ReadView.under`."""
        return _under(self._volatile if table.volatile else self._durable, self._handles[table.name], prefix, limit)

    def values_under(self, table: Table, prefixes: Sequence[bytes]) -> list[list[bytes]]:
        """See `ReadView.values_under`."""
        pages = self.pages(table) if len(prefixes) >= MANY else None
        transaction = self._volatile if table.volatile else self._durable
        return _values_under(transaction, self._handles[table.name], prefixes, pages)

    def count(self, table: Table) -> int:
        """See `ReadView.count`."""
        transaction = self._volatile if table.volatile else self._durable
        return int(transaction.stat(self._handles[table.name])["entries"])

    def is_empty(self, table: Table) -> bool:
        """See `ReadView.is_empty`."""
        return not self.count(table)

    def counters(self, table: Table, key: bytes) -> tuple[int, ...]:
        """See `ReadView.counters`."""
        return unpack_counters(self.get(table, key))


class VolatileWriteView:
    """The `WriteView` of a change that runs inline on the event loop: volatile tables only, durable ones can be read."""

    __slots__ = ("_durable", "_durable_environment", "_handles", "_transaction", "_volatile")

    def __init__(
        self, transaction: Transaction, *, volatile: Environment, durable: Environment, handles: Handles
    ) -> None:
        self._transaction = transaction
        self._volatile = volatile
        self._durable_environment = durable
        self._durable: Transaction | None = None
        self._handles = handles

    def close(self) -> None:
        """End the durable snapshot; the volatile transaction is its owner's."""
        if self._durable is not None:
            self._durable.abort()

    def _of(self, table: Table) -> Transaction:
        if table.volatile:
            return self._transaction
        if self._durable is None:
            self._durable = self._durable_environment.begin()
        return self._durable

    def get(self, table: Table, key: bytes) -> bytes | None:
        """See `ReadView.get`."""
        return self._of(table).get(key, None, self._handles[table.name])

    def get_many(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `ReadView.get_many`."""
        return _get_many(self._of(table), keys, self._handles[table.name])

    def range(
        self, table: Table, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """See `ReadView.range`."""
        return range_of(self._of(table), self._handles[table.name], start=start, stop=stop, reverse=reverse)

    def under(self, table: Table, prefix: bytes, *, limit: int | None = None) -> list[tuple[bytes, bytes]]:
        """See `ReadView.under`."""
        return _under(self._of(table), self._handles[table.name], prefix, limit)

    def values_under(self, table: Table, prefixes: Sequence[bytes]) -> list[list[bytes]]:
        """See `ReadView.values_under`."""
        return _values_under(self._of(table), self._handles[table.name], prefixes)

    def pages(self, table: Table) -> TablePages | None:  # noqa: ARG002 - see `ReadView.pages`
        """See `ReadView.pages`. None: an inline change asks for few keys."""
        return None

    def count(self, table: Table) -> int:
        """See `ReadView.count`."""
        return int(self._of(table).stat(self._handles[table.name])["entries"])

    def is_empty(self, table: Table) -> bool:
        """See `ReadView.is_empty`."""
        return not self.count(table)

    def counters(self, table: Table, key: bytes) -> tuple[int, ...]:
        """See `ReadView.counters`."""
        return unpack_counters(self.get(table, key))

    def put(self, table: Table, key: bytes, value: bytes, *, headroom: bool = False) -> None:
        """See `WriteView.put`."""
        _require_volatile(table)
        if self._volatile.is_full and not headroom:
            raise StoreFullError("the volatile database is full", table=table.name)
        self._transaction.put(key, value, db=self._handles[table.name])

    def delete(self, table: Table, key: bytes) -> bool:
        """See `WriteView.delete`."""
        _require_volatile(table)
        return self._transaction.delete(key, b"", self._handles[table.name])

    def put_many(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None:
        """See `WriteView.put_many`."""
        _require_volatile(table)
        put_all(self._transaction, self._handles[table.name], items)

    def delete_many(self, table: Table, keys: Sequence[bytes]) -> None:
        """See `WriteView.delete_many`."""
        _require_volatile(table)
        delete_all(self._transaction, self._handles[table.name], keys)

    def add(self, table: Table, key: bytes, amounts: Sequence[int]) -> None:
        """See `WriteView.add`."""
        _require_volatile(table)
        add_in(self._transaction, self._handles[table.name], key, amounts)

    def log(self, entry: bytes) -> None:
        """Refuse: what is volatile is not rebuilt."""
        raise RuntimeError(f"a volatile change has no record log ({len(entry)} bytes)")

    def log_many(self, entries: Iterable[bytes]) -> None:
        """Refuse: what is volatile is not rebuilt."""
        for entry in entries:
            self.log(entry)

    def publish(self, content: bytes, *, topic: str = "") -> None:  # noqa: ARG002 - see `WriteView.publish`
        """Refuse: nobody is told of what is volatile."""
        raise RuntimeError(f"a volatile change has no outbox ({len(content)} bytes)")


class DurableWriteView:
    """The `WriteView` of a change on the writer thread: durable tables in the group's transaction, volatile ones through
    the group's overlay over a snapshot."""

    __slots__ = (
        "_changed",
        "_effects",
        "_entries",
        "_handles",
        "_is_full",
        "_mapped",
        "_order",
        "_published",
        "_snapshot",
        "_sums",
        "_transaction",
        "_volatile_mapped",
    )

    def __init__(
        self,
        transaction: Transaction,
        snapshot: Transaction,
        *,
        effects: Effects,
        entries: list[bytes],
        published: list[Publication] | None,
        handles: Handles,
        mapped: MappedTables,
        volatile_mapped: MappedTables,
        durable_is_full: bool,
        volatile_is_full: bool,
    ) -> None:
        self._mapped = mapped
        self._volatile_mapped = volatile_mapped
        # Durable tables that this group has written to: what the map has of them is what they were.
        self._changed: set[str] = set()
        self._transaction = transaction
        self._snapshot = snapshot
        self._effects = effects
        self._entries = entries
        self._published = published
        self._handles = handles
        self._is_full = (durable_is_full, volatile_is_full)
        # The overlay's keys of a table in order, from the first range over it on: a group may ask for thousands of ranges.
        self._order: dict[str, list[bytes]] = {}
        # What is added to durable counters, until `finish`: most changes of a group add to the same few.
        self._sums = Effects()

    def finish(self) -> None:
        """Write what was held back. After the last change, before the commit."""
        self._sums.apply(self._transaction, self._handles)

    def get(self, table: Table, key: bytes) -> bytes | None:
        """See `ReadView.get`."""
        name = table.name
        if not table.volatile:
            return self._transaction.get(key, None, self._handles[name])
        values = self._effects.values.get(name)
        if values is not None and key in values:
            return values[key]
        return self._snapshot.get(key, None, self._handles[name])

    def get_many(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `ReadView.get_many`. No faster than `get` where the table is volatile: these lie under the overlay."""
        if table.volatile:
            return [self.get(table, key) for key in keys]
        return _get_many(self._transaction, keys, self._handles[table.name], self._pages(table, len(keys)))

    def _pages(self, table: Table, count: int) -> TablePages | None:
        """The pages of a durable table, if so many look-ups are worth it."""
        return None if count < MANY or table.volatile else self.pages(table)

    def pages(self, table: Table) -> TablePages | None:
        """See `ReadView.pages`. None of a table that the group has written to. LMDB writes no page of before the transaction while
        that is under way, and what it says of a table is as of then."""
        if table.volatile:
            if self._effects.values.get(table.name):
                return None
            return self._volatile_mapped.table(self._snapshot, table.name)
        return None if table.name in self._changed else self._mapped.table(self._transaction, table.name)

    def range(
        self, table: Table, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """See `ReadView.range`."""
        name = table.name
        transaction = self._snapshot if table.volatile else self._transaction
        below = range_of(transaction, self._handles[name], start=start, stop=stop, reverse=reverse)
        above = self._effects.values.get(name) if table.volatile else None
        if above is None:
            return below
        order = self._order.get(name)
        if order is None:
            order = self._order[name] = sorted(above)
        return overlaid(below, above, order, start=start, stop=stop, reverse=reverse)

    def under(self, table: Table, prefix: bytes, *, limit: int | None = None) -> list[tuple[bytes, bytes]]:
        """See `ReadView.under`."""
        name = table.name
        if table.volatile and name in self._effects.values:
            found = takewhile(lambda item: item[0].startswith(prefix), self.range(table, prefix))
            return list(islice(found, limit))
        return _under(self._snapshot if table.volatile else self._transaction, self._handles[name], prefix, limit)

    def values_under(self, table: Table, prefixes: Sequence[bytes]) -> list[list[bytes]]:
        """See `ReadView.values_under`."""
        name = table.name
        if table.volatile and name in self._effects.values:
            return [[value for _, value in self.under(table, prefix)] for prefix in prefixes]
        transaction = self._snapshot if table.volatile else self._transaction
        return _values_under(transaction, self._handles[name], prefixes, self._pages(table, len(prefixes)))

    def count(self, table: Table) -> int:
        """See `ReadView.count`."""
        transaction = self._snapshot if table.volatile else self._transaction
        return int(transaction.stat(self._handles[table.name])["entries"])

    def is_empty(self, table: Table) -> bool:
        """See `ReadView.is_empty`."""
        return not self.count(table) and not (table.volatile and self._effects.values.get(table.name))

    def counters(self, table: Table, key: bytes) -> tuple[int, ...]:
        """See `ReadView.counters`."""
        value = self.get(table, key)
        effects = self._effects if table.volatile else self._sums
        amounts = effects.amounts.get(table.name, {}).get(key)
        return unpack_counters(value if amounts is None else summed(value, amounts))

    def put(self, table: Table, key: bytes, value: bytes, *, headroom: bool = False) -> None:
        """See `WriteView.put`."""
        if self._is_full[table.volatile] and not headroom:
            raise StoreFullError("the database is full", table=table.name)
        if table.volatile:
            self._set(table.name, key, value)
        else:
            self._changed.add(table.name)
            self._transaction.put(key, value, db=self._handles[table.name])

    def delete(self, table: Table, key: bytes) -> bool:
        """See `WriteView.delete`."""
        if not table.volatile:
            self._changed.add(table.name)
            return self._transaction.delete(key, b"", self._handles[table.name])
        was_there = self.get(table, key) is not None
        if was_there:
            self._set(table.name, key, None)
        return was_there

    def put_many(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None:
        """See `WriteView.put_many`."""
        name = table.name
        if not table.volatile:
            self._changed.add(name)
            put_all(self._transaction, self._handles[name], items)
        elif name in self._order:
            for key, value in items:
                self._set(name, key, value)
        else:
            self._effects.set_all(name, items)

    def delete_many(self, table: Table, keys: Sequence[bytes]) -> None:
        """See `WriteView.delete_many`."""
        if not table.volatile:
            self._changed.add(table.name)
            delete_all(self._transaction, self._handles[table.name], sorted(keys))  # neighbours lie in one page
            return
        for key in keys:
            self.delete(table, key)

    def _set(self, table: str, key: bytes, value: bytes | None) -> None:
        order = self._order.get(table)
        if order is not None and key not in self._effects.values[table]:
            insort(order, key)
        self._effects.set(table, key, value)

    def add(self, table: Table, key: bytes, amounts: Sequence[int]) -> None:
        """See `WriteView.add`."""
        (self._effects if table.volatile else self._sums).add(table.name, key, amounts)

    def log(self, entry: bytes) -> None:
        """See `WriteView.log`."""
        self._entries.append(entry)

    def log_many(self, entries: Iterable[bytes]) -> None:
        """See `WriteView.log_many`."""
        self._entries.extend(entries)

    def publish(self, content: bytes, *, topic: str = "") -> None:
        """See `WriteView.publish`."""
        if self._published is not None:
            self._published.append((content, topic))


def _under(transaction: Transaction, handle: Handle, prefix: bytes, limit: int | None) -> list[tuple[bytes, bytes]]:
    found: list[tuple[bytes, bytes]] = []
    cursor = transaction.cursor(handle)
    is_there = cursor.set_range(prefix)
    while is_there:
        item = cursor.item()
        if not item[0].startswith(prefix):
            break
        found.append(item)
        if len(found) == limit:
            break
        is_there = cursor.next()
    cursor.close()
    return found


def _values_under(
    transaction: Transaction, handle: Handle, prefixes: Sequence[bytes], pages: TablePages | None = None
) -> list[list[bytes]]:
    if pages is not None:

        def ask(prefix: bytes) -> list[bytes]:
            return [value for _, value in _under(transaction, handle, prefix, None)]

        copied = find_values_under(pages, prefixes, ask)
        if copied is not None:
            return copied
    cursor = transaction.cursor(handle)
    item, seek, step = cursor.item, cursor.set_range, cursor.next
    found: list[list[bytes]] = []
    for prefix in prefixes:
        values: list[bytes] = []
        is_there = seek(prefix)
        while is_there:
            key, value = item()
            if not key.startswith(prefix):
                break
            values.append(value)
            is_there = step()
        found.append(values)
    cursor.close()
    return found


def _get_many(
    transaction: Transaction, keys: Sequence[bytes], handle: Handle, pages: TablePages | None = None
) -> list[bytes | None]:
    if pages is not None:
        found = find_values(pages, keys, lambda key: transaction.get(key, None, handle))
        if found is not None:
            return found
    return list(map(transaction.get, keys, repeat(None), repeat(handle)))


def range_of(
    transaction: Transaction, handle: Handle, *, start: bytes, stop: bytes | None, reverse: bool
) -> Iterator[tuple[bytes, bytes]]:
    """See `ReadView.range`, over one table of one transaction."""
    cursor = transaction.cursor(handle)
    try:
        if reverse:
            yield from _backwards(cursor, start=start, stop=stop)
        elif cursor.set_range(start) if start else cursor.first():
            for key, value in cursor.iternext():
                if stop is not None and key >= stop:
                    return
                yield key, value
    finally:
        cursor.close()


def _backwards(cursor: Cursor, *, start: bytes, stop: bytes | None) -> Iterator[tuple[bytes, bytes]]:
    found = cursor.last() if stop is None or not cursor.set_range(stop) else cursor.prev()
    if not found:
        return
    for key, value in cursor.iterprev():
        if key < start:
            return
        yield key, value


def _require_volatile(table: Table) -> None:
    if not table.volatile:
        raise RuntimeError(f"table {table.name} is durable: it is written through `write`")
