"""What a group of changes will do to the volatile environment once it is durable: an overlay until then, a redo record too.

The writer thread sees volatile tables through it; the event loop, the only writer of that environment, applies it. The redo record
goes into the durable transaction itself, so that a crash in between is finished at the next open (`Database`).
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import add

import msgspec

from kvobj.database.lmdb_types import Handle, Transaction

_PAIR = struct.Struct(">qq")
_PAIR_NUMBERS = 2


class Effects(msgspec.Struct, array_like=True):
    """Values to be (None: deleted) by table and key, and amounts to be added to counters by table and key."""

    values: dict[str, dict[bytes, bytes | None]] = {}
    amounts: dict[str, dict[bytes, list[int]]] = {}

    def is_empty(self) -> bool:
        """Whether applying would do nothing."""
        return not self.values and not self.amounts

    def set(self, table: str, key: bytes, value: bytes | None) -> None:
        """Remember a put, or a delete as None."""
        self.values.setdefault(table, {})[key] = value

    def set_all(self, table: str, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Remember many puts."""
        self.values.setdefault(table, {}).update(items)

    def add(self, table: str, key: bytes, amounts: Sequence[int]) -> None:
        """Remember an addition; additions to one counter sum up."""
        counters = self.amounts.setdefault(table, {})
        before = counters.get(key)
        counters[key] = list(amounts) if before is None else list(map(add, before, amounts))

    def apply(self, transaction: Transaction, handles: Mapping[str, Handle]) -> None:
        """Do it, in a write transaction of the volatile environment."""
        for name, values in self.values.items():
            handle = handles[name]
            put_all(transaction, handle, [(key, value) for key, value in values.items() if value is not None])
            delete_all(transaction, handle, [key for key, value in values.items() if value is None])
        for name, counters in self.amounts.items():
            for key, amounts in counters.items():
                add_in(transaction, handles[name], key, amounts)


class Redo(msgspec.Struct, array_like=True, frozen=True):
    """The effects of the last group that had any. Groups with effects are counted in both environments."""

    number: int
    effects: Effects


def unpack_counters(value: bytes | None) -> tuple[int, ...]:
    """Signed 64-bit counters as stored; nothing stored is no counter."""
    return () if value is None else struct.unpack(f">{len(value) // 8}q", value)


def summed(value: bytes | None, amounts: Sequence[int]) -> bytes | None:
    """The stored form of counters after an addition; None when all are zero, which is stored as nothing."""
    if len(amounts) == _PAIR_NUMBERS:  # as nearly all are
        first, second = amounts
        if value is not None:
            before = _PAIR.unpack(value)
            first += before[0]
            second += before[1]
        return _PAIR.pack(first, second) if first or second else None
    total = amounts if value is None else tuple(map(add, unpack_counters(value), amounts))
    return struct.pack(f">{len(total)}q", *total) if any(total) else None


def put_all(transaction: Transaction, handle: Handle, items: Sequence[tuple[bytes, bytes]]) -> None:
    """Set many values in a write transaction."""
    if items:
        cursor = transaction.cursor(handle)
        cursor.putmulti(items)
        cursor.close()


def delete_all(transaction: Transaction, handle: Handle, keys: Iterable[bytes]) -> None:
    """Remove the keys that are there, in a write transaction."""
    deque(map(transaction.delete, keys, repeat(b""), repeat(handle)), maxlen=0)


def add_in(transaction: Transaction, handle: Handle, key: bytes, amounts: Sequence[int]) -> None:
    """Add to counters in a write transaction."""
    value = summed(transaction.get(key, None, handle), amounts)
    if value is None:
        transaction.delete(key, b"", handle)
    else:
        transaction.put(key, value, db=handle)


def overlaid(
    below: Iterator[tuple[bytes, bytes]],
    above: Mapping[bytes, bytes | None],
    order: Sequence[bytes],
    *,
    start: bytes,
    stop: bytes | None,
    reverse: bool,
) -> Iterator[tuple[bytes, bytes]]:
    """`below` with the values of `above` in [start, stop) put over it, in order. `order` are the keys of `above`, sorted."""
    keys = list(order[bisect_left(order, start) : len(order) if stop is None else bisect_left(order, stop)])
    if reverse:
        keys.reverse()
    yield from _merged(below, above, keys, reverse=reverse)


def _merged(
    below: Iterator[tuple[bytes, bytes]], above: Mapping[bytes, bytes | None], keys: list[bytes], *, reverse: bool
) -> Iterator[tuple[bytes, bytes]]:
    place = 0
    for key, value in below:
        while place < len(keys) and keys[place] != key and (keys[place] < key) != reverse:
            yield from _present(keys[place], above)
            place += 1
        if place < len(keys) and keys[place] == key:
            yield from _present(key, above)
            place += 1
        else:
            yield key, value
    for key in keys[place:]:
        yield from _present(key, above)


def _present(key: bytes, above: Mapping[bytes, bytes | None]) -> Iterator[tuple[bytes, bytes]]:
    value = above[key]
    if value is not None:
        yield key, value
